"""`python -m recapp.serve ranks=N`: the same answers, reload and end as of one process."""

import http.client
import json
import os
import re
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from hosts import TORCHRUN, Started, at_once, free_port, wait_for
from jobs import command, ranks_of
from serving.processes import ServerProcess, trained
from serving.test_serve_command import rows

from recapp import load_model
from recapp.transport.join_ranks import SILENT_SECONDS

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def models(stored):
    """Two checkpoints of one schema."""
    return [trained(stored), trained(stored, "seed=2")]


def scores_of(server, name, given):
    body = json.dumps({"rows": given.to_pylist()}).encode()
    status, _, answer = server.ask("POST", f"/v2/models/{name}/infer_rows", body)
    assert status == 200, answer
    return torch.tensor(json.loads(answer)["scores"])


def test_it_answers_reloads_and_ends_as_one_process_does(models, tmp_path, start_server):
    link = tmp_path / "current"
    link.symlink_to(models[0])
    server = start_server(tmp_path / "server", link, "ranks=2")
    given = rows()
    assert torch.equal(scores_of(server, "current", given), load_model(models[0]).predict(given))
    assert server.row["ranks"] == 2 and len(ranks_of(server.process.pid)) == 2
    (tmp_path / "new").symlink_to(models[1])
    (tmp_path / "new").replace(link)
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 60
    while "is in service" not in server.errors:
        assert time.monotonic() < end, server.errors
        time.sleep(0.05)
    assert torch.equal(scores_of(server, "current", given), load_model(models[1]).predict(given))
    status, _, answer = server.ask("POST", "/v2/models/current/infer_rows", {"rows": [{}]})
    assert status == 400 and b"feature I1" in answer
    link.unlink()
    status, _, answer = server.ask("POST", "/v2/repository/models/current/load")
    assert status == 400 and b"stays in service" in answer
    assert torch.equal(scores_of(server, "current", given), load_model(models[1]).predict(given))
    assert server.stop() == 0
    assert server.errors.splitlines()[-1] == "ended" and "Traceback" not in server.errors


BEYOND_SECONDS = 30  # 5 of them on a machine that does nothing else


class Asking:
    """A client that asks for scores and whether the server is ready until it is gone; what it was
    answered.
    """

    def __init__(self, server, name):
        self.server = server
        self.path = f"/v2/models/{name}/infer_rows"
        self.body = {"rows": rows(3).to_pylist()}
        self.health = []
        self.answers = []
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._ask)]
        for thread in self._threads:
            thread.start()

    def _look(self):
        with suppress(OSError, http.client.HTTPException):
            while True:
                self.health.append(self.server.ask("GET", "/v2/health/ready")[0])
                time.sleep(0.05)

    def _ask(self):
        with suppress(OSError, http.client.HTTPException):
            while True:
                status, _, answer = self.server.ask("POST", self.path, self.body)
                self.answers.append((status, answer.decode()))
                time.sleep(0.05)

    def wait(self):
        for thread in self._threads:
            thread.join()


def assert_refused(asking, silence):
    """Once a rank was silent nobody was told to ask here, and all were told why."""
    asking.wait()
    # a machine that is very busy may have been silent before, and gone on
    assert asking.health[-1] == 503 and asking.health.count(503) > 10
    refused = [answer for status, answer in asking.answers if status != 200]
    assert refused and {status for status, _ in asking.answers} <= {200, 503}
    assert silence in refused[0], refused
    # at the end the rank is killed, and whoever waits for it hears that
    assert all(silence in answer or "cannot compute any more" in answer for answer in refused)


def test_a_rank_that_dies_ends_the_server_with_one_line(models, tmp_path, start_server):
    server = start_server(tmp_path, models[0], "ranks=2", "name=clicks")
    ranks = ranks_of(server.process.pid)
    asking = Asking(server, "clicks")
    until(lambda: asking.answers)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    assert server.process.wait(60) == 1
    assert time.monotonic() - began < 10 + BEYOND_SECONDS  # timeout_s
    asking.wait()
    assert {status for status, _ in asking.answers} <= {200, 503} and asking.answers[0][0] == 200
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values())
    last = server.errors.splitlines()[-1]
    assert last.startswith("error: rank 1 ") and "SIGKILL" in last
    assert "Traceback" not in server.errors


def test_a_rank_that_is_stopped_makes_a_server_unready_and_ends_it(models, tmp_path, start_server):
    server = start_server(tmp_path, models[0], "ranks=3", "name=clicks", "timeout_s=60")
    ranks = ranks_of(server.process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    asking = Asking(server, "clicks")
    assert server.process.wait(SILENT_SECONDS + 60) == 1
    assert time.monotonic() - began < SILENT_SECONDS + BEYOND_SECONDS
    assert_refused(asking, "rank 1 has not answered for ")
    lost = r"error: the ranks have lost each other: rank 1 has not answered for \d+ s: it is "
    assert re.fullmatch(f"{lost}stopped or lost", server.errors.splitlines()[-1]), server.errors
    assert "Traceback" not in server.errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values())


def test_a_rank_that_is_let_go_on_answers_again(models, tmp_path, start_server):
    server = start_server(tmp_path, models[0], "ranks=2", "name=clicks")
    (rank,) = (pid for number, pid in ranks_of(server.process.pid).items() if number)
    os.kill(rank, signal.SIGSTOP)
    until(lambda: server.ask("GET", "/v2/health/ready")[0] == 503)
    os.kill(rank, signal.SIGCONT)
    until(lambda: server.ask("GET", "/v2/health/ready")[0] == 200)
    asking = {"rows": rows(3).to_pylist()}
    until(lambda: server.ask("POST", "/v2/models/clicks/infer_rows", asking)[0] == 200)
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_under_torchrun_a_rank_that_is_lost_ends_the_server(models, tmp_path, number):
    port = free_port()
    given = ["recapp.serve", f"artefact={models[0]}", f"port={port}", "name=clicks"]
    given.append("timeout_s=60")
    agent = Started(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", *given], tmp_path, "run"
    )
    with at_once(agent):
        wait_for(f"http://127.0.0.1:{port}", agent)
        os.kill(agent.processes("RANK=1")[0], number)
        began = time.monotonic()
        leader = agent.processes("RANK=0")[0]
        if number == signal.SIGSTOP:
            asking = Asking(ServerAt(port), "clicks")
            until(lambda: not os.path.exists(f"/proc/{leader}"))
            assert time.monotonic() - began < SILENT_SECONDS + BEYOND_SECONDS
            assert_refused(asking, "rank 1 has not answered for ")
        ran = agent.wait(90)
        assert ran.code == 1 and agent.processes() == []
    if number == signal.SIGSTOP:
        lost = r"error: the ranks have lost each other: rank 1 has not answered for (\d+) s: it is "
        said = re.search(lost + "stopped or lost\n", ran.err)
        assert said and SILENT_SECONDS <= int(said[1]) < SILENT_SECONDS + BEYOND_SECONDS, ran.err


class ServerAt(ServerProcess):
    """A server that something else has started."""

    def __init__(self, port):
        self.host = "127.0.0.1"
        self.port = port


def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["device=cuda"], "device=cuda ranks=2: each rank needs a GPU of its own"),
        (["artefact=/no/such"], "there is no checkpoint /no/such"),
        (["ranks=0"], "ranks=0: must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_one_line(models, tmp_path, settings, said):
    if settings == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = command("serve", f"artefact={models[0]}", "ranks=2", *settings, cwd=tmp_path)
    assert ran.code == 1 and ran.out == ""
    assert ran.err.splitlines()[-1].startswith("error: ") and said in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err
