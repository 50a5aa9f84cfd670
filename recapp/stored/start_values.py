"""Start values of tables from files (`tables.values`).

    c1.safetensors      the only tensor in it, or the one with the table's name: row by row
    c1.parquet          an id and a vector in each row; the table's rules make rows of ids
    run/best.ckpt       the table of the same name in a checkpoint
    FILE@NAME           the tensor or table with another name

Each rank reads only the rows that it holds, a few MB at a time, so the values are the same under
every plan. Rows that Parquet has no id for keep their usual start values.

Shapes: R rows, D columns of a table; N rows at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from recapp.console import note
from recapp.dataset.derive import places
from recapp.dataset.schema import Schema
from recapp.dataset.vector_rows import VectorRows
from recapp.errors import ConfigError, IdError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.sharding.layout import Block
from recapp.sparse.batch import MISSING
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.stored.block_files import by
from recapp.stored.checkpoint import load_blocks, read_manifest
from recapp.stored.directories import is_checkpoint
from recapp.stored.model_store import entry_of, size_of
from recapp.tables.config import EmbeddingConfig, IdRule, lookups_of
from recapp.tables.ids import IdRules

SETTING = "tables.values"
CHUNK_BYTES = 8 << 20
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of tensors that can be start values, in the names of safetensors."""


def values_file(
    table: EmbeddingConfig, given: str, schema: Schema, key: str
) -> "_Checkpoint | _Tensors | _Vectors":
    """Return the file of a table's start values: it can `check` without reading values that it fits
    a table of some rows, or of an unknown number, and `fill` the rectangles of this rank. That
    returns the number of rows of the table that have values in the file, and the number of values
    for them: more, where ids share a row.

    Args:
        table: The table.
        given: The path, after it perhaps `@` and a name.
        schema: The columns of the data set, whose rules make rows of ids.
        key: The name of the table in the settings.

    Raises:
        ConfigError: The file does not exist, or the table cannot take values from it.
    """
    setting = f"{SETTING}.{key}={given}"
    path, _, name = given.rpartition("@")
    if entry_of(Path(given)) or not path or not entry_of(Path(path)):
        path = given
        name = ""
    if table.dynamic is not None:
        raise ConfigError(
            f"{setting}: table {table.name} is dynamic, and its rows exist once their ids are "
            "trained: give it a number of rows, or leave it out"
        )
    if is_checkpoint(path):
        return _Checkpoint(table, path, name or key, setting)
    if Path(path).suffix == ".safetensors":
        if size_of(Path(path)) is None:
            raise ConfigError(f"{setting}: no such file: name a file of safetensors")
        return _Tensors(table, path, name, key, setting)
    if name:
        raise ConfigError(f"{setting}: a file of ids and vectors has no names: leave out @{name}")
    return _Vectors(table, path, schema, f"{SETTING}.{key}")


def check_values(
    values: Mapping[str, str], tables: Sequence[EmbeddingConfig], schema: Schema, sized: bool
) -> None:
    """Check the files of start values before ranks start.

    Args:
        values: The files, by table.
        tables: The tables of the model, all of `values` among them.
        schema: The columns of the data set.
        sized: Whether the rows of the tables are known.

    Raises:
        RecappError: A file does not exist, or does not fit its table.
    """
    by_name = {table.name: table for table in tables}
    for name, given in values.items():
        table = by_name[name]
        listed = any(feature in schema.vocabularies for feature in table.feature_names)
        file = values_file(table, given, schema, name)
        file.check(None if listed or not sized else table.num_embeddings)
        if isinstance(file, _Tensors) and (listed or table.id_rule is IdRule.HASH):
            chooses = "dataset.min_frequency" if listed else "id_rule=hash"
            note(
                f"{SETTING}.{name}={given}: row r of the tensor becomes row r of the table, and "
                f"{chooses} chooses the row of an id: if the tensor has id r in row r, write ids "
                "and vectors to Parquet, which finds their rows"
            )


def check_filled(table: str, given: str, blocks: Sequence[Block]) -> None:
    """Check that the values of a table are finite.

    Raises:
        ConfigError: They are not.
    """
    if not all(is_finite(block.data) for block in blocks):
        raise ConfigError(
            f"{SETTING}.{table}={given}: the file has values that are not finite in the type of "
            "the table (NaN or infinity): write numbers"
        )


def _check_shape(
    setting: str, found: Sequence[int], table: EmbeddingConfig, rows: int | None
) -> None:
    known = table.num_embeddings if rows is None else rows
    wanted = (found[0] if rows is None and found else known, table.embedding_dim)
    if tuple(found) != wanted:
        said = " x ".join(f"{n:,}" for n in found)
        raise ConfigError(
            f"{setting}: the values are {said}, and table {table.name} is {by(wanted)}: give the "
            "table as many rows and columns, or write other values"
        )


@dataclass(frozen=True)
class _Checkpoint:
    """The table of a checkpoint."""

    table: EmbeddingConfig
    path: str
    name: str
    setting: str

    def check(self, rows: int | None) -> None:
        shapes = read_manifest(self.path).shapes
        if self.name not in shapes:
            raise ConfigError(
                f"{self.setting}: the checkpoint has no table {self.name}; "
                f"{suggest(self.name, shapes)}; PATH@TABLE names another"
            )
        stored = shapes[self.name]
        if stored.dynamic:
            raise ConfigError(
                f"{self.setting}: the checkpoint's table is dynamic, and its rows have no numbers: "
                "write its ids and vectors (recapp.static_table) to Parquet"
            )
        _check_shape(self.setting, tuple(stored[:2]), self.table, rows)

    def fill(self, blocks: Sequence[Block]) -> tuple[int, int]:
        self.check(self.table.num_embeddings)
        load_blocks(self.path, [block._replace(table=self.name) for block in blocks])
        return self.table.num_embeddings, self.table.num_embeddings


@dataclass(frozen=True)
class _Tensors:
    """A tensor of a safetensors file."""

    table: EmbeddingConfig
    path: str
    name: str
    key: str
    setting: str

    def check(self, rows: int | None) -> None:
        self._read(rows, ())

    def fill(self, blocks: Sequence[Block]) -> tuple[int, int]:
        self._read(self.table.num_embeddings, blocks)
        return self.table.num_embeddings, self.table.num_embeddings

    def _read(self, rows: int | None, blocks: Sequence[Block]) -> None:
        """Check the tensor, and write its rows into the rectangles that hold them."""
        try:
            with safetensors.safe_open(self.path, "pt") as opened:
                values = opened.get_slice(self._chosen(opened.keys()))
                if values.get_dtype() not in FLOATS:
                    raise ConfigError(
                        f"{self.setting}: the tensor is {values.get_dtype()}: start values are "
                        f"floats, {', '.join(FLOATS)}"
                    )
                _check_shape(self.setting, tuple(values.get_shape()), self.table, rows)
                for some in self._ranges(blocks):
                    row_N = torch.arange(some.start, some.stop, device="cpu")
                    _place(blocks, row_N, values[some.start : some.stop])
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"{self.setting}: is not a whole file of safetensors ({error})"
            ) from error

    def _chosen(self, names: Sequence[str]) -> str:
        wanted = self.name or (names[0] if len(names) == 1 else self.key)
        if wanted not in names:
            raise ConfigError(
                f"{self.setting}: the file has no tensor {wanted}; {suggest(wanted, names)}; "
                "FILE@TENSOR names another"
            )
        return wanted

    def _ranges(self, blocks: Sequence[Block]) -> Iterator[range]:
        """Yield the rows to read, some MB at a time: those of the blocks, or all rows where blocks
        have an order of their own.
        """
        ordered = any(block.order is not None for block in blocks)
        held = [range(self.table.num_embeddings)] if ordered else [b.rows for b in blocks if b.rows]
        step = max(1, CHUNK_BYTES // (8 * self.table.embedding_dim))
        for rows in dict.fromkeys(held):
            for first in range(rows.start, rows.stop, step):
                yield range(first, min(first + step, rows.stop))


@dataclass(frozen=True)
class _Vectors:
    """Ids and vectors in data files."""

    table: EmbeddingConfig
    path: str
    schema: Schema
    setting: str

    def _opened(self) -> VectorRows:
        names = self.table.feature_names
        return VectorRows.of(self.path, names, self.table.embedding_dim, self.setting)

    def check(self, rows: int | None) -> None:
        self._opened()

    def fill(self, blocks: Sequence[Block]) -> tuple[int, int]:
        feature = self.table.feature_names[0]
        known = self.schema.vocabularies.get(feature)
        rules = IdRules(lookups_of([self.table])[:1])
        filled_R = torch.zeros(self.table.num_embeddings, dtype=torch.bool, device="cpu")
        values = 0
        for ids_N, vectors_ND in self._opened().chunks(self.schema.text_ids(feature)):
            if known is not None:
                ids_N = places(ids_N, known)
                among_N = ids_N != MISSING  # other ids share the row of missing ones
                ids_N = ids_N[among_N]
                vectors_ND = vectors_ND[among_N]
            ids = KeyedJaggedTensor(
                [feature], torch.from_numpy(ids_N), lengths=torch.ones(len(ids_N)).long()
            )
            try:
                found = rules(ids)
            except IdError as error:
                raise ConfigError(f"{self.setting}: {error}") from None
            kept_N = found.lengths_FB[0].numpy() > 0
            row_N, at_N = _last_of_each(found.rows_L.numpy())
            _place(blocks, torch.from_numpy(row_N), torch.from_numpy(vectors_ND[kept_N][at_N]))
            filled_R[row_N] = True
            values += int(kept_N.sum())
        return int(filled_R.sum()), values


def _last_of_each(row_N: "np.ndarray") -> tuple["np.ndarray", "np.ndarray"]:
    """Return each row once, and the place of its last vector: ids may share a row."""
    row_M, from_end_M = np.unique(row_N[::-1], return_index=True)
    return row_M, len(row_N) - 1 - from_end_M


def _place(blocks: Sequence[Block], row_N: Tensor, values_ND: Tensor) -> None:
    """Write the values of some rows into the rectangles that hold them."""
    for block in blocks:
        position_N = row_N if block.order is None else block.order.positions_of(row_N)
        here_N = (position_N >= block.rows.start) & (position_N < block.rows.stop)
        at_M = (position_N[here_N] - block.rows.start).to(block.data.device)
        part = values_ND[here_N][:, block.cols.start : block.cols.stop]
        block.data[at_M] = part.to(block.data)
