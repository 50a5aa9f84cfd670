"""Statistics of rounds, and which contender runs when."""

import itertools

import numpy as np
import pytest

from recapp.benchmarks import timing
from recapp.benchmarks.timing import (
    Measured,
    Steps,
    interleave,
    ratio,
    slowest,
    spread,
)
from recapp.reporting.phases import quartiles
from recapp.transport.communicator import Comm


class Scripted:
    """A contender that claims to take so long, and records each of its turns."""

    def __init__(self, name, ms, turns):
        self.name = name
        self.ms = ms
        self.turns = turns

    def run(self, steps):
        self.turns.append((self.name, steps))
        return {"step": [self.ms] * steps, "forward": [self.ms / 4] * steps}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10])
def test_quartiles_are_numpys(count):
    values = list(np.random.default_rng(count).uniform(size=count))
    assert quartiles(values) == pytest.approx(np.percentile(values, [50, 25, 75]))


def test_a_ratio_is_above_one_where_recapp_is_faster_and_pairs_rounds():
    own = Measured({"step": [[1.0, 2.0, 3.0], [20.0], [1.0]]})
    other = Measured({"step": [[4.0], [60.0], [4.0, 5.0, 6.0]]})
    assert ratio("peer", other, own) == {
        "peer_ratio": 3.0,
        "peer_ratio_q1": 2.5,
        "peer_ratio_q3": 4.0,
    }


def test_a_ratio_without_its_baseline_is_null():
    assert ratio("peer", None, Measured({"step": [[1.0]]})) == dict.fromkeys(
        ("peer_ratio", "peer_ratio_q1", "peer_ratio_q3")
    )


def test_a_median_is_over_all_steps_with_quartiles_beside_it():
    measured = Measured({"step": [[1.0, 2.0], [3.0, 4.0, 5.0]]})
    assert spread(measured) == {"median_ms": 3.0, "q1_ms": 2.0, "q3_ms": 4.0}


def test_everyone_has_a_turn_in_every_round_and_the_order_turns():
    turns = []
    advanced = []
    contenders = {name: Scripted(name, ms, turns) for name, ms in (("fast", 1.0), ("slow", 1000.0))}
    measured = interleave(contenders, Comm(), rounds=3, seconds=0.01, advance=advanced.append)
    warm = turns[:2]
    rounds = turns[2:]
    assert warm == [("fast", timing.WARM_STEPS), ("slow", timing.WARM_STEPS)]
    assert [name for name, _ in rounds] == ["fast", "slow", "slow", "fast", "fast", "slow"]
    assert {steps for name, steps in rounds if name == "fast"} == {10 + timing.SETTLE_STEPS}
    assert {steps for name, steps in rounds if name == "slow"} == {
        timing.LEAST_STEPS + timing.SETTLE_STEPS
    }
    assert [len(steps) for steps in measured["fast"].rounds["step"]] == [10, 10, 10]
    assert advanced == [1, 1, 1]
    assert measured["slow"].median("forward") == 250.0


def test_a_step_takes_as_long_as_its_slowest_rank(monkeypatch):
    comm = Comm()
    monkeypatch.setattr(comm, "all_gather", lambda mine: [mine, {"step": [3.0, 1.0]}, {}])
    assert slowest(comm, {"step": [2.0, 4.0]}) == {"step": [3.0, 4.0]}


def test_parts_of_a_step_add_up_and_what_stands_before_is_not_timed(monkeypatch):
    clock = itertools.accumulate(itertools.repeat(1.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    done = []
    parts = {
        "forward": lambda number: done.append(f"f{number}"),
        "backward": lambda number: done.append(f"b{number}"),
    }
    times = Steps(parts, before=lambda: done.append("barrier")).run(2)
    assert done == ["barrier", "f0", "b0", "barrier", "f1", "b1"]
    assert times == {"forward": [1000.0] * 2, "backward": [1000.0] * 2, "step": [2000.0] * 2}
