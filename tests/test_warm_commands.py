"""A command that is forked from a warm process is like one that an interpreter is started for."""

import json
import os
import signal
import subprocess
from multiprocessing import util
from pathlib import Path

import pytest
from jobs import REPOSITORY, command, started
from tiers import one_of


def run(folder, fresh, *arguments):
    path = os.pathsep.join((str(REPOSITORY), str(Path(__file__).parent)))
    out, err = folder / f"{fresh}.out", folder / f"{fresh}.err"
    variables = {"PYTHONPATH": path, "OF_THE_TEST": "1"}
    return started("standin_command", arguments, folder, variables, out, err, fresh)


def test_it_has_what_python_m_has_and_so_have_processes_from_its_fork_server(tmp_path):
    said = []
    for fresh in (True, False):
        assert run(tmp_path, fresh, "7", "a b=c").wait(60) == 7
        assert (tmp_path / f"{fresh}.err").read_text() == "beside it\n"
        said.append(json.loads((tmp_path / f"{fresh}.out").read_text()))
    started, forked = said
    folders = [Path(found.pop("folder")) for found in said]
    assert util.get_temp_dir() not in map(str, folders) and not any(f.exists() for f in folders)
    assert forked == started
    assert forked["has the server"] and forked["child"]["environ"]["OF_THE_SERVER"] == "1"


def test_it_is_waited_for_and_signalled_as_another_process(tmp_path):
    running = run(tmp_path, False, "wait")
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.1)
    running.terminate()
    assert running.wait(60) == running.returncode == -signal.SIGTERM
    running.kill()  # which changes nothing


@pytest.mark.parametrize("fresh", one_of(2, [True, False]))
def test_an_exit_code_and_both_streams_are_those_of_the_command(tmp_path, fresh):
    good = command("plan", "types", cwd=tmp_path, fresh=fresh)
    assert good.code == 0 and "row_wise" in good.out and good.err == ""
    assert "unknown verb x" in command("plan", "x", cwd=tmp_path, fresh=fresh).error()
