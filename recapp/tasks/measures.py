"""The metrics of a task in words: title, direction, where each is shown. Plain values, which a run
stores, so that its report needs no task.

    JOB/task.json    {"best": "auc", "metrics": [{"name": "auc", "title": "AUC", ...}, ...]}

A metric `auc` is called `val_auc` and `test_auc` where validation and test have measured it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

VALIDATION = "val_"
TRAINING = "train_"


@dataclass(frozen=True)
class Measure:
    """A metric in words.

    Args:
        name: The name in `metrics.names`.
        title: The name as people read it: `AUC`, `log loss`.
        better: `max` where larger is better, `min` where smaller is, None where neither is.
        output: The output of the model that it is computed from; empty where there is only one.
        training: The curve of training that is drawn beside that of validation: `train_loss`, or
            `train_<name>`, which is then logged while training runs.
        shown: Whether progress, comparisons and tables of a sweep show it; they do not show all.
        defined: Whether it is a finite number on any rows, unless the predictions are not finite.
        fall: How much worse than the best so far is worth a note; None where nothing is.
    """

    name: str
    title: str
    better: str | None = None
    output: str = ""
    training: str | None = None
    shown: bool = False
    defined: bool = False
    fall: float | None = None

    @property
    def of_validation(self) -> str:
        """The name of what validation measures: `val_auc`."""
        return f"{VALIDATION}{self.name}"

    @property
    def running(self) -> bool:
        """Whether its value over the epoch's training rows so far is logged and shown."""
        return self.training == f"{TRAINING}{self.name}"


@dataclass(frozen=True)
class Measures:
    """The metrics of a task, in the order in which they are listed.

    Args:
        metrics: The metrics; `metrics.names` chooses them.
        best: The name of the metric by which checkpoints are chosen and sweeps are won.
    """

    metrics: tuple[Measure, ...]
    best: str

    def __iter__(self) -> Iterator[Measure]:
        return iter(self.metrics)

    def get(self, name: str) -> Measure | None:
        """Return a metric by its name, with or without `val_`; None where there is none."""
        name = name.removeprefix(VALIDATION)
        return next((measure for measure in self.metrics if measure.name == name), None)

    @property
    def objective(self) -> str:
        """The name of what validation measures of the best: `val_auc`."""
        return f"{VALIDATION}{self.best}"

    @property
    def mode(self) -> str:
        """`min` where the least value of the best metric is best, else `max`."""
        found = self.get(self.best)
        return found.better or "max" if found else "max"

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of what validation measures and every table shows."""
        return tuple(measure.of_validation for measure in self.metrics if measure.shown)

    def plain(self) -> dict[str, Any]:
        """Return them as a file keeps them."""
        return {"best": self.best, "metrics": [asdict(measure) for measure in self.metrics]}


def measures_from(plain: Mapping[str, Any]) -> Measures:
    """Return the metrics that a file keeps; entries that are not known are left out.

    Raises:
        ValueError: It keeps no metrics.
    """
    known = {field.name for field in fields(Measure)}
    try:
        metrics = [
            Measure(**{key: value for key, value in one.items() if key in known})
            for one in plain["metrics"]
        ]
        return Measures(tuple(metrics), str(plain["best"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no metrics of a task") from error
