"""Write scores part by part, so that an ended run can continue, and join the parts to one file.

    scores.parquet.parts/
      identity.json              the source of the scores: model, input files, columns, boundaries
      part-0000007.parquet       the scores of rows 7 * rows_per_part .., whole
      part-0000008.parquet.tmp   a part that is being written, or was when its rank was killed
      joined.tmp                 the parts, concatenated; becomes scores.parquet

A part gets its name when it is whole and on disk. So does the output; then the parts are deleted. A
later run scores the missing parts, on any number of ranks. It compares the identity first, so
scores of another model or input are never mixed in.
"""

import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from recapp.console import note, short_path
from recapp.dataset.data_file import Stamp
from recapp.dataset.data_settings import SCORE, ScoringSettings, score_is_kept
from recapp.dataset.parquet import UNREADABLE
from recapp.dataset.prediction_input import InputBatch, PredictionInput
from recapp.dataset.schema import Schema
from recapp.errors import ConfigError, DataError
from recapp.settings.small_files import read_json

IDENTITY = "identity.json"
SCORES = "scores"
"""The entry of an identity that names the columns of scores, unless `score` is the only one."""
JOINED = "joined.tmp"
ROWS_PER_GROUP = 65_536  # the least in the output, except in the last: readers prefer large groups
SUFFIXES = (".parquet", ".parq", ".pq")
Scores = npt.NDArray[np.float32]
Measured = dict[str, float | None]
"""The number of all rows as `rows`; `mean_score`, `least_score` and `largest_score`, or the like
for each column of scores, None without rows. A score that is NaN makes the mean NaN.
"""
_PART = re.compile(r"part-(\d{7,})\.parquet")
_OWN = re.compile(r"part-\d{7,}\.parquet(\.tmp)?|joined\.tmp|identity\.json(\.tmp)?")


def identity_of(
    model: Mapping[str, Any],
    files: Iterable[tuple[str, Stamp]],
    settings: ScoringSettings,
    schema: Schema,
    transform: str,
    scores: Sequence[str] = (SCORE,),
) -> dict[str, Any]:
    """Return plain values that identify a prediction, under names for people.

    Args:
        model: The identity of the model, and its settings of computation.
        files: The input files.
        settings: The kept columns and the boundaries of parts.
        schema: The columns of the input.
        transform: The transform of dense numbers.
        scores: The columns of scores.

    Raises:
        ConfigError: A column of scores has the name of a kept column.
    """
    if twice := [name for name in settings.columns if name in scores]:
        raise ConfigError(score_is_kept(twice[0]))
    return {
        **model,
        **({} if list(scores) == [SCORE] else {SCORES: list(scores)}),
        "input": [[path, stamp.size, stamp.changed] for path, stamp in files],
        "columns": list(settings.columns),
        "rows_per_batch": settings.rows_per_batch,
        "rows_per_part": settings.rows_per_part,
        "dense": list(schema.dense),
        "sparse": list(schema.sparse),
        **({"times": dict(schema.times)} if schema.times else {}),
        **({"vectors": dict(schema.vectors)} if schema.vectors else {}),
        **schema.list_rules(),
        "text ids": [schema.text_ids(name).value for name in schema.sparse],
        "dense_transform": transform,
    }


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
    named = f"output={short_path(output)}"
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{named}: scores are written as Parquet: name a file {output.stem}.parquet"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"{named}: there is no directory {output.parent}; make it first")
    if output.is_dir():
        raise ConfigError(f"{named}: is a directory; name a file in it")
    if os.path.realpath(output) in {os.path.realpath(name) for name in inputs}:
        raise ConfigError(
            f"{named}: is one of the files that are scored (input); write elsewhere, or leave it "
            "out of input"
        )
    if output.exists() and not overwrite:
        raise ConfigError(f"{named}: exists; choose another name, or set overwrite=true")


class ScoreParts:
    """The directory of the score parts of one output.

    Args:
        output: The file that the parts become.
        identity: Plain values that identify the prediction (`identity_of`).
        overwrite: Whether to delete parts of another prediction.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.columns: tuple[str, ...] = tuple(self.identity.get(SCORES, (SCORE,)))
        self.overwrite = overwrite

    def check(self) -> None:
        """Check that the parts in the directory belong to these scores, or may be deleted.

        Raises:
            ConfigError: The parts belong to another prediction; the error names a difference.
        """
        if (why := self._foreign()) and not self.overwrite:
            raise ConfigError(
                f"output={short_path(self.output)}: {short_path(self.folder)} has parts of another "
                f"prediction ({why}); set overwrite=true to begin anew, or delete that directory"
            )

    def prepare(self) -> None:
        """Make the directory, or delete parts of other scores and unfinished parts from it.

        One rank calls it.

        Raises:
            ConfigError: As for `check`; or the directory has files that are not of a prediction.
        """
        self.check()
        with self._writing():
            self.folder.mkdir(exist_ok=True)
            strange = [n for n in self._names() if not _OWN.fullmatch(n) and n != ".lock"]
            if strange:
                raise ConfigError(
                    f"output={short_path(self.output)}: {short_path(self.folder)} holds "
                    f"{strange[0]}, which no prediction has written; move it away"
                )
            keep = not self._foreign()
            for name in self._names():
                if name.endswith(".tmp") or (not keep and _OWN.fullmatch(name)):
                    (self.folder / name).unlink()
            with _whole(self.folder / IDENTITY) as file:
                file.write(f"{json.dumps(self.identity, indent=2)}\n".encode())

    def finished(self, input: PredictionInput) -> list[int]:
        """Return the numbers of the whole parts, ascending."""
        numbers = (int(part[1]) for name in self._names() if (part := _PART.fullmatch(name)))
        return [n for n in sorted(numbers) if n < input.parts and self._is_whole(n, input)]

    def write(self, number: int, scored: Sequence[tuple[InputBatch, Mapping[str, Scores]]]) -> None:
        """Write a score part, whole or not at all.

        Args:
            number: The number of the part.
            scored: The batches of the part and their scores by column, in order.

        Raises:
            DataError: The part cannot be written.
        """
        kept = pa.concat_tables([batch.kept for batch, _ in scored])
        table = self._with_scores(kept, [scores for _, scores in scored])
        with (
            self._writing(),
            _whole(self._path(number)) as file,
            pq.ParquetWriter(file, table.schema) as writer,
        ):
            writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def join(self, input: PredictionInput) -> Measured:
        """Concatenate the parts to the output, and measure the scores. One rank calls this when all
        parts are whole.

        The parts are read one after the other; small parts share a row group.

        Raises:
            DataError: A part is missing or damaged, or the output cannot be written.
        """
        none = dict.fromkeys(self.columns, np.zeros(0, np.float32))
        schema = self._with_scores(input.kept.empty_table(), [none]).schema
        sums: dict[str, list[float]] = {column: [] for column in self.columns}
        ends: dict[str, list[np.float32]] = {column: [] for column in self.columns}
        with (
            self._writing(),
            _whole(self.output, self.folder / JOINED) as file,
            pq.ParquetWriter(file, schema) as writer,
        ):
            for table in self._row_groups(input):
                for column in self.columns:
                    scores_N = table.column(column).to_numpy()
                    sums[column].append(float(scores_N.sum(dtype=np.float64)))
                    ends[column] += [np.fmin.reduce(scores_N), np.fmax.reduce(scores_N)]
                writer.write_table(table, row_group_size=table.num_rows)
        measured: Measured = {"rows": input.rows}
        for column in self.columns:  # sums are added in the order of the rows
            some = bool(sums[column])
            total = np.cumsum(sums[column])
            measured[f"mean_{column}"] = float(total[-1]) / input.rows if some else None
            measured[f"least_{column}"] = float(np.fmin.reduce(ends[column])) if some else None
            measured[f"largest_{column}"] = float(np.fmax.reduce(ends[column])) if some else None
        return measured

    def remove(self) -> None:
        """Delete the parts, and their directory if it has no other files."""
        for name in self._names():
            if _OWN.fullmatch(name):
                (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _with_scores(self, kept: pa.Table, scored: Sequence[Mapping[str, Scores]]) -> pa.Table:
        """Append the columns of scores to the kept columns."""
        columns = dict(zip(kept.column_names, kept.columns, strict=True))
        for name in self.columns:
            scores_N = np.concatenate([scores[name] for scores in scored])
            columns[name] = pa.array(scores_N, pa.float32())
        return pa.table(columns)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:07d}.parquet"

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def _foreign(self) -> str:
        """Return the difference between the parts in the directory and these scores, in words;
        empty without a difference or without parts.
        """
        if not any(_PART.fullmatch(name) for name in self._names()):
            return ""
        try:
            stored = read_json(self.folder / IDENTITY)
        except (OSError, ValueError):
            stored = None
        if not isinstance(stored, dict):
            return f"it has no {IDENTITY} that can be read"
        return _difference(stored, self.identity)

    def _is_whole(self, number: int, input: PredictionInput) -> bool:
        try:
            return bool(pq.read_metadata(self._path(number)).num_rows == len(input.part(number)))
        except UNREADABLE:
            return False

    def _row_groups(self, input: PredictionInput) -> Iterator[pa.Table]:
        """Yield all parts in order, joined to row groups of at least ROWS_PER_GROUP rows."""
        held: list[pa.Table] = []
        for number in range(input.parts):
            held.append(self._read(number, input))
            last = number + 1 == input.parts
            if last or sum(table.num_rows for table in held) >= ROWS_PER_GROUP:
                yield pa.concat_tables(held)
                held = []

    def _read(self, number: int, input: PredictionInput) -> pa.Table:
        path = self._path(number)
        try:
            table = pq.read_table(path, partitioning=None, memory_map=False)
        except UNREADABLE as error:
            raise DataError(
                f"{path}: cannot be read ({error}); delete it and run the same command again"
            ) from error
        if table.num_rows != len(input.part(number)):
            raise DataError(f"{path}: has other rows; delete it and run the same command again")
        return table

    @contextmanager
    def _writing(self) -> Iterator[None]:
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
                f"({' '.join(why.split())}); finished parts stay in {short_path(self.folder)}: "
                "make room, then run the same command again"
            ) from error


def note_finished(finished: Sequence[int], input: PredictionInput) -> None:
    """Print a note that this run continues an ended run."""
    if finished:
        rows = sum(len(input.part(number)) for number in finished)
        note(
            f"going on: {len(finished)} of {input.parts} parts ({rows:,} rows) are finished already"
        )


def _difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the first difference of two identities in words; empty without a difference.

    For long lists this names the first entry that differs.
    """
    for name in dict.fromkeys([*wanted, *stored]):
        values: tuple[Any, Any] = (stored.get(name), wanted.get(name))
        if values[0] == values[1]:
            continue
        if all(isinstance(each, list) for each in values) and len(values[0]) == len(values[1]):
            values = next(pair for pair in zip(*values, strict=True) if pair[0] != pair[1])
        there, here = (textwrap.shorten(json.dumps(each), 160) for each in values)
        return f"{name}: {there} there, {here} here"
    return ""


@contextmanager
def _whole(path: Path, unfinished: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a file to write; at the end of the `with`, flush it to disk and give it its name."""
    unfinished = unfinished or path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
