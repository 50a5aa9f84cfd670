"""What a conversion finds in the rows before it converts them: types of text, the cuts of a split
by time, vocabularies of the training rows. Each is a pass over the parts of the logs.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import or_
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recapp.dataset.arrow_types import is_text, value_type
from recapp.errors import DataError
from recapp.logs.column_types import OWN, Spelling, spelling_of, typed
from recapp.logs.log_parts import Part, Workers, naming
from recapp.logs.splits import Split, cuts_of_order, cuts_of_times, times_of
from recapp.logs.vocabularies import Occurrences, encoded, vocabulary
from recapp.run.recipe import Convert
from recapp.settings.whole_file import write_whole

FITTED = "state/fitted.json"
VOCABULARIES = "vocabularies"
LOOKS = 8  # chunks of rows, all over the logs, in which types of text are found at first


class OtherKindError(DataError):
    """A value is none of the kind that was found in some rows."""


@dataclass(frozen=True)
class Fitted:
    """The functions of a conversion, whose values were found in the rows.

    Args:
        kinds: The kind of each column (`column_types.py`), in the order of the results.
        given: The columns whose kinds are settings.
        separator: The sign between the values of a text, by column.
        split: The rule that splits rows.
        vocabularies: The values of vocabularies by column, in the order of their ids.
    """

    kinds: Mapping[str, str]
    given: Collection[str]
    separator: Mapping[str, str]
    split: Split
    vocabularies: Mapping[str, pa.Array]

    def column(self, name: str, chunk: pa.RecordBatch, path: str, first: int) -> pa.Array:
        """Return a column in its type.

        Args:
            name: The column.
            chunk: Rows of the logs.
            path: Their file, for errors.
            first: The number of the first row in the logs, for errors.

        Raises:
            DataError: A value is none of this type.
        """
        given = name in self.given
        sign = self.separator.get(name)
        with naming(name, path, first, DataError if given else OtherKindError):
            return typed(chunk.column(name), self.kinds[name], sign, spelled=not given)

    def table(self, chunk: pa.RecordBatch, path: str, first: int) -> pa.Table:
        """Return rows of the logs as they are written. Arguments as for `column`."""
        columns = {name: self.column(name, chunk, path, first) for name in self.kinds}
        return pa.table({name: self.with_ids(name, one) for name, one in columns.items()})

    def with_ids(self, name: str, values: pa.Array) -> pa.Array:
        """Return values, or lists of them, as ids of a column's vocabulary, if it has one."""
        known = self.vocabularies.get(name)
        return values if known is None else encoded(values, known)


def fitted(
    settings: Convert, parts: Sequence[Part], work: Path, workers: Workers, *, in_all: bool
) -> Fitted:
    """Return what is found in the rows, from the files of a conversion that was ended if they are
    there.

    Args:
        settings: The settings.
        parts: The logs.
        work: The directory of the conversion.
        workers: The threads.
        in_all: Whether types are found in all values, or in `LOOKS` chunks.

    Raises:
        OtherKindError: A value is none of the type that was found in some chunks.
    """
    shares = (1 - settings.val_share - settings.test_share, settings.val_share, settings.test_share)
    column = settings.time if settings.split == "time" else settings.user
    split = Split(settings.split, shares, column, settings.seed)
    separator = settings.separator or {}
    given = settings.types or {}
    file = work / FITTED
    if not file.is_file():
        some = _kinds(settings, parts, workers, in_all=in_all)
        if None in some.values():  # columns without a value in these rows
            some = _kinds(settings, parts, workers, in_all=True)
        kinds = {name: kind or "text" for name, kind in some.items()}
        split = replace(split, cuts=_cuts(split, parts, workers))
        found = Fitted(kinds, given, separator, split, {})
        _write_vocabularies(settings, found, parts, work, workers)
        write_whole(file, json.dumps({"kinds": kinds, "cuts": split.cuts}))
    known = json.loads(file.read_text())
    cuts = tuple(known["cuts"]) if known["cuts"] else None
    vocabularies = {
        name: pq.read_table(vocabulary_file(work, name))["value"].combine_chunks()
        for name in settings.vocabularies or ()
    }
    split = replace(split, cuts=cuts)
    return Fitted(known["kinds"], given, separator, split, vocabularies)


def vocabulary_file(folder: Path, column: str) -> Path:
    """Return the file of the vocabulary of a column: values and counts in the order of the ids."""
    return folder / VOCABULARIES / f"{column}.parquet"


def _kinds(
    settings: Convert, parts: Sequence[Part], workers: Workers, *, in_all: bool
) -> dict[str, str | None]:
    """Return the kind of each column: given, its own, or that of its texts in all rows or some;
    None if it has none there.
    """
    types = parts[0].source.types
    names = settings.columns or tuple(types.names)
    given = settings.types or {}
    kinds: dict[str, str | None] = {name: given.get(name, OWN) for name in names}
    texts = [
        name for name in names if name not in given and is_text(value_type(types.field(name).type))
    ]
    separator = settings.separator or {}
    some = parts if in_all else parts[:: -(-len(parts) // LOOKS)]
    most = None if in_all else -(-LOOKS // len(some))

    def look(part: Part) -> list[Spelling]:
        here = [Spelling.NOTHING] * len(texts)
        for _, _, chunk in islice(part.chunks(texts), most):
            for n, name in enumerate(texts):
                here[n] |= spelling_of(chunk.column(name), separator.get(name))
        return here

    found = [*workers.each(some if texts else (), look)]
    return kinds | {
        name: reduce(or_, each).kind
        for name, each in zip(texts, zip(*found, strict=True), strict=True)
    }


def _cuts(split: Split, parts: Sequence[Part], workers: Workers) -> tuple[int, int] | None:
    if split.rule == "user":
        return None
    if split.rule == "order":
        return cuts_of_order(split.shares, sum(part.source.rows for part in parts))

    def look(part: Part) -> pa.Table:
        counts = Occurrences()
        for path, first, chunk in part.chunks([str(split.column)]):
            counts.add(pa.array(times_of(chunk, str(split.column), path, first)))
        return counts.result()

    times = Occurrences()
    for here in workers.each(parts, look):
        times.merge(here)
    counted = times.result().sort_by("value")
    return cuts_of_times(split.shares, *(column.to_numpy() for column in counted.columns))


def _write_vocabularies(
    settings: Convert, found: Fitted, parts: Sequence[Part], work: Path, workers: Workers
) -> None:
    names = settings.vocabularies or {}

    def look(part: Part) -> dict[str, pa.Table]:
        counts = {name: Occurrences() for name in names}
        for path, first, chunk in part.chunks([*names, str(found.split.column)]):
            trains = pa.array(found.split.of(chunk, path, first) == 0)
            for name, one in counts.items():
                one.add(found.column(name, chunk, path, first).filter(trains))
        return {name: one.result() for name, one in counts.items()}

    counts = {name: Occurrences() for name in names}
    for here in workers.each(parts if names else (), look):
        for name, table in here.items():
            counts[name].merge(table)
    for name, least in names.items():
        file = vocabulary_file(work, name)
        file.parent.mkdir(exist_ok=True)
        pq.write_table(vocabulary(counts[name], least), file)
