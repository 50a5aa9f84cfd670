"""The phases of a training step, and a clock that measures them between a collection's marks.

| phase       | what it holds                           | parts that `EngineObserver.ends` names   |
|             |                                         |                                          |
|-------------|-----------------------------------------|------------------------------------------|
| `input`     | ids become rows, counts and ids travel, | route, counts, place, ids, link, serve   |
|             | what is asked here is linked            |                                          |
| `lookup`    | rows are read and summed, for the       | answer, combine                          |
|             | others and for this rank                |                                          |
| `output`    | waiting for vectors                     | vectors                                  |
| `dense`     | the rest of a step: dense part, its     | data, outside, autograd                  |
|             | all-reduce and optimiser, data          |                                          |
| `gradients` | gradients are sent, requested rows      | spread, group, gradients                 |
|             | brought together                        |                                          |
| `update`    | touched rows and their optimiser state  | update                                   |
|             | are written                             |                                          |

A mark ends a part: the time since the last mark is its own. What plans predict, runs record and
pages draw goes by these names.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence

PHASES = ("input", "lookup", "output", "dense", "gradients", "update")
# marks of whoever measures: what came before was not a collection's; was waiting for a batch
OUTSIDE = "outside"
DATA = "data"
MARKS = {
    **dict.fromkeys(("route", "counts", "place", "ids", "link", "serve"), "input"),
    **dict.fromkeys(("answer", "combine"), "lookup"),
    "vectors": "output",
    **dict.fromkeys((DATA, OUTSIDE, "autograd"), "dense"),
    **dict.fromkeys(("spread", "group", "gradients"), "gradients"),
    "update": "update",
}
KEPT_STEPS = 4096  # a run of millions of steps is told by its last ones


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile: half of the values lie between them. One value is
    both.
    """
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


class PhaseClock:
    """Milliseconds between the marks of steps, on the host: a collection's observer calls it.

    A mark costs some 200 ns. A batch that is looked ahead to has its first marks inside the step
    before its own: they count there, under their own names, which is what a step of a steady run
    costs.
    """

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        self._step: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """A step begins; what was marked since the last one ended is dropped."""
        self._step = {}
        self._last = time.perf_counter()

    def __call__(self, mark: str) -> None:
        """A part has ended; one that comes several times in a step is one."""
        now = time.perf_counter()
        self._step[mark] = self._step.get(mark, 0.0) + (now - self._last) * 1e3
        self._last = now

    def end(self, mark: str) -> None:
        """The last part has ended, and the step with it."""
        self(mark)
        self._steps.append(self._step)
        self._step = {}

    def means(self) -> dict[str, float]:
        """The mean of each part over the middle half of the steps by their length: it adds up to
        those steps, and bad ones have no say.
        """
        ordered = sorted(self._steps, key=lambda step: sum(step.values()))
        middle = ordered[len(ordered) // 4 : -(-3 * len(ordered) // 4)]
        names = dict.fromkeys(name for step in middle for name in step)
        return {name: statistics.mean(step.get(name, 0.0) for step in middle) for name in names}

    def measured(self, warm_up: int) -> list[dict[str, float]]:
        """The steps that are kept, without the first `warm_up` where there are more."""
        return list(self._steps)[warm_up:] or list(self._steps)

    def parts_ms(self, warm_up: int) -> dict[str, float]:
        """The median of each part, in order of appearance, without the first steps."""
        steps = self.measured(warm_up)
        names = dict.fromkeys(name for step in steps for name in step)
        return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}

    def phases_ms(self, warm_up: int) -> dict[str, float]:
        """The median of each of `PHASES`, without the first steps. A mark that no phase knows
        counts as `dense`.
        """
        return {
            phase: statistics.median(values) for phase, values in self._by_phase(warm_up).items()
        }

    def phases_quartiles_ms(self, warm_up: int) -> dict[str, list[float]]:
        """The first and the third quartile of each of `PHASES`, likewise."""
        return {phase: quartiles(values) for phase, values in self._by_phase(warm_up).items()}

    def _by_phase(self, warm_up: int) -> dict[str, list[float]]:
        """Milliseconds of each phase, step by step; empty before the first step."""
        steps = []
        for step in self.measured(warm_up):
            spent = dict.fromkeys(PHASES, 0.0)
            for mark, ms in step.items():
                spent[MARKS.get(mark, "dense")] += ms
            steps.append(spent)
        return {phase: [step[phase] for step in steps] for phase in PHASES} if steps else {}
