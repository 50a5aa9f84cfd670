"""The group `metrics`: what validation and test measure."""

from dataclasses import dataclass, field
from typing import Annotated

from recapp.errors import ConfigError
from recapp.settings.records import Constructor
from recapp.settings.values import Within

GAUC = "gauc"
"""The name of the mean AUC of groups."""


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
