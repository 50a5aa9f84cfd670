"""Pulses tell ranks that run from those that do not."""

import threading
import time

import pytest
from torch.distributed import HashStore

from recapp.transport.communicator import LONGEST_LOOK_SECONDS, SecondsSeen
from recapp.transport.join_ranks import Pulses

LOST_SECONDS = 2.0  # a thread of a busy machine is not held up for so long


class Watched:
    """Rank 0 of three, which watches the others through a store."""

    def __init__(self, store, quiet=0.3, lost_after=LOST_SECONDS):
        self.rank = [
            Pulses(
                store,
                rank,
                3,
                pulse_seconds=0.02,
                quiet_seconds=quiet,
                silent_seconds=lost_after,
            )
            for rank in range(3)
        ]
        self.lost = []
        self.end = threading.Event()
        self.rank[1].show()
        self.rank[2].show()
        self.rank[0].watch(lambda error: (self.lost.append(str(error)), self.end.set()))

    def stop(self):
        for each in self.rank:
            each.end()


@pytest.fixture
def store():
    return HashStore()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_rank_that_stops_counting_is_an_obstacle_and_then_lost(store):
    watched = Watched(store)
    until(
        lambda: store.add("1", 0) > 3 and store.add("2", 0) > 3 and not watched.rank[0].obstacle()
    )
    watched.rank[2].end()  # as one that is stopped
    until(lambda: watched.rank[0].obstacle())
    assert watched.rank[0].obstacle().startswith("rank 2 has not answered for ")
    assert watched.end.wait(60)
    assert watched.lost == ["rank 2 has not answered for 2 s: it is stopped or lost"]
    watched.stop()


def test_a_rank_that_goes_on_is_no_obstacle_any_more(store):
    watched = Watched(store, lost_after=1000)
    watched.rank[1].end()
    until(watched.rank[0].obstacle)
    watched.rank[1]._ended.clear()
    watched.rank[1].show()
    until(lambda: not watched.rank[0].obstacle())
    assert watched.lost == []
    watched.stop()


@pytest.mark.full
def test_a_store_that_is_gone_with_its_process_is_silence():
    class Gone:
        def add(self, key, more):
            raise RuntimeError("Connection reset by peer")

    watched = Watched(Gone())
    assert watched.end.wait(60)
    assert "has not answered for 2 s" in watched.lost[0]
    watched.stop()


def test_nobody_is_lost_after_the_end(store):
    watched = Watched(store, lost_after=0.2)
    watched.rank[0].end()
    watched.rank[1].end()
    assert not watched.end.wait(0.5)
    watched.stop()


def test_seconds_in_which_nobody_looked_do_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen = SecondsSeen()
    assert seen.look([1, 2]) == {1: 0, 2: 0}
    now[0] += 1.5
    assert seen.look([1]) == {1: 1.5}
    now[0] += 3600
    assert seen.look([1, 2]) == {1: 1.5 + LONGEST_LOOK_SECONDS, 2: 0}
    assert seen.look([]) == {} and seen.look([1]) == {1: 0}
