"""Read each table of a checkpoint as one tensor, from blocks of any shape, and write the row files
of an artefact, table by table, in bounded memory.

A table of more than `MEMORY_BYTES` becomes a mapped scratch file, whose pages the system may write
out. So this reads tables of any size, stored under any plan and order of rows.

A file of an artefact holds the tables of one data type and one number of columns, in the order of
the model. The store of a single rank needs this order (`recapp/inference/placed_model.py`).
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from recapp.engine.dynamic_keys import KEYS
from recapp.engine.read_only_store import values_of
from recapp.errors import CheckpointError
from recapp.inference.storage import bytes_of, stored
from recapp.sharding.layout import WEIGHT, Block
from recapp.stored.model_manifests import StoredTable
from recapp.stored.model_store import files_at
from recapp.stored.stored_model import Checkpoint
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import positions_of
from recapp.tables.initial import start_hash

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
        block = Block(table.name, tensor, shape, range(rows), range(columns), data, True)
        self.snapshot.fill([block])
        return data


PART_ELEMENTS = 1 << 22  # elements converted at a time


@dataclass
class _File:
    out: BinaryIO
    rows: int = 0
    size: int = 0
    crc: int = 0

    def write(self, raw: Any) -> None:
        view = memoryview(raw)
        self.out.write(view)
        self.size += view.nbytes
        self.crc = zlib.crc32(view, self.crc)


class RowWriter(ExitStack):
    """Write tables, one after the other; a context manager that closes the files.

    Args:
        folder: The directory of the artefact.

    Attributes:
        tables: The tables written so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.tables: list[StoredTable] = []
        self._files: dict[str, _File] = {}

    def add(
        self,
        table: EmbeddingConfig,
        rows_RD: Tensor,
        storage: DataType,
        positions_R: Tensor | None,
        seed: int,
    ) -> StoredTable:
        """Append a table to its file.

        Args:
            table: The table.
            rows_RD: Its rows, as floats; they may be mapped.
            storage: The data type to store them in.
            positions_R: The sorted positions of a dynamic table's keys; None for other tables.
            seed: The seed of its start values.

        Raises:
            CheckpointError: A value is not finite, or too large for the data type.
        """
        stem = f"rows/{storage}_{table.embedding_dim}"
        keys = None
        if positions_R is not None:
            stem += "_dynamic"
            keys = f"{stem}.keys"
            self._file(keys).write(positions_R.contiguous().numpy())
        file = self._file(f"{stem}.bin")
        step = max(1, PART_ELEMENTS // table.embedding_dim)
        for first in range(0, len(rows_RD), step):
            part = rows_RD[first : first + step]
            try:
                rows = stored(part, storage)
            except ValueError as error:
                raise _refused(table, first, str(error)) from error
            if not bool(values_of(rows).isfinite().all()):
                raise _refused(table, first, f"there are values that {storage} cannot hold")
            file.write(bytes_of(rows).numpy())
        entry = StoredTable(
            name=table.name,
            rows=len(rows_RD),
            dim=table.embedding_dim,
            storage=str(storage),
            file=f"{stem}.bin",
            first_row=file.rows,
            keys=keys,
            id_rule=str(table.id_rule),
            min_key=table.min_key,
            start_hash=start_hash(table, seed),
            start_range=float(table.start_range),
        )
        file.rows += len(rows_RD)
        self.tables.append(entry)
        return entry

    def finish(self) -> dict[str, Mapping[str, Any]]:
        """Flush all files to disk, and return the size and checksum of each."""
        self.close()
        return {name: {"bytes": f.size, "crc32": f"{f.crc:08x}"} for name, f in self._files.items()}

    def _file(self, name: str) -> _File:
        if name not in self._files:
            out = files_at(self.folder).create(self.folder / name)
            self._files[name] = _File(self.enter_context(out))
        return self._files[name]


def _refused(table: EmbeddingConfig, first: int, why: str) -> CheckpointError:
    return CheckpointError(f"table {table.name}, rows from {first} on: {why}")
