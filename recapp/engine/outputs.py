"""The layout of a batch's vectors: all lookups of all collections write to one flat buffer.

    | samples x (room + columns of sums, means, concatenated vectors) |   a collection of bags
    | ids of a lookup x D | ids of the next lookup x D | ...          |   a collection of sequences

Kernels know only bags and offsets. The bag of a sum or mean has the ids of a sample, and its vector
lies in the row of the sample. The bag of a concatenation is one place of a sample, with one id or
none. The bag of a sequence is one id. So the same kernels request, answer, combine and train every
kind of lookup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.links import Counts
from recapp.tables.config import PoolingType, TableLookup
from recapp.tables.ids import LookupRows


@dataclass(frozen=True)
class Member:
    """One collection's share of an exchange.

    Args:
        lookups: The lookups of the collection, in the order of its output.
        is_weighted: Whether ids must have sample weights; None where batches decide.
        own_ids: Whether the collection is called with ids of its own, which other collections do
            not look up.
    """

    lookups: tuple[TableLookup, ...]
    is_weighted: bool | None = None
    own_ids: bool = False

    @cached_property
    def columns(self) -> int:
        """The columns of the collection's vectors side by side; 0 for sequences."""
        return sum(x.columns for x in self.lookups)

    @property
    def sequences(self) -> tuple[TableLookup, ...]:
        """The lookups of sequences, whose vectors are not pooled."""
        return tuple(x for x in self.lookups if x.pooling is PoolingType.NONE)


class BatchOutput(NamedTuple):
    """The layout of one batch's output.

    Args:
        taken: For each member, whether it looks up this batch.
        bags: Number of samples B.
        count_F: The number of bags of each lookup.
        lengths_N: The number of ids of each bag, lookup by lookup.
        first_F: The offset of the first bag of each lookup.
        per_F: The number of ids of each lookup.
        numel: The number of elements of the buffer.
    """

    taken: tuple[bool, ...]
    bags: int
    count_F: Counts
    lengths_N: Tensor
    first_F: Counts
    per_F: Sequence[int]
    numel: int


class Outputs:
    """The output layout of collections that share an exchange.

    Args:
        members: The collections, in order.
        device: Device of the vectors.

    `room` has the number of free columns before the first vector of a sample, for each member.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.members = tuple(members)
        self.device = device
        self.lookups = tuple(x for m in members for x in m.lookups)
        self.member_F = [i for i, m in enumerate(members) for _ in m.lookups]
        self.ragged = any(m.sequences for m in members)
        self.room = [0] * len(members)
        self._uniform = all(x.columns == x.dim for x in self.lookups)  # a bag for each sample
        self.column_F = [
            column
            for m in members
            for column in [0, *accumulate(x.columns for x in m.lookups)][: len(m.lookups)]
        ]

    def width(self, member: int) -> int:
        """Return the number of columns of a member's matrix, with the free columns."""
        columns = self.members[member].columns
        return self.room[member] + columns if columns else 0

    def whole_lines(self, elements: int) -> bool:
        """Return whether every vector begins at a cache line, if widths of vectors are whole cache
        lines.

        Args:
            elements: The number of elements of a cache line.
        """
        rows = [x for i in range(len(self.members)) for x in (self.room[i], self.width(i))]
        places = [*self.column_F, *(x.dim for x in self.lookups if not x.columns)]
        return not any(n % elements for n in [*rows, *places])

    def of(self, rows: LookupRows, taken: Sequence[bool]) -> BatchOutput:
        """Return the layout of a batch's output.

        Args:
            rows: The rows of the batch.
            taken: For each member, whether it looks up this batch. The others have no bags and no
                output.
        """
        B = rows.lengths_FB.shape[1]
        all_taken = all(taken)
        if self._uniform and all_taken:
            lengths_N = rows.lengths_FB.reshape(-1)
            count_F = np.full(len(self.lookups), B, np.int64)
        else:
            per_lookup = [
                _bag_lengths(x, rows.lengths_FB[i], rows.per_F[i])
                for i, x in enumerate(self.lookups)
                if taken[self.member_F[i]]
            ]
            count_F = np.zeros(len(self.lookups), np.int64)
            count_F[[taken[m] for m in self.member_F]] = list(map(len, per_lookup))
            lengths_N = torch.cat(per_lookup)
        first_F, numel = self._firsts(rows.per_F, B, taken)
        return BatchOutput(tuple(taken), B, count_F, lengths_N, first_F, rows.per_F, numel)

    def _firsts(self, per_F: Sequence[int], B: int, taken: Sequence[bool]) -> tuple[Counts, int]:
        """Return the offset of each lookup's first bag, and the number of elements of the
        buffer.
        """
        first_F = np.zeros(len(self.lookups), np.int64)
        end = 0
        start = 0
        for i, x in enumerate(self.lookups):
            member = self.member_F[i]
            if i == 0 or member != self.member_F[i - 1]:
                start = end
                end += B * self.width(member) if taken[member] else 0
            if x.columns:
                first_F[i] = start + self.room[member] + self.column_F[i]
            else:
                first_F[i] = end
                end += per_F[i] * x.dim
        return first_F, end

    def where(self, lookup: int, output: BatchOutput) -> Tensor:
        """Return the offset of each bag of a lookup, int64.

        Args:
            lookup: The number of the lookup.
            output: The output of the batch.
        """
        x = self.lookups[lookup]
        first = int(output.first_F[lookup])
        n = int(output.count_F[lookup])
        if not x.columns:
            return torch.arange(first, first + n * x.dim, x.dim, device=self.device)
        wide = self.width(self.member_F[lookup])
        places = x.columns // x.dim
        bags = torch.arange(n // places, device=self.device) * wide + first
        if places == 1:
            return bags
        return (bags[:, None] + torch.arange(places, device=self.device) * x.dim).view(-1)

    def parts(self, flat: Tensor, output: BatchOutput) -> list[Tensor]:
        """Return the vectors of every member: one matrix with a row per sample, or for each
        sequence a matrix with a row per id. They share the memory of the buffer, but autograd does
        not treat them as views.
        """
        parts = []
        end = 0
        for i, m in enumerate(self.members):
            shapes = [(output.bags, self.width(i))] if m.columns else []
            shapes += [
                (int(output.count_F[f]), x.dim)
                for f, x in enumerate(self.lookups)
                if self.member_F[f] == i and not x.columns
            ]
            for n, width in shapes if output.taken[i] else []:
                part = flat.new_empty(0).set_(flat.untyped_storage(), end, (n, width), (width, 1))
                parts.append(part)
                end += n * width
        return parts

    def of_members(self, parts: Sequence[Tensor], output: BatchOutput) -> dict[int, list[Tensor]]:
        """Return the parts of the output by member, for members that look up the batch."""
        left = iter(parts)
        return {
            i: list(islice(left, (1 if m.columns else 0) + len(m.sequences)))
            for i, m in enumerate(self.members)
            if output.taken[i]
        }


def _bag_lengths(lookup: TableLookup, lengths_B: Tensor, ids: int) -> Tensor:
    """Return the number of ids of each bag of a lookup."""
    if not lookup.columns:
        return lengths_B.new_ones(ids)
    places = lookup.columns // lookup.dim
    if places == 1:
        return lengths_B
    place_H = torch.arange(places, device=lengths_B.device)
    return (lengths_B[:, None] > place_H).to(lengths_B.dtype).view(-1)
