"""Published experiments that `recapp.reproduce` repeats: the records of `conf/reproduce/NAME.yaml`.

NAME.yaml -> Published -> the settings of its runs; verdict by the value that was published
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal

from recapp.dataset.published_files import PublishedFiles
from recapp.errors import ConfigError, suggest
from recapp.reporting.record import read_yaml
from recapp.settings.option_files import Folders, option_file, options
from recapp.settings.records import record

GROUP = "reproduce"
REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
SHAPE_ONLY = "shape only"
OTHER_SETTINGS = "other settings"


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Values that somebody has published.

    Args:
        auc: The AUC; None if only other values were published.
        log_loss: The log loss, if it was published.
        source: The file, table or thread that states them.
    """

    auc: float | None = None
    log_loss: float | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published experiment.

    Args:
        published: The published values and their source.
        again: The values of somebody who has repeated it; None if nobody has.
        tolerance: The largest difference from the published AUC of a repeated experiment.
        seeds: The seeds of the runs.
        split: Words for how the rows were split.
        chosen_by: The rows whose metric chose the epoch that was measured.
        measured_on: The rows that were measured.
        data: The published files and their columns; None for an experiment whose settings generate
            the data.
        differs: What is not as published, in words.
        overrides: The settings of the runs, as on the command line of `recapp.train`.
        shape: Further settings for data of the same shape.
    """

    published: Witness
    again: Witness | None = None
    tolerance: float = 0.0004
    seeds: tuple[int, ...] = (1,)
    split: str = ""
    chosen_by: Literal["validation", "test", "none"] = "validation"
    measured_on: Literal["val", "test"] = "test"
    data: PublishedFiles | None = None
    differs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    shape: tuple[str, ...] = field(default_factory=tuple)

    def verdict(
        self, results: Sequence[Mapping[str, Any]], *, whole: bool, changed: bool = False
    ) -> str:
        """Return the verdict about some runs: by the difference of their mean AUC from the
        published one, if they are of the published data.

        Args:
            results: The results of the runs.
            whole: Whether the runs read the published files.
            changed: Whether settings of the record were changed.
        """
        measured = self.measured(results)
        if not whole:
            return SHAPE_ONLY
        if changed:
            return OTHER_SETTINGS
        if measured is None or self.published.auc is None:
            return NOT_REPRODUCED
        near = abs(measured - self.published.auc) <= self.tolerance
        return REPRODUCED if near else NOT_REPRODUCED

    def measured(self, results: Sequence[Mapping[str, Any]], name: str = "auc") -> float | None:
        """Return the mean of a metric over runs; None if a run lacks it."""
        found = [result.get(f"{self.measured_on}_{name}") for result in results]
        known = [float(value) for value in found if value is not None]
        return mean(known) if known and len(known) == len(found) else None


def read_published(name: str | None, folders: Folders = ()) -> Published:
    """Return the record of an experiment.

    Args:
        name: The name of its file, without suffix.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: No name is given, there is no such experiment, or its file is wrong.
    """
    known = options(GROUP, folders)
    if not name:
        raise ConfigError(f"name must be given: name=..., one of {', '.join(known)}")
    path = option_file(GROUP, name, folders)
    if path is None:
        raise ConfigError(f"name={name}: there is no such experiment; {suggest(name, known)}")
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is no mapping of settings")
    fields = [each.name for each in dataclasses.fields(Published)]
    if strange := sorted({*map(str, found)} - {*fields}):
        raise ConfigError(f"{path}: {strange[0]}: {suggest(strange[0], fields)}")
    try:
        return record(Published, found, GROUP)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
