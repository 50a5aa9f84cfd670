"""Start values of tables from files (`tables.values`).

    c1.parquet             an id and a vector in each row; the table's rules make rows of ids
    run/best.ckpt          the table of the same name in a checkpoint
    run/best.ckpt@NAME     the table with another name

Each rank reads only the rows that it holds, a few MB at a time, so the values are the same under
every plan. Rows that Parquet has no id for keep their usual start values.

Shapes: R rows, D columns of a table; N rows at a time.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from recapp.dataset.rows import places
from recapp.dataset.schema import Schema
from recapp.dataset.source import VectorRows
from recapp.errors import ConfigError, IdError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.settings.uris import path_to
from recapp.sharding.layout import Block
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING
from recapp.stored.block_files import by
from recapp.stored.store import entry_of, is_checkpoint
from recapp.stored.stored_model import load_blocks, read_manifest
from recapp.tables.config import EmbeddingConfig, lookups_of
from recapp.tables.ids import IdRules

SETTING = "tables.values"


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
    if entry_of(path_to(source)) or not path or not entry_of(path_to(path)):
        path = source
        name = ""
    if table.dynamic is not None:
        raise ConfigError(
            f"{setting}: table {table.name} is dynamic, and its rows exist once their ids are "
            "trained: give it a number of rows, or leave it out"
        )
    if is_checkpoint(path):
        _read_checkpoint(table, path, name or key, setting, rows, blocks)
        return table.num_embeddings, table.num_embeddings
    if name:
        raise ConfigError(f"{setting}: a file of ids and vectors has no names: leave out @{name}")
    return _read_vectors(table, path, schema, f"{SETTING}.{key}", blocks)


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
    shape = shapes[name][:2]
    of_table = (shape[0] if rows is None else rows, table.embedding_dim)
    if shape != of_table:
        raise ConfigError(
            f"{setting}: the values are {by(shape)}, and table {table.name} is {by(of_table)}: "
            "give the table as many rows and columns, or write other values"
        )
    if blocks is not None:
        load_blocks(path, [block._replace(table=name) for block in blocks])


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
