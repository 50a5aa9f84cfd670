"""The clock of phases, and what a run records of its record."""

import errno
import itertools
import json
import socket
from pathlib import Path

import pytest
from jobs import small
from lightning.pytorch import Callback
from reporting.records import performance, plan_report
from trainer.runs import compose, fit, make_logs

from recapp.errors import ConfigError
from recapp.reporting import phases
from recapp.reporting.phases import MARKS, PHASES, PhaseClock
from recapp.reporting.run_record import (
    PERFORMANCE_FILE,
    Performance,
    PlanReport,
    claim_directory,
    read_record,
    write_record,
)
from recapp.trainer.callbacks import StepClock


@pytest.fixture
def ticking(monkeypatch):
    """Let a second pass with every look at the clock."""
    ticks = itertools.count()
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(ticks)))


def step(clock, *marks):
    clock.start()
    for mark in marks[:-1]:
        clock(mark)
    clock.end(marks[-1])


def test_a_part_is_the_time_since_the_last_mark_and_parts_of_a_phase_add_up(ticking):
    clock = PhaseClock()
    step(
        clock,
        "outside",
        "route",
        "counts",
        "outside",
        "answer",
        "combine",
        "vectors",
        "combine",
        "autograd",
        "spread",
        "update",
        "outside",
    )
    assert clock.parts_ms(0) == {
        "outside": 3e3,
        "route": 1e3,
        "counts": 1e3,
        "answer": 1e3,
        "combine": 2e3,
        "vectors": 1e3,
        "autograd": 1e3,
        "spread": 1e3,
        "update": 1e3,
    }
    assert clock.phases_ms(0) == {
        "input": 2e3,
        "lookup": 3e3,
        "output": 1e3,
        "dense": 4e3,
        "gradients": 1e3,
        "update": 1e3,
    }


def test_medians_are_those_of_steps_without_the_first(ticking):
    clock = PhaseClock()
    step(clock, *["route"] * 9)
    for n in (1, 5, 2):
        step(clock, *["route"] * n)
    assert clock.phases_ms(1)["input"] == 2e3
    assert clock.phases_ms(10)["input"] == 3.5e3  # fewer steps than that: all of them


def test_quartiles_hold_the_middle_half_of_the_steps():
    assert phases.quartiles([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0, 4.0)
    assert phases.quartiles([7.0]) == (7.0, 7.0, 7.0) and PhaseClock().phases_ms(0) == {}


def test_what_comes_between_two_steps_is_no_part_of_them(ticking):
    clock = PhaseClock()
    step(clock, "route")
    clock("route")  # a validation
    step(clock, "route")
    assert clock.measured(0) == [{"route": 1e3}] * 2


def test_a_long_run_is_described_by_its_last_steps(monkeypatch):
    clock = PhaseClock()
    for _ in range(phases.KEPT_STEPS + 7):
        step(clock, "route")
    assert len(clock.measured(0)) == phases.KEPT_STEPS


def test_every_phase_has_marks():
    assert (
        tuple(dict.fromkeys(MARKS.values()))
        == ("input", "lookup", "output", "dense", "gradients", "update")
        == PHASES
    )


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return make_logs(tmp_path_factory.mktemp("logs") / "set")


def record(logs, folder, *extra, overrides=()):
    clock = StepClock(folder)
    settings = compose(logs, "trainer.max_steps=14", "engine.backend=torch", *overrides)
    fit(settings, folder, clock, *extra)


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_a_run_records_phases_memory_and_bytes_of_every_rank(logs, tmp_path, look_ahead):
    seen = []

    class Watch(Callback):
        def on_train_end(self, trainer, pl_module):
            seen.extend(s for c in trainer.strategy.sharded_tables() for s in c.stores)

    record(
        logs,
        tmp_path,
        Watch(),
        overrides=["trainer.val_check_interval=6", f"engine.look_ahead={look_ahead}"],
    )
    measured = read_record(Performance, tmp_path / PERFORMANCE_FILE)
    assert (measured.ranks, measured.batch_per_rank, measured.steps) == (1, 96, 4)
    assert measured.sent_bytes == (0.0,)
    (spent,), (parts,), (memory,) = measured.phases_ms, measured.parts_ms, measured.memory
    # alone: nothing sent
    assert tuple(spent) == PHASES and all(
        spent[phase] > 0 for phase in ("input", "lookup", "dense", "update")
    )
    # whatever a collection marks has its phase
    assert set(parts) <= set(MARKS) and parts["data"] > 0
    assert sum(spent.values()) < 3 * measured.step_ms
    assert memory.weights == sum(s.weights.nbytes for s in seen)
    assert memory.state == sum(t.nbytes for s in seen for t in s.state) > 0
    assert memory.buffers > 0 and 0 < memory.rss <= memory.rss_peak and memory.allocated is None
    assert measured.mean_phases() == spent


@pytest.mark.full
def test_every_rank_tells_its_own(jobs, tmp_path):
    metrics = jobs.train(tmp_path / "run", *small(tmp_path / "logs"), "+plan=row_wise")
    found = read_record(Performance, tmp_path / "run" / PERFORMANCE_FILE)
    assert found.ranks == 2 and found.batch_per_rank == 128 and found.step_ms == metrics["step_ms"]
    assert [memory.weights + memory.state for memory in found.memory] == metrics["bytes_by_rank"]
    assert 0 < metrics["samples_per_cpu_second"] < 1e9
    low, high = metrics["step_ms_quartiles"]
    assert low <= metrics["step_ms"] <= high
    assert (
        metrics["rows_train"] + metrics["rows_val"] == 6000
        and metrics["batch_size"] == 256
        and metrics["model"] == "DLRM"
    )
    assert all(metrics[f"version_{name}"] for name in ("recapp", "torch", "lightning", "python"))
    assert metrics["hosts"] == [socket.gethostname()]
    assert sum(found.sent_bytes) == pytest.approx(metrics["bytes_exchanged_per_step"])
    for parts, spent in zip(found.parts_ms, found.phases_ms, strict=True):
        assert set(MARKS) - {"serve"} <= set(parts) <= set(MARKS) and all(
            spent[phase] > 0 for phase in PHASES
        )


def test_a_run_that_fails_records_nothing(logs, tmp_path):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        record(logs, tmp_path, Fail())
    assert read_record(Performance, tmp_path / PERFORMANCE_FILE) is None


def test_a_new_run_in_the_directory_takes_the_old_record_away(tmp_path):
    write_record(performance(), tmp_path / "performance.json")
    claim_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_for_which_the_disk_has_no_room_leaves_the_earlier_one(tmp_path, monkeypatch):
    write_record(performance(step_ms=1.0), tmp_path / "performance.json")

    def write_text(path, text, **_):
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match="No space"):
        write_record(performance(step_ms=2.0), tmp_path / "performance.json")
    assert read_record(Performance, tmp_path / PERFORMANCE_FILE) == performance(step_ms=1.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_records_are_read_as_they_were_written_and_others_are_refused(tmp_path):
    path = tmp_path / "predicted.json"
    assert read_record(PlanReport, path) is None
    report = plan_report(tables=4, ranks=3, hosts=1)
    write_record(report, path)
    assert read_record(PlanReport, path) == report
    assert report.mean_ms("input") == 1.0 and report.sent_bytes == 6000
    content = json.loads(path.read_text())
    for wrong, words in (
        ({"step_ms": 9.0}, "has no batch_per_rank"),
        (content | {"best": 1}, "has unknown best"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=f"predicted.json: {words}"):
            read_record(PlanReport, path)
    path.write_text('{"step_ms": ')
    assert read_record(PlanReport, path) is None
