"""Ranks are forked from a process that is fit for it, and nothing is left of it."""

import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from jobs import REPOSITORY, command, environment, metrics_of, small, start, validation
from tiers import one_of

from recapp.processes import fork_server
from recapp.processes.fork_server import MODULES_OF_TRAINING
from recapp.processes.rank_process import threads_of

TESTS = Path(__file__).resolve().parents[1]

# what would make a CUDA context, or a thread, in a process that is forked later
WATCHED = """
import importlib, os, sys
import torch
asked = []
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, lambda *_, name=name: asked.append(name) or 0)
torch.cuda._lazy_init = lambda: asked.append("_lazy_init")
for name in sys.argv[1].split():
    importlib.import_module(name)
tasks = os.listdir("/proc/self/task")
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
print(asked, len(names) == 1 or names)
"""


def in_server_environment(*arguments, **variables):
    """Run Python with the variables of a fork server, and some of its user."""
    more = fork_server.DEFAULTS | variables | fork_server.OWN_VARIABLES
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.full
def test_what_a_server_imports_makes_no_thread_and_no_cuda_context():
    ran = in_server_environment("-c", WATCHED, MODULES_OF_TRAINING, OMP_NUM_THREADS="4")
    assert ran.stdout == "[] True\n", ran.stdout + ran.stderr


@pytest.mark.full
def test_the_test_above_would_see_a_thread():
    code = WATCHED.replace("import importlib,", "import threading, time, importlib,").replace(
        "tasks =", "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\ntasks ="
    )
    ran = in_server_environment("-c", code, "json")
    assert ran.stdout.startswith("[] ['"), ran.stdout + ran.stderr


IMPORTED = """
import json, os, sys
from pathlib import Path
from recapp import train

def run(settings, directory):
    before = set(sys.modules)
    train.run(settings, directory)
    found = sorted(set(sys.modules) - before)
    Path(directory, f"imported{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


@pytest.mark.full
def test_a_rank_imports_nothing_of_weight_after_the_fork(tmp_path):
    (tmp_path / "imported_by_rank.py").write_text(IMPORTED)
    code = "from recapp import train; train.main(worker='imported_by_rank')"
    overrides = [*small(tmp_path / "logs"), "trainer.max_steps=2", f"hydra.run.dir={tmp_path}/run"]
    ran = subprocess.run(
        [sys.executable, "-c", code, "+plan=mixed", *overrides],
        env=environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY}"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"run/imported{rank}.json").read_text())
        assert len(found) < 12 and not [name for name in found if name.startswith("recapp.")], found


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
    ],
)
def test_a_rank_takes_the_threads_that_a_fresh_process_would_take(variables, threads):
    assert threads_of(variables) == threads


SAYS = """
import json, multiprocessing, os, signal, sys
from pathlib import Path

def run(settings, directory):
    import torch
    rank = os.environ["RANK"]
    Path(directory, f"said{rank}.json").write_text(json.dumps({
        "threads": torch.get_num_threads(),
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "session": os.getsid(0) == os.getpid(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "title": Path("/proc/self/cmdline").read_text().partition(chr(0))[0],
        "umask": os.umask(0o22),
        "imports": "hydra" in sys.modules,
        "method": multiprocessing.get_start_method(),
    }))
"""
LAUNCH = """
import os, sys, tempfile
from pathlib import Path
import hydra
from recapp.errors import LaunchError
from recapp.processes.fork_server import start_early
from recapp.processes.launch import launch

settings = Path("resolved.yaml").absolute()
"""


def launched(folder, lines, ranks=("fine", "fine"), **variables):
    """A process that runs these lines in `folder`, where the settings of two ranks lie."""
    (folder / "command.py").write_text(f"{LAUNCH}{lines}\n")
    (folder / "resolved.yaml").write_text(json.dumps({"model": {"ranks": ranks}, "choices": {}}))
    return subprocess.Popen(
        [sys.executable, "command.py"],
        cwd=folder,
        env=environment(PYTHONPATH=f"{folder}:{REPOSITORY}:{TESTS}", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, timeout=120):
    """The exit code of a process, and what it has said on both streams."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.mark.parametrize("way", one_of(2, ["forkserver", "changed"]))
def test_a_fork_is_what_a_fresh_interpreter_is(tmp_path, way):
    (tmp_path / "says.py").write_text(SAYS)
    lines = [
        "start_early('torch')",
        "os.environ['CHANGED'] = '1'" if way == "changed" else "",
        "launch(settings, 2, module='says', preload='torch')",
    ]
    process = launched(tmp_path, "\n".join(lines), OMP_NUM_THREADS="3", MINE="x")
    assert ended(process) == (0, "", "")
    for rank in range(2):
        said = json.loads((tmp_path / f"said{rank}.json").read_text())
        seen = said.pop("variables")
        assert said == {
            "threads": 3,
            "folder": str(tmp_path),
            "session": True,
            "blocked": [],
            "title": f"says rank {rank} of 2 in {tmp_path}",
            "umask": 0o22,
            "imports": False,
            "method": multiprocessing.get_start_method(),
        }
        assert seen["MINE"] == "x" and seen.get("CHANGED") == ("1" if way == "changed" else None)
        assert seen["OMP_NUM_THREADS"] == "3"
        left = {*fork_server.OWN_VARIABLES, fork_server.PRELOADED, fork_server.SOCKET_FOLDER}
        assert not left & set(seen) - set(environment()) - {"OMP_NUM_THREADS"}


# ---- what may happen to a server


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def server_of(pid):
    """The fork server of a process; None where it has none yet."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{name}/cmdline").read_text()
        except OSError:
            continue
        if title.startswith(f"recapp: ranks of process {pid} "):
            return int(name)
    return None


def processes_in(folder):
    """The processes that work in a directory, whatever has become of their parents."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == str(folder):
                found.append(int(name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "lines",
    one_of(
        3,
        [
            "launch(settings, 2, module='standin_worker', preload='ends_itself')",
            "launch(settings, 2, module='standin_worker', preload='raises')",
            "tempfile.tempdir = '/no/such/folder'\nlaunch(settings, 2, module='standin_worker')",
        ],
    ),
)
def test_a_server_that_cannot_be_used_is_noted_and_ranks_start_without_it(tmp_path, lines):
    (tmp_path / "ends_itself.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "raises.py").write_text("raise MemoryError")
    code, out, err = ended(launched(tmp_path, lines))
    assert (code, out) == (0, "rank 0 speaks\n"), err
    (line,) = err.splitlines()
    assert line.startswith("the fork server cannot be used (") and "loads torch for itself" in line
    assert json.loads((tmp_path / "metrics.json").read_text())["ranks"] == 2


@pytest.mark.parametrize("method", one_of(2, ["forkserver", "spawn"]))
def test_ranks_of_a_command_without_standard_output_run_without_it(tmp_path, method):
    lines = f"launch(settings, 2, module='standin_worker', preload='json', method='{method}')"
    process = launched(tmp_path, lines)
    assert ended(process) == (0, "rank 0 speaks\n", "")
    (tmp_path / "metrics.json").unlink()
    shell = ["sh", "-c", f"{shlex.quote(sys.executable)} command.py >&-"]
    python_path = f"{tmp_path}:{REPOSITORY}:{TESTS}"
    ran = subprocess.run(
        shell,
        cwd=tmp_path,
        env=environment(PYTHONPATH=python_path),
        capture_output=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, b"") and (tmp_path / "metrics.json").exists()


TWO_JOBS = """
try:
    launch(settings, 2, module="standin_worker", preload="json")
except LaunchError as error:
    print(error)
settings.write_text(settings.read_text().replace("wait", "fine"))
launch(settings, 2, module="standin_worker", preload="json")
"""


def test_a_killed_server_ends_its_ranks_with_one_line_and_the_next_job_has_another(tmp_path):
    process = launched(tmp_path, TWO_JOBS, ("wait", "wait"))
    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    ranks = [int(pid.read_text()) for pid in pids]
    os.kill(server_of(process.pid), signal.SIGKILL)
    code, out, err = ended(process)
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert (first, third) == ("rank 0 speaks", "rank 0 speaks")
    assert second.startswith("rank ") and "was ended with the fork server" in second
    until(lambda: not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")])


THREE_JOBS = """
import json
from processes.test_fork_server import server_of

found = []
for job in range(3):
    launch(settings, 2, module="standin_worker", preload="json")
    found.append([server_of(os.getpid()), len(os.listdir("/proc/self/fd"))])
Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.full
def test_jobs_share_a_server_commands_do_not_and_nothing_piles_up(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    for process in [launched(folder, THREE_JOBS) for folder in folders]:
        assert ended(process) == (0, "rank 0 speaks\n" * 3, "")
    one, other = (json.loads((folder / "found.json").read_text()) for folder in folders)
    assert one[0] == one[1] == one[2] and other[0] == other[1] == other[2]
    assert one[0][0] and other[0][0] and one[0][0] != other[0][0]


@pytest.fixture
def short_folder():
    """A directory that is short enough to hold sockets, as pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_server_whose_command_goes_before_there_are_ranks_leaves_nothing_behind(tmp_path):
    code = """
        import os, signal, time
        from multiprocessing import forkserver, util
        from recapp.processes.fork_server import ensure_running

        ensure_running("json")
        print(util.get_temp_dir(), end="", flush=True)
        # what the kernel does first when it ends a process, long before it tells the children
        os.close(forkserver._forkserver._forkserver_alive_fd)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == -signal.SIGKILL and ran.stderr == "" and "pymp-" in ran.stdout
    until(lambda: not Path(ran.stdout).exists())


@pytest.mark.full
def test_a_command_that_is_killed_at_any_moment_leaves_nothing_behind(tmp_path, short_folder):
    moments = random.Random(20261124)
    kills = 5
    for kill in range(kills):
        folder = tmp_path / str(kill)
        folder.mkdir()
        run = start(
            "train",
            "+plan=mixed",
            "trainer.max_steps=100000",
            *small(tmp_path / "logs"),
            "hydra.run.dir=run",
            cwd=folder,
            fresh=True,
            TMPDIR=str(short_folder),
        )
        moment = 0.02 + 8 * (kill + moments.random()) / kills
        time.sleep(moment)
        run.kill()
        run.wait()
        until(lambda folder=folder: not processes_in(folder))
        left = [str(path) for path in short_folder.rglob("*") if "pymp-" in str(path)]
        assert not left, (kill, moment, left, (folder / "err.txt").read_text())


@pytest.mark.full
def test_forked_ranks_and_fresh_interpreters_are_the_same_run_to_the_last_bit(tmp_path):
    found = []
    for method in ("forkserver", "spawn"):
        overrides = [*small(tmp_path / "logs"), f"launch.start_method={method}"]
        ran = command("train", "+plan=mixed", *overrides, f"hydra.run.dir={method}", cwd=tmp_path)
        assert ran.code == 0, ran.err
        found.append(validation(metrics_of(tmp_path / method)))
    assert found[0] == found[1] and found[0]["val_auc"] > 0.5
