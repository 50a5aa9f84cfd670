"""Read the rows of a source in file order, chunk by chunk: files to Arrow, Arrow to arrays.

Benchmarks time these two steps separately, and checks of the first rows before training use them.
Training reads shuffled batches (`BatchStream`).
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from recapp.dataset.collate import Collate, SourceRows
from recapp.dataset.data_file import DataFile, chunks
from recapp.dataset.rows import Rows
from recapp.dataset.schema import Schema
from recapp.dataset.source import Source


def arrow_chunks(source: Source) -> Iterator[tuple[DataFile, int, pa.RecordBatch]]:
    """Yield the rows of a source as Arrow record batches, decompressed but not converted.

    Yields:
        The file, the number of a chunk's first row in it, and the chunk.
    """
    for number, row_group, first, rows in source.segments:
        file = source.files[number]
        for begin, chunk in chunks(file, row_group, first + rows):
            skipped = max(first - begin, 0)
            if skipped < chunk.num_rows:
                yield (
                    file,
                    file.starts[row_group] + begin + skipped,
                    chunk.slice(skipped, first + rows - begin - skipped),
                )


def decoded_chunks(source: Source, schema: Schema, transform: str = "log1p") -> Iterator[Rows]:
    """Yield the rows of a source as arrays of ids, numbers and labels, checked and transformed."""
    collate = Collate(schema, source.bags, transform)
    for file, first, chunk in arrow_chunks(source):
        yield collate.rows(
            chunk, file.columns, SourceRows(file.path, first + np.arange(chunk.num_rows))
        )
