"""How runs end: what their directory and the last line say. Jobs on a pool of ranks; whole commands
with signals in the full tier.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hosts import TORCHRUN, Started, at_once, wait_for
from jobs import Failed, environment, metrics_of, ranks_of, small, start

from recapp.stored.stored_model import read_manifest


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("ends")


@pytest.mark.full
def test_metrics_that_one_class_leaves_open_are_null_and_the_run_is_not_called_ok(jobs, base):
    jobs.train(base / "first", *small(base / "logs"), "trainer.max_steps=1")
    rows = pq.read_table(sorted((base / "logs").glob("*.parquet"))[-1])
    pq.write_table(rows.filter(pc.field("label") == 0), base / "no_clicks.parquet")
    found = jobs.train(
        base / "one_class",
        *small(base / "logs"),
        f"dataset.val_path={base}/no_clicks.parquet",
        "trainer.max_steps=2",
    )
    text = (base / "one_class/metrics.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == found
    stored = (base / "one_class" / found["checkpoint"] / "manifest.json").read_text()
    assert json.loads(stored, parse_constant=pytest.fail)["metrics"]["val_auc"] is None
    assert (
        found["status"] == "undefined"
        and found["val_auc"] is None
        and 0 < found["val_log_loss"] < 1
    )
    assert set(found["undefined"]) == {"val_auc", "val_normalized_entropy", "val_calibration"}
    (said,) = [
        line
        for line in (base / "one_class/rank0.err").read_text().splitlines()
        if "cannot be computed" in line
    ]
    assert "the validation rows are of one class only" in said and "dataset.val_share" in said
    assert re.search(
        r"^validation AUC +undefined$", (base / "one_class/rank0.out").read_text(), re.MULTILINE
    )


def test_a_loss_that_is_not_finite_fails_on_all_ranks_and_leaves_neither_metrics_nor_a_checkpoint(
    jobs, base
):
    with pytest.raises(Failed) as failed:
        jobs.train(
            base / "nan",
            *small(base / "logs"),
            "optimizer.sparse.lr=1e30",
            "trainer.log_every_n_steps=1",
        )
    said = set(failed.value.errors.values())
    assert len(said) == 1 and len(failed.value.errors) == 2
    ((kind, line),) = said
    assert (
        kind == "TrainingError"
        and "is not a finite number on rank" in line
        and "optimizer.sparse.lr (now 1e+30)" in line
    )
    assert not (base / "nan/metrics.json").exists() and not [*(base / "nan").rglob("*.ckpt")]


# ---- whole commands

ENDLESS = [
    "+plan=mixed",
    "trainer.max_steps=1000000",
    "trainer.val_check_interval=1000000",
    "trainer.log_every_n_steps=5",
]


def training(base, name, *overrides, said="step 5/", **variables):
    """A command that trains without end in `base`/`name`, once it has said something; and a
    function that reads what it said.
    """
    folder = base / f"{name}_said"
    folder.mkdir()
    run = start(
        "train",
        *ENDLESS,
        *small(base / "logs"),
        f"hydra.run.dir={base / name}",
        *overrides,
        cwd=folder,
        **variables,
    )

    def output():
        return (folder / "out.txt").read_text() + (folder / "err.txt").read_text()

    end = time.monotonic() + 120
    while said not in output():
        assert run.poll() is None and time.monotonic() < end, output()
        time.sleep(0.02)
    return run, output


def assert_stopped(directory, by, output):
    """The run is saved, marked and says how to go on; nothing else was said."""
    found = metrics_of(directory)
    assert found["status"] == "stopped" and by in found["stopped"] and found["steps"] >= 5
    assert not (directory / "error.json").exists() and not (directory / ".lock").exists()
    assert read_manifest(directory / "checkpoints/last.ckpt").info["step"] == found["steps"]
    assert (directory / "csv/metrics.csv").stat().st_size and (
        directory / "performance.json"
    ).exists()
    assert (
        f"to go on: python -m recapp.train ckpt_path=../{directory.name}/checkpoints/last.ckpt\n"
        in output
    )
    assert re.search(rf"^stopped +step \d+: {by}( to rank [\d, ]+)?$", output, re.MULTILINE)
    assert "Traceback" not in output and "error" not in output


@pytest.mark.full
def test_ctrl_c_saves_once_though_every_process_of_the_terminal_hears_it(base):
    run, output = training(base, "ctrl_c", "dataset.num_threads=1", fresh=True)
    ranks = ranks_of(run.pid)
    began = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    # as a service manager or a scheduler does: the launcher and all ranks
    for pid in ranks.values():
        os.killpg(pid, signal.SIGINT)
    assert run.wait(timeout=60) == 130
    assert time.monotonic() - began < 20
    assert output().endswith("interrupted\n")
    assert_stopped(base / "ctrl_c", "SIGINT", output())


@pytest.mark.full
def test_sigterm_to_one_rank_stops_all_and_is_no_success(base):
    run, output = training(base, "one_rank")
    os.kill(ranks_of(run.pid)[1], signal.SIGTERM)
    assert run.wait(timeout=60) == 143
    assert output().endswith("stopped by SIGTERM\n")
    assert_stopped(base / "one_rank", "SIGTERM to rank 1", output())


BEGUN = """
import pathlib, sys
def hook(event, arguments):
    if event == "import" and arguments[0] == "hydra":
        pathlib.Path("begun").touch()
sys.addaudithook(hook)
"""


ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}
MOMENTS = 4


@pytest.mark.full
def test_a_signal_at_any_moment_of_the_start_counts_and_is_one_line(jobs, base):
    # else a start writes the logs, and says so
    jobs.train(base / "logs_of_signals", *small(base / "logs"), "trainer.max_steps=1")
    folder = base / "start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BEGUN)  # the clock starts when recapp runs

    def started():
        (folder / "begun").unlink(missing_ok=True)
        run = start(
            "train",
            *ENDLESS,
            *small(base / "logs"),
            f"hydra.run.dir={folder}/run",
            cwd=folder,
            fresh=True,
            PYTHONPATH=f"{folder}:{environment()['PYTHONPATH']}",
        )
        wait(lambda: (folder / "begun").exists())
        return run, time.monotonic()

    def wait(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    took = float("inf")
    for _ in range(2):  # the faster: those below may be faster than the first
        run, began = started()
        wait(lambda pid=run.pid: len(ranks_of(pid)) == 2)
        took = min(took, time.monotonic() - began)
        run.terminate()
        assert run.wait(timeout=60) == 143
    before_training = 0
    for moment in range(MOMENTS):
        number, ending = list(ENDS.items())[moment % 2]
        run, began = started()
        time.sleep(took * 1.2 * moment / (MOMENTS - 1))
        ranks = ranks_of(run.pid)
        run.send_signal(number)
        code = run.wait(timeout=30)
        # with ranks there is something to wait for, and that is said
        lines = [
            line
            for line in (folder / "err.txt").read_text().splitlines()
            if not line.startswith("stopping after ")
        ]
        assert code == 128 + number and lines[-1] == ending, (moment, took, lines)
        if spoke := (folder / "out.txt").read_text():  # the start was over
            assert "Traceback" not in spoke and not any("error" in line for line in lines), moment
            ended = [folder / "run" / name for name in ("metrics.json", "error.json")]
            assert [json.loads(mark.read_text())["status"] for mark in ended if mark.exists()] == [
                "stopped"
            ], moment
        else:
            before_training += 1
            assert lines == [ending] and not (folder / "run/metrics.json").exists(), (moment, took)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()), moment
        assert not (folder / "run/.lock").exists(), moment
        shutil.rmtree(folder / "run", ignore_errors=True)
    assert before_training >= MOMENTS / 2


@pytest.mark.full
def test_a_second_signal_ends_the_run_at_once(base):
    run, _ = training(base, "second")
    os.kill(ranks_of(run.pid)[0], signal.SIGSTOP)  # it cannot save
    for _ in range(2):
        run.send_signal(signal.SIGINT)
        time.sleep(0.2)
    began = time.monotonic()
    assert run.wait(timeout=60) == 130 and time.monotonic() - began < 5
    assert json.loads((base / "second/error.json").read_text()) == {
        "error": "interrupted",
        "status": "stopped",
    }


@pytest.mark.full
def test_under_torchrun_the_mark_and_the_summary_tell_of_the_stop(base):
    arguments = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "recapp.train",
        *ENDLESS,
        *small(base / "logs"),
        f"hydra.run.dir={base / 'torchrun'}",
    ]
    with at_once(Started(arguments, base, "agent", OMP_NUM_THREADS="1")) as (agent,):
        wait_for("step 5/", agent)
        agent.process.send_signal(signal.SIGTERM)
        ran = agent.wait(60)
        assert agent.processes() == []
    found = metrics_of(base / "torchrun")
    assert (
        found["status"] == "stopped"
        and "SIGTERM" in found["stopped"]
        and "to go on: " in ran.err
        and "Summary" in ran.out
    )
    assert read_manifest(base / "torchrun/checkpoints/last.ckpt").info["step"] == found["steps"]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_that_is_stopped_ends_the_run_after_launch_timeout(base, transport):
    run, output = training(
        base, f"frozen_{transport}", "launch.timeout=5", f"engine.transport={transport}"
    )
    assert_ended_when_stopped(run, output, 1, 5)


def assert_ended_when_stopped(run, output, rank, timeout):
    pid = ranks_of(run.pid)[rank]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert run.wait(timeout=120) == 1
    # 5 of them on a machine that does nothing else
    assert time.monotonic() - began < timeout + 15
    waited = rf"error: rank \d has waited for .* for {timeout} seconds \(launch.timeout\): it is "
    known = rf"{waited}stopped or stuck|error: the ranks could not meet at .*time(d )?out"
    assert re.match(known, output().splitlines()[-1]), output()
    assert "Traceback" not in output() and ranks_of(run.pid) == {}


@pytest.mark.full
def test_a_rank_that_is_stopped_ends_the_run_at_whatever_moment_of_the_start(jobs, base):
    # else a start writes the logs, for longer or shorter
    jobs.train(base / "logs_of_stops", *small(base / "logs"), "trainer.max_steps=1")

    def started(number):
        folder = base / f"stop_{number}"
        folder.mkdir()
        run = start(
            "train",
            *ENDLESS,
            *small(base / "logs"),
            f"hydra.run.dir={folder}/run",
            "trainer.devices=3",
            "launch.timeout=4",
            cwd=folder,
        )
        until(lambda: len(ranks_of(run.pid)) == 3)
        return run, lambda: (folder / "out.txt").read_text() + (folder / "err.txt").read_text()

    run, output = started("none")
    began = time.monotonic()
    until(lambda: "step 5/" in output())
    took = time.monotonic() - began
    run.kill()
    run.wait()
    for moment in range(3):
        run, output = started(moment)
        time.sleep(took * moment / 2)
        assert_ended_when_stopped(run, output, moment % 3, 4)


@pytest.mark.full
def test_a_run_that_was_stopped_as_a_whole_goes_on(base):
    timeout = 6
    run, output = training(base, "suspended", f"launch.timeout={timeout}")
    ranks = ranks_of(run.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(0.2)  # rank 0 waits for it
    for pid in (ranks[0], run.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(timeout + 1)
    steps = output().count("step ")
    for pid in (run.pid, *ranks.values()):
        os.kill(pid, signal.SIGCONT)
    until(lambda: run.poll() is not None or output().count("step ") > steps + 2)
    assert run.poll() is None, output()
    run.kill()
    run.wait()


def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_small_folder(folder, size, *arguments, cwd, **variables):
    """A command that sees a file system of `size` bytes at `folder`; skips where none can be
    mounted.
    """
    mount = f'mount -t tmpfs -o size={size} tmpfs "{folder}"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    command = " ".join(
        [
            shlex.quote(sys.executable),
            "-m",
            "recapp.train",
            *(shlex.quote(str(a)) for a in arguments),
        ]
    )
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {command}"],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    return [line for line in ran.stderr.splitlines() if line.startswith("error")]


@pytest.mark.full
def test_a_disk_that_fills_while_training_is_one_line(base):
    (base / "disk").mkdir()
    said = in_small_folder(
        base / "disk",
        "36k",
        *ENDLESS,
        *small(base / "logs"),
        f"hydra.run.dir={base / 'disk/run'}",
        "trainer.log_every_n_steps=1",
        cwd=base,
    )
    assert said == [
        f"error: the disk under {base / 'disk/run'} is full, or its quota is used up: make room "
        "there, or choose another hydra.run.dir"
    ]
