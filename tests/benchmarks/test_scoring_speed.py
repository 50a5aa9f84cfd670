"""How fast a model answers: everybody scores the same rows alike, and the records say it all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_cases import SETTINGS
from trainer.runs import compose, fit, make_logs

from recapp import inference_bench
from recapp.benchmarks import mapped_memory
from recapp.benchmarks.mapped_memory import memory_of_two
from recapp.benchmarks.scoring_speed import (
    batches_of,
    goal_lines,
    no_twin,
    record,
    torchrec_spec,
    write_batches,
)
from recapp.benchmarks.timing import Measured
from recapp.errors import ConfigError
from recapp.inference_bench import cpp_program, served_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny DLRM, trained for three steps."""
    folder = tmp_path_factory.mktemp("served")
    settings = compose(make_logs(folder / "logs"), "trainer.max_steps=3")
    fit(settings, folder / "run")
    return folder / "run" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artefacts")
    return served_model("tiny", checkpoint, ["none", "int8"], False, folder, None)


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measured(path, folder, **more):
    """Return all records of a measurement in this process."""
    settings = SETTINGS | {
        "verb": "inference",
        "folder": str(folder),
        "served": {"tiny": str(path)},
        "quantize": ["none", "int8"],
        "batch_size": [1, 50],
    }
    inference_bench.run(settings | more, folder)
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture
def no_processes(monkeypatch):
    """Start no processes to measure memory, which takes seconds."""
    nothing = {"rows_resident_bytes": None, "two_resident_bytes": None}
    monkeypatch.setattr(mapped_memory, "memory_of_two", lambda artefact: nothing)


def test_plain_torch_scores_the_rows_as_the_artefact_does(served):
    eager = served.load(served.artefacts["none"])
    batches = batches_of(eager, served.rows, 40)
    assert len(batches.raw) == served.rows.num_rows // 40 >= 2
    for raw, batch in zip(batches.raw, batches.decoded, strict=True):
        with torch.no_grad():
            plain = torch.sigmoid(served.plain(batch))
        torch.testing.assert_close(eager.scores(batch), plain)
        assert torch.equal(eager.predict(raw), eager.scores(batch))


def test_torchrec_gets_the_layers_and_the_rows_of_the_model(served, tmp_path):
    eager = served.load(served.artefacts["none"])
    batches = batches_of(eager, served.rows, 8).decoded[:3]
    file = tmp_path / "8.npz"
    write_batches(served.plain, batches, file)
    assert no_twin(served.plain) == ""
    spec = torchrec_spec(served.plain, "int8", {"8": file})
    assert spec["model"] == {"dense": 13, "bottom": [8, 16], "top": [8, 1]}
    assert len(spec["tables"]) == len(spec["features"]) == 26
    found = np.load(spec["batches"]["8"])
    rows = served.plain.embedding_bag_collection.id_rules(batches[1].sparse)
    first = found["ids_of_batch"][0]
    own = found["ids"][first : first + found["ids_of_batch"][1]]
    assert own.tolist() == rows.rows_L.tolist()
    assert found["lengths"][1].tolist() == rows.lengths_FB.flatten().tolist()
    assert found["dense"].shape == (3, 8, 13)
    for number, (_, sizes, _, _) in enumerate(spec["tables"]):
        assert int(rows.of(range(number, number + 1)).rows_L.max()) < sizes


def test_a_model_that_torchrec_does_not_have_is_named_as_such():
    assert (
        no_twin(torch.nn.Linear(2, 1)) == no_twin(None) == "the model is no DLRM of static tables"
    )


@pytest.mark.usefixtures("no_processes")
def test_every_way_has_a_record_and_loading_has_its_own(checkpoint, tmp_path):
    found = measured(checkpoint, tmp_path)
    ways = ["torch", "eager", "raw_rows"]
    assert [(r["quantize"], r["batch_size"], r["way"]) for r in found["rows"]] == [
        (quantize, size, way) for quantize in ("none", "int8") for size in (1, 50) for way in ways
    ]
    for row in found["rows"]:
        assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] <= row["p99_ms"]
        assert row["torch_ratio"] > 0 and row["torchrec_ratio"] is None
        assert (row["tail_met"] is None) == (row["batch_size"] > 1)
    assert [load["quantize"] for load in found["loads"]] == ["none", "int8"]
    for load in found["loads"]:
        assert load["rows_bytes"] > 0 and min(load["map_ms"], load["load_ms"]) > 0
    assert {Path(path).name for path in found["pictures"]} == {"answers.png"}


@pytest.mark.full
@pytest.mark.usefixtures("no_processes")
def test_an_artefact_is_measured_as_it_is_stored(served, tmp_path):
    found = measured(served.artefacts["int8"], tmp_path, batch_size=[5000])
    assert {(r["quantize"], r["batch_size"]) for r in found["rows"]} == {("int8", 5000)}


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_two_processes_hold_the_rows_of_an_artefact_once(served):
    path = served.artefacts["none"]
    size = sum(file.stat().st_size for file in (path / "rows").iterdir())
    found = memory_of_two(path)
    assert size <= found["rows_resident_bytes"] < size + 2 * 4096
    assert found["two_resident_bytes"] == found["rows_resident_bytes"]


def test_without_a_compiler_the_program_is_left_out_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference_bench, "missing_tools", lambda: ["cmake"])
    assert cpp_program(tmp_path) is None
    assert "the C++ program is left out: cmake is missing" in capsys.readouterr().err


def test_a_program_that_cannot_be_built_is_left_out_with_a_note(tmp_path, monkeypatch, capsys):
    def fails(folder):
        raise ConfigError("recapp_score cannot be built: it is Monday")

    monkeypatch.setattr(inference_bench, "missing_tools", list)
    monkeypatch.setattr(inference_bench, "build", fails)
    assert cpp_program(tmp_path) is None
    assert "left out: recapp_score cannot be built: it is Monday" in capsys.readouterr().err


def times(*rounds):
    return Measured({"step": [list(steps) for steps in rounds]})


def test_p99_is_of_all_steps_and_ratios_are_of_rounds():
    own = times([1.0] * 99 + [11.0], [2.0] * 100)
    found = record("eager", 1, {"eager": own, "torch": times([4.0] * 100, [4.0] * 100)})
    assert found["p99_ms"] == 2.0 and found["steps"] == 200 and found["median_ms"] == 2.0
    assert found["torch_ratio"] == 3.0 and found["torchrec_ratio"] is None
    assert found["samples_per_second"] == pytest.approx(200 / 0.310)
    assert found["tail_met"] is True
    assert record("eager", 64, {"eager": own})["tail_met"] is None
    slow = record("eager", 1, {"eager": times([1.0] * 97 + [3.5] * 3)})
    assert slow["tail_ratio"] == 3.5 and slow["tail_met"] is False


def test_the_goal_is_said_of_our_own_ways_at_batch_1():
    def row(way, tail, size=1):
        met = tail < 3 if size == 1 else None
        shape = {"model": "small", "quantize": "int8", "threads": 1, "way": way}
        return shape | {"batch_size": size, "tail_ratio": tail, "tail_met": met}

    met = [row("eager", 2.0), row("torch", 9.0), row("torchrec", 9.0), row("cpp", 9.0, 64)]
    assert goal_lines(met) == ["goal, p99 at batch 1 below 3 x p50: met (1 of 1)"]
    assert goal_lines([*met, row("cpp", 4.25)]) == [
        "goal, p99 at batch 1 below 3 x p50: missed (1 of 2)",
        "  missed by cpp, small int8, threads: 1: 4.2",
    ]
    assert goal_lines([row("eager", 2.0, 64)]) == []
