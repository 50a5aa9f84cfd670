"""The order in which the rows of a table lie: by number, or mixed, so that rows which are asked for
more often than others are dealt over all strips.

    row  --x multiplier + shift, mod R-->  position 0..R-1  --plan-->  rank

Ids may be sorted by frequency, or the newest ids may be the busiest. Then most rows that a batch
asks for lie in one contiguous strip, on one rank. Under `row_order: mixed` a plan's rectangles are
rectangles of *positions*. Rows keep their numbers everywhere else: start values, `state_dict`,
whole tables.

The bijection is affine. The multiplier is near R / 1.618, coprime to R, and R / multiplier has
small partial quotients as a continued fraction; so the positions of neighbouring rows spread as
evenly as points on a circle can (three-distance theorem). Any run of k rows, not the first k alone,
has its share of any strip but for a handful of rows, where random positions would be off by the
square root of k, and the remainder modulo n is even for n equal strips only. What is asked of a
strip then differs from its share by as little, however steeply frequency falls along such a run:
sum the runs. Rows whose numbers advance in steps can still crowd, as they can in their own order.

The shift depends on the table's name, so that the first rows of many tables are not all on rank 0.

A checkpoint holds multiplier and shift (`row_orders` of its manifest), so `mixed_order` may choose
others one day.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

RowOrderName = Literal["natural", "mixed"]
"""`natural`: rows lie by number. `mixed`: neighbours are dealt over all strips."""
ROW_ORDERS: tuple[RowOrderName, ...] = get_args(RowOrderName)

SEARCHED = 64  # multipliers on either side of R / 1.618 of which the best is taken
PART_ROWS = 1 << 18  # moved at a time between orders: their numbers take a few MB
MOST_ROWS = 2**53  # products of parts of such numbers fit into 63 bits


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A bijection of the rows of a table: position = (multiplier * row + shift) mod rows.

    Args:
        rows: Rows of the table.
        multiplier: Coprime to it, below it.
        shift: Below it.

    Raises:
        ValueError: Numbers that make no bijection.
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
        return affine(row_N, self.multiplier, self.shift, self.rows, self.rows)

    def rows_at(self, position_N: "Tensor") -> "Tensor":
        """Return the rows at positions: the inverse of `positions_of`."""
        inverse = pow(self.multiplier, -1, self.rows)
        back = -inverse * self.shift % self.rows
        return affine(position_N, inverse, back, self.rows, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values: what a manifest says of a table."""
        return {"order": "mixed", "multiplier": self.multiplier, "shift": self.shift}

    @staticmethod
    def from_dict(plain: Mapping[str, Any], rows: int) -> "RowOrder":
        """Return what `to_dict` has made plain values of.

        Args:
            plain: The values.
            rows: Rows of the table.

        Raises:
            KeyError, TypeError, ValueError: `to_dict` would not make such values.
        """
        if plain["order"] != "mixed" or set(plain) != {"order", "multiplier", "shift"}:
            raise ValueError(f"row order {plain['order']}")
        return RowOrder(rows, plain["multiplier"], plain["shift"])


@lru_cache(maxsize=4096)
def mixed_order(table: str, rows: int) -> RowOrder:
    """Return the mixed order of a table.

    Args:
        table: Its name.
        rows: Its rows.
    """
    golden = round(rows * (math.sqrt(5) - 1) / 2)
    near = range(max(1, golden - SEARCHED), min(golden + SEARCHED, max(1, rows - 1)) + 1)
    coprime = [n for n in near if math.gcd(n, rows) == 1]
    best = min(coprime, key=lambda n: (_quotients(rows, n), abs(n - golden), n))
    return RowOrder(rows, best, zlib.crc32(table.encode()) % rows)


def _quotients(a: int, b: int) -> int:
    """Return the sum of the partial quotients of a / b, which bounds how unevenly the multiples of
    b modulo a lie.
    """
    total = 0
    while b:
        total += a // b
        a, b = b, a % b
    return total


def affine(
    row_N: "Tensor",
    factor: "int | Tensor",
    shift: "int | Tensor",
    rows: "int | Tensor",
    most: int,
) -> "Tensor":
    """Return (row * factor + shift) mod rows exactly. Where products would not fit into 63 bits,
    rows are multiplied a few bits at a time.

    Args:
        row_N: Rows, of any integers.
        factor: Of all, or of each.
        shift: Of all, or of each.
        rows: Rows of the table of all, or of each.
        most: The most rows among those.
    """
    row_N = row_N.long()
    bits = 62 - most.bit_length()
    if bits >= most.bit_length():
        return (row_N * factor).add_(shift).remainder_(rows)
    made_N = row_N.new_zeros(row_N.shape)
    for first in reversed(range(0, most.bit_length(), bits)):
        digit_N = (row_N >> first) & ((1 << bits) - 1)
        made_N = ((made_N << bits) % rows + digit_N * factor) % rows
    return (made_N + shift) % rows


def moved_rows(
    positions: range, stored: RowOrder | None, held: RowOrder | None, wanted: range
) -> "tuple[Tensor, Tensor]":
    """Return which of some positions go where when rows move from one order to another.

    Args:
        positions: At most `PART_ROWS` positions in the order that rows are stored in.
        stored: That order; None: by number.
        held: The order that they are wanted in; None: by number.
        wanted: The positions there that are wanted.

    Returns:
        Indices in `positions`, and of each the index in `wanted`, on the CPU.
    """
    import torch  # a plan names orders without it

    position_N = torch.arange(positions.start, positions.stop, device="cpu")
    row_N = position_N if stored is None else stored.rows_at(position_N)
    target_N = (row_N if held is None else held.positions_of(row_N)) - wanted.start
    from_M = ((target_N >= 0) & (target_N < len(wanted))).nonzero()[:, 0]
    return from_M, target_N[from_M]
