"""The commands as a user types them, from no data at all to numbers: train, sweep, evaluate, go on,
and a rank that is killed.
"""

import csv
import json
import os
import signal
import time

import jobs as product
import pytest
from jobs import command, metrics_of, small, validation

from recapp.stored.stored_model import read_manifest, verify

PLANS = ("data_parallel", "row_wise")  # the README's five: test_readme.py
STEPS = "trainer.max_steps=20"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Where the commands run; the first writes its data here."""
    return tmp_path_factory.mktemp("product")


@pytest.fixture(scope="module")
def trained(base):
    """A run of 20 steps with data generated first, in base/run."""
    settings = ["+plan=mixed", *small("logs"), STEPS, "hydra.run.dir=run"]
    done = command("train", *settings, cwd=base, fresh=True)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def swept(base, trained):
    """The same data and steps under two more plans, in base/sweep/<job>."""
    done = command(
        "train",
        "-m",
        f"+plan={','.join(PLANS)}",
        *small("logs"),
        STEPS,
        "hydra.sweep.dir=sweep",
        cwd=base,
    )
    assert done.code == 0, done.err
    return done


def test_metrics_are_flat_but_for_the_rows_and_say_what_was_measured(base, trained):
    found = metrics_of(base / "run")
    assert (found["steps"], found["ranks"], found["plan"], found["status"]) == (
        20,
        2,
        "mixed",
        "ok",
    )
    assert 0.5 < found["val_auc"] < 1 and 0 < found["val_log_loss"] < 0.7
    assert 0 < found["val_normalized_entropy"] < 2 and 0.5 < found["val_calibration"] < 2
    assert (
        found["samples_per_second"] > 0
        and found["step_ms"] > 0
        and found["bytes_exchanged_per_step"] > 0
    )
    assert found["bytes_per_rank"] == max(found["bytes_by_rank"]) > 0
    assert [name for name, value in found.items() if isinstance(value, dict)] == ["rows_read"]


def test_the_named_checkpoint_is_whole_and_holds_the_metrics_of_the_summary(base, trained):
    found = metrics_of(base / "run")
    assert verify(found["checkpoint"]) > 0
    assert read_manifest(found["checkpoint"]).metrics == validation(found)
    assert {path.name for path in (base / "run").rglob("*.ckpt")} <= {
        "step_000020.ckpt",
        "last.ckpt",
    }
    assert not [path for path in (base / "run").rglob("*") if set(path.name) & set("=,[] ")]


def test_before_the_first_step_it_is_said_what_will_happen(trained):
    before = trained.out.partition("Layers")[0]
    assert "Data in " in before and "left out: hidden 2 (_generated.json, _truth.json)" in before
    data = {line.split()[0]: line.split() for line in before.splitlines() if line.strip()}
    assert (data["train"][2], data["validate"][2]) == ("5,142", "858")
    seed, *lines = trained.out.splitlines()
    assert seed == "seed 1, 2 ranks, backend gloo, transport shared_memory, plan mixed"
    said = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert said["bottom.0"][1:5] == ["Linear", "B", "x", "256"] and said["top.4"][1:5] == [
        "Linear",
        "B",
        "x",
        "1",
    ]
    assert said["interaction"][1:5] == ["DotInteraction", "B", "x", "367"]
    assert said["C1"][1:] == ["120,001", "16", "row_wise", "3.840", "all"]
    assert said["C6"][1:] == ["4", "16", "data_parallel", "0.000", "all"]
    assert said["C2"][3] == "table_wise" and said["C2"][-1] in ("0", "1")


def test_each_rank_is_listed_with_host_device_and_the_bytes_of_the_metrics(base, trained):
    lines = trained.out[trained.out.index("Ranks") :].splitlines()
    held = [line.split() for line in lines[3:5]]
    assert [(row[0], row[2]) for row in held] == [("0", "cpu"), ("1", "cpu")]
    assert held[0][1] == held[1][1] == os.uname().nodename
    assert [row[-1] for row in held] == [
        f"{n / 1e6:,.3f}" for n in metrics_of(base / "run")["bytes_by_rank"]
    ]


def test_at_the_end_the_summary_says_how_good_and_where(base, trained):
    found = metrics_of(base / "run")
    summary = trained.out[trained.out.index("Summary") :]
    lines = {
        line.rsplit(maxsplit=1)[0].strip(): line.split()[-1]
        for line in summary.splitlines()
        if line.split()
    }
    shown = {
        "AUC": "auc",
        "log loss": "log_loss",
        "normalised entropy": "normalized_entropy",
    }
    assert [lines[f"validation {name}"] for name in shown] == [
        f"{found[f'val_{key}']:.5f}" for key in shown.values()
    ]
    assert f" {found['val_calibration']:.5f}, predicted over real share: 1 is right" in summary
    assert lines["samples/s, all ranks"] == f"{found['samples_per_second']:,.0f}"
    assert "checkpoint  run/checkpoints/step_000020.ckpt\nmetrics     run/metrics.json" in summary


def test_where_the_output_is_no_terminal_progress_is_plain_lines(trained):
    written, step, validated = trained.err.splitlines()
    assert written.startswith("writing ") and written.endswith("logs: 6,000 of 6,000")
    assert step.startswith("step 20/20, ") and all(
        part in step for part in (" s for 20 steps", "loss 0.", "lr 0.001")
    )
    assert validated.startswith("step 20/20, validation: AUC 0.")


@pytest.mark.full
def test_data_is_written_once_and_the_score_of_its_hidden_model_beside_it(base, trained, swept):
    assert "writing" not in swept.err
    assert 0.75 < json.loads((base / "logs/_truth.json").read_text())["auc"] < 0.9


@pytest.mark.full
def test_every_plan_of_a_sweep_trains_the_same_model_bit_for_bit(base, trained, swept):
    first = metrics_of(base / "run")
    for job, plan in enumerate(PLANS):
        found = metrics_of(base / f"sweep/{job}")
        assert found["plan"] == plan and [*(base / f"sweep/{job}").rglob("*.ckpt")]
        assert (found["val_auc"], found["val_log_loss"]) == (
            first["val_auc"],
            first["val_log_loss"],
        )
        assert validation(found) == validation(first)


@pytest.mark.full
def test_a_sweep_compares_its_jobs_on_screen_and_in_a_file(base, swept):
    with open(base / "sweep/comparison.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["status"], row["plan"], row["ranks"]) for row in rows] == [
        (str(i), "ok", p, "2") for i, p in enumerate(PLANS)
    ]
    assert len({(row["val_auc"], row["val_log_loss"]) for row in rows}) == 1
    measured = ("step_ms", "samples_per_second", "bytes_per_rank", "bytes_exchanged_per_step")
    assert all(float(row[name]) > 0 for row in rows for name in measured)
    assert float(rows[0]["bytes_per_rank"]) > 1.5 * float(rows[1]["bytes_per_rank"])
    table = swept.out[swept.out.rindex("comparison.csv") :]
    assert all(plan in table for plan in PLANS)
    assert [line for line in swept.err.splitlines() if line.startswith("job ")] == [
        f"job {i}: +plan={plan} {' '.join(small('logs'))} {STEPS}" for i, plan in enumerate(PLANS)
    ]


@pytest.mark.full
def test_evaluation_on_four_ranks_under_another_plan_reproduces_the_metrics(base, trained):
    named = metrics_of(base / "run")["checkpoint"]
    done = command(
        "eval",
        f"ckpt_path={named}",
        "+plan=row_wise",
        "trainer.devices=4",
        "hydra.run.dir=eval",
        "format=json",
        cwd=base,
    )
    assert done.code == 0 and done.err == "", done.err
    found = metrics_of(base / "eval")
    assert found["rows_read"]["splits"] == {
        "val": metrics_of(base / "run")["rows_read"]["splits"]["val"]
    }
    assert json.loads(done.out)["rows"] == [found]
    assert (found["ranks"], found["plan"], found["checkpoint"]) == (4, "row_wise", named)
    assert validation(found) == pytest.approx(validation(metrics_of(base / "run")), rel=1e-6)


def test_evaluation_on_as_many_ranks_is_exact_and_on_one_within_rounding(base, trained, jobs):
    named = f"ckpt_path={metrics_of(base / 'run')['checkpoint']}"
    saved = validation(metrics_of(base / "run"))
    assert validation(jobs.evaluate(base / "eval2", named, "+plan=column_wise")) == saved
    assert validation(jobs.evaluate(base / "eval1", named, world=1)) == pytest.approx(
        saved, rel=1e-6
    )


def test_where_nothing_is_left_to_train_it_says_so_and_leaves_the_checkpoint_alone(
    base, trained, jobs
):
    path = base / "run/checkpoints/last.ckpt"
    before = (path / "manifest.json").stat().st_mtime_ns
    found = jobs.train(base / "done", f"ckpt_path={path}")
    said = (base / "done/rank0.out").read_text()
    assert (
        said.startswith("nothing is left to train: ")
        and "20 steps" in said
        and "trainer.max_steps=20" in said
    )
    assert validation(found) == validation(metrics_of(base / "run")) and found["steps"] == 20
    assert (path / "manifest.json").stat().st_mtime_ns == before and not (
        base / "done/checkpoints"
    ).exists()


@pytest.mark.full
def test_what_a_scheduler_ends_with_sigterm_is_saved_first_and_goes_on(base, trained, jobs):
    run = product.start(
        "train",
        "+plan=mixed",
        *small("logs"),
        "trainer.max_steps=1000000",
        "trainer.val_check_interval=1000000",
        "hydra.run.dir=ended",
        cwd=base,
    )
    end = time.monotonic() + 120
    while "step 40/" not in (base / "err.txt").read_text():
        assert run.poll() is None and time.monotonic() < end, (base / "err.txt").read_text()
        time.sleep(0.05)
    run.terminate()
    assert run.wait(timeout=60) == 128 + signal.SIGTERM
    found = metrics_of(base / "ended")
    assert found["steps"] >= 40 and found["status"] == "stopped"
    more = found["steps"] + 1
    assert (
        jobs.train(
            base / "ended_on",
            f"ckpt_path={base}/ended/checkpoints/last.ckpt",
            f"trainer.max_steps={more}",
        )["steps"]
        == more
    )


@pytest.mark.full
def test_a_killed_rank_is_named_the_others_end_and_the_last_checkpoint_is_whole(
    base, trained, jobs
):
    run = product.start(
        "train",
        "+plan=row_wise",
        *small("logs"),
        "trainer.max_steps=1000000",
        "trainer.val_check_interval=3",
        "trainer.limit_val_batches=1",
        "hydra.run.dir=killed",
        cwd=base,
    )
    last = base / "killed/checkpoints/last.ckpt"
    end = time.monotonic() + 120
    while not (last / "manifest.json").exists():
        assert run.poll() is None and time.monotonic() < end, (base / "err.txt").read_text()
        time.sleep(0.05)
    ranks = product.ranks_of(run.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(timeout=120) == 1
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values())
    *_, said = (base / "err.txt").read_text().splitlines()
    assert said.startswith(
        f"error: rank 1 on {os.uname().nodename} (process {ranks[1]}) was ended by SIGKILL"
    )
    assert "Traceback" not in (base / "err.txt").read_text()
    steps = read_manifest(last).info["step"]
    assert verify(last) > 0
    assert (
        jobs.train(base / "goes_on", f"ckpt_path={last}", f"trainer.max_steps={steps + 2}")["steps"]
        == steps + 2
    )
