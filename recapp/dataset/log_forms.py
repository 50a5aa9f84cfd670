"""The same rows in the forms that logs have, for `recapp.bench data`: typed Parquet, hexadecimal
text in Parquet, some columns of lists, CSV. The rows have Criteo's columns.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from recapp.dataset.decode import decode_ids
from recapp.dataset.schema import criteo_schema
from recapp.dataset.source import Source, arrow_chunks
from recapp.sparse.missing_ids import MISSING

LISTS = 6  # columns that hold lists in that form
LONGEST_LIST = 7


def typed_rows(source: Source) -> pa.Table:
    """Return rows with their ids as numbers."""
    schema = criteo_schema()
    parts = []
    for file, _, chunk in arrow_chunks(source):
        columns = {name: chunk.column(own) for name, own in file.columns.items()}
        for name in schema.sparse:
            id_N = decode_ids(columns[name], schema.text_ids(name))
            columns[name] = pa.array(id_N, mask=id_N == MISSING)
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _with(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    return pa.table({name: columns.get(name, table[name]) for name in table.column_names})


def _in_hex(table: pa.Table) -> pa.Table:
    texts = {
        name: pa.array(
            [None if one is None else f"{one & 0xFFFFFFFF:08x}" for one in table[name].to_pylist()]
        )
        for name in criteo_schema().sparse
    }
    return _with(table, texts)


def _in_lists(table: pa.Table) -> pa.Table:
    length_N = np.arange(table.num_rows) % (LONGEST_LIST + 1)
    bounds = pa.array(np.append(0, np.cumsum(length_N)), pa.int32())
    row_L = pa.array(np.repeat(np.arange(table.num_rows), length_N))
    lists = {
        name: pa.ListArray.from_arrays(bounds, table[name].take(row_L).combine_chunks())
        for name in criteo_schema().sparse[:LISTS]
    }
    return _with(table, lists)


def _parquet(table: pa.Table, path: Path, rows: int) -> None:
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=rows)


# What writes rows in each form, in row groups of some rows where the format has them.
FORMS: dict[str, Callable[[pa.Table, Path, int], None]] = {
    "typed": _parquet,
    "hex": lambda table, path, rows: _parquet(_in_hex(table), path, rows),
    "lists": lambda table, path, rows: _parquet(_in_lists(table), path, rows),
    "csv": lambda table, path, _: csv.write_csv(table, path.with_suffix(".csv")),
}
