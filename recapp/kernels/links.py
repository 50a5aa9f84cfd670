"""What the two halves of a kernel backend hand to each other: a group as arrays, a batch as a group
sees it, and sparse matrices.

An *offset* counts elements of a flat buffer (a message, the output, its gradient): vectors of every
width lie behind each other in one buffer, and nothing has to be moved or aligned. A *row* counts in
units of a store's width. Letters: S slots, I strips, K pieces, L ids, P (slot, id) pairs,
M output bags, V vectors, U distinct rows, N entries, W ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Counts = NDArray[np.int64]
CACHE_LINE_BYTES = 64


class Staged(NamedTuple):
    """How the source of a sparse matrix is read strip by strip: first copied side by side, then
    gathered from the copy.

    Bags of one table lie a whole output row apart, and at such distances thousands of them fall
    into a few sets of a cache. Where each is read several times (bags of many ids), a copy that
    fits the cache halves the gathering (measured).
    """

    where_M: Tensor  # offsets of all bags in the source
    # strip i has bags bag[i] .. bag[i + 1]; entries of the matrix are offsets in the copy of its
    # bags
    bag_I1: Counts
    row_I1: Counts  # and rows of the matrix row[i] .. row[i + 1]


class Links(NamedTuple):
    """A sparse matrix in CSR between flat buffers: bag m sums `weights[k] * source[index[k]]` over
    its entries k in offsets[m] .. offsets[m + 1].

    No `offsets_M1`: one entry per bag. No weights: ones. The result of bag m stands at offset
    `at[m]` of the target; without, bags stand side by side. `index` holds offsets in the source, or
    rows where the source is a store. `staged`: or offsets in copies that are made strip by strip.
    """

    index_N: Tensor
    offsets_M1: Tensor | None
    weights_N: Tensor | None
    at_M: Tensor | None
    bags: int
    staged: Staged | None = None


@dataclass(frozen=True)
class Routes:
    """A group as arrays: its slots strip by strip, and where every row of its strips lives.
    Integers are int64, on the group's device.

    Args:
        mode: How its rows are requested.
        width: Columns of its strips.
        features: Feature of each slot, on the host.
        feature_S: The same, on the device.
        column_S: First output column of each slot, on the host.
        strip_S: Strip of each slot, numbered within the group.
        rows_I: Rows of each strip.
        piece_I1: Strip i is made of pieces piece[i] .. piece[i + 1].
        start_K: First row of each piece within its strip.
        rank_K: Owner of each piece.
        base_K: First row of each piece in the owner's store.
        row_dtype: Type of rows in requests; int32 where all stores' rows fit, for all groups of a
            collection alike, because ids travel in one message.
    """

    mode: str
    width: int
    features: list[int]
    feature_S: Tensor
    column_S: Counts
    strip_S: Tensor
    rows_I: Tensor
    piece_I1: Tensor
    start_K: Tensor
    rank_K: Tensor
    base_K: Tensor
    row_dtype: torch.dtype


@dataclass(slots=True)
class Bags:
    """A batch as a group sees it.

    Args:
        rows_L: Rows of the whole batch, pair by pair.
        lengths_FB: Ids per bag.
        first_S: Where the ids of each slot begin, on the host.
        last_S: Where they end.
        where_M: Offset of each bag in the output, slots first.
        scale_M: Factor of each bag (means); None: there is none, and there are no weights either.
        weights_L: A weight per id, or None.
    """

    rows_L: Tensor
    lengths_FB: Tensor
    first_S: Counts
    last_S: Counts
    where_M: Tensor
    scale_M: Tensor | None
    weights_L: Tensor | None

    @property
    def pairs(self) -> int:
        """Return P: how many ids the group looks up."""
        return int((self.last_S - self.first_S).sum())


class Rule(Protocol):
    """What kernels need to know of a row rule (`recapp/optim/rules.py`)."""

    @property
    def step(self) -> Callable[..., tuple[Any, ...]]:
        """The expression."""

    @property
    def constants(self) -> tuple[float, ...]:
        """Handed to it before the state."""

    @property
    def state(self) -> tuple[tuple[str, Any], ...]:
        """Name and kind ("row" or "element") of every state tensor."""

    @property
    def needs_row(self) -> bool:
        """Whether it asks for the mean square of the whole row's gradient."""


class Scratch:
    """Arrays by name that stay: a fresh one costs a page fault per 4 KB, more than the arithmetic
    done in it (measured).

    One belongs to one group of one batch in flight, so what stands in it is that batch's until the
    batch's backward has run.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return an array of n elements on the CPU, contents undefined; the same memory for the
        same name.
        """
        held = self._held.get(name)
        if held is None or held.numel() < n or held.dtype != dtype:
            held = self._held[name] = self._grown(n, dtype)
        return held[:n]

    def tensors(self) -> Iterable[Tensor]:
        """Return the memory that is held."""
        return self._held.values()

    @staticmethod
    @torch.inference_mode(False)
    def _grown(n: int, dtype: torch.dtype) -> Tensor:
        """Memory made in inference mode could not be written outside of it."""
        return torch.empty(n + n // 5 + 64, dtype=dtype)


def offset_dtype(numel: int) -> torch.dtype:
    """Return the type of offsets in a buffer of `numel` elements."""
    return torch.int32 if numel < 2**31 else torch.int64
