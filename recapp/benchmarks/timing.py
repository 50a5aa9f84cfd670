"""Timing in rounds: everyone who is compared runs a few steps, then the next one, and so again.

    round 1   recapp ······   torchrec ······   torchrec tuned ······
    round 2   torchrec tuned ······   torchrec ······   recapp ······
    ...

A machine that others use too drifts by more than what is to be measured; what stands in one round
has met the same machine. So a comparison is a ratio of medians of one round, its median and
quartiles over the rounds of one run, and never a number from another day. A step of several ranks
takes as long as its slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from recapp.transport.communicator import Comm

# of a round
LEAST_STEPS = 2
MOST_STEPS = 40
SETTLE_STEPS = 1  # of a round, not counted: the caches are another's
WARM_STEPS = 3  # before the first round: buffers grow, memory is touched for the first time

Times = dict[str, list[float]]
"""Milliseconds of steps, by part: `step` always, and what a contender tells apart (`forward`,
`backward`).
"""


class Contender(Protocol):
    """Whoever is timed."""

    def run(self, steps: int) -> Times:
        """Run so many steps and time each; nothing where this rank has no part in it."""
        ...


@dataclass
class Measured:
    """What a contender took: milliseconds, by part, by round, by step."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, times: Times) -> None:
        """One more round."""
        for part, steps in times.items():
            self.rounds.setdefault(part, []).append(steps)

    def summary(self, part: str = "step") -> tuple[float, float, float]:
        """Median and quartiles over all steps."""
        return quartiles([ms for steps in self.rounds[part] for ms in steps])

    def median(self, part: str = "step") -> float:
        """Median over all steps."""
        return self.summary(part)[0]

    def by_round(self, part: str = "step") -> list[float]:
        """The median of each round."""
        return [statistics.median(steps) for steps in self.rounds[part]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile, interpolated between neighbours as numpy does."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return median, first, third


def spread(measured: Measured, part: str = "step", prefix: str = "") -> dict[str, float]:
    """`median_ms`, `q1_ms`, `q3_ms` of a record, as `<prefix>median_ms`."""
    return dict(
        zip(
            (f"{prefix}median_ms", f"{prefix}q1_ms", f"{prefix}q3_ms"),
            measured.summary(part),
            strict=True,
        )
    )


def ratio(
    name: str, other: Measured | None, own: Measured, part: str = "step"
) -> dict[str, float | None]:
    """How much faster recapp is: `<name>_ratio`, above 1 where it is faster, with quartiles.

    Each round has a ratio of two medians; theirs is the median over rounds, which a machine that
    drifts between rounds does not move.

    Args:
        name: of the entry.
        other: who recapp is compared with; None where it was not there or refused.
        own: recapp.
        part: what is compared.
    """
    keys = (f"{name}_ratio", f"{name}_ratio_q1", f"{name}_ratio_q3")
    if other is None or part not in other.rounds:
        return dict.fromkeys(keys)
    ratios = [
        theirs / ours for theirs, ours in zip(other.by_round(part), own.by_round(part), strict=True)
    ]
    return dict(zip(keys, quartiles(ratios), strict=True))


def time_steps(
    parts: Iterable[tuple[str, Callable[[], object]]],
    steps: int,
    before: Callable[[], None] = lambda: None,
) -> Times:
    """Run steps of some parts; each part's time, and their sum as `step`.

    Args:
        parts: name and work of each part, in order. One part called `step` has no other sum.
        steps: how many.
        before: done before each step, untimed: a barrier.
    """
    parts = list(parts)
    times: Times = {name: [] for name in (*(name for name, _ in parts), "step")}
    for _ in range(steps):
        before()
        begin = last = time.perf_counter()
        for name, work in parts:
            work()
            now = time.perf_counter()
            if name != "step":
                times[name].append((now - last) * 1e3)
            last = now
        times["step"].append((last - begin) * 1e3)
    return times


def interleave(
    contenders: Mapping[str, Contender],
    comm: Comm,
    *,
    rounds: int,
    seconds: float,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Measured]:
    """Time contenders round by round. Every rank calls it with the same names.

    Args:
        contenders: who is timed, by name.
        comm: the ranks.
        rounds: how often each has its turn; the order turns round every time.
        seconds: how long a turn should be; it is at least two steps.
        advance: told after each round.
    """
    steps = {}
    for name, contender in contenders.items():
        comm.barrier()
        warm = slowest(comm, contender.run(WARM_STEPS))["step"]
        steps[name] = min(max(round(seconds * 1e3 / min(warm)), LEAST_STEPS), MOST_STEPS)
    measured = {name: Measured() for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: 1 if i % 2 == 0 else -1]:
            comm.barrier()
            times = slowest(comm, contenders[name].run(SETTLE_STEPS + steps[name]))
            measured[name].add({part: values[SETTLE_STEPS:] for part, values in times.items()})
        advance(1)
    return measured


def slowest(comm: Comm, times: Times) -> Times:
    """Of each step the time of the rank that took longest; ranks without times have no say."""
    told = [t for t in comm.all_gather(times) if t]
    return {
        part: [max(step) for step in zip(*(t[part] for t in told), strict=True)] for part in told[0]
    }
