"""What recapp uses of a LightningDataModule beyond Lightning's own methods.

A data module that has none of it trains all the same: the planner then assumes id statistics, open
modes are `unique`, and a checkpoint holds no position in the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from recapp.sparse.batch import Batch
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup
from recapp.tables.statistics import TableStatistics


@runtime_checkable
class ProvidesStatistics(Protocol):
    """Data whose first rows can be read before training, once `setup("fit")` was called."""

    def statistics(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup] | None = None,
    ) -> Mapping[str, TableStatistics]:
        """Return the id statistics of the tables, by table.

        Args:
            tables: The tables of the model.
            lookups: What reads them; None takes the lookups that the tables declare.
        """

    def sample(self, batches: int) -> Sequence[Batch]:
        """Return this rank's first training batches."""


@dataclass
class Position:
    """How far training has come.

    Args:
        epoch: The epoch, counted from 0.
        batches: The batches trained in it.
    """

    epoch: int = 0
    batches: int = 0


@runtime_checkable
class KeepsPosition(Protocol):
    """Data in which training can resume where a checkpoint was saved.

    Args:
        position: How far training has come; a callback writes it after every step.
    """

    position: Position

    @property
    def batch_size(self) -> int:
        """Return the rows of a training batch over all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a checkpoint keeps it: `epoch`, `batches`, `batch_size`, and
        whatever else the data need to go on from there.
        """

    def id_encoding(self) -> dict[str, Any]:
        """Return how text becomes ids, as a checkpoint keeps it."""

    def check_ids(self, checkpoint: str | Path) -> None:
        """Check that a checkpoint was trained on ids made of text in the same way.

        Raises:
            CheckpointError: Its text became other ids.
        """


@runtime_checkable
class ProvidesExample(Protocol):
    """Data of which a checkpoint keeps some rows, so that its model can be tried anywhere."""

    def example(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, as `recapp.dataset.example_rows.plain_rows` makes them; rank 0 asks."""


def datamodule_of(trainer: Trainer) -> Any:
    """Return the LightningDataModule of a trainer, None where it has loaders alone."""
    return getattr(trainer, "datamodule", None)
