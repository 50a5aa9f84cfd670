"""Read each table of a checkpoint as one tensor, from blocks of any shape.

A table of more than `MEMORY_BYTES` becomes a mapped scratch file, whose pages the system may write
out. So this reads tables of any size, stored under any plan and order of rows.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recapp.engine.dynamic_keys import KEYS
from recapp.errors import CheckpointError
from recapp.sharding.layout import WEIGHT, Block
from recapp.stored.stored_model import Checkpoint
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import positions_of

MEMORY_BYTES = 1 << 28  # the largest table that is read into memory


class TrainedTables:
    """Read tables of an open checkpoint.

    Args:
        snapshot: The checkpoint, with all its files open.
        scratch: A directory for large tables, on the disk of the artefact.
    """

    def __init__(self, snapshot: Checkpoint, scratch: Path) -> None:
        self.snapshot = snapshot
        self.scratch = scratch

    def bytes_of(self, table: EmbeddingConfig) -> int:
        """Return the bytes of a table's weights.

        Raises:
            CheckpointError: The checkpoint does not have the table.
        """
        rows, columns = self._shape(table, WEIGHT, table.embedding_dim)
        return rows * columns * table.data_type.dtype.itemsize

    @contextmanager
    def rows(self, table: EmbeddingConfig) -> Iterator[Tensor]:
        """Yield the rows of a table as one tensor, [R, D]; rows of a dynamic table by the positions
        of their keys.

        Raises:
            CheckpointError: The checkpoint does not have the table, or is damaged.
            OSError: The disk has no space for the table.
        """
        shape = self._shape(table, WEIGHT, table.embedding_dim)
        dtype = table.data_type.dtype
        size = shape[0] * shape[1] * dtype.itemsize
        if size <= MEMORY_BYTES:
            yield self._filled(table, WEIGHT, torch.empty(shape, dtype=dtype))
            return
        file = self.scratch / "table.tmp"
        try:
            with open(file, "wb") as out:
                os.posix_fallocate(out.fileno(), 0, size)  # a full disk is an error, not a signal
            raw = torch.from_numpy(np.memmap(file, np.uint8, "r+"))
            yield self._filled(table, WEIGHT, raw.view(dtype).view(shape))
        finally:
            file.unlink(missing_ok=True)

    def positions(self, table: EmbeddingConfig) -> Tensor | None:
        """Return the ascending positions of a dynamic table's keys; None for other tables.

        Raises:
            CheckpointError: The checkpoint does not have the positions, or they do not ascend.
        """
        if table.dynamic is None:
            return None
        shape = self._shape(table, KEYS, 1)
        keys = self._filled(table, KEYS, torch.empty(shape, dtype=torch.int64))[:, 0]
        positions = positions_of(keys)
        if bool((positions[1:] <= positions[:-1]).any()):
            raise CheckpointError(f"table {table.name}: its keys are not in ascending positions")
        return positions

    def _shape(self, table: EmbeddingConfig, tensor: str, columns: int) -> tuple[int, int]:
        stored = self.snapshot.manifest.tensors.get((table.name, tensor))
        rows = (
            table.num_embeddings if table.dynamic is None else stored[0].shape[0] if stored else 0
        )
        return rows, columns

    def _filled(self, table: EmbeddingConfig, tensor: str, data: Tensor) -> Tensor:
        rows, columns = data.shape
        shape = (rows, columns)
        held = Block(table.name, tensor, shape, range(rows), range(columns), data, True)
        self.snapshot.fill([held])
        return data
