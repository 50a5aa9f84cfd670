"""Time contenders in rounds: in each round, each contender runs a few steps in its turn.

    round 1   table_wise ······   row_wise ······   mixed ······
    round 2   mixed ······   row_wise ······   table_wise ······
    ...

The speed of a shared machine drifts by more than the measured differences, but hardly within one
round. So a comparison divides two medians of the same round. It reports the median and quartiles of
these ratios over the rounds of one run, and never uses a number from another day. A step of several
ranks takes as long as its slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from recapp.reporting.phases import quartiles
from recapp.transport.communicator import Comm

T = TypeVar("T")
LEAST_STEPS = 2  # of a turn
MOST_STEPS = 40  # of a turn
SETTLE_STEPS = 1  # first steps of a turn, not counted: the caches hold another contender's data
WARM_STEPS = 3  # before the first round, because buffers grow and memory pages are new

# The milliseconds of each step, by part: `step` always, and the parts that a contender times
# separately, such as `forward` and `backward`.
Times = dict[str, list[float]]


class Contender(Protocol):
    """A piece of work that is timed in rounds."""

    def run(self, steps: int) -> Times:
        """Run steps, and return the time of each; empty where this rank has no part in them.

        Args:
            steps: The number of steps.
        """
        ...


@dataclass
class Steps:
    """A contender whose steps consist of parts, which run one after the other.

    Args:
        parts: The function of each part, which gets the number of the step. A part named `step` has
            no times of its own, because `step` is the sum of all parts.
        before: A function that is called before each step, untimed, such as a barrier.
        inside: A function that makes the context of the steps, such as `torch.no_grad`.
        number: The number of the next step.
        clock: The clock, in seconds; `time.process_time` gives CPU time.
    """

    parts: Mapping[str, Callable[[int], object]]
    before: Callable[[], object] = lambda: None
    inside: Callable[[], AbstractContextManager[object]] = nullcontext
    number: int = 0
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)

    def run(self, steps: int) -> Times:
        """Run steps, and return the milliseconds of each part and of their sum, `step`."""
        times: Times = {name: [] for name in (*self.parts, "step")}
        with self.inside():
            for _ in range(steps):
                self.before()
                begin = last = self.clock()
                for name, work in self.parts.items():
                    work(self.number)
                    now = self.clock()
                    if name != "step":
                        times[name].append((now - last) * 1e3)
                    last = now
                times["step"].append((last - begin) * 1e3)
                self.number += 1
        return times


def in_turn(work: Callable[[T], object], batches: Sequence[T]) -> Callable[[int], object]:
    """Return a function that runs the step of a number: steps take batches in turn.

    Args:
        work: The function that runs a step on a batch.
        batches: The batches.
    """
    return lambda number: work(batches[number % len(batches)])


@dataclass
class Measured:
    """The milliseconds of a contender, by part, round and step."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, times: Times) -> None:
        """Add the times of one more round."""
        for part, steps in times.items():
            self.rounds.setdefault(part, []).append(steps)

    def summary(self, part: str = "step") -> tuple[float, float, float]:
        """Return median, first and third quartile over the steps of all rounds."""
        return quartiles([ms for steps in self.rounds[part] for ms in steps])

    def median(self, part: str = "step") -> float:
        """Return the median over the steps of all rounds."""
        return self.summary(part)[0]

    def by_round(self, part: str = "step") -> list[float]:
        """Return the median of each round."""
        return [statistics.median(steps) for steps in self.rounds[part]]


def spread(measured: Measured, part: str = "step", prefix: str = "") -> dict[str, float]:
    """Return the entries `<prefix>median_ms`, `<prefix>q1_ms` and `<prefix>q3_ms` of a result."""
    return dict(
        zip(
            (f"{prefix}median_ms", f"{prefix}q1_ms", f"{prefix}q3_ms"),
            measured.summary(part),
            strict=True,
        )
    )


def ratio(
    name: str, other: Measured | None, measured: Measured, part: str = "step"
) -> dict[str, float | None]:
    """Return `<name>_ratio`, the other's time over recapp's, and its quartiles. Above 1, recapp is
    faster.

    Each round has a ratio of two medians. The entry is the median of these ratios, which does not
    change when the machine becomes slower between rounds.

    Args:
        name: The beginning of the entries' names.
        other: The times of the other contender; None where it was absent or refused. The entries
            are None then.
        measured: The times of recapp.
        part: The compared part of a step.
    """
    keys = (f"{name}_ratio", f"{name}_ratio_q1", f"{name}_ratio_q3")
    if other is None or part not in other.rounds:
        return dict.fromkeys(keys)
    ratios = [
        theirs / ours
        for theirs, ours in zip(other.by_round(part), measured.by_round(part), strict=True)
    ]
    return dict(zip(keys, quartiles(ratios), strict=True))


def compared(measured: Measured, others: Mapping[str, Measured | None]) -> dict[str, Any]:
    """Return the common entries of a comparison's row: recapp's median and quartiles, the ratio
    to each of the others, and the number of rounds.

    Args:
        measured: The times of recapp.
        others: The times of the others, by the names of their ratios.
    """
    entries: dict[str, Any] = dict(spread(measured))
    for name, other in others.items():
        entries |= ratio(name, other, measured)
    return entries | {"rounds": len(measured.rounds["step"])}


def interleave(
    contenders: Mapping[str, Contender],
    comm: Comm,
    *,
    rounds: int,
    seconds: float,
    most: int = MOST_STEPS,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Measured]:
    """Time contenders round by round. Every rank calls this function with the same names.

    Args:
        contenders: The contenders by name.
        comm: The ranks.
        rounds: The number of turns of each contender; every other round reverses the order.
        seconds: The planned duration of a turn, which has at least two steps.
        most: The largest number of steps in a turn.
        advance: The function that is called with 1 after each round.
    """
    steps = {}
    for name, contender in contenders.items():
        comm.barrier()
        warm = slowest(comm, contender.run(WARM_STEPS))["step"]
        steps[name] = min(max(round(seconds * 1e3 / min(warm)), LEAST_STEPS), most)
    measured = {name: Measured() for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: 1 if i % 2 == 0 else -1]:
            comm.barrier()
            times = slowest(comm, contenders[name].run(SETTLE_STEPS + steps[name]))
            measured[name].add({part: values[SETTLE_STEPS:] for part, values in times.items()})
        advance(1)
    return measured


def slowest(comm: Comm, times: Times) -> Times:
    """Return the times of the slowest rank in each step; ranks without times do not count.

    Every rank calls this function.
    """
    of_ranks = [each for each in comm.all_gather(times) if each]
    return {
        part: [max(step) for step in zip(*(each[part] for each in of_ranks), strict=True)]
        for part in of_ranks[0]
    }
