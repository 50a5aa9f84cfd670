"""Read the rows to score: files of features without labels, in file order.

    rows of the input   [ 0 .. 65,536 )              [ 65,536 .. 131,072 )      ..
    score part          0                            1                          ..
    batches             [0 .. 4096) [4096 .. 8192)   ..                         ..

Batches begin at multiples of `rows_per_batch` of the whole input. So a batch has the same rows on
any rank, and after any earlier run. Each rank scores consecutive whole parts, so that it reads a
row group once. Columns to keep beside the scores travel with their batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from recapp.dataset.arrow_types import value_type, without_views
from recapp.dataset.collate import Collate
from recapp.dataset.data_file import DataFile
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.files import file_names
from recapp.dataset.rows import Rows
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import arrow_chunks
from recapp.dataset.source import Source, open_files
from recapp.errors import ConfigError, DataError, alike, meant
from recapp.sparse.batch import Batch

SETTING = "input"
PARTS = 64  # of an input by default: enough parts for the ranks to share equally
MOST_ROWS_PER_PART = 262_144  # by default: a rank holds these until a write, and may lose them


@dataclass(slots=True)
class InputBatch(Batch):
    """A batch of the input, with the place of its scores.

    Args:
        first_row: The number of its first row in the whole input.
        kept: The columns to keep beside the scores, for the same rows.
    """

    first_row: int
    kept: pa.Table


@dataclass(frozen=True)
class PredictionInput:
    """The rows to score.

    Args:
        source: The rows.
        schema: The columns of the rows, without labels.
        kept: The types of the columns to keep beside the scores, in the output.
        transform: The function applied to dense columns.
        settings: The sizes of batches and parts.
    """

    source: Source
    schema: Schema
    kept: pa.Schema
    transform: str
    settings: ScoringSettings

    @cached_property
    def rows(self) -> int:
        """The number of rows."""
        return self.source.rows

    @cached_property
    def rows_per_part(self) -> int:
        """The rows of a score part."""
        size = self.settings.rows_per_batch
        most = max(1, MOST_ROWS_PER_PART // size)
        batches = min(most, max(1, -(-self.rows // (PARTS * size))))
        return self.settings.rows_per_part or batches * size

    @property
    def parts(self) -> int:
        """Return the number of score parts."""
        return -(-self.rows // self.rows_per_part)

    def part(self, number: int) -> range:
        """Return the rows of a score part, as numbers in the whole input."""
        first = number * self.rows_per_part
        return range(first, min(first + self.rows_per_part, self.rows))

    def batches(self, rows: range) -> Iterator[InputBatch]:
        """Yield the batches of consecutive rows.

        Args:
            rows: The rows, by their numbers in the whole input; the first row must begin a batch.

        Raises:
            DataError: Rows cannot be read, or a value cannot be used.
        """
        collate = Collate(self.schema, self.source.bags, self.transform)
        size = self.settings.rows_per_batch
        row = rows.start
        held: list[Rows] = []
        kept: list[pa.RecordBatch] = []
        for file, file_row, chunk in arrow_chunks(self.source.slice(rows.start, rows.stop)):
            while chunk.num_rows:
                part = chunk.slice(0, size - row % size)
                numbers_N = file_row + np.arange(part.num_rows, dtype=np.int64)
                held.append(collate.rows(part, file.columns, file.path, numbers_N))
                kept.append(self._kept(part))
                chunk = chunk.slice(part.num_rows)
                file_row += part.num_rows
                row += part.num_rows
                if row % size == 0 or row == rows.stop:
                    yield self._batch(collate, held, kept, row - sum(map(len, held)))
                    held = []
                    kept = []

    def no_rows(self) -> InputBatch:
        """Return a batch without rows, for a rank that is finished before others."""
        collate = Collate(self.schema, self.source.bags, self.transform)
        return self._batch(collate, [], [], self.rows)

    def _batch(
        self, collate: Collate, held: list[Rows], kept: list[pa.RecordBatch], first: int
    ) -> InputBatch:
        made = collate.batch(held)
        table = pa.Table.from_batches(kept, self.kept)
        return InputBatch(made.dense_BI, made.sparse, made.labels, made.weights, None, first, table)

    def _kept(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """Return the kept columns of a chunk, in the types of the output."""
        arrays = [
            column if column.type == field.type else column.cast(field.type)
            for field in self.kept
            for column in [without_views(chunk.column(field.name))]
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.kept)


@dataclass(frozen=True)
class RankInput:
    """The batches of one of several ranks; all ranks have the same number of batches.

    Args:
        input: The rows of all ranks.
        unscored: The numbers of the score parts to score, ascending.
        rank: The number of this rank.
        world: The number of ranks.
    """

    input: PredictionInput
    unscored: Sequence[int]
    rank: int = 0
    world: int = 1

    def parts_of(self, rank: int) -> Sequence[int]:
        """Return the parts of a rank: consecutive parts, an equal share of all or one more."""
        count = len(self.unscored)
        return self.unscored[rank * count // self.world : (rank + 1) * count // self.world]

    def rows_after(self, batches: int) -> int:
        """Return the number of rows that all ranks together have scored after some batches each."""
        size = self.input.settings.rows_per_batch
        return sum(min(batches * size, rows) for rows in self._rows_W)

    @property
    def rows(self) -> int:
        """Return the number of rows that all ranks together score."""
        return sum(self._rows_W)

    def __len__(self) -> int:
        """Return the number of batches of each rank: at least one, which may be empty."""
        size = self.input.settings.rows_per_batch
        return max(1, *(-(-rows // size) for rows in self._rows_W))

    def __iter__(self) -> Iterator[InputBatch]:
        """Yield this rank's batches, then empty batches until the other ranks are finished."""
        own = (batch for rows in self._runs() for batch in self.input.batches(rows))
        for _ in range(len(self)):
            batch = next(own, None)
            yield self.input.no_rows() if batch is None else batch

    @cached_property
    def _rows_W(self) -> list[int]:
        ranks = range(self.world)
        return [sum(len(self.input.part(n)) for n in self.parts_of(rank)) for rank in ranks]

    def _runs(self) -> list[range]:
        """Return this rank's rows as ranges of consecutive rows, as few as possible."""
        runs: list[range] = []
        for number in self.parts_of(self.rank):
            rows = self.input.part(number)
            before = runs.pop().start if runs and runs[-1].stop == rows.start else rows.start
            runs.append(range(before, rows.stop))
        return runs


def open_input(settings: ScoringSettings, schema: Schema, transform: str) -> PredictionInput:
    """Open the files to score; they may have no rows.

    Args:
        settings: The rows.
        schema: The columns of the model; its labels are not read and may be absent.
        transform: A key of `recapp.dataset.collate.DENSE_TRANSFORMS`.

    Raises:
        DataError: There is no file, or a file is not whole, lacks a column, or has a column of an
            unreadable type.
    """
    if settings.input is None:
        raise ConfigError("input must be given: name the rows that are to be scored")
    names = file_names(settings.input, setting=SETTING)
    unlabelled = schema.unlabelled()
    source = _open(names, schema, unlabelled)
    kept = _kept_schema(source.files, settings.columns)
    files = tuple(file._replace(kept=tuple(kept.names)) for file in source.files)
    return PredictionInput(replace(source, files=files), unlabelled, kept, transform, settings)


def _open(names: Sequence[str], schema: Schema, unlabelled: Schema) -> Source:
    """Open files with or without labels; this matters for files that are read by position, where
    labels are further columns.

    Raises:
        DataError: The files do not have the columns, with or without labels.
    """
    try:
        return open_files(names, unlabelled, setting=SETTING)
    except DataError:
        if schema.positional and schema.labels:
            with suppress(DataError):
                labelled = open_files(names, schema, setting=SETTING)
                return labelled.only(schema.inputs)
        raise


def _kept_schema(files: Sequence[DataFile], columns: Sequence[str]) -> pa.Schema:
    """Return the types of the kept columns, which must be equal in all files.

    Raises:
        DataError: A file lacks a kept column, has it twice, or has another type than the first
            file.
    """
    kept = pa.schema([])
    for file in files if columns else ():
        found = file.types
        for name in columns:
            if (times := found.names.count(name)) > 1:
                raise DataError(
                    f"columns: {file.path} has column {name} {times} times; leave one of them in "
                    "the file"
                )
            if not times:
                near = f"{meant(close)} " if (close := alike(name, found.names)) else ""
                raise DataError(
                    f"columns: {file.path} has no column {name}; {near}it has "
                    f"{', '.join(found.names)}"
                )
        empty = {name: pa.nulls(0, value_type(found.field(name).type)) for name in columns}
        own = pa.schema([pa.field(name, without_views(each).type) for name, each in empty.items()])
        kept = kept if kept.names else own
        for field in own:
            if field.type != (first := kept.field(field.name).type):
                raise DataError(
                    f"columns: {field.name} has type {field.type} in {file.path}, {first} in "
                    f"{files[0].path}; convert one of them, or leave it out"
                )
    return kept
