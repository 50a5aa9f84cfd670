"""`python -m recapp.serve ranks=N`: the same answers, reload and end as of one process."""

import json
import os
import signal
import time

import pytest
import torch
from jobs import command, ranks_of
from serving.processes import trained
from serving.test_serve_command import rows

from recapp import load_model

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


def test_a_rank_that_dies_ends_the_server_with_one_line(models, tmp_path, start_server):
    server = start_server(tmp_path, models[0], "ranks=2")
    os.kill(ranks_of(server.process.pid)[1], signal.SIGKILL)
    assert server.process.wait(60) == 1
    last = server.errors.splitlines()[-1]
    assert last.startswith("error: rank 1 ") and "SIGKILL" in last
    assert "Traceback" not in server.errors


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
