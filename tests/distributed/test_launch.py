"""Starting ranks: what they inherit, which of them is blamed, and that none is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from recapp.distributed import launch as launching
from recapp.distributed import rank_process
from recapp.distributed.launch import launch, rank_count
from recapp.distributed.place import outside_rank, shared_run_name, started_outside
from recapp.errors import ConfigError, DataError, LaunchError

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def ranks_find_the_standin(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")


@pytest.fixture
def start(tmp_path):
    """`start("raise", "wait")`: launches ranks that do what these words say; answers how it ended, and the job's directory."""

    def start(*words, **options):
        settings = tmp_path / "resolved.yaml"
        settings.write_text(yaml.safe_dump({"model": {"ranks": list(words)}, "choices": {}}))
        error = None
        try:
            launch(settings, len(words), module="standin_worker", **options)
        except (Exception, SystemExit, KeyboardInterrupt) as raised:
            error = raised
        assert [pid for pid in pids(tmp_path) if is_alive(pid)] == []
        return error, tmp_path

    return start


def pids(directory):
    return [int(file.read_text()) for file in directory.glob("pid*")]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def notes(error):
    return "\n".join(getattr(error, "__notes__", ()))


def test_rank_0_speaks_for_all_and_the_others_into_files(start, capfd):
    error, job = start("fine", "fine")
    assert error is None
    assert json.loads((job / "metrics.json").read_text())["ranks"] == 2
    assert capfd.readouterr().out == "rank 0 speaks\n"
    (log,) = job.glob("ranks/*/attempt_0/1/stdout.log")
    assert log.read_text() == "rank 1 speaks\n"


def test_a_rank_whose_output_nobody_reads_says_so(start):
    error, _ = start("unread", "wait")
    assert isinstance(error, LaunchError) and str(error).startswith("nobody reads standard output any more")


def test_nothing_of_an_outer_launcher_reaches_the_ranks_and_nothing_of_them_stays_here(start, monkeypatch):
    for name, value in {"RANK": "77", "LOCAL_RANK": "5", "WORLD_SIZE": "99", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1",
                        "TORCHELASTIC_RUN_ID": "outer", "GROUP_RANK": "3", "TORCHELASTIC_OF_OUTER": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    error, job = start("fine", "fine")
    assert error is None
    seen = json.loads((job / "env1.json").read_text())
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == ("1", "1", "2", "127.0.0.1")
    assert seen["TORCHELASTIC_RUN_ID"] != "outer" and "TORCHELASTIC_OF_OUTER" not in seen and seen["RECAPP_PARENT_PID"] == str(os.getpid())
    assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert dict(os.environ) == before


def test_signals_have_their_handlers_back_after_a_run(start):
    def ours(*_):
        pass

    kept = {number: signal.signal(number, ours) for number in launching.SIGNALS}
    try:
        start("fine")
        assert [signal.getsignal(number) for number in launching.SIGNALS] == [ours] * 4
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_ranks_leave_standard_output_to_the_answer_if_it_is_a_document(start, capfd):
    error, _ = start("fine", to_stderr=True)
    print("the answer", flush=True)
    assert error is None
    assert capfd.readouterr() == ("the answer\n", "rank 0 speaks\n")


def test_an_error_for_people_arrives_as_itself(start):
    error, _ = start("wait", "refuse")
    assert type(error) is DataError and str(error) == "dataset.path=nowhere: there is no such directory"
    assert notes(error) == ""


def test_another_exception_names_the_rank_and_the_host_and_brings_its_traceback(start, capfd):
    error, job = start("wait", "raise")
    pid = (job / "pid1").read_text()
    assert type(error) is LaunchError
    assert str(error) == f"rank 1 on {socket.gethostname()} (process {pid}) failed: RuntimeError: boom in rank 1"
    assert notes(error).startswith("Traceback") and "standin_worker.py" in notes(error)
    assert "Traceback" not in "".join(capfd.readouterr())  # it is shown once, by whoever catches the error


@pytest.mark.parametrize(("word", "said"), [("exit", "exited with code 3"), ("kill", "was ended by SIGKILL")])
def test_a_rank_that_dies_without_a_word_is_named_with_its_last_lines(start, word, said):
    error, job = start("late", word)  # rank 0 tells of a peer that is gone: not the cause
    assert str(error).startswith(f"rank 1 on {socket.gethostname()} (process {(job / 'pid1').read_text()}) {said}")
    assert "rank 1 speaks" in notes(error) and ("about to leave" in notes(error)) == (word == "exit")


class Failure:
    def __init__(self, error_file, exitcode):
        self.error_file, self.exitcode = str(error_file), exitcode


def test_of_two_ranks_that_tell_the_first_to_write_is_blamed(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    for file, nanoseconds in zip(files, (2_000_000_001, 2_000_000_000), strict=True):  # elastic sees the same second
        file.touch()
        os.utime(file, ns=(nanoseconds, nanoseconds))
    assert launching._first_to_fail({rank: Failure(file, 1) for rank, file in enumerate(files)})[0] == 1


def test_a_rank_that_elastic_had_to_kill_after_another_told_is_not_blamed(tmp_path):
    told = tmp_path / "error.json"
    told.touch()
    failures = {0: Failure(told, 1), 1: Failure("<N/A>", -signal.SIGKILL)}
    assert launching._first_to_fail(failures)[0] == 1
    past = time.time() - launching.ELASTIC_KILLS_AFTER_SECONDS
    os.utime(told, (past, past))
    assert launching._first_to_fail(failures)[0] == 0


def test_a_taken_port_is_named_and_a_free_one_is_used(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error, job = start("fine", port=port)
        assert type(error) is LaunchError and str(error).startswith(f"launch.port={port}: Address already in use")
        assert not (job / "pid0").exists()
    error, job = start("fine", port=port)
    assert error is None and (job / "metrics.json").exists()


@pytest.mark.parametrize("port", [-1, 70000, "x"])
def test_a_port_that_is_none_is_refused(start, port):
    error, _ = start("fine", port=port)
    assert type(error) is ConfigError and str(error).startswith(f"launch.port={port}: give a number")


def test_gloo_is_told_the_loopback_only_where_the_host_has_no_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for resolves, wanted in ((True, None), (False, "lo")):
        monkeypatch.setattr(launching, "_resolves", lambda host, answer=resolves: answer)
        with launching._environment_of_ranks(2):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == wanted
    assert not launching._resolves("no such host.invalid")


PARENT = """
import sys
from pathlib import Path
from recapp.distributed.launch import launch
print("ready", flush=True)
launch(Path(sys.argv[1]), 2, module="standin_worker")
"""


def test_ranks_die_with_their_parent_however_it_ends(tmp_path):
    settings = tmp_path / "resolved.yaml"
    settings.write_text(yaml.safe_dump({"model": {"ranks": ["wait", "wait"]}, "choices": {}}))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(settings)])
    until(lambda: all((tmp_path / f"pid{rank}").exists() and (tmp_path / f"pid{rank}").read_text() for rank in (0, 1)))
    assert all(is_alive(pid) for pid in pids(tmp_path))
    parent.kill()
    parent.wait()
    until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_whose_parent_is_gone_before_it_could_say_so_leaves():
    code = "from recapp.distributed.rank_process import die_with_parent; die_with_parent(); print('still here')"
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, rank_process.PARENT_PID: "1"}, capture_output=True)
    assert (ran.returncode, ran.stdout) == (rank_process.TERMINATED, b"")
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, rank_process.PARENT_PID: str(os.getpid())},
                         capture_output=True)
    assert (ran.returncode, ran.stdout) == (0, b"still here\n")


HANGING = """
import ctypes, os, signal, sys, time
from recapp.distributed import rank_process
rank_process.SECONDS_AFTER_SIGTERM = 0.1
with rank_process.as_rank():
    signal.signal(signal.SIGTERM, lambda *_: None)
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # a data worker is told to end: not this rank's business
        os._exit(0)
    os.wait()
    time.sleep(0.5)
    print("still here", flush=True)
    while True:
        ctypes.CDLL(None).sleep(100)  # as a collective whose peers are gone
"""


def test_a_rank_that_hangs_and_ignores_sigterm_is_gone_soon_after_it():
    hanging = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    assert hanging.stdout.readline() == "still here\n"
    hanging.terminate()
    assert hanging.wait(timeout=60) == rank_process.TERMINATED


# ---- how many ranks


def test_auto_is_two_ranks_without_gpus_and_one_for_each_gpu(monkeypatch):
    for gpus, wanted in ((0, 2), (3, 3)):
        monkeypatch.setattr(launching, "_gpu_count", lambda answer=gpus: answer)
        assert rank_count("auto") == wanted
        assert rank_count("auto", "cpu") == 2
        assert rank_count(1) == 1 and rank_count("2") == 2


@pytest.mark.parametrize(("devices", "accelerator", "gpus", "said"), [
    (0, "auto", 0, "trainer.devices=0: give a number of ranks, or auto"),
    (-1, "auto", 3, "trainer.devices=-1: give a number of ranks, or auto"),
    ("two", "cpu", 0, "trainer.devices=two: give a number of ranks, or auto"),
    ([0, 1], "cpu", 0, "trainer.devices=[0, 1]: give a number"),
    (2, "gpu", 0, "trainer.accelerator=gpu: there is no GPU here"),
    (4, "auto", 2, "trainer.devices=4: there are 2 GPUs here; use at most that, or trainer.accelerator=cpu"),
])
def test_a_number_of_ranks_that_cannot_be_is_refused(monkeypatch, devices, accelerator, gpus, said):
    monkeypatch.setattr(launching, "_gpu_count", lambda: gpus)
    with pytest.raises(ConfigError) as raised:
        rank_count(devices, accelerator)
    assert str(raised.value).startswith(said)


# ---- who has started us

SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(("environ", "rank"), [
    ({}, None),
    ({"RANK": "1"}, None),
    ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
    ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 0),
    (SRUN, 1),
    (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    (SRUN | {"SLURM_JOB_NAME": "interactive"}, None),
    (SRUN | {"ENVIRONMENT": "BATCH"}, 1),
    ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}, None),
    (SRUN | {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8"}, 5),
])
def test_ranks_started_by_torchrun_srun_or_hand_are_recognised_and_a_batch_script_is_not(environ, rank):
    assert outside_rank(environ) == rank
    assert started_outside(environ) == (rank is not None)


def test_ranks_agree_on_the_name_of_their_run():
    assert shared_run_name({"RECAPP_RUN_ID": "night", **SRUN}) == "night"
    assert shared_run_name(SRUN) == "slurm_77_3"
    with pytest.raises(LaunchError, match=r"give hydra.run.dir=DIR or RECAPP_RUN_ID=NAME"):
        shared_run_name({"RANK": "1", "WORLD_SIZE": "2"})


def test_under_torchrun_rank_0_tells_the_others_the_name_through_the_agents_store():
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True)
    environ = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    name = shared_run_name(environ | {"RANK": "0"})
    time.sleep(1.1)  # a clock of its own would say another second
    assert shared_run_name(environ | {"RANK": "1"}) == name
