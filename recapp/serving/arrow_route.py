"""Read raw rows from an Arrow IPC stream and answer with a stream of scores, for data frames.

Clients are not trusted, but Arrow trusts the sizes that a stream declares. So this file adds up the
declared sizes before it decompresses a buffer, reads only the columns of features, and validates
all offsets of a record batch before it reads a value. It refuses views of text and of lists: many
views may share the same bytes, so a small body could cause unbounded work.
"""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from torch import Tensor

from recapp.dataset.arrow_messages import sizes_of
from recapp.dataset.arrow_types import has_views, is_list, is_text
from recapp.errors import DataError
from recapp.serving.feature_columns import check_columns
from recapp.serving.limits import Limits, bad, check_body_bytes, check_rows
from recapp.serving.question import Question, Reply
from recapp.serving.served_model import Served

ARROW = "application/vnd.apache.arrow.stream"


def read_arrow(
    body: memoryview, headers: Mapping[str, str], served: Served, limits: Limits
) -> Question:
    """Read a question from an Arrow IPC stream of raw rows; ignore columns that are not features.

    Args:
        body: The stream.
        headers: The headers of the request; not used.
        served: The model that answers.
        limits: The bounds of decompressed bytes, rows and ids.

    Raises:
        Refused: The bytes are not a valid stream, or exceed a limit.
        DataError: A column is missing, or has a type that cannot be read.
    """
    if not len(body):
        raise bad("the body is empty: send an Arrow IPC stream")
    try:
        _check_unpacked_bytes(body, limits)
        table = _read(body, served, limits)
    except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise bad(f"the body is no valid Arrow IPC stream: {said}") from None
    return Question(table, lambda outputs: _reply(served, outputs))


def _check_unpacked_bytes(body: memoryview, limits: Limits) -> None:
    """Check the decompressed bytes of a stream: Arrow allocates the size that a buffer declares."""
    total = 0
    for sizes in sizes_of(body):
        total += sizes.unpacked_bytes
        check_body_bytes(total, limits)


def _read(body: memoryview, served: Served, limits: Limits) -> pa.Table:
    """Return the validated features of a stream, with the names of the schema."""
    schema = served.scorer.schema
    source = pa.py_buffer(body)
    with pa.ipc.open_stream(source) as reader:
        own = reader.schema
    columns = schema.resolve(own, "the rows")
    for name, column in columns.items():
        if has_views(own.field(column).type):
            kind = own.field(column).type
            raise bad(f"column {column} ({name}) has type {kind}: write it as text or list")
    numbers = sorted(own.get_field_index(column) for column in columns.values())
    options = pa.ipc.IpcReadOptions(included_fields=numbers)
    with pa.ipc.open_stream(source, options=options) as reader:
        batches = []
        rows = 0
        for batch in reader:
            rows += batch.num_rows
            check_rows(max(rows, 1), limits)
            batch.validate(full=True)
            batches.append(batch)
        table = pa.Table.from_batches(batches, reader.schema)
    check_rows(rows, limits)
    table = pa.table({name: table.column(column) for name, column in columns.items()})
    check_columns(table, schema, limits)
    check_body_bytes(sum(_text_bytes(c) for each in table.columns for c in each.chunks), limits)
    return table


def _text_bytes(column: pa.Array) -> int:
    """Return the bytes that a column of texts would take without dictionary encoding."""
    if is_list(column.type):
        return _text_bytes(column.flatten())
    if not pt.is_dictionary(column.type) or not is_text(column.type.value_type):
        return 0
    return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0


def _reply(served: Served, outputs: Mapping[str, Tensor]) -> Reply:
    scores = served.task.scores(outputs)
    schema = pa.schema([pa.field(name, pa.float32()) for name in scores], metadata=served.named)
    columns = [pa.array(column.numpy()) for column in scores.values()]
    answer = pa.RecordBatch.from_arrays(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, answer.schema) as writer:
        writer.write_batch(answer)
    return Reply(sink.getvalue().to_pybytes(), ARROW)
