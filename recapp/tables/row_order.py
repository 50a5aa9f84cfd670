"""The order of the rows of a table: by number, or mixed, so that frequent rows are dealt over all
strips.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

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
        return affine(row_N, self.multiplier, self.shift, self.rows, self.rows)

    def rows_at(self, position_N: "Tensor") -> "Tensor":
        """Return the rows at positions: the inverse of `positions_of`."""
        inverse = pow(self.multiplier, -1, self.rows)
        back = -inverse * self.shift % self.rows
        return affine(position_N, inverse, back, self.rows, self.rows)

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


def affine(
    row_N: "Tensor",
    factor: "int | Tensor",
    shift: "int | Tensor",
    rows: "int | Tensor",
    most: int,
) -> "Tensor":
    """Return the exact (row * factor + shift) mod rows. If products do not fit into 63 bits, rows
    are multiplied a few bits at a time.

    Args:
        row_N: Rows, of any integer type.
        factor: One number for all rows, or one for each.
        shift: One number for all rows, or one for each.
        rows: The number of rows of the table: one number for all rows, or one for each.
        most: The largest of `rows`.
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
