"""A run's curves as CSV, for any spreadsheet: one row per logged step, one column per metric. A
cell is empty if the step has no value of the metric.

    epoch,lr-dense,step,train_auc,train_loss,val_auc
    0,0.001,19,,,
    0,,19,0.6612,0.5093,

`train_loss` is the mean over the steps since the previous row with a `train_loss`. `train_auc`, a
running metric of the task, is the AUC of the epoch so far.

Lightning's own CSV logger deletes the file of an earlier run during set-up: before it is known
whether the new run can start, and even if the new run resumes from a checkpoint of the same
directory. This logger does not touch the file before its first write, and a resumed run keeps the
rows of the steps before its checkpoint.
"""

import csv
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from recapp.reporting.record import write_whole


class CSVCurves(Logger):
    """Writes `<save_dir>/csv/metrics.csv`.

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
