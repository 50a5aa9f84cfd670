"""The rivals' processes: what they are sent, what they answer, and that none is left."""

import os
import sys

import pytest

from recapp.errors import ConfigError, LaunchError
from recapp.transport.communicator import Comm

from . import rivals as room
from .rivals import Absent, Refused, Rival, check_python, rivals

OBEDIENT = """
import json, os, sys
spec = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    tuned = os.environ.get("MALLOC_MMAP_MAX_") == "0"
    step = spec["rank"] + wanted["threads"] + 100.0 * tuned
    print(json.dumps({"step": [step] * wanted["steps"]}), flush=True)
"""
REFUSING = (
    "import json, sys; sys.stdin.readline(); print(json.dumps({'refused': 'not on the CPU'}), "
    "flush=True)"
)
DYING = "import sys; sys.stdin.readline(); sys.exit('no memory left')"
RANK = (
    "import os; assert not [n for n in os.environ if n.startswith(('RANK', 'TORCHELASTIC'))], "
    "os.environ\n"
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that makes a script the rivals' worker."""

    def use(text):
        (tmp_path / "worker.py").write_text(text)
        monkeypatch.setattr(room, "WORKER", tmp_path / "worker.py")

    return use


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_step_of_a_rival_takes_as_long_as_its_slowest_process(script, tmp_path):
    script(OBEDIENT)
    rival = Rival(sys.executable, [{}, {}], tmp_path, {}, threads=5)
    pids = [process.pid for process in rival._processes]
    assert rival.run(3) == {"step": [6.0, 6.0, 6.0]}
    rival.threads = 1
    assert rival.run(1) == {"step": [2.0]}
    rival.close()
    assert not any(map(alive, pids))


def test_it_runs_as_installed_and_with_its_allocator_tuned(script, tmp_path):
    script(OBEDIENT)
    with rivals("torchrec", sys.executable, [{}], tmp_path, Comm()) as found:
        assert {name: rival.run(1)["step"] for name, rival in found.items()} == {
            "torchrec": [1.0],
            "torchrec_tuned": [101.0],
        }


def test_what_refuses_is_not_compared_with(script, tmp_path, capsys):
    script(REFUSING)
    with rivals("torchrec", sys.executable, [{}, {}], tmp_path, Comm()) as found:
        assert found == {}
    assert "torchrec refuses: not on the CPU" in capsys.readouterr().err


def test_without_a_python_there_is_no_rival(tmp_path):
    with rivals("torchrec", None, [{}], tmp_path, Comm()) as found:
        assert found == {}


def test_ranks_that_do_not_lead_hold_contenders_that_do_nothing(tmp_path, monkeypatch):
    comm = Comm()
    comm.rank = 1
    monkeypatch.setattr(comm, "broadcast", lambda mine: ["torchrec", "torchrec_tuned"])
    with rivals("torchrec", sys.executable, [{}, {}], tmp_path, comm) as found:
        assert (
            found == {"torchrec": Absent(), "torchrec_tuned": Absent()}
            and found["torchrec"].run(3) == {}
        )


def test_one_that_dies_is_an_error_with_its_last_words(script, tmp_path):
    script(DYING)
    with pytest.raises(LaunchError, match="no memory left"):
        Rival(sys.executable, [{}, {}], tmp_path, {}, 1)


def test_a_rival_inherits_nothing_of_a_rank(script, tmp_path, monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "MALLOC_ARENA_MAX"):
        monkeypatch.setenv(name, "1")
    script(RANK + OBEDIENT)
    rival = Rival(sys.executable, [{}], tmp_path, {}, 1)
    assert rival.run(1)
    rival.close()


def test_a_refusal_ends_its_processes(script, tmp_path, monkeypatch):
    script(REFUSING)
    closed = []
    monkeypatch.setattr(
        Rival,
        "close",
        lambda self, close=Rival.close: (close(self), closed.extend(self._processes)),
    )
    with pytest.raises(Refused):
        Rival(sys.executable, [{}], tmp_path, {}, 1)
    assert closed and not any(alive(process.pid) for process in closed)


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("/no/such/python", "--torchrec_python=/no/such/python: cannot be run"),
        (sys.executable, "cannot import torchrec"),
        ("/bin/false", "--torchrec_python=/bin/false: cannot import torchrec"),
    ],
)
def test_a_python_without_torchrec_is_refused(python, says):
    check_python(None)
    with pytest.raises(ConfigError) as error:
        check_python(python)
    assert says in str(error.value) and "Beside TorchRec" in str(error.value)
    assert "\n" not in str(error.value)
