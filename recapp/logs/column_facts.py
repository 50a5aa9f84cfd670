"""The facts of a column of raw logs, counted while the rows stream by.

    chunk of rows -> distinct values of the column and their counts (Arrow)
                  -> counts of all rows, of the first tenth and of the last tenth
                  -> `ColumnFacts`

All work is done on the distinct values of some ten thousand rows. A column is looked at as ids and,
as long as all of its values are numbers, as numbers. Memory holds counts of a bounded number of
values (`sampled_counts.py`), not rows.

Letters: N values, P parts of the rows.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import (
    id_type,
    is_id,
    is_list,
    is_number,
    is_text,
    texts_of_uuids,
    value_type,
    without_views,
)
from recapp.dataset.decode import as_text, decode_ids, shown
from recapp.logs.sampled_counts import Counted, SampledCounts, in_sample

PARTS = 20  # equal parts of the rows, in file order
ENDS = 2  # parts at the beginning, and at the end, that are compared
TOPS = (1, 10, 100)  # numbers of most frequent values whose share is shown
BUCKETS = 64  # of values, over which two parts are compared
SAMPLE_TEXTS = 4096  # texts in memory that tell a list in text
_MOST_OF_PART = 2**16
_KEPT_TEXTS = 10_000

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ColumnFacts:
    """The facts of a column.

    Args:
        name: The name of the column in the files.
        type: Its Arrow type.
        rows: The number of rows.
        missing: The number of nulls and empty texts.
        distinct: The number of distinct values, without missing ones; None for nested values.
        counted: `exact`, or `sample` for an estimate.
        singles: The share of the distinct values that occur once.
        top: The most frequent values as text, with their counts, the most frequent first.
        tops: The share of the values that the most frequent 1, 10 and 100 values take.
        drift: The distance of the distributions of the first and the last tenth of the rows, from 0
            to 1 (total variation over at most 64 buckets); None without values in both.
        new: The share of the last tenth's values that do not occur in the first tenth.
        numbers: The least value, quartiles and the largest value; None for a column with other
            values than numbers.
        whole: Whether all numbers are whole.
        means: The mean of the numbers in each twentieth of the rows, in file order; NaN without.
        ids_per_row: The mean length of the lists of a column of lists; None for others.
        lengths: The least and the largest length of the lists; None for others.
        texts: Some of its distinct texts.
    """

    name: str
    type: pa.DataType
    rows: int
    missing: int
    distinct: int | None
    counted: str
    singles: float
    top: tuple[tuple[str, int], ...]
    tops: tuple[float, ...]
    drift: float | None
    new: float | None
    numbers: tuple[float, ...] | None
    whole: bool
    means: tuple[float, ...]
    ids_per_row: float | None
    lengths: tuple[int, int] | None
    texts: tuple[str, ...] = field(repr=False, default=())

    @property
    def is_binary(self) -> bool:
        """Whether all values are 0 or 1, and both occur."""
        ends = self.numbers is not None and (self.numbers[0], self.numbers[-1]) == (0, 1)
        return ends and self.whole and self.lengths is None


class ColumnCounter:
    """Count the values of a column.

    Args:
        name: The name of the column in the files.
        type: Its Arrow type.
    """

    def __init__(self, name: str, type: pa.DataType) -> None:
        self.name = name
        self.type = type
        self._rows = 0
        self._missing = 0
        self._values = 0
        self._ids = _of_parts()
        self._numbers: dict[str, SampledCounts] | None = _of_parts()
        self._whole = True
        self._sums_P = np.zeros(PARTS)
        self._values_P = np.zeros(PARTS)
        self._texts: dict[int, str] = {}
        self._sample: dict[str, None] = {}
        self._lengths: tuple[int, int] | None = None
        self._countable = not pt.is_nested(id_type(type))

    def add(self, column: pa.Array, part: int) -> None:
        """Count the values of some rows, all of which are in one of the `PARTS` of the rows."""
        self._rows += len(column)
        lists = is_list(column.type)
        if lists or not self._countable:
            self._missing += column.null_count
        if not self._countable:
            return
        if lists:
            column = self._flat(without_views(column))
        values, counts = _distinct(column)
        present = pc.is_valid(values)
        if is_text(values.type):
            present = pc.and_(present, pc.not_equal(pc.binary_length(values), 0))
        here = present.to_numpy(zero_copy_only=False).astype(bool)
        if self._lengths is None:
            self._missing += int(counts[~here].sum())
        values = values.filter(present)
        counts = counts[here]
        self._values += int(counts.sum())
        if len(values):
            self._count(values, counts, part)

    def facts(self) -> ColumnFacts:
        """Return the facts of the values so far."""
        ids = _results(self._ids)
        numbers = None if self._numbers is None else _results(self._numbers)
        whole = ids["all"]
        top, top_counts = whole.most_frequent(TOPS[-1])
        taken = np.cumsum(top_counts) / max(self._values, 1)
        shown_top = zip(top[: TOPS[1]].tolist(), top_counts.tolist(), strict=False)
        singles = whole.counts_N[whole.sampled_N] == 1
        quantiles = _quantiles(numbers["all"]) if numbers and self._values else None
        means_P = self._sums_P / np.where(self._values_P > 0, self._values_P, np.nan)
        lists = self._lengths is not None
        return ColumnFacts(
            self.name,
            self.type,
            self._rows,
            self._missing,
            whole.distinct if self._countable else None,
            "exact" if whole.share == 1 else "sample",
            float(singles.mean()) if len(singles) else 0.0,
            tuple((self._texts[one], n) for one, n in shown_top if one in self._texts),
            tuple(float(taken[min(most, len(taken)) - 1]) if len(taken) else 0.0 for most in TOPS),
            _distance(ids, numbers if quantiles else None),
            _share_of_new(ids),
            quantiles,
            self._whole,
            tuple(means_P.tolist()) if quantiles else (),
            self._values / max(self._rows, 1) if lists else None,
            self._lengths,
            tuple(self._sample),
        )

    def _flat(self, lists: pa.Array) -> pa.Array:
        lengths = pc.min_max(pc.list_value_length(lists))
        least = lengths["min"].as_py()
        most = lengths["max"].as_py()
        if least is not None:
            before = self._lengths or (least, most)
            self._lengths = min(before[0], least), max(before[1], most)
        elif self._lengths is None:
            self._lengths = (0, 0)
        return lists.flatten()

    def _count(self, values: pa.Array, counts: npt.NDArray[np.int64], part: int) -> None:
        keys = _keys(values)
        for counter in _parts_of(self._ids, part):
            counter.add(keys, counts)
        for index in np.argsort(-counts, kind="stable")[: TOPS[1]].tolist():
            if len(self._texts) < _KEPT_TEXTS:
                self._texts.setdefault(int(keys[index]), _text_of(values[index]))
        if is_text(values.type) and len(self._sample) < SAMPLE_TEXTS:
            texts = as_text(values.slice(0, SAMPLE_TEXTS))
            self._sample |= dict.fromkeys(texts.to_pylist())
        numbers = None if self._numbers is None else _numbers(values)
        if numbers is None:
            self._numbers = None
            return
        assert self._numbers is not None
        self._whole = self._whole and bool((numbers == np.floor(numbers)).all())
        self._sums_P[part] += float(numbers @ counts)
        self._values_P[part] += float(counts.sum())
        for counter in _parts_of(self._numbers, part):
            counter.add((numbers + 0.0).view(np.int64), counts)  # -0.0 becomes 0.0


def _of_parts() -> dict[str, SampledCounts]:
    return {
        "all": SampledCounts(),
        "first": SampledCounts(_MOST_OF_PART),
        "last": SampledCounts(_MOST_OF_PART),
    }


def _results(counters: dict[str, SampledCounts]) -> dict[str, Counted]:
    return {part: counts.result() for part, counts in counters.items()}


def _parts_of(counters: dict[str, SampledCounts], part: int) -> list[SampledCounts]:
    more = ["first"] * (part < ENDS) + ["last"] * (part >= PARTS - ENDS)
    return [counters[name] for name in ("all", *more)]


def _distinct(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the distinct values of a column, with null if there are any, and their counts."""
    counted = pc.value_counts(texts_of_uuids(without_views(column)))
    values = counted.field("values")
    values = values.cast(value_type(values.type))
    if pt.is_decimal(values.type):
        values = values.cast(pa.float64())
    return values, counted.field("counts").to_numpy()


def _keys(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return a 64-bit key of each value: integers as they are, text by its hash."""
    if pt.is_floating(values.type):
        numbers: npt.NDArray[np.int64] = (_plain(values) + 0.0).view(np.int64)
        return numbers
    if is_id(values.type):
        return decode_ids(values)
    if pt.is_boolean(values.type):
        return decode_ids(values.cast(pa.int64()))
    if pt.is_temporal(values.type):
        bits = 32 if values.type.bit_width == 32 else 64
        return decode_ids(values.view(pa.int32() if bits == 32 else pa.int64()))
    return decode_ids(values.cast(pa.string()))


def _numbers(values: pa.Array) -> FloatArray | None:
    """Return values as numbers, true and false as 1 and 0; None if one is none, or not finite."""
    if is_text(values.type):
        values = as_text(values)
        truth = pc.all(pc.match_substring_regex(values, r"\A(true|True|TRUE|false|False|FALSE)\z"))
        try:
            values = values.cast(pa.bool_() if truth.as_py() else pa.float64())
        except pa.ArrowInvalid:
            return None
    elif not is_number(values.type):
        return None
    numbers = _plain(values)
    return numbers if np.isfinite(numbers).all() else None


def _plain(values: pa.Array) -> FloatArray:
    plain: FloatArray = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return plain


def _text_of(value: pa.Scalar) -> str:
    return shown(value).strip("'") if is_text(value.type) else str(value.as_py())


def _quantiles(counted: Counted) -> tuple[float, ...]:
    """Return the least value, the quartiles and the largest value of counted numbers."""
    numbers = counted.values_N.view(np.float64)
    order = np.argsort(numbers)
    weights = counted.counts_N / np.where(counted.sampled_N, counted.share, 1)
    ends = np.cumsum(weights[order])
    places = np.searchsorted(ends, np.arange(5) / 4 * ends[-1])
    return tuple(numbers[order][np.minimum(places, len(order) - 1)].tolist())


def _distance(ids: dict[str, Counted], numbers: dict[str, Counted] | None) -> float | None:
    """Return the total variation of the first and the last part over buckets: of the most frequent
    values and all others; or of numbers, if there are many.
    """
    first = ids["first"]
    last = ids["last"]
    if not len(first.values_N) or not len(last.values_N):
        return None
    if numbers and len(numbers["all"].values_N) > BUCKETS:
        every = numbers["all"].values_N.view(np.float64)
        edges = np.unique(np.quantile(every, np.arange(1, BUCKETS) / BUCKETS))
        shares = [
            np.bincount(
                np.searchsorted(edges, numbers[part].values_N.view(np.float64)),
                weights=numbers[part].counts_N,
                minlength=len(edges) + 1,
            )
            for part in ("first", "last")
        ]
    else:
        top, _ = ids["all"].most_frequent(BUCKETS - 1)
        shares = [
            np.append(counts := part.of(top), part.counts_N.sum() - counts.sum()).astype(float)
            for part in (first, last)
        ]
    before, after = (share / share.sum() for share in shares)
    return float(np.abs(before - after).sum() / 2)


def _share_of_new(ids: dict[str, Counted]) -> float | None:
    """Return the share of the last part's values that the first part does not have, among values
    that both samples could have.
    """
    first = ids["first"]
    last = ids["last"]
    if not len(first.values_N) or not len(last.values_N):
        return None
    both = in_sample(last.values_N, min(first.share, last.share))
    counts = last.counts_N[both]
    new = first.of(last.values_N[both]) == 0
    return float(counts[new].sum() / max(counts.sum(), 1))
