"""Starting ranks: what they inherit, which of them is blamed, and that none is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from recapp.errors import ConfigError, DataError, LaunchError, RecappError
from recapp.processes import launch as launching
from recapp.processes import rank_process
from recapp.processes.faults import explain_error
from recapp.processes.launch import first_failure, launch, rank_count
from recapp.processes.rank_environment import (
    external_rank,
    shared_run_directory,
)
from recapp.processes.rank_process import RankFailure
from recapp.processes.stopping import SIGNALS, Stopped

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def ranks_find_the_standin(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")


@pytest.fixture
def start(tmp_path):
    """`start("raise", "wait")`: launches ranks that do what these words say; answers how it ended,
    and the job's directory.
    """

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
    assert sorted(path.name for path in job.glob("ranks/**/*")) == ["1.log"]
    assert (job / "ranks" / "1.log").read_text() == "rank 1 speaks\n"


def test_logs_are_of_the_last_run_in_a_directory_and_silent_ranks_leave_none(start):
    _, job = start("fine", "exit")
    assert (job / "ranks" / "1.log").read_text() == "rank 1 speaks\nabout to leave\n"
    (job / "ranks" / "3.log").touch()  # of an earlier run of more ranks
    (job / "ranks" / "own.txt").touch()
    assert start("fine", "quiet")[0] is None
    assert [path.name for path in job.glob("ranks/*")] == ["own.txt"]
    (job / "ranks" / "own.txt").unlink()
    assert start("fine", "quiet")[0] is None
    assert not (job / "ranks").exists()


def test_a_rank_whose_output_nobody_reads_says_so(start):
    error, _ = start("unread", "wait")
    assert isinstance(error, LaunchError) and str(error).startswith(
        "standard output is a pipe whose reader has ended"
    )


def test_nothing_of_an_outer_launcher_reaches_the_ranks_and_nothing_of_them_stays_here(
    start, monkeypatch
):
    for name, value in {
        "RANK": "77",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "99",
        "MASTER_ADDR": "nowhere",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "outer",
        "GROUP_RANK": "3",
        "TORCHELASTIC_OF_OUTER": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    error, job = start("fine", "fine")
    assert error is None
    seen = json.loads((job / "env1.json").read_text())
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == (
        "1",
        "1",
        "2",
        "127.0.0.1",
    )
    assert (
        seen["TORCHELASTIC_RUN_ID"] != "outer"
        and "TORCHELASTIC_OF_OUTER" not in seen
        and seen["RECAPP_PARENT_PID"] == str(os.getpid())
    )
    assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert dict(os.environ) == before


def test_signals_have_their_handlers_back_after_a_run(start):
    def ours(*_):
        pass

    kept = {number: signal.signal(number, ours) for number in SIGNALS}
    try:
        start("fine")
        assert [signal.getsignal(number) for number in SIGNALS] == [ours] * 4
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
    assert (
        type(error) is DataError
        and str(error) == "dataset.path=nowhere: there is no such directory"
    )
    assert notes(error) == ""


def test_another_exception_names_the_rank_and_the_host_and_brings_its_traceback(start, capfd):
    error, job = start("wait", "raise")
    pid = (job / "pid1").read_text()
    assert type(error) is LaunchError
    assert (
        str(error)
        == f"rank 1 on {socket.gethostname()} (process {pid}) failed: RuntimeError: boom in rank 1"
    )
    assert notes(error).startswith("Traceback") and "standin_worker.py" in notes(error)
    # it is shown once, by whoever catches the error
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("word", "said"), [("exit", "exited with code 3"), ("kill", "was ended by SIGKILL")]
)
def test_a_rank_that_dies_without_a_word_is_named_with_its_last_lines(start, word, said):
    error, job = start("late", word)  # rank 0 tells of a peer that is gone: not the cause
    assert str(error).startswith(
        f"rank 1 on {socket.gethostname()} (process {(job / 'pid1').read_text()}) {said}"
    )
    assert "rank 1 speaks" in notes(error) and ("about to leave" in notes(error)) == (
        word == "exit"
    )


def failures(*files, exitcodes=(1, 1), ended=(False, False)):
    return [
        RankFailure(rank, 1000 + rank, exitcodes[rank], file, ended[rank])
        for rank, file in enumerate(files)
    ]


def test_of_two_ranks_that_tell_the_first_to_write_is_blamed(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    # both in the same second
    for file, nanoseconds in zip(files, (2_000_000_001, 2_000_000_000), strict=True):
        file.touch()
        os.utime(file, ns=(nanoseconds, nanoseconds))
    assert first_failure(failures(*files)).rank == 1


def test_a_rank_that_was_killed_after_another_told_is_not_blamed(tmp_path):
    told, silent = tmp_path / "error.json", tmp_path / "none"
    told.touch()
    killed = {"exitcodes": (1, -signal.SIGKILL)}
    assert first_failure(failures(told, silent, **killed)).rank == 1
    assert first_failure(failures(told, silent, **killed, ended=(False, True))).rank == 0


def test_a_rank_that_is_stopped_holds_nothing_up_where_another_fails(start):
    began = time.monotonic()
    error, _ = start("own_fault", "stop", "wait")
    assert type(error) is DataError and str(error) == "no such column"
    assert time.monotonic() - began < 20


PARENT = """
import sys
from pathlib import Path
from recapp.processes.launch import launch
print("ready", flush=True)
launch(Path(sys.argv[1]), 2, module="standin_worker", method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks_die_with_their_parent_however_it_ends(tmp_path, method):
    settings = tmp_path / "resolved.yaml"
    settings.write_text(yaml.safe_dump({"model": {"ranks": ["wait", "wait"]}, "choices": {}}))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(settings), method])
    until(
        lambda: all(
            (tmp_path / f"pid{rank}").exists() and (tmp_path / f"pid{rank}").read_text()
            for rank in (0, 1)
        )
    )
    assert all(is_alive(pid) for pid in pids(tmp_path))
    parent.kill()
    parent.wait()
    until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


GONE = """
import multiprocessing, os, sys
from recapp.processes import rank_process
context = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    receiving, sending = context.Pipe(duplex=False)
    rank = context.Process(target=rank_process.be_rank, args=(receiving,))
    rank.start()
    if sys.argv[1] == "gives up":
        sending.close()
        receiving.close()
        rank.join()
        os._exit(rank.exitcode)
    print(rank.pid, flush=True)
    os._exit(0)
"""


def test_a_rank_that_gets_no_work_leaves(tmp_path):
    (tmp_path / "gone.py").write_text(GONE)
    ran = subprocess.run([sys.executable, "gone.py", "gives up"], cwd=tmp_path, timeout=60)
    assert ran.returncode == rank_process.TERMINATED
    ran = subprocess.run(
        [sys.executable, "gone.py", "goes"], cwd=tmp_path, capture_output=True, timeout=60
    )
    until(lambda: not is_alive(int(ran.stdout)))


HANGING = """
import ctypes, os, signal, sys, time
from recapp.processes import rank_process
from recapp.processes import stopping
stopping.SECONDS_TO_STOP, stopping.SAME_SIGNAL_SECONDS = float(sys.argv[1]), 0.3
with rank_process.as_rank():
    stopping.listen(lambda number: None, grace=float(sys.argv[2]))
    if os.fork() == 0:
        # a data worker is told to end: not its business, and not this rank's
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    with stopping.saving():
        print("still here", flush=True)
        end = time.monotonic() + int(sys.argv[3])
        while time.monotonic() < end:
            # as a collective whose peers are gone; a signal cuts it short
            ctypes.CDLL(None).sleep(1)
    while True:
        ctypes.CDLL(None).sleep(100)
"""


@pytest.fixture
def hanging(tmp_path):
    """`hanging(seconds, grace, saves)`: a rank that is told of signals and does nothing about
    them.
    """
    started = []

    def start(seconds, grace, saves):
        arguments = [sys.executable, "-c", HANGING, str(seconds), str(grace), str(saves)]
        started.append(
            subprocess.Popen(
                arguments,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, rank_process.ERROR_FILE: str(tmp_path / "error.json")},
            )
        )
        assert started[-1].stdout.readline() == "still here\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rank_that_hangs_is_gone_soon_after_a_signal_and_tells_of_it(hanging, tmp_path, number):
    rank = hanging(seconds=0.1, grace=0.2, saves=0)
    rank.send_signal(number)
    assert rank.wait(timeout=60) == 128 + number
    assert (
        json.loads((tmp_path / "error.json").read_text())["message"]["message"]
        == f"Stopped: {number.name}"
    )


def test_a_checkpoint_under_way_has_the_grace(hanging):
    rank = hanging(seconds=0.1, grace=1.5, saves=100)
    rank.terminate()
    began = time.monotonic()
    assert rank.wait(timeout=60) == rank_process.TERMINATED
    assert time.monotonic() - began > 1


def test_what_follows_at_once_is_the_same_signal_and_a_second_one_ends_at_once(hanging):
    rank = hanging(seconds=60, grace=60, saves=0)
    for _ in range(3):
        rank.terminate()
        time.sleep(0.02)
    time.sleep(0.5)
    assert rank.poll() is None
    rank.send_signal(signal.SIGINT)
    assert rank.wait(timeout=5) == rank_process.TERMINATED


def test_before_training_a_signal_ends_a_rank_where_it_is_and_its_workers_with_it(start, tmp_path):
    def send():
        until(
            lambda: all(
                (tmp_path / f"pid{rank}").exists() and (tmp_path / f"pid{rank}").read_text()
                for rank in (0, 1)
            )
        )
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    began = time.monotonic()
    error, _ = start("wait", "wait")
    sender.join()
    assert isinstance(error, Stopped) and error.code == 143
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_whoever_has_started_the_ranks_ends_them(start, tmp_path, number, capfd):
    def send():
        until(
            lambda: all(
                (tmp_path / f"pid{rank}").exists() and (tmp_path / f"pid{rank}").read_text()
                for rank in (0, 1)
            )
        )
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    error, _ = start("wait", "wait")
    sender.join()
    assert isinstance(error, Stopped) and error.code == 128 + number
    assert (
        capfd.readouterr().err
        == f"stopping after {number.name}; a second one ends the run at once\n"
    )


def test_a_second_signal_kills_ranks_that_take_their_time(start, tmp_path):
    def send():
        until(lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid0").read_text())
        os.kill(int((tmp_path / "pid0").read_text()), signal.SIGSTOP)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    sender = threading.Thread(target=send)
    sender.start()
    began = time.monotonic()
    error, _ = start("wait")
    sender.join()
    assert isinstance(error, Stopped) and time.monotonic() - began < 15


# ---- faults that are nobody's setting


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "rank 3 is out of memory; use a smaller dataset.batch_size or tables.dim"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:120] data. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 25600000000 "
                "bytes. Error code 12 (Cannot allocate memory)"
            ),
            "rank 3 is out of memory: it tried to allocate 25600000000 bytes; use",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            "rank 3 is out of memory: it tried to allocate 2.00 GiB; use",
        ),
        (
            MemoryError("Unable to allocate 7.45 GiB for an array with shape"),
            "rank 3 is out of memory: it tried to allocate 7.45 GiB; use",
        ),
        (RuntimeError("std::bad_alloc"), "rank 3 is out of memory; use"),
        (OSError(12, "Cannot allocate memory"), "rank 3 is out of memory; use"),
        (OSError(28, "No space left on device"), "the disk under RUN is full"),
        (OSError(28, "No space left on device", "a/b.csv"), "the disk under a/b.csv is full"),
        (
            RuntimeError(
                "unable to write to file </torch_1234_56_0>: No space left on device (28)"
            ),
            "the data workers of rank 3 found no room in shared memory (/dev/shm has ",
        ),
        (
            RuntimeError(
                "DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that "
                "dataloader's workers are out of shared "
                "memory. Please try to raise your shared memory limit."
            ),
            "the data workers of rank 3 found no room in shared memory",
        ),
        (
            RuntimeError("Resource temporarily unavailable"),
            "rank 3 cannot start another thread: the limit of memory or of processes is reached",
        ),
        (
            RuntimeError(
                "[unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
            ),
            "rank 3 has waited for another rank for 5 seconds (launch.timeout)",
        ),
        (
            RuntimeError("wait timeout after 10000ms, keys: /default_pg/1//cpu//0/1"),
            "rank 3 has waited for another rank for 10 seconds (launch.timeout)",
        ),
        (
            RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:24731"),
            "another rank has ended while rank 3 waited for it",
        ),
        (
            ModuleNotFoundError("`X` needs `psutil`.\nHINT: Try running `pip install psutil`"),
            "rank 3 lacks a package: `X` needs `psutil`. HINT: Try running `pip install psutil`",
        ),
    ],
)
def test_faults_of_the_machine_are_one_line_that_says_what_helps(error, said):
    words = explain_error(error, 3, Path("RUN"))
    assert isinstance(words, RecappError) and str(words).startswith(said) and "\n" not in str(words)


def test_other_errors_stay_as_they_are():
    for error in (
        ValueError("x"),
        DataError("out of memory"),
        OSError(2, "No such file or directory", "x"),
        ModuleNotFoundError("No module named 'x'", name="x"),
    ):
        assert explain_error(error, 0) is error


@pytest.mark.full
def test_a_rank_without_memory_and_one_that_the_library_aborts_say_so(start):
    error, _ = start("wait", "no_memory")
    assert (
        type(error) is LaunchError
        and str(error).startswith("rank 1 is out of memory; use")
        and notes(error) == ""
    )
    error, _ = start("wait", "abort")
    assert (
        type(error) is LaunchError
        and str(error).startswith("rank 1 is out of memory; use")
        and notes(error) == ""
    )


def test_an_error_file_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv(rank_process.ERROR_FILE, str(tmp_path / "error.json"))

    def full(path, text, **_):
        path.write_bytes(text[:10].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        rank_process.write_error_file(ValueError("x"))
    assert list(tmp_path.iterdir()) == []
    rank_process.write_error_file(ValueError("x"))
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


# ---- how many ranks


def test_auto_is_two_ranks_without_gpus_and_one_for_each_gpu(monkeypatch):
    for gpus, wanted in ((0, 2), (3, 3)):
        monkeypatch.setattr(launching, "gpu_count", lambda answer=gpus: answer)
        assert rank_count("auto") == wanted
        assert rank_count("auto", "cpu") == 2
        assert rank_count(1) == 1 and rank_count("2") == 2


@pytest.mark.parametrize(
    ("devices", "accelerator", "gpus", "said"),
    [
        (2, "gpu", 0, "trainer.accelerator=gpu: this machine has no GPU"),
        (
            4,
            "auto",
            2,
            "trainer.devices=4: this machine has 2 GPUs; use at most 2, or trainer.accelerator=cpu",
        ),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused(monkeypatch, devices, accelerator, gpus, said):
    monkeypatch.setattr(launching, "gpu_count", lambda: gpus)
    with pytest.raises(ConfigError) as raised:
        rank_count(devices, accelerator)
    assert str(raised.value).startswith(said)


# ---- who has started us

SRUN = {
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 0),
        (SRUN, 1),
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (SRUN | {"SLURM_JOB_NAME": "interactive"}, None),
        (SRUN | {"ENVIRONMENT": "BATCH"}, 1),
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
            | {"ENVIRONMENT": "BATCH"},
            None,
        ),
        (SRUN | {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8"}, 5),
    ],
)
def test_ranks_started_by_torchrun_srun_or_hand_are_recognised_and_a_batch_script_is_not(
    environ, rank
):
    assert external_rank(environ) == rank


def test_ranks_agree_on_the_directory_of_their_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert shared_run_directory(alone) != shared_run_directory(alone)
    assert shared_run_directory({"RECAPP_RUN_ID": "night", **SRUN}) == "outputs/night"
    assert shared_run_directory(SRUN) == "outputs/slurm_77_3"
    with pytest.raises(LaunchError, match=r"give hydra.run.dir=DIR or RECAPP_RUN_ID=NAME"):
        shared_run_directory({"RANK": "1", "WORLD_SIZE": "2"})


def test_under_torchrun_rank_0_tells_the_others_the_directory_through_the_agents_store(
    tmp_path, monkeypatch
):
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True)
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
    }
    monkeypatch.chdir(tmp_path)
    directory = shared_run_directory(environ | {"RANK": "0"})
    assert (tmp_path / directory).is_dir()
    time.sleep(1.1)  # a clock of its own would say another second
    assert shared_run_directory(environ | {"RANK": "1"}) == directory
