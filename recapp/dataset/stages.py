"""Reading taken apart, to see what each stage costs: Parquet to Arrow, Arrow to arrays. The whole of it is `BatchStream`."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recapp.dataset.collate import Collate, Place
from recapp.dataset.reader import CHUNK_ROWS
from recapp.dataset.rows import Rows
from recapp.dataset.schema import Schema
from recapp.dataset.source import DataFile, Source


def parquet_bytes(source: Source) -> int:
    """Bytes on disk of the columns that are read, of the row groups that a source takes rows of."""
    total = 0
    for number, row_group in sorted({(s.file, s.row_group) for s in source.segments}):
        file = source.files[number]
        with pq.ParquetFile(file.path) as parquet:
            group, wanted = parquet.metadata.row_group(row_group), set(file.columns.values())
            chunks = [group.column(i) for i in range(group.num_columns)]
            total += sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in wanted)
    return total


def arrow_chunks(source: Source) -> Iterator[tuple[DataFile, pa.RecordBatch]]:
    """The row groups of a source as Arrow has them: decompressed, nothing converted."""
    for number, row_group in sorted({(s.file, s.row_group) for s in source.segments}):
        file = source.files[number]
        with pq.ParquetFile(file.path, read_dictionary=file.texts, memory_map=True) as parquet:
            columns = list(file.columns.values())
            for chunk in parquet.iter_batches(CHUNK_ROWS, row_groups=[row_group], columns=columns, use_threads=False):
                yield file, chunk


def decoded_chunks(source: Source, schema: Schema, transform: str = "log1p") -> Iterator[Rows]:
    """The same rows as arrays of ids, numbers and labels, checked and transformed, in file order."""
    collate = Collate(schema, source.bags, transform)
    for file, chunk in arrow_chunks(source):
        yield collate.rows(chunk, file.columns, Place(file.path, np.arange(chunk.num_rows)))
