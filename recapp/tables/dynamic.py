"""Dynamic tables: any int64 is a key, and a row exists once its key has been trained.

    key  --mix-->  position (64 bits)  --top 6 bits-->  run 0..63  --plan-->  rank

A bijection of all 2^64 values mixes each key to its *position*, so no two keys ever share a row and
positions are even, whatever the keys are. Equal parts of the positions are the 64 *runs*: to a plan
a dynamic table has 64 rows, its runs, which are cut and placed like any rows. Within a rank a store
finds the rows that exist by their positions (`recapp/engine/dynamic_store.py`).

A missing id is a key like any other, so it has a row of its own. Positions are held as signed
integers, smallest first, because torch knows no unsigned ones.

The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood 2014; variant 13 of
Stafford's, public domain).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from recapp.errors import ConfigError, suggest
from recapp.settings.value_kinds import Positive, Rows
from recapp.settings.values import Within

if TYPE_CHECKING:
    from torch import Tensor

DYNAMIC = "dynamic"
"""What stands for the number of rows of a dynamic table in settings."""
RUNS = 64
"""Equal parts of the positions, by which plans cut a table and within which rows are evicted."""
RUN_BITS = 6
FIND_BYTES = 20  # a position, a strip, and 1 / .42 numbers of slots (numba_key_index.py)
USE_BYTES = 8  # a row's last use and the number of its uses
SKETCH_LINES = 4
COUNT_BYTES = 4
MOST_STEPS = 2**31 - 1  # counts and steps are kept in 32 bits
MOST_OF_ROWS = 2**48
EXPECTED_ROWS = 100_000
"""Rows that the planner counts with where nothing is known of a table."""

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd, as signed 64-bit numbers
_INVERSES = (-0x6921E4E8C0EE6F77, 0x319642B2D24D8EC3)  # of the multipliers, modulo 2^64
_SHIFTS = (30, 27, 31)


class Eviction(StrEnum):
    """Which rows leave a table of `max_rows` when there are too many.

    - `lru`: those that were not used for the longest time.
    - `lfu`: those that were used in the fewest steps.
    - `ttl`: those that were not used for `ttl_steps` steps, whether or not there are too many; and
      of the others as `lru`.
    """

    LRU = "lru"
    LFU = "lfu"
    TTL = "ttl"


class Counter(StrEnum):
    """How steps in which a key was seen are counted before it has a row.

    - `exact`: one count for each key, 20 to 30 bytes of memory each.
    - `sketch`: a count-min sketch of fixed size (Cormode and Muthukrishnan 2005), which may count
      too many for a few keys and never too few.
    """

    EXACT = "exact"
    SKETCH = "sketch"


@dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """Which keys of a dynamic table get rows, and which rows leave it.

    Args:
        expected_rows: Rows that the planner counts with, and that say how large start values are;
            None: as many as the data set tells, `max_rows`, or 100,000.
        max_rows: Most rows of the table, in all ranks together; None: as many as memory holds. Each
            of the 64 runs has its share.
        seen: A key gets its row in the step in which it is seen for the `seen`th time. It counts
            once for each step of the run in which it occurs on any rank. Until then it answers its
            start value and learns nothing.
        counter: "exact" or "sketch".
        sketch_width: Counts in each of the 4 lines of the sketch, in all runs together.
        eviction: "lru", "lfu" or "ttl".
        ttl_steps: Of eviction "ttl".

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
            least = RUNS if name in ("max_rows", "sketch_width") else 1
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
                given = getattr(self, name)
                raise ConfigError(f"{name}={given}: {suggest(str(given), known)}") from None
        if self.eviction is Eviction.TTL and self.ttl_steps is None:
            raise ConfigError("eviction=ttl: needs ttl_steps, a whole number of at least 1")
        if self.eviction is not Eviction.TTL and self.ttl_steps is not None:
            raise ConfigError(
                f"ttl_steps={self.ttl_steps}: is of eviction=ttl, and eviction={self.eviction}: "
                "set that, or leave ttl_steps out"
            )

    @property
    def tracks_use(self) -> bool:
        """Return whether it matters when a row was used."""
        return self.max_rows is not None or self.eviction is Eviction.TTL

    @property
    def bytes_beside_a_row(self) -> int:
        """Return the bytes that a store holds beside each row: its position and strip, where it
        lies, and when it was used, where that matters.
        """
        return FIND_BYTES + USE_BYTES * self.tracks_use

    @property
    def bytes_of_sketch(self) -> int:
        """Return the bytes of the table's count-min sketch, if it has one."""
        counts = self.seen > 1 and self.counter is Counter.SKETCH
        return SKETCH_LINES * COUNT_BYTES * self.sketch_width if counts else 0

    def most_rows(self, run: int) -> int | None:
        """Return the most rows of a run; None where nothing limits them."""
        if self.max_rows is None:
            return None
        return (run + 1) * self.max_rows // RUNS - run * self.max_rows // RUNS


def dynamic_rows(values: "DynamicRows | Mapping[str, Any]", setting: str) -> DynamicRows:
    """Return the record that settings describe.

    Args:
        values: The record, or its fields.
        setting: The setting they stand under, for errors.

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
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, _SHIFTS[2])


def keys_of(positions_N: "Tensor") -> "Tensor":
    """Return the keys of positions: the inverse of `positions_of`."""
    x = _unshifted(positions_N, _SHIFTS[2])
    for shift, inverse in zip(_SHIFTS[1::-1], _INVERSES[::-1], strict=True):
        x = _unshifted(x * inverse, shift)
    return x


def runs_of(positions_N: "Tensor") -> "Tensor":
    """Return the run of each position, 0..63."""
    return (positions_N >> (64 - RUN_BITS)) + RUNS // 2


def first_position(run: int) -> int:
    """Return the smallest position of a run."""
    return (run - RUNS // 2) << (64 - RUN_BITS)


def _shifted(x: "Tensor", bits: int) -> "Tensor":
    """Shift to the right as unsigned numbers are shifted."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _unshifted(x: "Tensor", bits: int) -> "Tensor":
    """Return the number that `x ^ (x >> bits)` was made of."""
    found = x
    for _ in range(64 // bits):
        found = x ^ _shifted(found, bits)
    return found
