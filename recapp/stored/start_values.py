"""Start values of tables from files (`tables.values`).

    c1.safetensors      the only tensor in it, or the one with the table's name: row by row
    c1.parquet          an id and a vector in each row; the table's rules make rows of ids
    run/best.ckpt       the table of the same name in a checkpoint
    FILE@NAME           the tensor or table with another name

Each rank reads only the rows that it holds, a few MB at a time, so the values are the same under
every plan. Rows that Parquet has no id for keep their usual start values.

Shapes: R rows, D columns of a table; N rows at a time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from recapp.console import note
from recapp.dataset.rows import places
from recapp.dataset.schema import Schema
from recapp.dataset.source import VectorRows
from recapp.errors import ConfigError, IdError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.sharding.layout import Block
from recapp.sparse.keyed_jagged_tensor import MISSING, KeyedJaggedTensor
from recapp.stored.block_files import by
from recapp.stored.store import entry_of, is_checkpoint, size_of
from recapp.stored.stored_model import load_blocks, read_manifest
from recapp.tables.config import EmbeddingConfig, IdRule, lookups_of
from recapp.tables.ids import IdRules

SETTING = "tables.values"
CHUNK_BYTES = 8 << 20
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of tensors that can be start values, in the names of safetensors."""


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
    for name, source in values.items():
        table = by_name[name]
        listed = any(feature in schema.vocabularies for feature in table.feature_names)
        rows = None if listed or not sized else table.num_embeddings
        _read(table, source, schema, name, rows, None)
        suffixes = [Path(path).suffix for path in (source, source.rpartition("@")[0])]
        if ".safetensors" in suffixes and (listed or table.id_rule is IdRule.HASH):
            chooses = "dataset.min_frequency" if listed else "id_rule=hash"
            note(
                f"{SETTING}.{name}={source}: row r of the tensor becomes row r of the table, and "
                f"{chooses} chooses the row of an id: if the tensor has id r in row r, write ids "
                "and vectors to Parquet, which finds their rows"
            )


def fill_values(
    table: EmbeddingConfig, source: str, schema: Schema, key: str, blocks: Sequence[Block]
) -> tuple[int, int]:
    """Fill the rectangles of this rank from the file of a table's start values.

    Args:
        table: The table.
        source: The path, after it perhaps `@` and a name.
        schema: The columns of the data set, whose rules make rows of ids.
        key: The name of the table in the settings.
        blocks: The rectangles.

    Returns:
        The number of rows of the table that have values in the file, and the number of values for
            them: more, where ids share a row.

    Raises:
        RecappError: The file cannot be read, does not fit the table, or has values that are not
            finite.
    """
    counts = _read(table, source, schema, key, table.num_embeddings, blocks)
    if not all(is_finite(block.data) for block in blocks):
        raise ConfigError(
            f"{SETTING}.{key}={source}: the file has values that are not finite in the type of the "
            "table (NaN or infinity): write numbers"
        )
    return counts


def _read(
    table: EmbeddingConfig,
    source: str,
    schema: Schema,
    key: str,
    rows: int | None,
    blocks: Sequence[Block] | None,
) -> tuple[int, int]:
    """Check that a file fits a table of some rows, or of an unknown number, and write its values
    into rectangles; without rectangles read no values. Return what `fill_values` does.
    """
    setting = f"{SETTING}.{key}={source}"
    path, _, name = source.rpartition("@")
    if entry_of(Path(source)) or not path or not entry_of(Path(path)):
        path = source
        name = ""
    if table.dynamic is not None:
        raise ConfigError(
            f"{setting}: table {table.name} is dynamic, and its rows exist once their ids are "
            "trained: give it a number of rows, or leave it out"
        )
    if is_checkpoint(path):
        _read_checkpoint(table, path, name or key, setting, rows, blocks)
    elif Path(path).suffix == ".safetensors":
        if size_of(Path(path)) is None:
            raise ConfigError(f"{setting}: no such file: name a file of safetensors")
        _read_tensor(table, path, (name, key), setting, rows, blocks)
    elif name:
        raise ConfigError(f"{setting}: a file of ids and vectors has no names: leave out @{name}")
    else:
        return _read_vectors(table, path, schema, f"{SETTING}.{key}", blocks)
    return table.num_embeddings, table.num_embeddings


def _check_shape(
    setting: str, shape: Sequence[int], table: EmbeddingConfig, rows: int | None
) -> None:
    known = table.num_embeddings if rows is None else rows
    of_table = (shape[0] if rows is None and shape else known, table.embedding_dim)
    if tuple(shape) != of_table:
        stored = " x ".join(f"{n:,}" for n in shape)
        raise ConfigError(
            f"{setting}: the values are {stored}, and table {table.name} is {by(of_table)}: give "
            "the table as many rows and columns, or write other values"
        )


def _read_checkpoint(
    table: EmbeddingConfig,
    path: str,
    name: str,
    setting: str,
    rows: int | None,
    blocks: Sequence[Block] | None,
) -> None:
    shapes = read_manifest(path).shapes
    if name not in shapes:
        raise ConfigError(
            f"{setting}: the checkpoint has no table {name}; {suggest(name, shapes)}; PATH@TABLE "
            "names another"
        )
    if shapes[name].dynamic:
        raise ConfigError(
            f"{setting}: the checkpoint's table is dynamic, and its rows have no numbers: write "
            "its ids and vectors (recapp.static_table) to Parquet"
        )
    _check_shape(setting, shapes[name][:2], table, rows)
    if blocks is not None:
        load_blocks(path, [block._replace(table=name) for block in blocks])


def _read_tensor(
    table: EmbeddingConfig,
    path: str,
    names: tuple[str, str],
    setting: str,
    rows: int | None,
    blocks: Sequence[Block] | None,
) -> None:
    """Read a tensor of a safetensors file; `names` are that of the tensor, which may be empty, and
    of the table.
    """
    try:
        with safetensors.safe_open(path, "pt") as opened:
            stored = opened.keys()
            name = names[0] or (stored[0] if len(stored) == 1 else names[1])
            if name not in stored:
                raise ConfigError(
                    f"{setting}: the file has no tensor {name}; {suggest(name, stored)}; "
                    "FILE@TENSOR names another"
                )
            values = opened.get_slice(name)
            if values.get_dtype() not in FLOATS:
                raise ConfigError(
                    f"{setting}: the tensor is {values.get_dtype()}: start values are floats, "
                    f"{', '.join(FLOATS)}"
                )
            _check_shape(setting, tuple(values.get_shape()), table, rows)
            for first, end in _ranges(table, blocks or ()):
                _place(blocks or (), torch.arange(first, end, device="cpu"), values[first:end])
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{setting}: is not a whole file of safetensors ({error})") from error


def _ranges(table: EmbeddingConfig, blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Return the rows to read, some MB at a time: those of the blocks, or all rows where blocks
    have an order of their own.
    """
    ordered = any(block.order is not None for block in blocks)
    parts = [range(table.num_embeddings)] if ordered else [b.rows for b in blocks if b.rows]
    step = max(1, CHUNK_BYTES // (8 * table.embedding_dim))
    return [
        pair
        for rows in dict.fromkeys(parts)
        for pair in pairwise([*range(rows.start, rows.stop, step), rows.stop])
    ]


def _read_vectors(
    table: EmbeddingConfig,
    path: str,
    schema: Schema,
    setting: str,
    blocks: Sequence[Block] | None,
) -> tuple[int, int]:
    """Read ids and vectors of data files; ids may share a row, whose last vector counts."""
    files = VectorRows.of(path, table.feature_names, table.embedding_dim, setting)
    if blocks is None:
        return 0, 0
    feature = table.feature_names[0]
    known = schema.vocabularies.get(feature)
    rules = IdRules(lookups_of([table])[:1])
    filled_R = torch.zeros(table.num_embeddings, dtype=torch.bool, device="cpu")
    values = 0
    for ids_N, vectors_ND in files.chunks(schema.text_ids(feature)):
        if known is not None:
            ids_N = places(ids_N, known)
            among_N = ids_N != MISSING  # other ids share the row of missing ones
            ids_N = ids_N[among_N]
            vectors_ND = vectors_ND[among_N]
        ids = KeyedJaggedTensor(
            [feature], torch.from_numpy(ids_N), lengths=torch.ones(len(ids_N)).long()
        )
        try:
            ruled = rules(ids)
        except IdError as error:
            raise ConfigError(f"{setting}: {error}") from None
        kept_N = ruled.lengths_FB[0].numpy() > 0
        row_M, from_end_M = np.unique(ruled.rows_L.numpy()[::-1], return_index=True)
        last_MD = vectors_ND[kept_N][::-1][from_end_M]
        _place(blocks, torch.from_numpy(row_M), torch.from_numpy(last_MD))
        filled_R[row_M] = True
        values += int(kept_N.sum())
    return int(filled_R.sum()), values


def _place(blocks: Sequence[Block], row_N: Tensor, values_ND: Tensor) -> None:
    for block in blocks:
        position_N = row_N if block.order is None else block.order.positions_of(row_N)
        here_N = (position_N >= block.rows.start) & (position_N < block.rows.stop)
        at_M = (position_N[here_N] - block.rows.start).to(block.data.device)
        part = values_ND[here_N][:, block.cols.start : block.cols.stop]
        block.data[at_M] = part.to(block.data)
