"""Write the row files of an artefact, table by table, in bounded memory.

A file holds the tables of one data type and one number of columns, in the order of the model. The
store of a single rank needs this order (`recapp/inference/held_tables.py`).
"""

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from recapp.engine.read_only_store import values_of
from recapp.errors import CheckpointError
from recapp.inference.storage import bytes_of, stored
from recapp.stored.model_manifests import StoredTable
from recapp.stored.model_store import files_at
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.initial import start_hash

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
