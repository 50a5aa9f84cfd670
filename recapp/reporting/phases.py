"""The phases of a training step, and a clock that measures them between a collection's marks.

| phase       | work in the phase                       | parts that `EngineObserver.ends` names   |
|-------------|-----------------------------------------|------------------------------------------|
| `input`     | ids become rows, counts and ids travel, | route, counts, place, ids, link, serve   |
|             | this rank's requests are linked         |                                          |
| `lookup`    | rows are read and summed, for the       | answer, combine                          |
|             | other ranks and for this rank           |                                          |
| `output`    | the wait for vectors                    | vectors                                  |
| `dense`     | the rest of a step: dense part, its     | data, outside, autograd                  |
|             | all-reduce and optimiser, data          |                                          |
| `gradients` | gradients are sent, requests of equal   | spread, group, gradients                 |
|             | rows are grouped                        |                                          |
| `update`    | touched rows and their optimiser state  | update                                   |
|             | are written                             |                                          |

A mark ends a part: the part takes the time since the last mark. Predictions of plans, records of
runs and pages use these names.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence

PHASES = ("input", "lookup", "output", "dense", "gradients", "update")
# these two marks are set by the code that measures a step; a collection sets all others
OUTSIDE = "outside"  # ends work outside collections
DATA = "data"  # ends the wait for a batch
MARKS = {
    **dict.fromkeys(("route", "counts", "place", "ids", "link", "serve"), "input"),
    **dict.fromkeys(("answer", "combine"), "lookup"),
    "vectors": "output",
    **dict.fromkeys((DATA, OUTSIDE, "autograd"), "dense"),
    **dict.fromkeys(("spread", "group", "gradients"), "gradients"),
    "update": "update",
}
KEPT_STEPS = 4096  # of a longer run, only this number of last steps counts


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, first and third quartile, interpolated between neighbours as numpy does. A
    single value is all of them.
    """
    several = values if len(values) > 1 else [*values, *values]
    first, median, third = statistics.quantiles(several, n=4, method="inclusive")
    return median, first, third


class PhaseClock:
    """A clock of the host for the parts of steps, in milliseconds; a collection calls it.

    A mark costs about 200 ns. With look-ahead, the first marks of a batch lie in the step before
    its own, and count in that step, under their own names. So each step of a steady run contains
    the marks of one whole batch.
    """

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        self._step: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Begin a step; drop the marks since the end of the last step."""
        self._step = {}
        self._last = time.perf_counter()

    def __call__(self, mark: str) -> None:
        """End a part of the step, and add its milliseconds to the sum of its name.

        Args:
            mark: The name of the part, a key of `MARKS`.
        """
        now = time.perf_counter()
        self._step[mark] = self._step.get(mark, 0.0) + (now - self._last) * 1e3
        self._last = now

    def end(self, mark: str) -> None:
        """End the last part of the step, and the step with it."""
        self(mark)
        self._steps.append(self._step)
        self._step = {}

    def means(self) -> dict[str, float]:
        """Return the mean milliseconds of each part over the middle half of the steps by length.

        The parts add up to the mean of these steps. The slowest and the fastest steps do not count.
        """
        ordered = sorted(self._steps, key=lambda step: sum(step.values()))
        middle = ordered[len(ordered) // 4 : -(-3 * len(ordered) // 4)]
        names = dict.fromkeys(name for step in middle for name in step)
        return {name: statistics.mean(step.get(name, 0.0) for step in middle) for name in names}

    def measured(self, warm_up: int) -> list[dict[str, float]]:
        """Return the milliseconds of each part in each kept step.

        Args:
            warm_up: The number of first steps to leave out; if there are no more steps than these,
                none is left out.
        """
        return list(self._steps)[warm_up:] or list(self._steps)

    def parts_ms(self, warm_up: int) -> dict[str, float]:
        """Return the median of each part, in order of appearance, without the first steps."""
        steps = self.measured(warm_up)
        names = dict.fromkeys(name for step in steps for name in step)
        return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}

    def phases_ms(self, warm_up: int) -> dict[str, float]:
        """Return the median of each of `PHASES`, without the first `warm_up` steps; empty before
        the first step.

        A mark that belongs to no phase counts as `dense`.
        """
        steps = []
        for step in self.measured(warm_up):
            spent = dict.fromkeys(PHASES, 0.0)
            for mark, ms in step.items():
                spent[MARKS.get(mark, "dense")] += ms
            steps.append(spent)
        return {p: statistics.median(step[p] for step in steps) for p in PHASES if steps}
