"""How fast a model answers: all ways score the same rows, and the results say it all."""

import json

import pytest
import torch
from bench_cases import SHORT
from compilers import NO_PROGRAM
from trainer.runs import compose, fit, make_logs

from recapp import inference_bench
from recapp.bench import MEASURES
from recapp.benchmarks import session
from recapp.benchmarks.timing import Measured
from recapp.errors import ConfigError
from recapp.inference_bench import cpp_program, latency, stored_models
from recapp.run.recipe import BenchInference
from recapp.settings.records import to_plain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny DLRM, trained for three steps."""
    folder = tmp_path_factory.mktemp("served")
    fit(compose(make_logs(folder / "logs"), "trainer.max_steps=3"), folder / "run")
    return folder / "run" / "checkpoints" / "last.ckpt"


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def settings_of(path, **more):
    shape = {"batch_size": (1, 50), "threads": 1, "compile": False}
    return BenchInference(**SHORT, artefact=str(path), **(shape | more))


def measured(settings, folder):
    """Return all rows of results of a measurement in this process."""
    plain = to_plain(settings)
    session.run(plain | {"command": "bench_inference", "measure": MEASURES["inference"]}, folder)
    return json.loads((folder / "metrics.json").read_text())["rows"]


@pytest.mark.full
def test_every_way_has_a_row(checkpoint, tmp_path):
    rows = measured(settings_of(checkpoint), tmp_path)
    assert [(r["quantize"], r["batch_size"], r["way"]) for r in rows] == [
        (quantize, size, way)
        for quantize in ("none", "int8")
        for size in (1, 50)
        for way in ("eager", "raw_rows")
    ]
    for row in rows:
        assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] <= row["p99_ms"]


@pytest.mark.full
def test_compiled_and_in_cpp_it_has_rows_too(checkpoint, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(inference_bench, "build", lambda folder: stored.program())
    rows = measured(settings_of(checkpoint, quantize="int8", compile=True), tmp_path)
    ways = {"eager", "raw_rows"} | (set() if NO_PROGRAM else {"compiled", "cpp"})
    for size in (1, 50):
        assert {row["way"] for row in rows if row["batch_size"] == size} == ways


def test_an_artefact_is_measured_as_it_is_stored_and_decoded_rows_score_as_raw_ones(
    checkpoint, tmp_path
):
    settings = settings_of(checkpoint, quantize="int8", batch_size=40)
    (stored,) = stored_models(checkpoint, settings, tmp_path)
    (again,) = stored_models(stored.path, settings_of(stored.path, batch_size=5000), tmp_path)
    assert again.quantize == "int8" and again.path == stored.path
    assert len(again.batches[0].raw) == 1  # rows repeat up to a batch
    for raw, batch in zip(stored.batches[0].raw, stored.batches[0].decoded, strict=True):
        assert torch.equal(stored.eager.predict(raw), stored.eager.scores(batch))


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


def test_p99_is_of_all_steps():
    times = Measured({"step": [[1.0] * 99 + [11.0], [2.0] * 100]})
    entries = latency(times, 1)
    assert entries["p99_ms"] == 2.0 and entries["steps"] == 200 and entries["median_ms"] == 2.0
    assert entries["samples_per_second"] == pytest.approx(200 / 0.310)
