"""The server as a whole: batches of requests, overload, models that come and go, what it counts."""

import asyncio
import resource
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from serving.small_models import ROWS, Clicks, running, scorer, table

from recapp.errors import CheckpointError, ConfigError, DataError, RankError
from recapp.serving.counts import Counts
from recapp.serving.http import allow_open_files, closing_at_the_end
from recapp.serving.limits import Limits
from recapp.serving.served_model import ModelInService, check_model
from recapp.tasks.task import ClickTask, Output

BODY = {"rows": ROWS}
DIRECT = scorer().predict(table())


class Gate:
    """Holds the models that it makes: they compute when it is open; `batches` are their rows."""

    def __init__(self):
        self.open = threading.Event()
        self.batches = []

    def load(self):
        made = scorer()
        forward = made.model.forward

        def held(batch):
            if batch.rows > 1:  # not the row that warms it up
                self.batches.append(batch.rows)
                assert self.open.wait(20)
            return forward(batch)

        made.model.forward = held
        return made


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


# ---- batches


def test_requests_that_wait_are_computed_together_and_answered_apart():
    gate = Gate()
    rows = [[ROWS[i % 3]] * (1 + i % 3) for i in range(6)]

    async def ask():
        async with running(gate.load, max_batch=8) as client:
            first = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            others = [
                asyncio.ensure_future(client.infer({"rows": each}, "infer_rows")) for each in rows
            ]
            await until(lambda: client.server.batcher.waiting == 6)
            gate.open.set()
            return await first, await asyncio.gather(*others)

    first, others = asyncio.run(ask())
    assert first.json["scores"] == DIRECT.tolist()
    assert gate.batches == [3, 7, 5]  # at most 8 rows, in order, none split
    for each, answer in zip(rows, others, strict=True):
        alone = scorer().predict(table(each))
        torch.testing.assert_close(torch.tensor(answer.json["scores"]), alone, rtol=0, atol=1e-6)


def test_the_first_of_a_batch_waits_for_others_as_long_as_it_is_told():
    gate = Gate()
    gate.open.set()

    async def ask():
        async with running(gate.load, max_batch=6, max_wait_ms=5000) as client:
            start = time.perf_counter()
            one = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await asyncio.sleep(0.1)
            other = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await asyncio.gather(one, other)
            return time.perf_counter() - start

    assert asyncio.run(ask()) < 4  # the batch was full
    assert gate.batches == [6]


def test_a_request_larger_than_a_batch_is_computed_alone():
    gate = Gate()
    gate.open.set()

    async def ask():
        async with running(gate.load, max_batch=2) as client:
            return await client.infer(BODY, "infer_rows")

    assert asyncio.run(ask()).json["scores"] == DIRECT.tolist()
    assert gate.batches == [3]


def test_an_id_that_the_model_refuses_spoils_no_other_request_of_its_batch():
    gate = Gate()
    bad = {"rows": [ROWS[0] | {"user": 50}]}

    async def ask():
        async with running(gate.load) as client:
            first = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            asked = [
                asyncio.ensure_future(client.infer(each, "infer_rows"))
                for each in (BODY, bad, BODY, {"rows": 3})
            ]
            await until(lambda: client.server.batcher.waiting == 4)
            gate.open.set()
            await first
            return await asyncio.gather(*asked)

    good, refused, other, malformed = asyncio.run(ask())
    assert good.json["scores"] == other.json["scores"] == DIRECT.tolist()
    assert "feature user has the id 50" in refused.error and refused.status == 400
    assert malformed.status == 400


def test_a_fault_of_the_model_is_a_500_and_the_server_goes_on(capsys):
    def load():
        made = scorer()
        forward = made.model.forward
        made.model.forward = lambda batch: 1 / 0 if batch.rows == 2 else forward(batch)
        return made

    async def ask():
        async with running(load) as client:
            return [await client.infer({"rows": ROWS[:n]}, "infer_rows") for n in (2, 3)]

    broken, good = asyncio.run(ask())
    assert broken.status == 500 and broken.error.startswith("a fault of the server")
    assert good.json["scores"] == DIRECT.tolist()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_ranks_that_have_lost_each_other_are_no_mistake_of_the_client():
    def load():
        made = scorer()

        def lost(batch):
            raise RankError("the ranks have lost each other: rank 1 is gone")

        made.model.forward = lost
        return made

    async def ask():
        async with running(load) as client:
            return await client.infer(BODY, "infer_rows")

    answer = asyncio.run(ask())
    assert answer.status == 503 and answer.headers["retry-after"]
    assert answer.error == (
        "this server cannot compute any more, and ends: the ranks have lost each other: rank 1 is "
        "gone"
    )


class Ranks:
    """The leader of ranks; `text` is what is in the way."""

    failure = None
    text = ""

    def obstacle(self):
        return self.text


def test_a_rank_that_does_not_answer_is_said_at_once_and_the_server_is_not_ready_meanwhile():
    gate = Gate()
    leader = Ranks()
    places = ["/v2/health/ready", "/v2/models/clicks/ready"]

    async def ask():
        async with running(gate.load, leader=leader, timeout_s=60) as client:
            assert [(await client("GET", place)).json["ready"] for place in places] == [True] * 2
            waits = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            leader.text = "rank 1 has not answered for 5 s: it is stopped or lost"
            refused = [await waits, await client.infer(BODY, "infer_rows")]
            refused.append(await client("POST", "/v2/repository/models/clicks/load"))
            health = [await client("GET", place) for place in places]
            live = await client("GET", "/v2/health/live")
            leader.text = ""
            gate.open.set()
            after = [await client("GET", place) for place in places]
            return refused, health, live, after, await client.infer(BODY, "infer_rows")

    refused, health, live, after, answered = asyncio.run(ask())
    for answer in refused:
        assert answer.status == 503 and answer.headers["retry-after"]
        assert answer.error == "rank 1 has not answered for 5 s: it is stopped or lost"
    assert [(each.status, each.json["ready"]) for each in health] == [(503, False)] * 2
    assert live.status == 200
    assert [(each.status, each.json["ready"]) for each in after] == [(200, True)] * 2
    assert answered.json["scores"] == DIRECT.tolist()


def test_a_score_that_is_no_number_is_not_sent():
    class Broken(Clicks):
        def forward(self, batch):
            return super().forward(batch) * float("nan")

    def load():
        made = scorer()
        made.model = Broken(1)
        return made

    async def ask():
        async with running(load) as client:
            return await client.infer(BODY, "infer_rows")

    answer = asyncio.run(ask())
    assert answer.status == 500
    assert answer.error == "row 0: the model gives a logit that is no finite number"


# ---- overload, slow and absent clients


def test_more_requests_than_the_queue_holds_are_told_to_come_again():
    gate = Gate()

    async def ask():
        async with running(gate.load, max_queue=2) as client:
            kept = [asyncio.ensure_future(client.infer(BODY, "infer_rows")) for _ in range(2)]
            await until(lambda: gate.batches and client.server.admission.requests == 2)
            more = await client.infer(BODY, "infer_rows")
            gate.open.set()
            return more, await asyncio.gather(*kept), await client.infer(BODY, "infer_rows")

    more, kept, after = asyncio.run(ask())
    assert more.status == 503 and more.headers["retry-after"] == "1"
    assert more.error == "2 requests are waiting, max_queue=2: try again later"
    assert [answer.status for answer in (*kept, after)] == [200, 200, 200]


def test_bodies_that_wait_have_a_limit_together():
    gate = Gate()

    async def ask():
        async with running(gate.load, max_pending_bytes=400) as client:
            kept = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            more = await client.infer(BODY, "infer_rows")
            gate.open.set()
            await kept
            assert client.server.admission.pending_bytes == 0
            return more

    more = asyncio.run(ask())
    assert more.status == 503 and "max_pending_bytes=400: try again later" in more.error


def test_no_answer_in_time_is_a_503_that_says_so():
    gate = Gate()

    async def ask():
        async with running(gate.load, timeout_s=0.2) as client:
            answer = await client.infer(BODY, "infer_rows")
            gate.open.set()
            return answer

    answer = asyncio.run(ask())
    assert answer.status == 503 and answer.error.startswith("no answer within timeout_s=0.2")


def test_requests_whose_client_has_gone_are_not_computed():
    gate = Gate()

    async def ask():
        async with running(gate.load) as client:
            first = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            gone = await client.infer({"rows": ROWS[:2]}, "infer_rows", goes_after=0.01)
            gate.open.set()
            await first
            last = await client.infer(BODY, "infer_rows")
            return gone, last, (await client("GET", "/metrics")).body.decode()

    gone, last, text = asyncio.run(ask())
    assert gone.status == 499 and last.status == 200
    assert gate.batches == [3, 3]
    assert 'recapp_requests_total{code="499",route="infer_rows"} 1.0' in text


# ---- models that come and go


class Shelf:
    """What the path of a model holds, one after the other; an error is raised."""

    def __init__(self, *found):
        self.found = list(found)

    def __call__(self):
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) and not isinstance(found, torch.nn.Module) else found


LOAD = "/v2/repository/models/clicks/load"


def test_a_new_model_takes_the_place_of_the_old_one():
    async def ask():
        async with running(Shelf(scorer(1), scorer(2))) as client:
            before = await client.infer(BODY, "infer_rows")
            loaded = await client("POST", LOAD)
            after = await client.infer(BODY, "infer_rows")
            old = await client.infer(BODY, "versions/v1/infer_rows")
            text = (await client("GET", "/metrics")).body.decode()
            return before, loaded, after, old, text

    before, loaded, after, old, text = asyncio.run(ask())
    assert before.json["scores"] == DIRECT.tolist() and before.json["model_version"] == "v1"
    assert loaded.json == {"name": "clicks", "version": "v2"}
    assert after.json["scores"] == scorer(2).predict(table()).tolist()
    assert after.json["model_version"] == "v2" and before.json["scores"] != after.json["scores"]
    assert old.error == "model clicks has no version v1; v2 is in service"
    assert 'recapp_model_info{name="clicks",version="v2"} 1' in text


def test_a_reload_stops_no_request():
    gate = Gate()

    async def ask():
        async with running(Shelf(gate.load, scorer(2))) as client:
            held = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            await until(lambda: gate.batches)
            assert (await client("POST", LOAD)).status == 200
            later = asyncio.ensure_future(client.infer(BODY, "infer_rows"))
            gate.open.set()
            return await held, await later

    held, later = asyncio.run(ask())
    assert held.json["model_version"] == "v1" and held.json["scores"] == DIRECT.tolist()
    assert later.json["model_version"] == "v2"


NEW_COLUMN = scorer(3)
NEW_COLUMN.raw_rows.schema = type(NEW_COLUMN.schema)(
    None, ("age", "cost"), NEW_COLUMN.schema.sparse, integers=("user",)
)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (CheckpointError("block 3 is damaged"), "block 3 is damaged"),
        (KeyError("a fault"), "KeyError: 'a fault'"),
        (
            scorer(2, example=table(), expected={"score": DIRECT}),
            "gives its example scores that differ by .* from the stored ones: export it",
        ),
        (NEW_COLUMN, r"reads other features than v1, which is in service \(cost, price\): start"),
    ],
)
def test_a_model_that_may_not_go_into_service_leaves_the_old_one_there(found, said):
    async def ask():
        async with running(Shelf(scorer(1), found, scorer(2))) as client:
            refused = await client("POST", LOAD)
            after = await client.infer(BODY, "infer_rows")
            text = (await client("GET", "/metrics")).body.decode()
            again = await client("POST", LOAD)
            return refused, after, text, again

    refused, after, text, again = asyncio.run(ask())
    assert refused.status == 400
    assert refused.error.startswith("not loaded, version v1 stays in service: ")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(refused.error)
    assert after.json["scores"] == DIRECT.tolist()
    assert 'recapp_reloads_total{result="refused"} 1' in text
    assert again.json["version"] == "v2"


def test_one_model_is_loaded_at_a_time():
    held = threading.Event()

    def slow():
        assert held.wait(20)
        return scorer(2)

    async def ask():
        async with running(Shelf(scorer(1), slow)) as client:
            first = asyncio.ensure_future(client("POST", LOAD))
            await until(lambda: client.server.model.loads)
            second = await client("POST", LOAD)
            held.set()
            return await first, second

    first, second = asyncio.run(ask())
    assert first.status == 200 and second.status == 409
    assert second.error == "a model is being loaded already: wait for it"


def test_clients_may_not_say_where_a_model_comes_from():
    async def ask():
        async with running() as client:
            named = {"parameters": {"path": "/elsewhere"}}
            wrong = await client("POST", "/v2/repository/models/other/load")
            nothing = b' {"parameters" : { }} '
            return [await client("POST", LOAD, body) for body in (named, b"?", {}, nothing)], wrong

    (named, broken, *plain), wrong = asyncio.run(ask())
    assert named.status == 400 and named.error.startswith("parameters: a reload takes none")
    assert broken.status == 400 and broken.error.startswith("the body is no JSON")
    assert wrong.status == 404 and [answer.status for answer in plain] == [200, 200]


@pytest.mark.parametrize("name", ["a/b", "..", "a\nb"])
def test_a_name_that_no_path_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="the name of a model is part of the paths"):
        ModelInService(scorer, name, Counts())


# ---- connections


def test_the_answers_of_an_ending_server_are_the_last_of_their_connections():
    async def ask():
        async with running() as client:
            client.app = closing_at_the_end(client.server)
            before = await client("GET", "/v2/health/live")
            client.server.ends = True
            return before, await client("GET", "/v2/health/live")

    before, after = asyncio.run(ask())
    assert "connection" not in before.headers and after.headers["connection"] == "close"


@pytest.mark.parametrize(("soft", "hard", "raised"), [(1000, 1200, 1152), (9000, 9000, None)])
def test_a_process_may_open_as_many_files_as_it_has_connections(monkeypatch, soft, hard, raised):
    changes = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    allow_open_files(Limits())
    assert changes == ([] if raised is None else [(raised, hard)])


def test_more_connections_than_a_process_may_open_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    with pytest.raises(ConfigError, match=r"max_connections=1024: this process may open 200 files"):
        allow_open_files(Limits())


def test_a_model_that_does_not_score_its_example_as_it_did_is_not_served():
    check_model(scorer(example=table(), expected={"score": DIRECT}))
    with pytest.raises(ConfigError, match=r"scores that differ by 0\.\d+ from the stored ones"):
        check_model(scorer(example=table(), expected={"score": DIRECT + 0.25}))
    broken = scorer(example=table())
    broken.model.score.weight.data *= float("inf")
    with pytest.raises(DataError, match="row 0: the model gives a logit that is no finite number"):
        check_model(broken)


@pytest.mark.parametrize(("apart", "served"), [(0.001, True), (0.1, False)])
def test_large_scores_may_differ_in_their_last_bits(apart, served):
    task = ClickTask()
    task.outputs = (Output("logit", column="price", activation="identity"),)
    model = scorer(example=table(), task=task)
    with torch.no_grad():
        model.model.score.bias += 1000.0
    model.expected = {"price": model.predict(table()) + apart}
    refused = pytest.raises(ConfigError, match=r"scores that differ by 0\.1 from the stored ones")
    with nullcontext() if served else refused:
        check_model(model)


# ---- what it counts


def test_what_happens_is_counted():
    async def ask():
        async with running() as client:
            await client.infer(BODY, "infer_rows")
            await client.infer({"rows": ROWS[:2]}, "infer_rows")
            await client.infer({"rows": 3}, "infer_rows")
            return await client("GET", "/metrics")

    answer = asyncio.run(ask())
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    for line in (
        'recapp_requests_total{code="200",route="infer_rows"} 2.0',
        'recapp_requests_total{code="400",route="infer_rows"} 1.0',
        'recapp_batch_rows_bucket{le="1.0"} 0.0',
        'recapp_batch_rows_bucket{le="2.0"} 1.0',
        'recapp_batch_rows_bucket{le="+Inf"} 2.0',
        "recapp_batch_rows_sum 5.0",
        'recapp_request_seconds_count{route="infer_rows"} 2.0',
        "recapp_requests_in_progress 0.0",
        "recapp_queue_requests 0.0",
    ):
        assert line in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_an_ending_server_is_not_ready_but_answers():
    async def ask():
        async with running() as client:
            client.server.ends = True
            paths = ("/v2/health/ready", "/v2/models/clicks/ready", "/v2/health/live")
            states = [(await client("GET", path)).status for path in paths]
            return states, await client.infer(BODY, "infer_rows")

    states, answer = asyncio.run(ask())
    assert states == [503, 503, 200] and answer.status == 200
