"""Dynamic tables: any int64 is a key, and a row exists once its key has been trained.

    key  --mix-->  position (64 bits)  --top 6 bits-->  run 0..63  --plan-->  rank

A bijection of all 2^64 values maps each key to its *position*. So no two keys share a row, and
positions are spread evenly, whatever the keys are. The positions have 64 equal parts, the *runs*:
in a plan a dynamic table has 64 rows, its runs, which are cut and placed like any rows. Within a
rank a store finds the existing rows by their positions (`recapp/engine/dynamic_store.py`).

A missing id is a key like any other, so it has its own row. Positions are signed integers, in
ascending order, because torch has no unsigned ones.

The mixing function is the finaliser of splitmix64 (Steele, Lea and Flood 2014; variant 13 of
Stafford's, public domain).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from recapp.errors import ConfigError, suggest
from recapp.settings.values import Positive, Rows, Within

if TYPE_CHECKING:
    from torch import Tensor

# The number of rows of a dynamic table in settings.
DYNAMIC = "dynamic"
# The number of runs: plans cut tables by runs, and rows are evicted within a run.
RUNS = 64
RUN_BITS = 6
FIND_BYTES = 20  # a position, a strip, and 1 / .42 buckets (numba_key_index.py)
USE_BYTES = 8  # the step of a row's last use and its number of uses
SKETCH_LINES = 4
COUNT_BYTES = 4
MOST_STEPS = 2**31 - 1  # counts and steps have 32 bits
MOST_OF_ROWS = 2**48
# Rows that the planner assumes for a table without any information.
EXPECTED_ROWS = 100_000

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd signed 64-bit numbers
_INVERSES = (-0x6921E4E8C0EE6F77, 0x319642B2D24D8EC3)  # of the multipliers, modulo 2^64
_SHIFTS = (30, 27, 31)


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
            limits it. Each of the 64 runs has an equal share.
        seen: A key gets its row in the `seen`th step of the training in which it occurs on any
            rank. Until then a lookup of the key returns its start value, and the key learns
            nothing.
        counter: "exact" or "sketch".
        sketch_width: The number of counts in each of the 4 lines of the sketch, in all runs
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

    def most_rows(self, run: int) -> int | None:
        """Return the largest number of rows of a run; None without a limit."""
        if self.max_rows is None:
            return None
        return (run + 1) * self.max_rows // RUNS - run * self.max_rows // RUNS


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
    """Shift to the right, like unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _unshifted(x: "Tensor", bits: int) -> "Tensor":
    """Return the number y with `y ^ (y >> bits)` equal to `x`."""
    y = x
    for _ in range(64 // bits):
        y = x ^ _shifted(y, bits)
    return y
