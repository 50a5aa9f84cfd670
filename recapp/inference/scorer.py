"""A trained model for applications: raw rows in, scores out.

    raw rows (Arrow) --batch--> Batch --model--> outputs by name --task--> scores by column

A scorer is an ordinary `nn.Module` on one device, without a process group. It decodes rows as
training did (`recapp/dataset/collate.py`) and looks them up with the same engine, so its scores
are those of the sharded model. Threads may share it. A task of one output gives tensors; a task of
several gives mappings of names to tensors.
"""

import threading
from collections.abc import Mapping
from copy import deepcopy
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor, nn

from recapp.dataset.collate import RawRows, RawTable, as_table
from recapp.dataset.schema import Schema
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError, DataError
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tasks.task import ClickTask, Task, one_or_all

ROWS_AT_ONCE = 4096
"""Rows of a batch in `predict`; larger batches are not faster (measured)."""


class Scorer(nn.Module):
    """Score raw rows with a trained model.

    Args:
        model: Computes the outputs of a `Batch`; its tables are those of one rank.
        raw_rows: Decodes raw rows as training did; None if the columns are unknown.
        name: The name of the model, for people and servers.
        version: A value that differs between versions of the model.
        info: Plain facts about the model: tables, bytes, metrics, origin.
        example: A few raw rows to try the model with; None if none are stored.
        expected: The scores of the example by column, each [N]; None if none are stored.
        task: Names the outputs and makes scores of them; None is a logit of a click.
    """

    def __init__(
        self,
        model: nn.Module,
        raw_rows: RawRows | None,
        name: str,
        version: str,
        info: Mapping[str, Any],
        example: RawTable | None = None,
        expected: Mapping[str, Tensor] | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._raw_rows = raw_rows
        self.name = name
        self.version = version
        self.info = dict(info)
        self.example = example
        self.expected = expected
        self.task = task or ClickTask()
        self._turn = threading.Lock()
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scorer":
        return Scorer(
            deepcopy(self.model, memo),
            self._raw_rows,
            self.name,
            self.version,
            self.info,
            self.example,
            self.expected,
            self.task,
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise PicklingError(
            f"model {self.name} is not pickled, because its rows may be mapped files: load it with "
            "recapp.load_model(path) in every process"
        )

    @property
    def raw_rows(self) -> RawRows:
        """Return the decoder of raw rows.

        Raises:
            ConfigError: The model was loaded without a description of its columns.
        """
        if self._raw_rows is None:
            raise ConfigError(
                f"model {self.name} does not know its columns: load it with "
                "load_model(path, module=..., data=ClickData(...)), or score batches"
            )
        return self._raw_rows

    @property
    def schema(self) -> Schema:
        """Return the schema of the model's columns, without labels."""
        return self.raw_rows.schema

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        dense = next(self.model.parameters(), None)
        # a model with only tables has no parameters
        return sharded_tables(self.model)[0].comm.device if dense is None else dense.device

    def batch(self, rows: Any) -> Batch:
        """Return raw rows as a batch on the CPU (`RawRows.batch`).

        Raises:
            DataError: `rows` is not a table, a column is missing, or a value cannot be read; the
                error names the column and the row.
        """
        return self.raw_rows.batch(rows)

    @torch.no_grad()
    def outputs(self, batch: Any) -> dict[str, Tensor]:
        """Return the outputs of the model by name, each [B]. Only one thread computes at a time,
        because tables reuse memory from batch to batch.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
            ConfigError: The model returns other outputs or shapes.
        """
        with self._turn:
            result = self.model(batch.to(self.device))
        name = type(self.model).__name__
        if not isinstance(batch, Batch):  # a user's module may read batches of another type
            return self.task.picked(result, name)
        return self.task.named(result, batch.rows, name)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the outputs of a batch: a logit for each sample, [B]; several outputs by name.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
        """
        return one_or_all(self.outputs(batch))

    def scores(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the scores of a batch, float32 [B]: probabilities of logits; several by column.

        Raises:
            IdError: An id is outside a table whose rule is `error`.
        """
        return one_or_all(self.task.scores(self.outputs(batch)))

    def predict(self, rows: Any) -> Tensor | dict[str, Tensor]:
        """Return the scores of any number of raw rows, float32 [N] on the CPU; several by column.

        Args:
            rows: An Arrow table, such as `pyarrow.parquet.read_table` returns; a data frame of
                pandas or polars; or a mapping of names to columns, where NaN in lists and arrays is
                a missing value. Columns that are not features are ignored.

        Raises:
            DataError: As for `batch`; or an output of a row is not finite.
            IdError: As for `outputs`.
        """
        return one_or_all(self.columns(as_table(rows)))

    def columns(self, table: RawTable) -> dict[str, Tensor]:
        """Return the scores of a table of raw rows by column, as `predict` does for any task."""
        parts = []
        for first in range(0, max(table.num_rows, 1), ROWS_AT_ONCE):
            outputs = self.outputs(self.batch(table.slice(first, ROWS_AT_ONCE)))
            if fault := not_finite(outputs, first):
                raise DataError(fault)
            parts.append(self.task.scores(outputs))
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def not_finite(outputs: Mapping[str, Tensor], first: int = 0) -> str:
    """Return a line about the first row whose output is not finite; empty where all are finite.

    Args:
        outputs: The outputs of rows by name, each [B].
        first: The number of the first row.
    """
    for name, values_B in outputs.items():
        if not bool(values_B.isfinite().all()):
            row = first + int((~values_B.isfinite()).nonzero()[0])
            return f"row {row}: the model gives a {name} that is no finite number"
    return ""
