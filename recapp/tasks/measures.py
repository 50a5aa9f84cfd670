"""The group `metrics`, and descriptions of a task's metrics: title, direction, places that show
them. A run stores them as plain values, so its report needs no task.

    JOB/task.json    {"best": "auc", "metrics": [{"name": "auc", "title": "AUC", ...}, ...]}

Validation logs a metric `auc` as `val_auc`, test as `test_auc`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from recapp.errors import ConfigError
from recapp.settings.records import Constructor
from recapp.settings.values import Within

VALIDATION = "val_"
TRAINING = "train_"


@dataclass(frozen=True)
class Measure:
    """The description of a metric.

    Args:
        name: The name in `metrics.names`.
        title: The name for people: `AUC`, `log loss`.
        better: `max` if larger is better, `min` if smaller is, None if neither is.
        output: The output of the model that the metric reads; empty if there is only one.
        training: The training curve to draw with the validation curve: `train_loss`, or
            `train_<name>`, which is then logged during training.
        shown: Whether progress, comparisons and tables of a sweep show the metric.
        defined: Whether the metric is finite on any rows if the predictions are finite.
        on_request: Whether the metric is measured only if `metrics.names` has it.
    """

    name: str
    title: str
    better: str | None = None
    output: str = ""
    training: str | None = None
    shown: bool = False
    defined: bool = False
    on_request: bool = False

    @property
    def of_validation(self) -> str:
        """The name of the metric in validation: `val_auc`."""
        return f"{VALIDATION}{self.name}"

    @property
    def running(self) -> bool:
        """Whether the metric's value over the epoch's training rows so far is logged and shown."""
        return self.training == f"{TRAINING}{self.name}"


@dataclass(frozen=True)
class Measures:
    """The metrics of a task, in the order of lists and tables.

    Args:
        metrics: The metrics; `metrics.names` chooses them.
        best: The name of the metric that chooses the best checkpoint and the best run of a sweep.
    """

    metrics: tuple[Measure, ...]
    best: str

    def __iter__(self) -> Iterator[Measure]:
        return iter(self.metrics)

    def get(self, name: str) -> Measure | None:
        """Return the metric of a name, with or without `val_`, or None."""
        name = name.removeprefix(VALIDATION)
        return next((measure for measure in self.metrics if measure.name == name), None)

    @property
    def objective(self) -> str:
        """The name of the best metric in validation: `val_auc`."""
        return f"{VALIDATION}{self.best}"

    @property
    def mode(self) -> str:
        """`min` if smaller values of the best metric are better, else `max`."""
        best = self.get(self.best)
        return best.better or "max" if best else "max"

    @property
    def shown(self) -> tuple[str, ...]:
        """The validation names of the metrics that every table shows."""
        return tuple(measure.of_validation for measure in self.metrics if measure.shown)

    def plain(self) -> dict[str, Any]:
        """Return the metrics as plain values for a file."""
        return {"best": self.best, "metrics": [asdict(measure) for measure in self.metrics]}


def measures_from(plain: Mapping[str, Any]) -> Measures:
    """Return the metrics of a file's plain values, without unknown entries.

    Raises:
        ValueError: The values are no metrics.
    """
    known = {one.name for one in fields(Measure)}
    try:
        metrics = [
            Measure(**{key: value for key, value in one.items() if key in known})
            for one in plain["metrics"]
        ]
        return Measures(tuple(metrics), str(plain["best"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no metrics of a task") from error


GAUC = "gauc"  # the name of the mean AUC of groups


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """The group `metrics`.

    Args:
        names: The metrics to measure, out of those of the task; None measures the usual ones.
        output: The output of the task that the following settings read; None is the first.
        group: The sparse column within whose values the AUC is averaged (`gauc`); None measures no
            such mean.
        extra: Metrics of torchmetrics by name.
        by: The sparse columns by whose most frequent values metrics are also measured.
        buckets: The number of buckets of predictions whose calibration is measured; None measures
            none.
        bootstrap: The number of samples of the rows from which `recapp.eval` computes intervals;
            None computes none.

    Raises:
        ConfigError: The list of names is empty.
    """

    names: tuple[str, ...] | None = None
    output: str | None = None
    group: str | None = None
    extra: dict[str, Constructor] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    buckets: Annotated[int, Within(2, 1000)] | None = None
    bootstrap: Annotated[int, Within(20, 10_000)] | None = None

    def __post_init__(self) -> None:
        if self.names == ():
            raise ConfigError("metrics.names=[]: name at least one, such as [auc]")

    @property
    def columns(self) -> dict[str, str]:
        """The setting that names each sparse column that a metric reads, by column."""
        by = dict.fromkeys(self.by, "metrics.by")
        return by | ({self.group: "metrics.group"} if self.group else {})

    @property
    def adds(self) -> bool:
        """Whether something is measured that is no metric of the task."""
        return bool(self.group or self.extra or self.by or self.buckets or self.bootstrap)
