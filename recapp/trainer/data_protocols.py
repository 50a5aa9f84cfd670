"""Protocols of a LightningDataModule: methods that recapp uses in addition to Lightning's own.

All are optional. Without them the planner assumes id statistics, open modes are `unique`, and a
checkpoint holds no position in the data. A checkpoint keeps the rows that a method `example`
returns on rank 0 (in the form of `recapp.dataset.sequential_rows.plain_rows`), so that its model
can be tried without the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.config import EmbeddingConfig, TableLookup
from recapp.tables.statistics import TableStatistics

if TYPE_CHECKING:  # scoring without ranks does without Lightning
    from lightning.pytorch import Trainer


@runtime_checkable
class ProvidesStatistics(Protocol):
    """Data whose first rows can be read before training, after `setup("fit")`."""

    def statistics(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup] | None = None,
    ) -> Mapping[str, TableStatistics]:
        """Return the id statistics of the tables, by table.

        Args:
            tables: The tables of the model.
            lookups: The lookups of the model; None takes the lookups that the tables declare.
        """

    def sample(self, batches: int) -> Sequence[Batch]:
        """Return this rank's first training batches."""


@dataclass
class Position:
    """The position of training in the data.

    Args:
        epoch: The epoch, counted from 0.
        batches: The number of batches trained in the epoch.
    """

    epoch: int = 0
    batches: int = 0


@runtime_checkable
class KeepsPosition(Protocol):
    """Data in which training can resume where a checkpoint was saved.

    Args:
        position: The position of training; a callback updates it after every step.
    """

    position: Position

    @property
    def batch_size(self) -> int:
        """Return the number of rows of a training batch over all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a checkpoint: `epoch`, `batches`, `batch_size`, and all other
        state that the data need to resume.
        """

    def id_encoding(self) -> dict[str, Any]:
        """Return the rules that turn text into ids, for a checkpoint."""

    def check_ids(self, checkpoint: str | Path, info: Mapping[str, Any]) -> None:
        """Check that a checkpoint was trained with the same rules from text to ids.

        Args:
            checkpoint: The checkpoint.
            info: The entries of its manifest.

        Raises:
            CheckpointError: The checkpoint's rules give other ids.
        """


def datamodule_of(trainer: "Trainer") -> Any:
    """Return the LightningDataModule of a trainer; None if the trainer has only loaders."""
    return getattr(trainer, "datamodule", None)
