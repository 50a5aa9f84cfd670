"""The curves of a run as CSV, for any spreadsheet, and its settings as hyper-parameters of loggers.

    epoch,lr-dense,step,train_auc,train_loss,val_auc
    0,0.001,19,,,
    0,,19,0.6612,0.5093,

A row is a logged step; a cell is empty if the step has no value of the metric. `train_loss` is the
mean over the steps since the previous row with a `train_loss`. `train_auc`, a running metric of the
task, is the AUC of the epoch so far.
"""

import csv
import re
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from recapp.console import note
from recapp.reporting.run_record import write_whole
from recapp.settings.records import leaves


class CSVCurves(Logger):
    """Writes `<save_dir>/csv/metrics.csv`.

    Lightning's own CSV logger deletes the file of an earlier run during set-up: before it is known
    whether the new run can start, and even if the new run resumes from a checkpoint of the same
    directory. This logger does not touch the file before its first write, and a resumed run keeps
    the rows of the steps before its checkpoint.

    Args:
        save_dir: The directory of the run.
        kept_steps: The step before which rows of an existing file are kept; 0 begins a new file.
    """

    def __init__(self, save_dir: str, kept_steps: int = 0) -> None:
        super().__init__()
        self.file = Path(save_dir) / "csv" / "metrics.csv"
        self.kept_steps = kept_steps
        self._columns: list[str] = []  # empty before the first write
        self._unsaved: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return "csv"

    @property
    def version(self) -> str:
        """Return an empty text, because a run has a directory of its own and needs no version."""
        return ""

    @property
    def log_dir(self) -> str:
        """Return the directory of the file."""
        return str(self.file.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep a row in memory; Lightning calls `save` after the step."""
        self._unsaved.append({**metrics, "step": step})

    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Do nothing, because `resolved.yaml` holds the settings."""

    @rank_zero_only
    def save(self) -> None:
        """Append the rows in memory to the file. If they have new columns, rewrite the file."""
        if not self._unsaved:
            return
        if self._columns and all(row.keys() <= set(self._columns) for row in self._unsaved):
            with open(self.file, "a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(self._unsaved)
        else:
            rows = [*(self._rows() if self._columns else self._kept()), *self._unsaved]
            columns = sorted({name for row in rows for name in row}.union(self._columns))
            self._write(columns, rows)
            self._columns = columns
        self._unsaved = []

    def finalize(self, status: str) -> None:
        """Save the last rows, unless the run failed before its first write."""
        if self._columns or status != "failed":
            self.save()

    def _kept(self) -> list[dict[str, Any]]:
        rows = self._rows() if self.kept_steps and self.file.is_file() else []
        return [row for row in rows if int(row["step"]) < self.kept_steps]

    def _rows(self) -> list[dict[str, Any]]:
        with open(self.file, newline="") as file:
            return list(csv.DictReader(file))

    def _write(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.file, text.getvalue())


# a resumed run has another `ckpt_path`, and services refuse another value of a setting
NOT_LOGGED = ("logger", "ckpt_path", "trust", "format", "choices")
CREDENTIALS = re.compile(r"(?i)key$|token|secret|passw|credential")
PLAIN_NAME = re.compile(r"\w[\w. -]*", re.ASCII)


class LogSettings(Callback):
    """Logs the settings of the run to every logger, as hyper-parameters with dotted names, and the
    chosen options by the names of their groups.

    Settings of loggers and those that look like credentials are left out.

    Args:
        settings: Returns the plain settings once the data module is set up.
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        self.settings = settings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the settings on rank 0. A logger that refuses them still gets the curves."""
        if not (trainer.loggers and trainer.is_global_zero):
            return
        found = self.settings()
        logged = {
            name: value
            for name, value in leaves(found, is_whole=_is_whole)
            if name.partition(".")[0] not in NOT_LOGGED
            and not any(map(CREDENTIALS.search, name.split(".")))
        }
        logged |= found["choices"]
        for logger in trainer.loggers:
            try:
                logger.log_hyperparams(logged)
            except Exception as error:  # of a service, such as a run that was logged with others
                said = " ".join(str(error).split())
                note(f"{type(logger).__name__}: does not take the settings of the run: {said}")


def _is_whole(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether loggers may refuse the names in a mapping, such as names of columns."""
    return not all(map(PLAIN_NAME.fullmatch, settings))
