"""What notebooks about TorchRec import from a `utils` of their own: times, memory, pictures."""

import re
from dataclasses import asdict

import pytest
import torch
from recapp.utils.benchmark import TorchRecBenchmark
from recapp.utils.debugging import TorchRecDebugger
from recapp.utils.visualization import TorchRecVisualizer
from torch._subclasses.fake_tensor import FakeTensorMode

from recapp import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    Topology,
)
from recapp.errors import ConfigError, PlanError

pytestmark = pytest.mark.usefixtures("reference_kernels")

RESULTS = {
    "table_wise": {"batch_time_ms": 2.5, "memory_gb": 0.5, "throughput": 1000.0},
    "row_wise": {"batch_time_ms": 1.25, "memory_gb": 0.3, "throughput": 2000.0},
}


def collection(name="t", rows=40):
    table = EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=["f"])
    return EmbeddingBagCollection(tables=[table], device=torch.device("meta"))


def batch_of(samples):
    return KeyedJaggedTensor(["f"], [i % 40 for i in range(2 * samples)], lengths=[2] * samples)


def row_wise_plan(world):
    return EmbeddingShardingPlanner(
        Topology(world), constraints={"*": ParameterConstraints(sharding_types=["row_wise"])}
    ).plan(collection())


def timed(comm):
    model = DistributedModelParallel(collection(), comm.group, plan=row_wise_plan(comm.world))
    found = TorchRecBenchmark(rounds=2, round_seconds=1e-4).benchmark_forward(
        model, batch_of(4), batch_size=4
    )
    before = model.comm.bytes_sent
    model(batch_of(4))
    return found, model.comm.bytes_sent - before


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_forward_is_timed_alike_on_all_ranks(ranks, world):
    answers = ranks.run(timed, world)
    first = answers[0][0]
    assert all(found == first for found, _ in answers)
    assert 0 < first.batch_time_ms_q1 <= first.batch_time_ms <= first.batch_time_ms_q3
    assert first.throughput == pytest.approx(4 * world / first.batch_time_ms * 1e3)
    assert first.bytes_exchanged == sum(sent for _, sent in answers)
    assert (first.bytes_exchanged > 0) == (world > 1)


def test_any_model_is_timed():
    model = torch.nn.Linear(3, 2)
    found = TorchRecBenchmark(rounds=1, round_seconds=1e-4).benchmark_forward(
        model, torch.ones(5, 3), batch_size=5
    )
    assert found.batch_time_ms > 0 and found.bytes_exchanged == 0


def compared(comm):
    models = {
        name: DistributedModelParallel(collection(), comm.group, plan=row_wise_plan(comm.world))
        for name in ("one", "other")
    }
    return TorchRecBenchmark(2, 1e-4).compare_forwards(models, batch_of(4), batch_size=4)


def test_models_are_timed_in_turn_and_alike_on_all_ranks(ranks):
    first, second = ranks.run(compared, 2)
    assert first == second and list(first) == ["one", "other"]
    assert first["one"].bytes_exchanged == first["other"].bytes_exchanged > 0


def test_no_models_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^compare_forwards: models=\{\}: give at least one"):
        TorchRecBenchmark().compare_forwards({}, batch_of(4), batch_size=4)


def test_a_batch_of_another_size_is_refused_in_one_line():
    model = DistributedModelParallel(collection())
    with pytest.raises(ConfigError, match=r"^batch_size=32, but the batch has 4"):
        TorchRecBenchmark().benchmark_forward(model, batch_of(4), batch_size=32)


@pytest.mark.parametrize(
    ("model", "batch", "size", "said"),
    [
        (None, 1, 4, "model forward is a NoneType: give a torch module"),
        (torch.nn.ReLU(), None, 4, "batch=NoneType, batch_size=4: give the argument of the model"),
        (torch.nn.ReLU(), 1, "4", "batch=int, batch_size='4': give the argument of the model"),
    ],
)
def test_what_is_no_model_no_batch_or_no_size_is_one_line(model, batch, size, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        TorchRecBenchmark().benchmark_forward(model, batch, size)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": "7"}, {"round_seconds": -1}])
def test_rounds_without_length_are_refused_in_one_line(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"^TorchRecBenchmark: {name}={value}: give a number"):
        TorchRecBenchmark(**wrong)


def test_memory_is_that_of_all_tensors_each_counted_once():
    debugger = TorchRecDebugger()
    before = debugger.memory_status()
    kept = torch.zeros(1_000_003)
    part = kept[10:20]
    status = debugger.memory_status()
    assert status["allocated"] - before["allocated"] == kept.nbytes > part.nbytes
    assert 0 < status["reserved"] <= status["peak"]
    circle = [kept]
    circle.append(circle)
    del kept, part, circle
    assert debugger.memory_status()["allocated"] == before["allocated"]


def test_tensors_that_a_compiler_left_behind_have_no_memory():
    before = TorchRecDebugger().memory_status()["allocated"]
    with FakeTensorMode():
        left = torch.zeros(1_000_003)
    assert left.device.type == "cpu"
    assert TorchRecDebugger().memory_status()["allocated"] == before


def test_the_memory_of_a_sharded_table_is_that_of_its_weights_and_state():
    debugger = TorchRecDebugger()
    before = debugger.memory_status()["allocated"]
    model = DistributedModelParallel(collection(rows=1_000_000))
    held = debugger.memory_status()["allocated"] - before
    weights, state = 1_000_000 * 8 * 4, 1_000_000 * 4  # row-wise Adagrad: a number a row
    assert weights + state <= held < (weights + state) * 1.2  # whole pages, and where rows lie
    del model


def test_on_a_gpu_memory_is_what_torch_has_allocated(monkeypatch):
    for number, name in enumerate(
        ("memory_allocated", "memory_reserved", "max_memory_allocated"), 1
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    expected = {"allocated": 1, "reserved": 2, "peak": 3}
    assert TorchRecDebugger("cuda").memory_status() == expected
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert TorchRecDebugger().memory_status() == expected


def test_pictures_say_what_was_measured_and_notebooks_show_them(tmp_path):
    visualizer = TorchRecVisualizer()
    latency = visualizer.plot_latency(RESULTS)
    memory = visualizer.plot_memory(RESULTS)
    assert latency.alt == (
        "Bars: table_wise 2.50 ms, 1,000 samples/s; row_wise 1.25 ms, 2,000 samples/s."
    )
    assert memory.alt == "Bars: table_wise 500.0 MB; row_wise 300.0 MB."
    assert latency._repr_svg_().startswith("<svg") and len(repr(latency)) < 500
    assert memory.write(tmp_path).name == "strategy_memory.svg"


def test_whiskers_are_drawn_where_quartiles_are_known():
    found = TorchRecBenchmark(rounds=1, round_seconds=1e-4).benchmark_forward(
        torch.nn.Identity(), torch.ones(2, 1), batch_size=2
    )
    assert "whisker" in TorchRecVisualizer().plot_latency({"none": asdict(found)}).caption
    assert "whisker" not in TorchRecVisualizer().plot_latency(RESULTS).caption


def test_a_plan_is_drawn_with_its_ranks():
    visualizer = TorchRecVisualizer()
    plan = row_wise_plan(2)
    assert "1 row_wise" in visualizer.plot_plan(plan, collection()).alt
    few = visualizer.plot_ranks(plan, collection(), batch_size=32).alt
    assert few.startswith("Bars of 2 ranks: the fullest holds ")
    assert few != visualizer.plot_ranks(plan, collection(), batch_size=320_000).alt


def test_a_plan_of_other_tables_is_refused():
    with pytest.raises(PlanError, match="other"):
        TorchRecVisualizer().plot_plan(row_wise_plan(2), collection("other"))


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ({}, "results={}: give the measured results"),
        ({"x": {"ms": 1.0}}, "results['x'] has no batch_time_ms: it has ms"),
    ],
)
def test_results_without_times_are_refused_in_one_line(results, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        TorchRecVisualizer().plot_latency(results)
