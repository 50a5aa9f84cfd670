"""The positions of rows, which plans cut and place: those of keys in dynamic tables, and those of
rows that are dealt over all strips.

In a dynamic table any int64 is a key, and a row exists once its key has been trained.

    key  --mix-->  position (64 bits)  --top 6 bits-->  stretch 0..63  --plan-->  rank

A bijection of all 2^64 values maps each key to its *position*. So no two keys share a row, and
positions are spread evenly, whatever the keys are. The positions have 64 equal parts, the
*stretches*: in a plan a dynamic table has 64 rows, its stretches, which are cut and placed like any
rows. Within a rank a store finds the existing rows by their positions
(`recapp/engine/dynamic_store.py`).

A missing id is a key like any other, so it has its own row. Positions are signed integers, in
ascending order, because torch has no unsigned ones.

The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood 2014; variant 13 of
Stafford's, public domain).

In other tables a row's position is its number or, in a mixed order, a number far from those of its
neighbours, so that frequent rows are dealt over all strips.

    row  --x multiplier + shift, mod R-->  position 0..R-1  --plan-->  rank

Ids may be sorted by frequency, or the newest ids may be the most frequent. Then most rows of a
batch lie in one contiguous strip, on one rank. Under `row_order: mixed` a plan's rectangles are
rectangles of *positions*. Rows keep their numbers everywhere else: start values, `state_dict`,
whole tables.

The bijection is affine. The multiplier is near R / 1.618, coprime to R, and R / multiplier has
small partial quotients as a continued fraction. So the positions of neighbouring rows spread as
evenly as points on a circle can (three-distance theorem). Of any k consecutive rows, each strip has
its share up to a handful of rows; with random positions the error would be the square root of k,
and the remainder modulo n is even only for n equal strips. The load of a strip then differs from
its share by as little, however steeply frequency falls along the rows (sum over all k). Rows whose
numbers advance in steps can still crowd, as they can in natural order.

The shift depends on the table's name: otherwise the first rows of all tables would lie on rank 0.

A checkpoint holds multiplier and shift (`row_orders` in the manifest), so a later version of
`mixed_order` may choose others.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from recapp.errors import ConfigError, suggest
from recapp.settings.values import Positive, Rows, Within

if TYPE_CHECKING:
    from torch import Tensor

# The number of rows of a dynamic table in settings.
DYNAMIC = "dynamic"
# The number of stretches: plans cut tables by stretches, and rows are evicted within a stretch.
STRETCHES = 64
STRETCH_BITS = 6
FIND_BYTES = 20  # a position, a strip, and 1 / .42 buckets (numba_key_index.py)
USE_BYTES = 8  # the step of a row's last use and its number of uses
SKETCH_LINES = 4
COUNT_BYTES = 4
MOST_STEPS = 2**31 - 1  # counts and steps have 32 bits
MOST_OF_ROWS = 2**48
# Rows that the planner assumes for a table without any information.
EXPECTED_ROWS = 100_000

MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd signed 64-bit numbers
INVERSES = (-0x6921E4E8C0EE6F77, 0x319642B2D24D8EC3)  # of the multipliers, modulo 2^64
SHIFTS = (30, 27, 31)


class Eviction(StrEnum):
    """The rows that leave a table when it has more than `max_rows`.

    - `lru`: the rows that were not used for the longest time.
    - `lfu`: the rows that were used in the fewest steps.
    - `ttl`: all rows that were not used for `ttl_steps` steps, even if there are not too many; of
      the others, the rows that `lru` takes.
    """

    LRU = "lru"
    LFU = "lfu"
    TTL = "ttl"


class Counter(StrEnum):
    """The counter of steps in which a key occurred, before the key has a row.

    - `exact`: one count for each key, with 20 to 30 bytes of memory.
    - `sketch`: a count-min sketch of fixed size (Cormode and Muthukrishnan 2005). Counts of a few
      keys may be too high, and none is too low.
    """

    EXACT = "exact"
    SKETCH = "sketch"


@dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """The admission of keys to a dynamic table, and the eviction of its rows.

    Args:
        expected_rows: The number of rows that the planner assumes and that sets the range of start
            values. None: the number from the data set, else `max_rows`, else 100,000.
        max_rows: The largest number of rows of the table, on all ranks together; None: only memory
            limits it. Each of the 64 stretches has an equal share.
        seen: A key gets its row in the `seen`th step of the training in which it occurs on any
            rank. Until then a lookup of the key returns its start value, and the key learns
            nothing.
        counter: "exact" or "sketch".
        sketch_width: The number of counts in each of the 4 lines of the sketch, in all stretches
            together.
        eviction: "lru", "lfu" or "ttl".
        ttl_steps: The number of steps for eviction "ttl".

    Raises:
        ConfigError: A field is out of range.
    """

    expected_rows: Rows | None = None
    max_rows: Annotated[int, Within(64, 2**48)] | None = None
    seen: Positive = 1
    counter: Counter = Counter.EXACT
    sketch_width: Annotated[int, Within(64, 2**40)] = 1 << 20
    eviction: Eviction = Eviction.LRU
    ttl_steps: Positive | None = None

    def __post_init__(self) -> None:
        for name in ("expected_rows", "max_rows", "seen", "sketch_width", "ttl_steps"):
            least = STRETCHES if name in ("max_rows", "sketch_width") else 1
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name}={value}: must be a whole number of at least {least}")
            most = MOST_STEPS if name in ("seen", "ttl_steps") else MOST_OF_ROWS
            if value is not None and value > most:
                raise ConfigError(f"{name}={value}: must be a whole number of at most {most}")
        for name, kind in (("counter", Counter), ("eviction", Eviction)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                known = [member.value for member in kind]
                choice = getattr(self, name)
                raise ConfigError(f"{name}={choice}: {suggest(str(choice), known)}") from None
        if self.eviction is Eviction.TTL and self.ttl_steps is None:
            raise ConfigError("eviction=ttl: needs ttl_steps, a whole number of at least 1")
        if self.eviction is not Eviction.TTL and self.ttl_steps is not None:
            raise ConfigError(
                f"ttl_steps={self.ttl_steps}: only eviction=ttl reads it, and here "
                f"eviction={self.eviction}: set eviction=ttl, or leave ttl_steps out"
            )

    @property
    def tracks_use(self) -> bool:
        """Return whether eviction needs the last use of rows."""
        return self.max_rows is not None or self.eviction is Eviction.TTL

    @property
    def bytes_beside_a_row(self) -> int:
        """Return the bytes per row that a store holds in addition: position, strip, index and, if
        `tracks_use`, the last use.
        """
        return FIND_BYTES + USE_BYTES * self.tracks_use

    @property
    def bytes_of_sketch(self) -> int:
        """Return the bytes of the table's count-min sketch; 0 without one."""
        counts = self.seen > 1 and self.counter is Counter.SKETCH
        return SKETCH_LINES * COUNT_BYTES * self.sketch_width if counts else 0

    def most_rows(self, stretch: int) -> int | None:
        """Return the largest number of rows of a stretch; None without a limit."""
        if self.max_rows is None:
            return None
        return (stretch + 1) * self.max_rows // STRETCHES - stretch * self.max_rows // STRETCHES


def dynamic_rows(values: "DynamicRows | Mapping[str, Any]", setting: str) -> DynamicRows:
    """Return the record from settings.

    Args:
        values: The record, or the fields of the record.
        setting: The setting that holds the fields, for errors.

    Raises:
        ConfigError: A field is unknown or out of range.
    """
    if isinstance(values, DynamicRows):
        return values
    known = [f.name for f in fields(DynamicRows)]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{setting}={values}: must be a mapping of {', '.join(known)}")
    for name in values:
        if name not in known:
            raise ConfigError(f"{setting}.{name}: unknown; {suggest(str(name), known)}")
    try:
        return DynamicRows(**values)
    except ConfigError as error:
        raise ConfigError(f"{setting}.{error}") from None


def positions_of(keys_N: "Tensor") -> "Tensor":
    """Return the positions of int64 keys."""
    x = keys_N
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ shifted(x, shift)) * multiplier
    return x ^ shifted(x, SHIFTS[2])


def keys_of(positions_N: "Tensor") -> "Tensor":
    """Return the keys of positions: the inverse of `positions_of`."""
    x = _unshifted(positions_N, SHIFTS[2])
    for shift, inverse in zip(SHIFTS[1::-1], INVERSES[::-1], strict=True):
        x = _unshifted(x * inverse, shift)
    return x


def stretches_of(positions_N: "Tensor") -> "Tensor":
    """Return the stretch of each position, 0..63."""
    return (positions_N >> (64 - STRETCH_BITS)) + STRETCHES // 2


def first_position(stretch: int) -> int:
    """Return the smallest position of a stretch."""
    return (stretch - STRETCHES // 2) << (64 - STRETCH_BITS)


def shifted(x: "Tensor", bits: int) -> "Tensor":
    """Shift to the right, like unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _unshifted(x: "Tensor", bits: int) -> "Tensor":
    """Return the number y with `y ^ (y >> bits)` equal to `x`."""
    y = x
    for _ in range(64 // bits):
        y = x ^ shifted(y, bits)
    return y


# `natural`: rows lie by number. `mixed`: neighbours are dealt over all strips.
RowOrderName = Literal["natural", "mixed"]
ROW_ORDERS: tuple[RowOrderName, ...] = get_args(RowOrderName)

SEARCHED = 64  # candidate multipliers on either side of R / 1.618
PART_ROWS = 1 << 18  # rows moved at a time between orders; their numbers take a few MB
MOST_ROWS = 2**53  # partial products of such numbers fit into 63 bits


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A bijection of the rows of a table: position = (multiplier * row + shift) mod rows.

    Args:
        rows: Rows of the table.
        multiplier: A number below `rows` and coprime to it.
        shift: A number below `rows`.

    Raises:
        ValueError: The numbers make no bijection.
    """

    rows: int
    multiplier: int
    shift: int

    def __post_init__(self) -> None:
        numbers = (self.rows, self.multiplier, self.shift)
        if any(type(n) is not int for n in numbers) or not (
            0 < self.rows <= MOST_ROWS
            and 0 <= self.shift < self.rows
            and 0 <= self.multiplier < max(self.rows, 2)
            and math.gcd(self.multiplier, self.rows) == 1
        ):
            raise ValueError(f"row order of {self.rows} rows: x {self.multiplier} + {self.shift}")

    def positions_of(self, row_N: "Tensor") -> "Tensor":
        """Return the positions of rows, int64."""
        return affine(row_N, self.multiplier, self.shift, self.rows)

    def rows_at(self, position_N: "Tensor") -> "Tensor":
        """Return the rows at positions: the inverse of `positions_of`."""
        inverse = pow(self.multiplier, -1, self.rows)
        back = -inverse * self.shift % self.rows
        return affine(position_N, inverse, back, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the order as plain values, the form in a manifest."""
        return {"order": "mixed", "multiplier": self.multiplier, "shift": self.shift}

    @staticmethod
    def from_dict(plain: Mapping[str, Any], rows: int) -> "RowOrder":
        """Return the order from the plain values of `to_dict`.

        Args:
            plain: The values.
            rows: Rows of the table.

        Raises:
            KeyError, TypeError, ValueError: `to_dict` does not make such values.
        """
        if plain["order"] != "mixed" or set(plain) != {"order", "multiplier", "shift"}:
            raise ValueError(f"row order {plain['order']}")
        return RowOrder(rows, plain["multiplier"], plain["shift"])


@lru_cache(maxsize=4096)
def mixed_order(table: str, rows: int) -> RowOrder:
    """Return the mixed order of a table.

    Args:
        table: The name of the table.
        rows: The number of rows of the table.
    """
    golden = round(rows * (math.sqrt(5) - 1) / 2)
    near = range(max(1, golden - SEARCHED), min(golden + SEARCHED, max(1, rows - 1)) + 1)
    coprime = [n for n in near if math.gcd(n, rows) == 1]
    best = min(coprime, key=lambda n: (_quotients(rows, n), abs(n - golden), n))
    return RowOrder(rows, best, zlib.crc32(table.encode()) % rows)


def _quotients(a: int, b: int) -> int:
    """Return the sum of the partial quotients of a / b. The smaller it is, the more evenly the
    multiples of b modulo a are spread.
    """
    total = 0
    while b:
        total += a // b
        a, b = b, a % b
    return total


def affine(row_N: "Tensor", factor: int, shift: int, rows: int) -> "Tensor":
    """Return the exact (row * factor + shift) mod rows. If products do not fit into 63 bits, rows
    are multiplied a few bits at a time.

    Args:
        row_N: Rows, of any integer type.
        factor: The multiplier.
        shift: The shift.
        rows: The number of rows of the table.
    """
    row_N = row_N.long()
    bits = 62 - rows.bit_length()
    if bits >= rows.bit_length():
        return (row_N * factor).add_(shift).remainder_(rows)
    made_N = row_N.new_zeros(row_N.shape)
    for first in reversed(range(0, rows.bit_length(), bits)):
        digit_N = (row_N >> first) & ((1 << bits) - 1)
        made_N = ((made_N << bits) % rows + digit_N * factor) % rows
    return (made_N + shift) % rows


def moved_rows(
    positions: range, stored: RowOrder | None, target_order: RowOrder | None, target: range
) -> "tuple[Tensor, Tensor]":
    """Return the target of each position when rows move from one order to another.

    Args:
        positions: At most `PART_ROWS` positions in the order of the stored rows.
        stored: The order of the stored rows; None: by row number.
        target_order: The order afterwards; None: by row number.
        target: The positions to fill in that order.

    Returns:
        Indices in `positions`, and for each the index in `target`, on the CPU.
    """
    import torch  # only here, because plans need no torch

    position_N = torch.arange(positions.start, positions.stop, device="cpu")
    row_N = position_N if stored is None else stored.rows_at(position_N)
    target_N = (row_N if target_order is None else target_order.positions_of(row_N)) - target.start
    from_M = ((target_N >= 0) & (target_N < len(target))).nonzero()[:, 0]
    return from_M, target_N[from_M]
