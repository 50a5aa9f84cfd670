"""A signal counts whenever it comes, whatever the code that it interrupts makes of the exception.
Whole runs: test_run_ends.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import command, environment
from tiers import one_of

from recapp.cli.command import run
from recapp.processes import stopping
from recapp.processes.rank_process import Forwarding
from recapp.processes.stopping import Stopped, stoppable

BOTH = [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "stopped by SIGTERM\n")]
EATER = """
import os, signal
done = False
try:
    os.kill(os.getpid(), signal.{name})
    for _ in range(1000):
        pass
except BaseException as error:
    raise ImportError("it is not there") from None
done = True
"""


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


def interrupted(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def lost(number):
    """The handler's exception disappears, as in a library that tries things."""
    try:
        interrupted(number)
    except BaseException:
        return


def turned(number):
    """It becomes another one."""
    try:
        interrupted(number)
    except BaseException:
        raise AttributeError("'NoneType' object has no attribute 'x'") from None


@pytest.mark.parametrize(("number", "said"), BOTH)
def test_what_is_being_imported_is_there_before_stopped_is_raised(
    number, said, tmp_path, monkeypatch
):
    (tmp_path / "eater.py").write_text(EATER.format(name=number.name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "eater", raising=False)
    began = time.monotonic()
    with pytest.raises(Stopped) as stopped, stoppable():
        import eater

        time.sleep(60)
    assert eater.done and stopped.value.number == number and time.monotonic() - began < 30


@pytest.mark.parametrize(("number", "said"), BOTH)
def test_stopped_is_raised_after_a_del_which_would_print_and_drop_it(number, said):
    class Owner:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            deleted.append(True)

    deleted = []
    began = time.monotonic()
    # what a `__del__` raises is an error of this test (filterwarnings)
    with pytest.raises(Stopped) as stopped, stoppable():
        owner = Owner()
        del owner
        time.sleep(60)
    assert deleted and stopped.value.number == number and time.monotonic() - began < 30


@pytest.mark.parametrize(("number", "said"), BOTH)
def test_stopped_is_raised_after_a_generator_has_been_closed_which_would_print_and_drop_it(
    number, said
):
    def numbers():
        try:
            yield 1
        finally:
            try:
                raise KeyError
            except KeyError:  # as a handler within `finally` would hide that it is closed
                os.kill(os.getpid(), number)
                time.sleep(0.01)
            closed.append(True)

    closed = []
    began = time.monotonic()
    with pytest.raises(Stopped) as stopped, stoppable():
        for _ in numbers():
            break
        time.sleep(60)
    assert closed and stopped.value.number == number and time.monotonic() - began < 30


@pytest.mark.parametrize("becomes", [lost, turned])
def test_stopped_is_raised_whatever_has_become_of_it(becomes):
    with pytest.raises(Stopped) as stopped, stoppable():
        becomes(signal.SIGTERM)
    assert stopped.value.code == 143
    with stoppable():  # and that was that
        pass


def test_no_rank_is_started_after_a_signal():
    def start():
        with Forwarding(1.0):
            started.append(True)

    started = []
    with pytest.raises(Stopped), stoppable():
        lost(signal.SIGTERM)
        start()
    assert not started


def test_ranks_that_are_started_though_stopped_got_lost_get_no_work():
    with Forwarding(60.0) as forwarding:
        lost(signal.SIGINT)
        with pytest.raises(Stopped):
            forwarding.watch({})


def test_a_rank_that_imports_ends_at_once_and_tells_of_the_signal(tmp_path):
    (tmp_path / "eater.py").write_text(EATER.format(name="SIGTERM"))
    code = "from recapp.processes.rank_process import as_rank\nwith as_rank():\n    import eater"
    variables = {
        "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (ran.returncode, ran.stderr) == (143, "")
    assert (
        json.loads((tmp_path / "error.json").read_text())["message"]["message"]
        == "Stopped: SIGTERM"
    )


@pytest.mark.parametrize(("becomes", "number", "said"), [(lost, *BOTH[0]), (turned, *BOTH[1])])
def test_a_job_is_stopped_and_not_failed(becomes, number, said, tmp_path, monkeypatch, capfd):
    jobs = []

    def task(config, job):
        jobs.append(job)
        becomes(number)

    code = run("train", task, argv=["-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep"])
    captured = capfd.readouterr()
    assert (code, captured.err.splitlines()[-1] + "\n", len(jobs)) == (128 + number, said, 1)
    assert "error" not in captured.err
    assert (
        not list(tmp_path.rglob(".lock"))
        and '"stopped"' in (jobs[0].directory / "error.json").read_text()
    )


def test_a_second_signal_ends_the_process_at_once():
    code = """if True:
        import os, signal, time
        from recapp.processes import stopping
        stopping.SAME_SIGNAL_SECONDS = 0.1
        with stopping.stoppable():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                try:
                    os.kill(os.getpid(), number)
                    time.sleep(0.01 if number == signal.SIGTERM else 60)
                except BaseException:
                    pass
                time.sleep(0.1 * (number == signal.SIGTERM))
        """
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=30
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (143, "", "stopped by SIGTERM\n")


AT_IMPORT = """
import os, signal, sys
def hook(event, arguments):
    if event == "import" and arguments[0] == "{module}":
        os.kill(os.getpid(), signal.{name})
sys.addaudithook(hook)
"""


@pytest.mark.parametrize("name", ["train", "eval", "predict", "plan", "bench", "report"])
@pytest.mark.parametrize(("number", "said"), one_of(3, BOTH))
def test_a_command_that_is_still_imported_ends_with_one_line(name, number, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.format(module="hydra", name=number.name))
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ran = command(name, "explain", cwd=tmp_path, fresh=True, PYTHONPATH=path)
    assert (ran.code, ran.out, ran.err) == (128 + number, "", said)


def test_a_library_takes_no_signals():
    code = (
        "import signal, recapp.train; print(*(signal.getsignal(n) in (signal.SIG_DFL, "
        "signal.default_int_handler) for n in (2, 15)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=Path("/"),
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "True True\n", ran.stderr


def test_no_signal_raises_where_a_kernel_is_loaded():
    """Python drops what a callback of LLVM raises, and the kernel is then read unloaded."""
    loader = {"__name__": "llvmlite.binding.executionengine"}
    exec("def load(hook):\n    return hook()", loader)
    assert loader["load"](lambda: stopping._imports_or_deletes(sys._getframe()))
    assert not stopping._imports_or_deletes(sys._getframe())
