"""What rivals get, and the floors that recapp is compared with."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from tiers import one_of

from recapp.benchmarks.steps import batches_of
from recapp.benchmarks.workloads import DENSE, MODELS, WORKLOADS, NamedModel, Workload
from recapp.models.published_dlrm import DLRM
from recapp.tables.collections import EmbeddingBagCollection
from recapp.transport.communicator import Comm

from . import lab, quantised_lookup, torchrec_worker
from .__main__ import settings_of
from .beside_torchrec import GivenDLRM, dense_flops, graphed, matrix_products
from .kernels import floor_of
from .lab import DEFAULTS, MEASUREMENTS, Lab, Settings

ROWS = (50, 7, 300)
TINY = Workload("W1", 16, ROWS, (8, 8, 8), (1, 3, 2))
SHORT = {"rounds": 2, "round_seconds": 1e-4, "backend": "torch", "threads": [1], "keys": 60}
COMPARED = {
    "kernels": ("torch_ratio", "floor_ratio", "gather_ratio", "small_pages_ratio"),
    "memory": ("peak_bytes", "table_bytes"),
    "quantised": ("torch_ratio", "fp32_ratio", "torch_quantised_ratio"),
    "step": ("torchrec_ratio", "bytes_exchanged"),
    "train": ("torchrec_ratio", "gemm_floor_ratio"),
    "dynamic": ("ids_per_second",),
}


class TinyModel(NamedModel):
    """A DLRM over the tiny tables."""

    def workload(self):
        return Workload(self.name, self.batch_size, ROWS, (self.dim,) * len(ROWS), (1,) * len(ROWS))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Make workloads tiny, and restore the number of torch's threads."""
    monkeypatch.setitem(WORKLOADS, "W1", TINY)
    monkeypatch.setitem(quantised_lookup.LOOKUPS, "W1", TINY)
    monkeypatch.setitem(MODELS, "small", TinyModel("small", 32, 4, (8,), (8, 1)))
    monkeypatch.setattr(Lab, "listed_tables", lambda self: TINY.tables())
    monkeypatch.setattr(lab, "keep_freed_memory", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("verb", one_of(3, COMPARED))
def test_a_measurement_leaves_its_rows(verb, tmp_path):
    plain = SHORT | {"verb": verb, "folder": str(tmp_path), "batch_size": [4]}
    lab.run(plain, tmp_path)
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert rows and all(set(COMPARED[verb]) <= set(row) for row in rows)
    for row in rows:
        assert all(row[key] is None for key in row if key.startswith(("fbgemm", "torchrec")))


def test_a_command_line_has_the_defaults_of_its_verb():
    settings = settings_of(["step", "--workload", "W2", "W3", "--rounds", "3"])
    assert settings.workload == ["W2", "W3"] and settings.rounds == 3 and settings.ranks == 2
    assert {*DEFAULTS} <= {*MEASUREMENTS}
    with pytest.raises(SystemExit):
        settings_of(["stp"])


def test_a_rival_reads_the_ids_that_recapp_looks_up(tmp_path):
    session = Lab(Settings(verb="step", folder=str(tmp_path)), Comm(), tmp_path)
    batches = session.batches(TINY)
    (spec,) = session.specs("step", TINY)
    ids_NL, lengths_FB = torchrec_worker.load_ids(spec)
    assert len(ids_NL) == len(batches)
    for ids_L, batch in zip(ids_NL, batches, strict=True):
        assert (
            torch.equal(ids_L, batch.values()) and lengths_FB.tolist() == batch.lengths().tolist()
        )
    assert [tuple(t) for t in spec["tables"]] == [("C1", 50, 8), ("C2", 7, 8), ("C3", 300, 8)]


def test_the_given_dense_part_is_that_of_a_dlrm():
    model = MODELS["small"]
    collection = EmbeddingBagCollection(model.workload().tables())
    (features,) = model.workload().features_of(model.workload().draw(0, 1))
    (batch,) = batches_of(model, [features])
    shape = (DENSE, model.bottom_layers, model.top)
    given = GivenDLRM(EmbeddingBagCollection(model.workload().tables()), *shape)
    ours = DLRM(collection, *shape)
    weights = {n: w for n, w in ours.state_dict().items() if n.startswith(("bottom", "top"))}
    given.given.load_state_dict({**weights, "pairs": given.given.pairs})
    given.collection.load_state_dict(collection.state_dict())
    torch.testing.assert_close(given(batch), ours(batch))


def test_graphs_are_contenders(tmp_path):
    session = Lab(Settings(verb="train", backend="torch", folder=str(tmp_path)), Comm(), tmp_path)
    model = MODELS["small"]
    workload = model.workload()
    features = session.batches(workload)
    plan = session.plan("table_wise", workload.tables(), features)
    training = graphed(session, model, workload, plan)
    steps = training.in_memory(batches_of(model, features))
    assert len(steps.run(2)["step"]) == 2 and training.step.steps == 2
    assert "the model is on the cpu" in training.step.why_not


@pytest.mark.full
def test_a_step_around_the_given_dense_part_trains(tmp_path, monkeypatch):
    monkeypatch.setattr("recapp.benchmarks.steps.DLRM", GivenDLRM)
    lab.run(SHORT | {"verb": "train", "folder": str(tmp_path), "bf16": True}, tmp_path)
    (row,) = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert row["samples_per_second"] > 0


def test_a_profile_counts_work_and_not_what_annotates_it(monkeypatch):
    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        *2 * [("gemm", gpu, 100, False), ("cudaLaunchKernel", cpu, 9, False)],
        ("Memcpy HtoD", gpu, 4, False),
        ("cudaMemcpyAsync", cpu, 9, False),
        ("Optimizer.step", gpu, 999, True),
        ("cudaGraphLaunch", cpu, 9, False),
        ("cudaEventSynchronize", cpu, 9, False),
        ("cudaDeviceSynchronize", cpu, 9, False),
    ]
    profile = MagicMock()
    profile.return_value.__enter__.return_value.events.return_value = [
        SimpleNamespace(
            name=name,
            device_type=device,
            is_user_annotation=annotates,
            time_range=SimpleNamespace(elapsed_us=lambda us=us: us),
        )
        for name, device, us, annotates in events
    ]
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = torchrec_worker.profiled(lambda number: None, 2)
    assert found.pop("gpu_ms") == pytest.approx(0.102)
    assert found == {
        "launches": 1.5,
        "waits": 0.5,
        "copies": 0.5,
        "kernels": {"gemm": 100.0, "Memcpy HtoD": 2.0},
    }


def test_the_floor_counts_what_must_move():
    workload = Workload("f", 2, (10, 10), (4, 4), (2, 1))
    (features,) = workload.features_of(torch.tensor([[1, 1, 1, 5, 3, 3]]))
    floor = floor_of(workload, features)
    output = 2 * 8 * 4
    distinct = 3 * 16
    ids = 6 * 8
    assert floor.forward == 2 * output + distinct + ids
    assert floor.backward == output + 2 * distinct + 2 * 3 * 64 + ids


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_a_model_are_those_of_its_layers(name, monkeypatch):
    """Counted by torch itself."""
    from torch.utils.flop_counter import FlopCounterMode

    model = MODELS[name].__class__(name, 4, MODELS[name].dim, MODELS[name].bottom, MODELS[name].top)
    products = matrix_products(model, Comm())
    with FlopCounterMode(display=False) as counter:
        products.run(1)
    assert counter.get_total_flops() == dense_flops(model)
