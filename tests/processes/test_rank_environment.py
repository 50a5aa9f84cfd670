"""Which rank a process is: what torchrun, srun and people set, and what follows from it."""

import os
import socket

import pytest

from recapp.errors import LaunchError
from recapp.processes import rank_environment as placing
from recapp.processes.rank_environment import RankInfo, external_rank, interface_towards, rank_info
from recapp.trainer.lightnings_parts import RankEnvironment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NAME": "train",
}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}


def test_a_process_that_nobody_started_as_a_rank_has_no_rank_info():
    assert rank_info({}) is None and rank_info({"WORLD_SIZE": "2"}) is None


def test_torchruns_ranks_stand_where_it_says():
    assert rank_info(TORCHRUN) == RankInfo(3, 4, 1, 2, 1, "10.0.0.1", 29500)
    assert rank_info(TORCHRUN | STEP) == rank_info(TORCHRUN)  # torchrun inside a step of srun


def test_a_task_of_srun_meets_the_others_at_the_first_host_of_the_step():
    assert rank_info(STEP) == RankInfo(4, 5, 1, 2, 2, "gpu07", 15000 + (37 * 123456 + 2) % 10000)
    assert (
        rank_info(
            STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        ).local_world
        == 1
    )


def test_steps_of_one_job_meet_at_different_ports_and_a_given_one_is_taken():
    ports = {rank_info(STEP | {"SLURM_STEP_ID": str(step)}).port for step in range(100)}
    assert len(ports) == 100 and min(ports) >= 15000 and max(ports) < 25000
    given = rank_info(STEP | {"MASTER_ADDR": "b", "MASTER_PORT": "77"})
    assert (given.address, given.port) == ("b", 77)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[3]", "n3"),
        ("n[007,9-11],b", "n007"),
        ("r[1-2]n[0-3]-ib,c", "r1n0-ib"),
    ],
)
def test_the_first_host_of_slurms_lists(hosts, first):
    assert rank_info(STEP | {"SLURM_STEP_NODELIST": hosts}).address == first


def test_a_command_typed_into_a_shell_of_an_allocation_is_no_task_but_srun_in_that_shell_is():
    interactive = STEP | {"SLURM_JOB_NAME": "interactive"}
    assert external_rank(interactive | {"SLURM_TASK_PID": str(os.getpid())}) == 4
    assert external_rank(interactive | {"SLURM_TASK_PID": "1"}) is None  # in another process group
    assert external_rank(interactive) is None


def test_ranks_started_by_hand_are_alone_on_their_host_unless_they_say_more():
    assert rank_info(HAND) == RankInfo(1, 2, 0, 1, 1, "a", 1234)
    assert rank_info(HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == RankInfo(
        1, 2, 1, 2, 0, "a", 1234
    )


def test_what_ranks_started_by_hand_lack_is_named():
    with pytest.raises(
        LaunchError,
        match="RANK is set, but not MASTER_ADDR and MASTER_PORT; each rank needs RANK, WORLD_SIZE",
    ):
        rank_info({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(LaunchError, match="RANK=2: must be below WORLD_SIZE=2"):
        rank_info(HAND | {"RANK": "2"})


def test_the_interface_is_the_one_that_leads_to_rank_0(monkeypatch):
    def towards(address, local_world):
        return interface_towards(RankInfo(0, 2, 0, local_world, 0, address, 80))

    assert towards("127.0.0.1", local_world=2) == "lo"
    # other hosts cannot reach us there, whatever this host calls itself
    assert towards("127.0.0.1", local_world=1) is None
    assert towards("no.such.host.invalid", local_world=2) is None
    monkeypatch.setattr(
        placing, "_address_of", lambda name, probe: "127.0.0.1" if name == "second" else "10.0.0.1"
    )
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "first"), (2, "second")])
    assert towards("127.0.0.1", local_world=2) == "second"


def test_lightning_hears_the_same_and_cannot_change_it():
    environment = RankEnvironment(rank_info(TORCHRUN))
    environment.set_world_size(8)
    environment.set_global_rank(7)
    assert (
        environment.world_size(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
    ) == (4, 3, 1, 1)
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29500)
    assert environment.creates_processes_externally


def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_is_shown():
    second = RankInfo(5, 8, 1, 4, 1, "first", 29500)
    assert second.gpu(visible=4) == 1 and second.gpu(visible=1) == 0
    fourth = RankInfo(7, 8, 3, 4, 1, "first", 29500)
    with pytest.raises(
        LaunchError, match=r"rank 7 has the number 3 .* where it sees 2 GPUs: start at"
    ):
        fourth.gpu(visible=2)
