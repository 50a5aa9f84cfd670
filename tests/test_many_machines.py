"""Ranks that are there already: torchrun, two hosts, srun, a person. It is the same run, in one
directory, whoever starts it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hosts import (
    PATIENCE_SECONDS,
    TORCHRUN,
    Hosts,
    Slurm,
    Started,
    at_once,
    free_port,
    wait_for,
    why_no_hosts,
    why_no_slurm,
)
from jobs import command, metrics_of, small, start, validation

pytestmark = pytest.mark.full

STEPS = 6
TRAIN = ["recapp.train", "+plan=mixed", f"trainer.max_steps={STEPS}"]
MEASURED = (
    "run",
    "samples_per_second",
    "samples_per_cpu_second",
    "train_seconds",
    "step_ms",
    "step_ms_quartiles",
    "date",
    "input_wait_ms",
    "exchange_wait_ms",
    "checkpoint",
)  # what differs between two equal runs


def comparable(metrics):
    return {
        name: value
        for name, value in metrics.items()
        if name not in MEASURED and not name.startswith(("hidden_share_", "seconds_to_"))
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small(tmp_path_factory.mktemp("clicks") / "set")


@pytest.fixture(scope="module")
def started_by_recapp(tmp_path_factory, data):
    """The run that all others must be: `python -m recapp.train` with two ranks."""
    base = tmp_path_factory.mktemp("own")
    ran = command("train", *TRAIN[1:], *data, "hydra.run.dir=run", cwd=base, OMP_NUM_THREADS="1")
    assert ran.code == 0, ran.err
    return base / "run"


def files(directory):
    return sorted(
        str(file.relative_to(directory)) for file in directory.rglob("*") if not file.is_dir()
    )


def assert_same_run(directory, reference):
    """Same numbers bit for bit, same files: no directory and no log of a rank beside rank 0."""
    mine = metrics_of(directory)
    other = metrics_of(reference)
    assert comparable(mine) == comparable(other)
    assert Path(mine["checkpoint"]).is_relative_to(directory)
    assert files(directory) == [file for file in files(reference) if not file.startswith("ranks/")]


def only_run_in(base):
    """The one directory under `base`/outputs."""
    (run,) = base.glob("outputs/*/*")
    return run


def strips_of(table):
    """The shards of a table in a checkpoint's plan, those of the same columns together: the ranks
    of each strip.
    """
    strips = {}
    for rank, _, _, first, last in table["shards"]:
        strips.setdefault((first, last), []).append(rank)
    return list(strips.values())


def one_summary(*outputs):
    return "".join(outputs).count("validation AUC") == 1


# ---- torchrun on one host


def test_under_torchrun_it_is_the_same_run_in_one_directory(tmp_path, data, started_by_recapp):
    with at_once(
        Started(
            [*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", "-m", *TRAIN, *data], tmp_path, "run"
        )
    ) as (agent,):
        ran = agent.wait()
    assert ran.code == 0, ran.err
    assert one_summary(ran.out)
    assert_same_run(only_run_in(tmp_path), started_by_recapp)


def test_two_agents_of_torchrun_on_one_host_go_on_as_one_run_and_one_host(
    tmp_path, started_by_recapp
):
    checkpoint = f"ckpt_path={metrics_of(started_by_recapp)['checkpoint']}"
    on = ["recapp.train", checkpoint, f"trainer.max_steps={STEPS + 2}"]
    agent = [
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    agents = [
        Started([*agent, "-m", *on], tmp_path, name, OMP_NUM_THREADS="1")
        for name in ("first", "second")
    ]
    with at_once(*agents):
        ran = [started.wait() for started in agents]
    assert [r.code for r in ran] == [0, 0], ran
    assert one_summary(*(r.out for r in ran))
    alone = command("train", *on[1:], "hydra.run.dir=alone", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert alone.code == 0, alone.err
    assert metrics_of(tmp_path / "alone")["steps"] == STEPS + 2
    assert_same_run(only_run_in(tmp_path), tmp_path / "alone")


def test_a_checkpoint_is_evaluated_under_torchrun(tmp_path, started_by_recapp):
    before = metrics_of(started_by_recapp)
    evaluate = [f"ckpt_path={before['checkpoint']}", "+plan=row_wise", "hydra.run.dir=eval"]
    agent = [*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", "-m", "recapp.eval", *evaluate]
    with at_once(Started(agent, tmp_path, "eval")) as (started,):
        evaluated = started.wait()
    assert evaluated.code == 0, evaluated.err
    assert validation(metrics_of(tmp_path / "eval")) == validation(before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "+plan=mixed,row_wise"], "-m starts the ranks of its jobs itself"),
        (["+plan=mixed", "dataset=criteo_kaggle", "dataset.path=nowhere"], "nowhere"),
    ],
)
def test_a_mistake_under_torchrun_is_one_line_and_nothing_is_written(
    tmp_path, data, arguments, said
):
    if not any(a.startswith("dataset=") for a in arguments):
        arguments = [*arguments, *data]
    run = Started(
        [*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", "-m", "recapp.train", *arguments],
        tmp_path,
        "run",
    )
    with at_once(run):
        ran = run.wait()
    lines = [line for line in ran.err.splitlines() if line.startswith("error")]
    assert ran.code == 1 and len(lines) == 1 and said in lines[0], ran.err
    assert lines[0].startswith("error: ")
    assert not list(tmp_path.rglob("metrics.json")) and not list(tmp_path.rglob("*.ckpt"))
    # what follows is torchrun's own
    assert "Traceback" not in ran.err.split("torch/distributed/elastic")[0]


def test_a_rank_that_dies_ends_the_others_and_torchrun_within_seconds(tmp_path, data):
    run = Started(
        [
            *TORCHRUN,
            "--nnodes=1",
            "--nproc-per-node=2",
            "-m",
            "recapp.train",
            "+plan=mixed",
            "trainer.max_steps=100000",
            "trainer.log_every_n_steps=1",
            *data,
        ],
        tmp_path,
        "run",
    )
    with at_once(run):
        wait_for("step 3/", run)
        (rank,) = run.processes("RANK=1")
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        assert run.wait(60).code == 1
        assert time.monotonic() - began < 30
        assert run.processes() == []
    assert not list(tmp_path.rglob("metrics.json"))


# ---- two hosts


@pytest.fixture(scope="module")
def hosts():
    if why := why_no_hosts():
        pytest.skip(why)
    with Hosts() as hosts:
        yield hosts


def test_two_hosts_of_one_name_train_as_one(tmp_path, data, hosts, started_by_recapp):
    with at_once(*hosts.torchrun(1, *TRAIN, *data, cwd=tmp_path)) as agents:
        ran = [agent.wait() for agent in agents]
    assert [r.code for r in ran] == [0, 0], ran
    assert one_summary(*(r.out for r in ran))
    assert_same_run(only_run_in(tmp_path), started_by_recapp)


def test_plans_that_know_hosts_keep_what_belongs_together_on_a_real_one(tmp_path, data, hosts):
    arguments = [
        "+plan=grid_shard",
        f"trainer.max_steps={STEPS}",
        "dataset.table_dims={C1: 32}",
        "plan.column_width=16",
        *data,
    ]
    with at_once(
        *hosts.torchrun(2, "recapp.train", *arguments, "hydra.run.dir=hosts", cwd=tmp_path)
    ) as agents:
        ran = [agent.wait() for agent in agents]
    assert [r.code for r in ran] == [0, 0], ran
    tables = json.loads(
        (Path(metrics_of(tmp_path / "hosts")["checkpoint"]) / "manifest.json").read_text()
    )["plan"]["tables"]
    hosts_of_strips = [
        {rank // 2 for rank in ranks} for table in tables.values() for ranks in strips_of(table)
    ]
    assert set.union(*hosts_of_strips) == {0, 1}
    assert all(len(of_strip) == 1 for of_strip in hosts_of_strips)

    alone = command(
        "train",
        *arguments,
        "topology.hosts=2",
        "trainer.devices=4",
        "hydra.run.dir=alone",
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert alone.code == 0, alone.err
    assert validation(metrics_of(tmp_path / "hosts")) == validation(metrics_of(tmp_path / "alone"))


def test_a_rank_that_dies_on_one_host_ends_both_within_seconds(tmp_path, data, hosts):
    arguments = [
        "recapp.train",
        "+plan=mixed",
        "trainer.max_steps=100000",
        "trainer.log_every_n_steps=1",
        *data,
    ]
    with at_once(*hosts.torchrun(1, *arguments, cwd=tmp_path)) as agents:
        wait_for("step 3/", *agents)
        (rank,) = [pid for agent in agents for pid in agent.processes("RANK=1")]
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        assert [agent.wait(90).code for agent in agents] == [1, 1]
        assert time.monotonic() - began < 45
        assert [agent.processes() for agent in agents] == [[], []]
    assert not list(tmp_path.rglob("metrics.json"))


# ---- srun


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := why_no_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def test_under_srun_it_is_the_same_run_in_one_directory(tmp_path, data, slurm, started_by_recapp):
    with at_once(
        Started(
            ["srun", "-n", "2", sys.executable, "-m", *TRAIN, *data],
            tmp_path,
            "srun",
            **slurm.variables,
        )
    ) as (step,):
        ran = step.wait()
    assert ran.code == 0, ran.err
    (run,) = tmp_path.glob("outputs/slurm_*")
    assert one_summary(ran.out)
    assert_same_run(run, started_by_recapp)


def test_srun_in_an_interactive_allocation_is_recognised_too(
    tmp_path, data, slurm, started_by_recapp
):
    allocate = [
        "salloc",
        "-n",
        "2",
        "srun",
        "-n",
        "2",
        sys.executable,
        "-m",
        *TRAIN,
        *data,
        "hydra.run.dir=run",
    ]
    with at_once(Started(allocate, tmp_path, "salloc", **slurm.variables)) as (step,):
        ran = step.wait()
    assert ran.code == 0, ran.err
    assert_same_run(tmp_path / "run", started_by_recapp)


def test_a_task_of_srun_that_dies_ends_the_step(tmp_path, data, slurm):
    step = Started(
        [
            "srun",
            "-n",
            "2",
            sys.executable,
            "-m",
            "recapp.train",
            "+plan=mixed",
            "trainer.max_steps=100000",
            "trainer.log_every_n_steps=1",
            *data,
        ],
        tmp_path,
        "srun",
        **slurm.variables,
    )
    with at_once(step):
        wait_for("step 3/", step)
        os.kill(next(iter(step.processes("SLURM_PROCID=1"))), signal.SIGKILL)
        began = time.monotonic()
        assert step.wait(60).code != 0
        assert time.monotonic() - began < 30


def test_two_processes_with_slurms_variables_are_a_run_without_slurm(
    tmp_path, data, started_by_recapp
):
    step = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
    }
    tasks = [
        Started(
            [sys.executable, "-m", *TRAIN, *data],
            tmp_path,
            f"task{i}",
            **step,
            SLURM_PROCID=str(i),
            SLURM_LOCALID=str(i),
        )
        for i in range(2)
    ]
    with at_once(*tasks):
        ran = [task.wait() for task in tasks]
    assert [r.code for r in ran] == [0, 0], ran
    assert one_summary(*(r.out for r in ran))
    assert_same_run(tmp_path / "outputs/slurm_4711_3", started_by_recapp)


# ---- by hand


def by_hand(rank, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_two_shells_with_variables_set_by_hand_are_a_run(tmp_path, data, started_by_recapp):
    port = free_port()
    folders = [tmp_path / f"shell{i}" for i in range(2)]
    for folder in folders:
        folder.mkdir()
    settings = [*TRAIN[1:], *data, f"hydra.run.dir={tmp_path}/run"]
    shells = [
        start("train", *settings, cwd=folder, **by_hand(i, port))
        for i, folder in enumerate(folders)
    ]
    ended = [shell.wait(PATIENCE_SECONDS) for shell in shells]
    assert ended == [0, 0], [(folder / "err.txt").read_text() for folder in folders]
    assert_same_run(tmp_path / "run", started_by_recapp)


def test_a_shell_that_lacks_a_variable_is_told_which(tmp_path, data):
    variables = by_hand(0, 1)
    del variables["MASTER_ADDR"]
    settings = ["+plan=mixed", *data, "hydra.run.dir=run"]
    ran = command("train", *settings, cwd=tmp_path, fresh=True, **variables)
    assert "MASTER_ADDR" in ran.error()
