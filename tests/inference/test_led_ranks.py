"""Ranks that hold a model together answer as one process does, whatever comes, until they end."""

import gc
import threading
import time
from functools import partial

import pytest
import torch
from inference.scored_models import raw_rows, settings, storages, write_logs
from ranks import auto_means
from trainer.runs import fit

import recapp
from recapp.errors import ArtefactError, IdError, RankError, RecappError
from recapp.inference.export_settings import Export
from recapp.inference.scorer import Leader, Word, follow
from recapp.model_export import export_model
from recapp.model_loading import load_on

TRUST = ("inference",)
WRONG = 99  # no id of table `errors`


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A checkpoint with tables of every kind, and an artefact of it."""
    folder = tmp_path_factory.mktemp("led")
    with auto_means("torch"):
        fit(settings(write_logs(folder / "logs", 0), 0), folder / "run")
    path = folder / "run/checkpoints/last.ckpt"
    options = Export(quantize_tables=storages(0), report_rows=0, compile=False)
    export_model(path, folder / "art", options, trust=TRUST)
    return path, folder / "art"


@pytest.fixture(autouse=True)
def plain_kernels(reference_kernels):
    """Those of the pool of ranks."""


def rows_of(count=200):
    return raw_rows(5, count, known=200).drop_columns(["label"])


def with_wrong_id(rows):
    column = rows.column_names.index("errors")
    return rows.set_column(column, "errors", [[WRONG] * len(rows)])


def said(leader, *calls):
    """The errors of some calls, by type and text."""
    found = []
    for call in calls:
        try:
            call()
        except RecappError as error:
            found.append((type(error), str(error)))
    return found


def _answers(comm, paths, rows):
    left = iter(paths)

    def load():
        return load_on(comm, next(left), TRUST)

    if comm.rank:
        return follow(comm, load)
    leader = Leader(comm, beat_seconds=0.05)
    scores = []
    errors = []
    for _ in paths:
        scorer = leader.load(load)
        scores.append(scorer.predict(rows))
        errors += said(leader, partial(scorer.predict, with_wrong_id(rows)))
        scores.append(scorer.predict(rows))
    leader.end()
    return scores, errors


@pytest.mark.parametrize("world", [2, 4])
def test_they_answer_the_bits_of_one_process_and_go_on_after_an_error(ranks, models, world):
    rows = rows_of()
    (scores, errors), *_ = ranks.run(_answers, world, models, rows)
    for number, path in enumerate(models):
        wanted = recapp.load_model(path, trust=TRUST).predict(rows)
        assert torch.equal(scores[2 * number], wanted)
        assert torch.equal(scores[2 * number + 1], wanted)
    assert len(errors) == 2 and all(issubclass(kind, IdError) for kind, _ in errors)
    assert all("errors" in text and str(WRONG) in text for _, text in errors)


def _own_rows(comm, path, rows):
    model = recapp.load_model(path, trust=TRUST, env=comm.group)
    try:
        recapp.load_model(path, "cpu", env=comm.group)
    except RecappError as error:
        return model.predict(rows.slice(10 * comm.rank, 10 - comm.rank)), str(error)


def test_ranks_of_a_process_group_score_rows_of_their_own(ranks, models):
    rows = rows_of(20)
    found = ranks.run(_own_rows, 2, models[1], rows)
    alone = recapp.load_model(models[1], trust=TRUST)
    for rank, (scores, error) in enumerate(found):
        assert torch.equal(scores, alone.predict(rows.slice(10 * rank, 10 - rank)))
        assert error.startswith("device=cpu env=") and "leave device out" in error


def _two_at_once(comm, path, rows):
    def load():
        return load_on(comm, path, TRUST)

    if comm.rank:
        return follow(comm, load)
    leader = Leader(comm)
    first = leader.load(load)
    second = leader.load(load)
    found = [first.predict(rows), second.predict(rows), first.predict(rows)]
    del first
    gc.collect()
    dropped = list(leader._gone)
    found.append(second.predict(rows))
    left = list(leader._gone)
    leader.end()
    return found, dropped, left


def test_requests_of_an_earlier_model_are_answered_by_it_until_it_is_gone(ranks, models):
    rows = rows_of(50)
    (found, dropped, left), _ = ranks.run(_two_at_once, 2, models[1], rows)
    assert all(torch.equal(scores, found[0]) for scores in found)
    assert dropped == [0] and left == []


def _one_is_missing(comm, path, rows):
    own = path if comm.rank == 0 else path.with_name("elsewhere")

    def load():
        return load_on(comm, own, TRUST)

    if comm.rank:
        return follow(comm, load)
    leader = Leader(comm)
    found = said(leader, lambda: leader.load(load))
    leader.end()
    return found


def test_a_model_that_one_rank_cannot_load_is_loaded_by_none(ranks, models):
    ((kind, text),), _ = ranks.run(_one_is_missing, 2, models[0], rows_of(3))
    assert kind is RankError and text.startswith("rank 1 could not read ") and "elsewhere" in text


def _all_refuse(comm, path):
    try:
        load_on(comm, path, TRUST)
    except RecappError as error:
        return type(error), str(error)


def test_a_damaged_artefact_is_refused_on_all_ranks(ranks, models, tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "recapp-artefact"')
    found = ranks.run(_all_refuse, 2, tmp_path)
    assert {kind for kind, _ in found} == {ArtefactError}
    assert all("damaged" in text for _, text in found)


class Words:
    """Words that reach nobody, or that nobody says any more."""

    world = 2

    def __init__(self, fails=None):
        self.fails = fails

    def swap(self, *_):
        if self.fails:
            raise RuntimeError(self.fails)
        return lambda: None


class Faulty(torch.nn.Module):
    """A model with a fault of its own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        raise ZeroDivisionError("a fault")


def loaded(models):
    made = recapp.load_model(models[1], trust=TRUST)
    made.model = Faulty()
    return made


def test_a_fault_of_the_model_ends_the_ranks_instead_of_leaving_them_out_of_step(models):
    lost = []
    leader = Leader(Words(), lambda error: lost.append(str(error)))
    scorer = leader.load(lambda: loaded(models))
    found = said(leader, lambda: scorer.predict(rows_of(3)), lambda: scorer.predict(rows_of(3)))
    assert [kind for kind, _ in found] == [RankError, RankError]
    assert all("lost each other" in text and "a fault" in text for _, text in found)
    assert lost == ["the ranks have lost each other: a fault"]
    assert isinstance(leader.failure, ZeroDivisionError)
    assert leader.obstacle() == f"this server cannot compute any more, and ends: {lost[0]}"
    leader.end()


def test_followers_that_have_gone_are_noticed(models):
    lost = []
    leader = Leader(Words("Connection closed by peer"), lambda error: lost.append(str(error)))
    ((kind, text),) = said(leader, lambda: leader.load(lambda: loaded(models)))
    assert kind is RankError and "closed by peer" in text and lost == [text]
    leader.end()


class Silence:
    """Pulses of a rank that is stopped, and given up when `lose` is called."""

    def watch(self, lost):
        self.lose = lambda: lost(RankError("rank 1 has not answered for 30 s"))

    def obstacle(self):
        return "rank 1 has not answered for 7 s"

    def end(self):
        self.ended = True


def test_a_follower_that_is_stopped_is_an_obstacle_and_holds_nothing_up_at_the_end():
    lost = []
    pulses = Silence()
    leader = Leader(Words(), lambda error: lost.append(str(error)), pulses=pulses)
    assert leader.obstacle() == "rank 1 has not answered for 7 s" and leader.failure is None
    pulses.lose()
    assert lost == ["the ranks have lost each other: rank 1 has not answered for 30 s"]
    assert lost[0] in leader.obstacle() and leader.failure is not None
    taken = threading.Event()
    released = threading.Event()

    def wait_for_the_follower():
        with leader._turn:
            taken.set()
            released.wait(60)

    waiting = threading.Thread(target=wait_for_the_follower)
    waiting.start()
    taken.wait(60)
    leader.end()  # would wait for the turn
    assert waiting.is_alive() and pulses.ended
    released.set()
    waiting.join()


def test_a_leader_that_has_gone_ends_the_followers():
    with pytest.raises(RankError, match="rank 0 has gone: Connection closed by peer"):
        follow(Words("Connection closed by peer"), None)


def test_no_beat_follows_the_end():
    """Whoever follows has gone then: its next message would be another's."""
    words = Words()
    told = []
    swap = words.swap
    words.swap = lambda buffer, *rest: told.append(int(buffer[0])) or swap(buffer, *rest)
    leader = Leader(words, beat_seconds=0.01)
    with leader._turn:
        time.sleep(0.1)  # a beat is due, and waits for its turn
        leader.end()
    time.sleep(0.1)
    assert told[-1] == Word.END and told.count(Word.END) == 1
