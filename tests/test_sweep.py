"""`recapp.train` around ranks that train nothing: one run, sweeps, their table, Ctrl-C, ranks
started from outside.
"""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin_conf
import yaml

from recapp import train
from recapp.console import print_table
from recapp.reporting import runs
from recapp.run import recipe as commands
from recapp.settings import option_files
from recapp.tasks.task import CLICK

TESTS = Path(__file__).resolve().parent
MEASURED = {
    "val_auc": 0.7580123,
    "val_log_loss": 0.4892,
    "step_ms": 1234.5,
    "step_ms_quartiles": [1200.25, 1300.0],
    "samples_per_second": 1234567.0,
    "train_seconds": 98.5,
    "ranks": 2,
    "bytes_per_rank": 3 << 30,
    "bytes_exchanged_per_step": 45 << 20,
    "plan": "table_row_wise",
}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A working directory with a configuration beside it; ranks find the stand-in."""
    (tmp_path / "conf").mkdir()
    conf = standin_conf.write(tmp_path / "conf")
    (tmp_path / "conf/model/bad.yaml").write_text("ranks: [wait, raise]")
    (tmp_path / "conf/model/slow.yaml").write_text("ranks: [wait, wait]")
    monkeypatch.setattr(option_files, "conf_dir", lambda: conf)
    for name, kind in standin_conf.COMMANDS.items():
        monkeypatch.setitem(commands.COMMANDS, name, kind)
    standin_conf.install(monkeypatch.setattr)
    monkeypatch.setenv("STANDIN_CONF", str(conf))
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(*argv):
    return train.main(list(argv), worker="standin_worker")


@pytest.mark.full
def test_a_run_writes_its_settings_with_absolute_paths_and_reports_as_json_alone(base, capfd):
    assert run("+plan=mixed", "dataset=other", "hydra.run.dir=out", "format=json") == 0
    written = yaml.safe_load((base / "out/resolved.yaml").read_text())
    assert written["dataset"]["path"] == [f"{base}/a", f"{base}/b/*.parquet"]
    assert written["choices"]["plan"] == "mixed" and written["plan"]["name"] == "mixed"
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert row == json.loads((base / "out/metrics.json").read_text())
    assert row["val_auc"] == 0.75 and row["plan"] == "mixed"


@pytest.mark.full
def test_a_run_that_could_not_begin_leaves_what_an_earlier_one_left(base):
    (base / "out").mkdir()
    earlier = {"metrics.json": "{}", "resolved.yaml": "seed: 7"}
    for name, text in earlier.items():
        (base / "out" / name).write_text(text)
    assert run("model=bad", "hydra.run.dir=out") == 1
    assert {
        file.name: file.read_text() for file in (base / "out").iterdir() if file.name in earlier
    } == earlier
    assert not (base / "out/error.json").exists()
    assert not (base / "out/resolved.yaml.tmp").exists()


@pytest.mark.full
def test_what_an_earlier_run_left_is_not_taken_for_the_result_of_one_that_measured_nothing(
    base, capfd
):
    (base.parent / "conf/model/mute.yaml").write_text("ranks: [mute, fine]")
    (base / "out").mkdir()
    (base / "out/metrics.json").write_text('{"val_auc": 0.9}')
    assert run("model=mute", "hydra.run.dir=out", "format=json") == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "the ranks ended without an error, but wrote no" in captured.err


@pytest.mark.full
def test_a_sweep_goes_on_after_a_failing_job_and_compares_all(base, capfd):
    assert run("-m", "+plan=mixed,row_wise", "model=dlrm,bad", "hydra.sweep.dir=sweep") == 1
    captured = capfd.readouterr()
    assert captured.out.count("comparison.csv") == 4  # after each job
    assert "Traceback" in captured.err and "boom" not in captured.out
    assert [
        captured.err.count(
            f"error: rank 1 on {socket.gethostname()} (process "
            f"{(base / f'sweep/{job}/pid1').read_text()}) failed: "
        )
        for job in (1, 3)
    ] == [1, 1]
    with (base / "sweep/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["status"], row["plan"], row["model"]) for row in rows] == [
        ("0", "ok", "mixed", "dlrm"),
        ("1", "failed", "mixed", "bad"),
        ("2", "ok", "row_wise", "dlrm"),
        ("3", "failed", "row_wise", "bad"),
    ]
    assert (
        rows[2]["val_auc"] == "0.75"
        and rows[3]["val_auc"] == ""
        and "boom in rank 1" in rows[3]["error"]
    )
    assert not list(base.glob("sweep/*/*/*torchelastic*")) and sorted(
        p.name for p in base.iterdir()
    ) == ["sweep"]


def test_each_job_of_a_sweep_has_checkpoints_of_its_own(base, capfd):
    varied = ("seed=1,2", "trainer.devices=1", "hydra.sweep.dir=sweep")
    assert run("-m", *varied, "checkpoints=kept") == 0
    where = [
        yaml.safe_load((base / f"sweep/{job}/resolved.yaml").read_text())["checkpoints"]
        for job in (0, 1)
    ]
    assert where == [str(base / "kept/0"), str(base / "kept/1")]
    capfd.readouterr()


def rows_of(sweep):
    with (sweep / "comparison.csv").open() as file:
        return [(row["job"], row["status"], row["val_auc"]) for row in csv.DictReader(file)]


@pytest.mark.full
def test_a_sweep_where_an_earlier_one_was_compares_its_own_jobs(base, capfd, monkeypatch):
    where = ("trainer.devices=1", "hydra.sweep.dir=sweep")
    assert run("-m", "seed=1,2,3", *where) == 0
    capfd.readouterr()
    while_it_ran = []
    launch = train.run_recipe
    monkeypatch.setattr(
        train,
        "run_recipe",
        lambda *given: while_it_ran.append(rows_of(base / "sweep")) or launch(*given),
    )
    assert run("-m", "seed=5,6", *where) == 0
    assert while_it_ran == [[("0", "running", "")], [("0", "ok", "0.75"), ("1", "running", "")]]
    assert rows_of(base / "sweep") == [("0", "ok", "0.75"), ("1", "ok", "0.75")]
    first, _, _ = capfd.readouterr().out.partition("seed=6")
    assert "seed=2" not in first  # the table after the first job has that one alone
    assert "Varied: seed (5, 6)." in (base / "sweep/report.html").read_text()
    # what recapp.report shows later
    assert [job.name for job in runs.jobs_of(base / "sweep")] == ["0", "1"]


@pytest.mark.full
def test_a_sweep_as_json_is_one_document_at_its_end(base, capfd):
    assert run("-m", "seed=1,2", "trainer.devices=1", "format=json", "hydra.sweep.dir=sweep") == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert [(row["job"], row["seed"], row["ranks"], row["status"]) for row in rows] == [
        (0, 1, 1, "ok"),
        (1, 2, 1, "ok"),
    ]


@pytest.mark.full
def test_ctrl_c_ends_all_ranks_and_starts_no_other_job(base):
    sweep = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "standin_train",
            "-m",
            "model=slow",
            "seed=1,2",
            "hydra.sweep.dir=sweep",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 60
    files = [base / f"sweep/0/pid{rank}" for rank in (0, 1)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(sweep.pid, signal.SIGINT)
    said, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert "Traceback" not in said and said.endswith("interrupted\n")
    assert not (base / "sweep/1").exists()
    with (base / "sweep/comparison.csv").open() as file:
        assert [(row["job"], row["status"], row["error"]) for row in csv.DictReader(file)] == [
            ("0", "stopped", "interrupted")
        ]
    assert not any(Path(f"/proc/{file.read_text()}").exists() for file in files)


@pytest.mark.full
def test_ranks_started_by_torchrun_share_one_directory(base):
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "standin_train",
            "+plan=mixed",
            "format=json",
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    (metrics,) = base.glob("outputs/*/*/metrics.json")
    assert {file.name for file in metrics.parent.iterdir()} == {
        ".hydra",
        "resolved.yaml",
        "metrics.json",
        "pid0",
        "pid1",
        "env0.json",
        "env1.json",
    }
    assert json.loads(ran.stdout)["rows"] == [json.loads(metrics.read_text())]


# ---- the table, from directories that somebody left


def job(sweep: Path, name: str, overrides: list[str], **files: dict) -> None:
    (sweep / name / ".hydra").mkdir(parents=True)
    (sweep / name / ".hydra/overrides.yaml").write_text(yaml.safe_dump(overrides))
    for kind, content in files.items():
        (sweep / name / f"{kind}.json").write_text(json.dumps(content))


@pytest.fixture
def sweep(tmp_path):
    asked = ["+plan=a,b", "seed=1,2", "trainer.max_steps=5"]
    (tmp_path / "multirun.yaml").write_text(
        yaml.safe_dump({"hydra": {"overrides": {"task": asked}}})
    )
    job(tmp_path, "0", ["+plan=a", "seed=1", "trainer.max_steps=5"], metrics=MEASURED)
    job(tmp_path, "10", ["+plan=b", "seed=2", "trainer.max_steps=5"])
    job(
        tmp_path,
        "9",
        ["+plan=b", "seed=1", "trainer.max_steps=5"],
        error={"error": "it broke"},
        metrics=MEASURED,
    )
    (tmp_path / "notes").mkdir()
    return tmp_path


def lines_of(sweep):
    return [run.flat() | {"what": run.name} for run in runs.read_runs(sweep)]


def test_jobs_are_compared_in_their_order_by_what_was_swept(sweep):
    rows = lines_of(sweep)
    assert [(row["job"], row["status"], row["plan"], row["seed"]) for row in rows] == [
        (0, "ok", "table_row_wise", 1),
        (9, "failed", "b", 1),
        (10, "stopped", "b", 2),
    ]
    assert rows[1]["val_auc"] is None  # what is beside an error is an earlier run's
    assert all("trainer.max_steps" not in row for row in rows)  # the same for all
    assert rows[0]["bytes_per_rank"] == 3 << 30 and rows[0]["val_auc"] == MEASURED["val_auc"]
    assert [row["error"] for row in rows] == [None, "it broke", None]


def test_without_a_plan_a_failed_job_is_called_as_a_good_one_would_be(tmp_path):
    job(tmp_path, "0", ["seed=1"], error={"error": "it broke"})
    job(tmp_path, "1", ["seed=1e-3"], metrics=MEASURED | {"plan": "automatic"})
    job(tmp_path, "2", ["seed=nan"])
    rows = lines_of(tmp_path)
    assert [row["plan"] for row in rows] == ["automatic"] * 3 and [row["seed"] for row in rows] == [
        1,
        1e-3,
        "nan",
    ]


def test_the_csv_holds_every_digit_and_replaces_the_last_one(sweep):
    path = sweep / "comparison.csv"
    path.write_text("old")
    runs.write_csv(runs.read_runs(sweep), path)
    header, first, *_ = path.read_text().splitlines()
    assert header == (
        "job,status,plan,seed,ranks,step_ms,step_ms_q1,step_ms_q3,samples_per_second,"
        "train_seconds,val_auc,val_log_loss,bytes_per_rank,bytes_exchanged_per_step,error"
    )
    assert (
        first == "0,ok,table_row_wise,1,2,1234.5,1200.25,1300.0,1234567.0,98.5,0.7580123,0.4892,"
        f"{3 << 30},{45 << 20},"
    )
    assert sorted(sweep.glob("comparison*")) == [path]


def test_the_jobs_of_a_directory_are_those_that_its_table_lists_and_without_one_all(sweep):
    runs.write_csv(runs.read_runs(sweep)[:2], sweep / "comparison.csv")
    assert [row["job"] for row in lines_of(sweep)] == [0, 9]
    (sweep / "comparison.csv").write_text("job,status\n77,ok\n")  # of directories that are gone
    assert [row["job"] for row in lines_of(sweep)] == [0, 9, 10]


def test_the_printed_table_fits_80_columns(sweep, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(lines_of(sweep), runs.columns_of(CLICK))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "1,234,567" in lines[2] and "0.75801" in lines[2] and "3,221.2" in lines[2]
