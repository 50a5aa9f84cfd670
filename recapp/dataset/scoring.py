"""Read the rows to score, files of features without labels in file order, and write their scores to
one Parquet file.

    rows of the input      [0 .. 4096) [4096 .. 8192) [8192 .. 12288) [12288 .. 16384)  batches
    ranks                  0                          1
    scores.parquet.parts/  rank-0.arrow               rank-1.arrow
    scores.parquet         the scores of all ranks, joined by rank 0

Batches begin at multiples of `rows_per_batch` of the whole input, so a batch has the same rows on
any number of ranks. Each rank scores consecutive batches, so that it reads a row group once.
Columns to keep beside the scores travel with their batch. The output gets its name when it is whole
and on disk; what a run that was ended has left in the directory is deleted by the next run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from recapp.console import short_path
from recapp.dataset.arrow_types import value_type, without_views
from recapp.dataset.collate import Collate
from recapp.dataset.data_file import DataFile, with_partitions
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.files import file_names
from recapp.dataset.formats import formats_of
from recapp.dataset.nested_columns import with_parts
from recapp.dataset.rows import Rows
from recapp.dataset.schema import Schema
from recapp.dataset.source import Source, arrow_chunks, open_files
from recapp.dataset.storage import RemotePath, located, put_file
from recapp.errors import ConfigError, DataError, alike, meant
from recapp.sparse.keyed_jagged_tensor import Batch

SETTING = "input"
ROWS_PER_GROUP = 262_144  # the least in the output, except in the last: readers prefer large groups
SUFFIXES = (".parquet", ".parq", ".pq")
Scores = npt.NDArray[np.float32]
# The number of all rows as `rows`; `mean_score`, `least_score` and `largest_score`, or the like for
# each column of scores, None without rows. A score that is NaN makes the mean NaN.
Measured = dict[str, float | None]
_OWN = re.compile(r"rank-\d+\.arrow|joined\.tmp")


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
        settings: The rows of a batch.
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
        pieces: list[Rows] = []
        chunks: list[pa.RecordBatch] = []
        for file, file_row, chunk in arrow_chunks(self.source.slice(rows.start, rows.stop)):
            while chunk.num_rows:
                part = chunk.slice(0, size - row % size)
                numbers_N = file_row + np.arange(part.num_rows, dtype=np.int64)
                pieces.append(collate.rows(part, file.columns, file.path, numbers_N))
                kept = [part.column(name) for name in self.kept.names]
                types = self.kept.types
                arrays = [one.cast(kind) for one, kind in zip(kept, types, strict=True)]
                chunks.append(pa.RecordBatch.from_arrays(arrays, schema=self.kept))
                chunk = chunk.slice(part.num_rows)
                file_row += part.num_rows
                row += part.num_rows
                if row % size == 0 or row == rows.stop:
                    yield self._batch(collate, pieces, chunks, row - sum(map(len, pieces)))
                    pieces = []
                    chunks = []

    def no_rows(self) -> InputBatch:
        """Return a batch without rows, for a rank that is finished before others."""
        collate = Collate(self.schema, self.source.bags, self.transform)
        return self._batch(collate, [], [], self.rows)

    def _batch(
        self, collate: Collate, pieces: list[Rows], chunks: list[pa.RecordBatch], first: int
    ) -> InputBatch:
        batch = collate.batch(pieces)
        table = pa.Table.from_batches(chunks, self.kept)
        return InputBatch(
            batch.dense_BI, batch.sparse, batch.labels, batch.weights, None, first, table
        )


@dataclass(frozen=True)
class RankInput:
    """The batches of one of several ranks; all ranks have the same number of batches.

    Args:
        input: The rows of all ranks.
        rank: The number of this rank.
        world: The number of ranks.
    """

    input: PredictionInput
    rank: int = 0
    world: int = 1

    def rows_of(self, rank: int) -> range:
        """Return the rows of a rank: consecutive batches, an equal share of all or one more."""
        size = self.input.settings.rows_per_batch
        count = -(-self.input.rows // size)
        first, stop = (each * count // self.world * size for each in (rank, rank + 1))
        return range(first, min(stop, self.input.rows))

    def rows_after(self, batches: int) -> int:
        """Return the number of rows that all ranks together have scored after some batches each."""
        most = batches * self.input.settings.rows_per_batch
        return sum(min(most, len(self.rows_of(rank))) for rank in range(self.world))

    def __len__(self) -> int:
        """Return the number of batches of each rank: at least one, which may be empty."""
        most = max(len(self.rows_of(rank)) for rank in range(self.world))
        return max(1, -(-most // self.input.settings.rows_per_batch))

    def __iter__(self) -> Iterator[InputBatch]:
        """Yield this rank's batches, then empty batches until the other ranks are finished."""
        batches = self.input.batches(self.rows_of(self.rank))
        for _ in range(len(self)):
            batch = next(batches, None)
            yield self.input.no_rows() if batch is None else batch


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
    names = file_names(settings.input, setting=SETTING, formats=formats_of(schema.files))
    unlabelled = schema.unlabelled()
    source = open_files(names, unlabelled, setting=SETTING)
    kept_schema = _kept_schema(source.files, settings.columns)
    files = tuple(file._replace(kept=tuple(kept_schema.names)) for file in source.files)
    return PredictionInput(
        replace(source, files=files), unlabelled, kept_schema, transform, settings
    )


def _kept_schema(files: Sequence[DataFile], columns: Sequence[str]) -> pa.Schema:
    """Return the types of the kept columns, which must be equal in all files.

    Raises:
        DataError: A file lacks a kept column, has it twice, or has another type than the first
            file.
    """
    schema = pa.schema([])
    for file in files if columns else ():
        types = with_parts(with_partitions(file.types, file.path), columns)
        for name in columns:
            if (times := types.names.count(name)) > 1:
                raise DataError(
                    f"columns: {file.path} has column {name} {times} times; leave one of them in "
                    "the file"
                )
            if not times:
                near = f"{meant(close)} " if (close := alike(name, types.names)) else ""
                raise DataError(
                    f"columns: {file.path} has no column {name}; {near}it has "
                    f"{', '.join(types.names)}"
                )
        empty = {name: pa.nulls(0, value_type(types.field(name).type)) for name in columns}
        file_schema = pa.schema(
            [pa.field(name, without_views(each).type) for name, each in empty.items()]
        )
        schema = schema if schema.names else file_schema
        for field in file_schema:
            if field.type != (first := schema.field(field.name).type):
                raise DataError(
                    f"columns: {field.name} has type {field.type} in {file.path}, {first} in "
                    f"{files[0].path}; convert one of them, or leave it out"
                )
    return schema


# ---- the file of the scores


def check_output(output: Path, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Check that scores may be written to a file.

    Args:
        output: The file.
        inputs: The files to score.
        overwrite: Whether to replace a file of that name.

    Raises:
        ConfigError: `output` is not the name of a Parquet file, its directory does not exist, it is
            one of the inputs, or it exists.
    """
    setting = f"output={short_path(output)}"
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{setting}: scores are written as Parquet: name a file {output.stem}.parquet"
        )
    folder = output.top if isinstance(output, RemotePath) else output.parent
    if str(folder).startswith("http"):
        raise ConfigError(f"{setting}: a web server takes no files; name a bucket or a disk")
    if not folder.is_dir():
        raise ConfigError(f"{setting}: there is no directory {folder}; make it first")
    if output.is_dir():
        raise ConfigError(f"{setting}: is a directory; name a file in it")
    if os.path.realpath(output) in {os.path.realpath(located(name)) for name in inputs}:
        raise ConfigError(
            f"{setting}: is one of the files that are scored (input); write elsewhere, or leave it "
            "out of input"
        )
    if output.exists() and not overwrite:
        raise ConfigError(f"{setting}: exists; choose another name, or set overwrite=true")


class ScoreFile:
    """A Parquet file of scores, which ranks write together.

    Args:
        output: The file.
        input: The rows.
        columns: The columns of scores.

    Raises:
        ConfigError: A column of scores has the name of a kept column.
    """

    def __init__(self, output: Path, input: PredictionInput, columns: Sequence[str]) -> None:
        if twice := [name for name in input.kept.names if name in columns]:
            raise ConfigError(
                f"columns: {twice[0]} is the column of the scores, so a column of the input with "
                "that name cannot be kept; leave it out, or rename it in the input"
            )
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        if isinstance(output, RemotePath):  # whose parts lie on this machine
            name = blake2b(str(output).encode(), digest_size=8).hexdigest()
            self.folder = Path(gettempdir(), f"recapp-{os.getuid()}-{name}.parts")
        self.columns = tuple(columns)
        self.rows = input.rows
        scores = [pa.field(name, pa.float32()) for name in columns]
        self.schema = pa.schema([*input.kept, *scores])
        self._opened = ExitStack()

    def open_part(self, rank: int) -> None:
        """Open the part of a rank.

        Raises:
            DataError: The part cannot be written.
        """
        with self.writing(), ExitStack() as opening:
            file = opening.enter_context(pa.OSFile(str(self._path(rank)), "wb"))
            options = pa.ipc.IpcWriteOptions(compression="zstd")  # the disk holds parts and output
            self._part = opening.enter_context(
                pa.ipc.new_stream(file, self.schema, options=options)
            )
            self._opened = opening.pop_all()

    def write(self, kept_columns: pa.Table, scores: Mapping[str, Scores]) -> None:
        """Append a batch to the part.

        Args:
            kept: The columns to keep beside the scores.
            scores: The scores by column.

        Raises:
            DataError: The part cannot be written.
        """
        columns = [*kept_columns.columns, *(pa.array(scores[name]) for name in self.columns)]
        table = pa.Table.from_arrays(columns, schema=self.schema)
        with self.writing():
            self._part.write_table(table.combine_chunks())

    def close_part(self) -> None:
        """Close the part, if it is open.

        Raises:
            DataError: The part cannot be written.
        """
        with self.writing():
            self._opened.close()

    def abandon(self) -> None:
        """Close the part, if it is open, whether or not it can be written whole."""
        with suppress(OSError, pa.ArrowException):
            self._opened.close()

    def join(self, world: int) -> Measured:
        """Concatenate the parts of all ranks to the output, and measure the scores. One rank calls
        this when all parts are closed.

        Args:
            world: The number of ranks.

        Raises:
            DataError: A part is not whole, or the output cannot be written.
        """
        sums: dict[str, list[float]] = {column: [] for column in self.columns}
        ends: dict[str, list[np.float32]] = {column: [] for column in self.columns}
        unfinished = self.folder / "joined.tmp"
        with self.writing():
            with open(unfinished, "wb") as file:
                with pq.ParquetWriter(file, self.schema) as writer:
                    for table in self._row_groups(world):
                        for column in self.columns:
                            scores_N = table.column(column).to_numpy()
                            sums[column].append(float(scores_N.sum(dtype=np.float64)))
                            ends[column] += [np.fmin.reduce(scores_N), np.fmax.reduce(scores_N)]
                        writer.write_table(table, row_group_size=table.num_rows)
                file.flush()
                os.fsync(file.fileno())
            if not isinstance(self.output, RemotePath):
                unfinished.replace(self.output)
        if isinstance(self.output, RemotePath):
            put_file(unfinished, str(self.output))
        measures: Measured = {"rows": self.rows}
        for column in self.columns:  # sums are added in the order of the rows
            some = bool(sums[column])
            total = np.cumsum(sums[column])
            measures[f"mean_{column}"] = float(total[-1]) / self.rows if some else None
            measures[f"least_{column}"] = float(np.fmin.reduce(ends[column])) if some else None
            measures[f"largest_{column}"] = float(np.fmax.reduce(ends[column])) if some else None
        return measures

    def _row_groups(self, world: int) -> Iterator[pa.Table]:
        """Yield the rows of all parts in order, as tables of at least ROWS_PER_GROUP rows."""
        group: list[pa.RecordBatch] = []
        rows = 0
        for rank in range(world):
            with pa.OSFile(str(self._path(rank))) as file, pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    group.append(batch)
                    rows += batch.num_rows
                    if rows == self.rows or sum(map(len, group)) >= ROWS_PER_GROUP:
                        yield pa.Table.from_batches(group)
                        group = []
        if rows != self.rows:
            raise DataError(
                f"{short_path(self.folder)} has {rows:,} scores of {self.rows:,} rows, so another "
                "program has changed it: run the same command again"
            )

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.arrow"

    def delete_parts(self) -> None:
        """Delete the parts of this run, or of one that was ended, from the directory."""
        with suppress(FileNotFoundError):
            for name in filter(_OWN.fullmatch, os.listdir(self.folder)):
                (self.folder / name).unlink()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn errors of the file system inside of the `with` into errors of one line.

        Raises:
            DataError: The disk is full, or a file cannot be written.
        """
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(
                f"output={short_path(self.output)}: cannot be written "
                f"({' '.join(why.split())}); make room, then run the same command again"
            ) from error
