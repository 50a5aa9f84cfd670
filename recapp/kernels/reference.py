"""The local functions of the engine in torch. They define the result that every faster backend must
reproduce, and they run on any device.

    integers    route, write, link      home: which rows a batch needs, of which ranks, and which
                                        vectors each bag sums
                serve, group            owner: requested rows, and the distinct rows to update
    arithmetic  pool                    sums of vectors along a sparse matrix: lookup, combine,
                                        segment sums of backward
                update                  weights and state of each touched row, once

The entries of a bag are summed one after the other in their order, whatever the width. Therefore
results are equal bit for bit, however a table is cut. Types and letters are those of
`recapp/kernels/links.py`.

A store of dynamic tables keeps each row in a *slot*, whatever its strip, and an index finds the
slot: (strip, position) -> slot. `SortedIndex` defines the result that `numba_key_index.py`
reproduces. It keeps the positions of a strip sorted, so adding some costs a sort of all. A
read-only store has numbers that are sorted strip by strip (`find_sorted`).

`recapp/tables/positions.py` explains positions and stretches. N entries, M entries of keys that the
index does not hold yet.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.kernels.links import (
    STRETCH_BITS,
    Bags,
    Counts,
    Grouped,
    Links,
    Routes,
    Scratch,
    decay_of,
    group,
    numbered,
    offset_dtype,
    ranges,
    starts,
)
from recapp.kernels.quantised import QuantisedRows, dequantise
from recapp.kernels.row_memory import RowMemory
from recapp.kernels.sums import bag_sums, squares
from recapp.optim.rules import Rate, RowRule
from recapp.sparse.transfer import to_device, to_host, true_indices
from recapp.tables.positions import stretches_of


def find_sorted(
    number_R: Tensor, edge_I1: Sequence[int], wanted_N: Tensor, strip_N: Tensor | None
) -> Tensor:
    """Return the indices of numbers, int64 [N]; -1 for numbers that are absent.

    Args:
        number_R: The numbers, int64, of each strip ascending and distinct.
        edge_I1: Strip i has number_R[edge[i] : edge[i + 1]].
        wanted_N: The numbers to find, int64.
        strip_N: The strip of each wanted number; None if there is one strip.
    """
    found_N = torch.full_like(wanted_N, -1)
    for strip in range(len(edge_I1) - 1):
        first = edge_I1[strip]
        held_K = number_R[first : edge_I1[strip + 1]]
        if not len(held_K):
            continue
        at_N = torch.searchsorted(held_K, wanted_N).clamp_(max=len(held_K) - 1)
        here_N = held_K[at_N] == wanted_N
        if strip_N is not None:
            here_N &= strip_N == strip
        found_N = torch.where(here_N, at_N + first, found_N)
    return found_N


class SortedIndex:
    """An index of the slots of all rows that exist.

    Args:
        stretches: The stretches whose rows the store may hold.
        capacity: The largest number of slots.
        device: The device of positions and slots.

    Attributes:
        positions: The position of each slot, [capacity, 1].
        strips: The strip of each slot, [capacity, 1], int16.
    """

    def __init__(self, stretches: Sequence[int], capacity: int, device: torch.device) -> None:
        self.positions = RowMemory(capacity, 1, torch.int64, device)
        self.strips = RowMemory(capacity, 1, torch.int16, device)
        self._hold(torch.zeros(0, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._slot_K)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index, without `positions` and `strips`."""
        return self._slot_K.nbytes + self._position_K.nbytes

    def _hold(self, slot_K: Tensor) -> None:
        """Hold the keys of these slots, strip by strip in the order of their positions."""
        slot_K = slot_K[self.positions.rows[slot_K, 0].argsort()]
        slot_K = slot_K[self.strips.rows[slot_K, 0].argsort(stable=True)]
        keys_of_strip = self.strips.rows[slot_K, 0].long().bincount()
        self._slot_K = slot_K
        self._position_K = self.positions.rows[slot_K, 0]
        self._edge_I1 = starts(keys_of_strip).tolist()

    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        """Return the slot of each key, int64; -1 for a key that is absent."""
        slot_N = find_sorted(self._position_K, self._edge_I1, position_N, strip_N)
        there_M = true_indices(slot_N >= 0)
        slot_N[there_M] = self._slot_K[slot_N[there_M]]
        return slot_N

    def find_or_insert(
        self, position_N: Tensor, strip_N: Tensor, free: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the slot of each key, after adding the keys that are absent.

        Args:
            position_N: The positions of the keys; a key may occur several times.
            strip_N: The strips of the keys, int16.
            free: A function that returns a number of free slots, for which `positions` and `strips`
                have room. It is asked for as many as there are new keys, or for more.

        Returns:
            The slot of each entry, int64, and the first entry of each new key, ascending: these
            entries took the free slots in order.
        """
        slot_N = self.find(position_N, strip_N)
        absent_M = true_indices(slot_N < 0)
        if not len(absent_M):
            return slot_N, absent_M
        position_M = position_N[absent_M]
        strip_M = strip_N[absent_M]
        same = group(position_M)
        keys = group(strip_M.long() * len(same.key_U) + same.number_N)
        entry_U = keys.order_N[keys.start_U1[:-1].long()]
        first_U = entry_U.sort().values
        slot_U = free(len(first_U))
        slot_M = torch.empty_like(position_M)
        slot_M[first_U] = slot_U
        slot_N[absent_M] = slot_M[entry_U][keys.number_N.long()]
        self.positions.rows[slot_U, 0] = position_M[first_U]
        self.strips.rows[slot_U, 0] = strip_M[first_U].to(torch.int16)
        self._hold(torch.cat([self._slot_K, slot_U]))
        return slot_N, absent_M[first_U]

    def remove(self, slot_M: Tensor) -> None:
        """Remove the keys of distinct slots."""
        self._hold(self._slot_K[~torch.isin(self._slot_K, slot_M)])

    def slots_of_stretches(self, wanted_IR: Tensor) -> Tensor:
        """Return the slots whose positions lie in some stretches.

        Args:
            wanted_IR: Whether the slots of each strip in each stretch are wanted.
        """
        slot_K = self._all_slots()
        stretch_K = stretches_of(self.positions.rows[slot_K, 0])
        return slot_K[true_indices(wanted_IR[self.strips.rows[slot_K, 0].long(), stretch_K])]

    def slots_of(self, strip: int) -> Tensor:
        """Return the slots of a strip in the order of their positions."""
        slot_K = self._all_slots()
        slot_K = slot_K[true_indices(self.strips.rows[slot_K, 0] == strip)]
        return slot_K[self.positions.rows[slot_K, 0].argsort()]

    def _all_slots(self) -> Tensor:
        """Return the slots of all keys."""
        return self._slot_K


# elements of the vectors that are gathered at a time from a buffer: 64 MB in fp32
CHUNK_ELEMENTS = 1 << 24


class UniqueRows(NamedTuple):
    """The distinct rows of a group in one batch.

    Args:
        row_U: The number of each row in its owner's store.
        rank_U: The owner of each row.
        nth_U: The number of the owner's rows before each row.
        grouped: The pairs of each row.
    """

    row_U: Tensor
    rank_U: Tensor
    nth_U: Tensor
    grouped: Grouped


class TorchBackend:
    """The reference backend.

    Functions take a `Scratch` for results, whose memory is used again from batch to batch. This
    backend ignores it and allocates new tensors.
    """

    name = "torch"
    # the order of sums (`recapp/kernels/sums.py`)
    blocks: tuple[int, ...] = ()
    # whether all offsets of outputs and messages are multiples of a cache line: a hint
    in_lines = False
    rows_of_ids: Any = None  # id rules have their own torch operations
    positions_of_rows: Any = None  # mixed row orders have their own torch operations
    write_start_values: Any = None  # start values have their own torch operations
    begin_rows: Any = None  # the start values of all strips at once
    fused_integers: Any = None  # no functions for all groups at once
    fused_requests: Any = None
    fused_places: Any = None  # the host knows the places
    key_index: type[SortedIndex] | Any = SortedIndex
    find_sorted = staticmethod(find_sorted)

    def route_rows(self, r: Routes, b: Bags, world: int, take: Scratch) -> tuple[Any, Counts]:
        """Return the distinct rows that a group needs, and their number for each owner.

        Args:
            r: The group.
            b: The batch.
            world: The number of ranks W.
            take: The memory of results.

        Returns:
            The distinct rows for `write_row_requests` and `link_rows` of this backend (`row_U`:
            rows in their owners' stores, strip by strip), and the number of rows of each strip that
            each rank owns, [I, W].
        """
        row_P, strip_P, _ = _pairs(r, b)
        if r.dynamic:  # positions fill all 64 bits, which leaves none to number the strips
            same = group(row_P)
            keys = len(r.rows_I) * len(same.key_U)
            grouped = group((strip_P * len(same.key_U) + same.number_N).to(offset_dtype(keys)))
        else:
            grouped = group((row_P + _keys(r)[strip_P]).to(r.key_dtype))
        first_U = grouped.order_N[grouped.start_U1[:-1].long()]
        strip_U = strip_P[first_U]
        piece_U, row_U = _locate(r, row_P[first_U], strip_U)
        rank_U = r.rank_K[piece_U]
        nth_U, _ = numbered(rank_U, world)
        n_X = torch.zeros(len(r.rows_I) * world, dtype=torch.int64, device=row_U.device)
        n_X.index_add_(0, strip_U * world + rank_U, torch.ones_like(rank_U))
        return UniqueRows(row_U, rank_U, nth_U, grouped), to_host(n_X).numpy().reshape(-1, world)

    def write_row_requests(
        self,
        r: Routes,
        unique: Any,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> Tensor:
        """Write the requests of distinct rows into a message and fix the offsets of their vectors.

        Args:
            r: The group.
            unique: The distinct rows, from `route_rows` of this backend.
            ids: The message of ids, which is written.
            id_first_W: The offset of each rank's request in it.
            vector_first_W: The offset of each rank's first vector of the group in the message of
                vectors.
            offset_dtype: The type of the offsets.
            take: The memory of results.

        Returns:
            The offsets of the vectors, [U].
        """
        first_W, first_vector_W = to_device(
            np.stack([id_first_W, vector_first_W]), ids.device
        ).unbind()
        ids[first_W[unique.rank_U] + unique.nth_U] = unique.row_U.to(ids.dtype)
        at_U: Tensor = first_vector_W[unique.rank_U] + unique.nth_U * r.width
        return at_U.to(offset_dtype)

    def link_rows(
        self,
        r: Routes,
        b: Bags,
        unique: Any,
        source_U: Tensor,
        dtype: torch.dtype,
        take: Scratch,
    ) -> tuple[Links, Links]:
        """Return the matrix A, by which bags sum the vectors of distinct rows, and its transpose.

        Args:
            r: The group.
            b: The batch.
            unique: The distinct rows, from `route_rows` of this backend.
            source_U: The place of each distinct row's vector: its offset in a message, or its row
                of the store.
            dtype: The type of the matrices' entries.
            take: The memory of results.

        Returns:
            The links from bags to vectors, with the bags' offsets in the output; and the links from
            distinct rows to offsets in the output's gradient.
        """
        offsets_M1 = starts(b.lengths_M).int()
        bag_P = torch.repeat_interleave(
            torch.arange(len(b.where_M), device=offsets_M1.device),
            offsets_M1.diff(),
            output_size=b.pairs,
        )
        use_P = None
        if b.scale_M is not None:
            use_P = (
                b.scale_M[bag_P]
                if b.weights_L is None
                else b.scale_M[bag_P] * b.weights_L[_pairs(r, b)[2]]
            )
        order = unique.grouped.order_N
        gradient_links = Links(
            b.where_M[bag_P[order]],
            unique.grouped.start_U1,
            None if use_P is None else use_P[order],
            None,
            len(unique.row_U),
        )
        return Links(
            source_U[unique.grouped.number_N], offsets_M1, use_P, b.where_M, len(b.where_M)
        ), gradient_links

    def route_bags(self, r: Routes, b: Bags, world: int, take: Scratch) -> tuple[Any, Counts]:
        """Find the rows that each bag of a group needs of each rank.

        Args:
            r: The group.
            b: The batch.
            world: The number of ranks W.
            take: The memory of results.

        Returns:
            The argument `bag_rows` of this backend's `write_bag_requests`, and the numbers of rows
            and vectors that are requested of each rank, [W, 2].
        """
        row_P, strip_P, pair_P = _pairs(r, b)
        piece_P, local_P = _locate(r, row_P, strip_P)
        rank_P = r.rank_K[piece_P]
        bag_P = torch.repeat_interleave(
            torch.arange(len(b.where_M), device=row_P.device),
            b.lengths_M,
            output_size=len(row_P),
        )
        # one vector for each bag and owner, bag by bag
        vector = group((bag_P * world + rank_P).to(offset_dtype(len(b.where_M) * world)))
        rank_V = vector.key_U.long() % world
        bag_V = vector.key_U.long() // world
        order = vector.order_N
        rank_P = rank_P[order]
        nth_V, vectors_W = numbered(rank_V, world)
        nth_P, rows_W = numbered(rank_P, world)
        end_V = nth_P[vector.start_U1[1:].long() - 1] + 1
        count_W2 = torch.stack([rows_W, vectors_W], 1)
        pairs = rank_P, local_P[order], pair_P[order], nth_P
        return (*pairs, rank_V, nth_V, bag_V, end_V, count_W2), to_host(count_W2).numpy()

    def write_bag_requests(
        self,
        r: Routes,
        b: Bags,
        bag_rows: Any,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        words_L: Tensor | None,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> tuple[Links, Links]:
        """Write the requests of bags into a message: for each rank the rows, the ends of the bags
        among them and the bits of the sample weights.

        Args:
            r: The group.
            b: The batch.
            bag_rows: The first result of `route_bags`.
            ids: The message of ids, which is written.
            id_first_W: The offset of each rank's request in it.
            vector_first_W: The offset of each rank's first vector of the group in the message of
                vectors.
            words_L: The sample weights as integers of the message's type, [L, words], or None.
            offset_dtype: The type of the offsets.
            take: The memory of results.

        Returns:
            The links from bags to vectors; and the links from vectors, with their offsets in the
            message, to offsets in the output's gradient.
        """
        device = ids.device
        rank_P, row_P, pair_P, nth_P, rank_V, nth_V, bag_V, end_V, count_W2 = bag_rows
        first_W, first_vector_W = to_device(np.stack([id_first_W, vector_first_W]), device).unbind()
        rows_W, vectors_W = count_W2.unbind(1)
        ids[first_W[rank_P] + nth_P] = row_P.to(ids.dtype)
        ids[(first_W + rows_W)[rank_V] + nth_V] = end_V.to(ids.dtype)
        if words_L is not None:
            first = (first_W + rows_W + vectors_W)[rank_P] + nth_P * words_L.shape[1]
            ids[first[:, None] + torch.arange(words_L.shape[1], device=device)] = words_L[pair_P]
        index_V = (first_vector_W[rank_V] + nth_V * r.width).to(offset_dtype)
        offsets_M1 = torch.searchsorted(
            bag_V, torch.arange(len(b.where_M) + 1, device=device), out_int32=True
        )
        use_V = None if b.scale_M is None else b.scale_M[bag_V]
        combine = Links(index_V, offsets_M1, use_V, b.where_M, len(b.where_M))
        return combine, Links(b.where_M[bag_V], None, use_V, index_V, len(index_V))

    def serve(
        self,
        ids: Tensor,
        id_first_W: Counts,
        counts_W3: Counts,
        vector_first_W: Counts,
        width: int,
        pooled: bool,
        words: int,
        weights: torch.dtype,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> Links:
        """Return the matrix S: the requests of all ranks to this rank's store of a group, in rank
        order, with the offsets of the answers in the message of vectors.

        Args:
            ids: The message of ids.
            id_first_W: The offset of each rank's request in it.
            counts_W3: The rows, vectors and words of each request.
            vector_first_W: The offset of each rank's first answer in the message of vectors.
            width: The columns of the group.
            pooled: Whether requests hold the ends of bags.
            words: The number of integers of a sample weight; 0 without weights.
            weights: The type of the weights.
            offset_dtype: The type of the offsets.
            take: The memory of results.
        """
        rows, ends, bits = zip(
            *(
                ids[first : first + total].tensor_split([n, n + v])
                for first, (n, v, total) in zip(
                    id_first_W.tolist(), counts_W3.tolist(), strict=True
                )
            ),
            strict=True,
        )
        row_N = torch.cat(rows)
        at_V = torch.cat(
            [
                first + width * torch.arange(v, device=ids.device)
                for first, v in zip(vector_first_W.tolist(), counts_W3[:, 1].tolist(), strict=True)
            ]
        ).to(offset_dtype)
        before_W = counts_W3[:, 0].cumsum() - counts_W3[:, 0]
        end_V = torch.cat([end + n for end, n in zip(ends, before_W.tolist(), strict=True)])
        offsets = F.pad(end_V.int(), (1, 0)) if pooled else None
        use_N = torch.cat(bits).view(weights) if words else None
        return Links(row_N, offsets, use_N, at_V, len(at_V))

    def group_rows(
        self, rows: int, served: Links, take: Scratch, in_turn: bool = False
    ) -> tuple[Tensor, Links]:
        """Return the distinct rows that were requested, and the links that sum their gradients.

        Args:
            rows: The number of rows of the store.
            served: The links from `serve`: rows, and the offset of each vector's gradient.
            take: The memory of results.
            in_turn: Whether rows must be in the order of their first requests: then their numbers
                are not those of the layout, and differ between strips.

        Returns:
            The rows [U], in an order that depends on the requests alone; and the links from each
            row to offsets of gradients, in the order of the requests.
        """
        assert served.at_M is not None
        grouped = group(served.index_N)
        if in_turn:
            first_U = grouped.order_N[grouped.start_U1[:-1].long()]
            turn_U = torch.empty_like(first_U)
            turn_U[first_U.argsort()] = torch.arange(len(first_U), device=first_U.device)
            in_order = group(turn_U[grouped.number_N.long()])
            grouped = in_order._replace(key_U=served.index_N[first_U.sort().values])
        at_N = served.at_M
        if served.offsets_M1 is not None:
            at_N = torch.repeat_interleave(
                at_N, served.offsets_M1.diff(), output_size=len(served.index_N)
            )
        use_T = None if served.weights_N is None else served.weights_N[grouped.order_N]
        return grouped.key_U, Links(
            at_N[grouped.order_N], grouped.start_U1, use_T, None, len(grouped.key_U)
        )

    def pool(
        self,
        source: Tensor | QuantisedRows,
        stride: int,
        width: int,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        """Write sums of vectors along a sparse matrix: target[at[m] : +width] = scale * sum of
        weights[k] * source[index[k] * stride : +width] over k in offsets[m] .. offsets[m + 1].

        Args:
            source: The flat buffer of vectors, in which 16-bit floats are read as fp32; or packed
                rows, whose values are computed in the type of the arithmetic.
            stride: The width where `index` holds rows, 1 where it holds offsets.
            width: The columns of a vector.
            links: The sparse matrix.
            target: The flat buffer of results, written in its own type.
            dtype: The type of the arithmetic, fp32 or fp64.
            scale: The factor of all sums.
            in_lines: A hint that every result fills whole cache lines, that the target begins at a
                cache line, and that results are not read soon.
        """
        links = links.exact()
        if isinstance(source, QuantisedRows):
            source = dequantise(source, links.index_N, dtype).view(-1)
            each_N = torch.arange(len(links.index_N), device=source.device)
            links = links._replace(index_N=each_N)
        step = max(1, CHUNK_ELEMENTS // width)
        for first in range(0, links.bags, step):
            last = min(first + step, links.bags)
            rows_MD = (
                bag_sums(source, stride, width, links, dtype, first, last, self.blocks) * scale
            )
            if links.at_M is None:
                target[first * width : last * width] = rows_MD.view(-1).to(target.dtype)
            else:
                column_D = torch.arange(width, device=target.device)
                target[links.at_M[first:last, None].long() + column_D] = rows_MD.to(target.dtype)

    def row_squares(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> Tensor:
        """Return the fp64 sums of squares of the tensors that a rule squares, [K, U]: those of its
        `squares`, or else the gradients.

        Squares are added within blocks of `SQUARE_BLOCK` columns, then block by block. So a table
        cut into strips of this width, whose owners add each other's sums, gets the bits of an uncut
        table. The arguments are those of `update`; none is changed.
        """
        grad_UD = self._gradients(gradients, weights_RD.shape[1], links, dtype)
        read = () if rule.squares is None else (weights_RD, *state)  # stores may have none here
        old = [x.index_select(0, row_U.long()).to(dtype) for x in read]
        return torch.stack([squares(x) for x in _squared(rule, grad_UD, old, lr)])

    def find_pieces(self, row_U: Tensor, base_K: Tensor) -> tuple[Tensor, Tensor, Counts]:
        """Return the piece of each touched row of a store.

        Args:
            row_U: The rows.
            base_K: The first row of each piece in the store.

        Returns:
            The piece of each row, the number of touched rows of the piece before it, and the
            number of touched rows of each piece.
        """
        piece_U = torch.bucketize(row_U, base_K, right=True) - 1
        nth_U, n_K = numbered(piece_U, len(base_K))
        return piece_U, nth_U, to_host(n_K).numpy()

    def mean_of_parts(
        self,
        parts: Tensor,
        begin_JK: Tensor,
        piece_U: Tensor,
        nth_U: Tensor,
        dim_K: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the mean square of each touched row over all of its strips.

        The parts of a row are added in the order of its strips and divided by the columns of the
        whole row.

        Args:
            parts: The message of parts.
            begin_JK: The offset of the first part of piece k in strip j of its table; -1 if there
                is no such strip.
            piece_U: The piece of each row, from `find_pieces`.
            nth_U: The number of each row within its piece, from `find_pieces`.
            dim_K: The columns of whole rows, for each piece.
            dtype: The type of the result.
        """
        total_U = torch.zeros(len(piece_U), dtype=torch.float64, device=parts.device)
        for begin_K in begin_JK:
            there_U = begin_K[piece_U] >= 0
            total_U += torch.where(
                there_U, parts[torch.where(there_U, begin_K[piece_U] + nth_U, 0)], 0.0
            )
        return (total_U / dim_K[piece_U]).to(dtype)

    def _gradients(self, source: Tensor, width: int, links: Links, dtype: torch.dtype) -> Tensor:
        """Return the summed gradient of each touched row."""
        links = links.exact()
        return bag_sums(source, 1, width, links, dtype, 0, links.bags, self.blocks)

    def on_device(
        self, rates: Sequence[Rate], rules: Sequence[RowRule], device: torch.device
    ) -> Sequence[Any]:
        """Return the rates of a step in the form for `update`, one for each rule.

        Args:
            rates: The learning rates, from each rule's `rate_of`.
            rules: The rules.
            device: The device of the rows.
        """
        return rates

    def update(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        mean_U: Tensor | None,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> None:
        """Sum the gradient of each touched row and apply a rule (`recapp/optim/rules.py`) once.

        Args:
            gradients: The flat message, or the output's gradient.
            links: The sparse matrix that sums the gradient of each touched row.
            row_U: The distinct rows of the store.
            mean_U: Where rows are cut into strips, the mean squares over whole rows of the table
                that the rule reads, [U] or [K, U]; else None.
            weights_RD: The rows of the store, changed in place; 16-bit floats are read as `dtype`
                and rounded back.
            state: The state tensors of the store, [R, 1] or [R, D], changed in place.
            dtype: The type of the arithmetic, fp32 or fp64.
            lr: The learning rate of this update, from the rule's `rate_of`.
            rule: The rule: its expression, constants and kinds of state.
        """
        links = links.exact()
        row_U = row_U[: links.bags].long()
        tensors = [weights_RD, *state]
        width = weights_RD.shape[1]
        grad_UD = self._gradients(gradients, width, links, dtype)
        w_UD, *s = old = [x.index_select(0, row_U).to(dtype) for x in tensors]
        if mean_U is None:
            means = [squares(x) / width for x in _squared(rule, grad_UD, old, lr)]
        else:
            means = list(mean_U.view(-1, links.bags)) if links.bags else [mean_U.view(-1)] * 4
        each = tuple(mean.to(dtype)[:, None] for mean in means)
        mean = each[0] if rule.squares is None else each
        if rule.decay:
            w_UD = w_UD - decay_of(lr, rule.decay) * w_UD
        new = rule.step(w_UD, grad_UD, mean, lr, torch.sqrt, *rule.constants, *s)
        for x, value in zip(tensors, new, strict=True):
            x.index_copy_(0, row_U, value.to(x.dtype))

    def catch_up(
        self,
        row_N: Tensor | None,
        steps_R: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        rates_TK: Tensor,
        first: int,
        rule: RowRule,
    ) -> None:
        """Take the missed steps of rows, all rows together from the one with the fewest steps on.

        A rule of all rows (`recapp/optim/rules.py`) changes every row in each step. A row that no
        id touched takes such a step with a gradient of zero. Such steps need no messages, so a row
        takes them later, one after the other. It does not matter when: the arithmetic of a step is
        the same, so the bits are. After the call, the rows have taken first + T steps; every other
        row stays.

        Args:
            row_N: Rows of the store, which may repeat; None: all rows.
            steps_R: The steps that each row has taken, at least `first`; changed in place.
            weights_RD: The rows of the store, changed in place.
            state: The state tensors of the store, [R, D], changed in place.
            dtype: The type of the arithmetic, fp32 or fp64.
            rates_TK: The `lr` of the rule in step first + 1, ..., first + T, fp64.
            first: The number of steps before those of `rates_TK`.
            rule: The rule.
        """
        now = first + len(rates_TK)
        row_U = rows_behind(row_N, steps_R, now)
        if not len(row_U):
            return
        begin_U, order_U = steps_R[row_U].sort(stable=True)
        row_U = row_U[order_U]
        stored = [weights_RD, *state]
        values = [x.index_select(0, row_U).to(dtype) for x in stored]
        begins = begin_U.tolist()
        zero = values[0].new_zeros(1, 1)
        n = 0
        for t, rates in enumerate(rates_TK[begins[0] - first :].tolist(), begins[0]):
            while n < len(begins) and begins[n] <= t:
                n += 1
            w_ND, *state_ND = [value[:n] for value in values]
            lr: Rate = tuple(rates) if len(rates) > 1 else rates[0]
            stepped = rule.step(
                w_ND, torch.zeros_like(w_ND), zero, lr, torch.sqrt, *rule.constants, *state_ND
            )
            for value, new_ND in zip(values, stepped, strict=True):
                value[:n] = new_ND
        for x, value in zip(stored, values, strict=True):
            x.index_copy_(0, row_U, value.to(x.dtype))
        steps_R.index_fill_(0, row_U, now)


def rows_behind(row_N: Tensor | None, steps_R: Tensor, now: int) -> Tensor:
    """Return the distinct rows that have taken fewer steps than `now`.

    Args:
        row_N: Rows, which may repeat; None: all rows.
        steps_R: The steps that each row has taken.
        now: The number of steps.
    """
    if row_N is None:
        return true_indices(steps_R < now)
    row_N = row_N.long()
    return torch.unique(  # type: ignore[no-any-return]
        row_N[steps_R.index_select(0, row_N) < now]
    )


def _squared(rule: RowRule, grad_UD: Tensor, old: Sequence[Tensor], lr: Rate) -> Sequence[Tensor]:
    """Return the tensors that a rule squares, each [U, D], from gradients and the old weights and
    state.
    """
    if rule.squares is None:
        return [grad_UD]
    w_UD, *state = old
    return rule.squares(w_UD, grad_UD, lr, torch.sqrt, *rule.constants, *state)


def _pairs(r: Routes, b: Bags) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, strip and position in the batch of every pair of a group, slot by slot.

    The ids of a lookup appear once for each of its slots.
    """
    device = b.rows_L.device
    first_S, last_S = to_device(np.stack([b.first_S, b.last_S]), device).unbind()
    pair_P = ranges(first_S, last_S - first_S, b.pairs)
    strip_P = torch.repeat_interleave(r.strip_S, last_S - first_S, output_size=len(pair_P))
    return b.rows_L[pair_P].long(), strip_P, pair_P


def _keys(r: Routes) -> Tensor:
    """Return the number of each strip's first row when the rows of all strips are numbered one
    after the other. For dynamic tables the stretches are numbered: plans cut stretches, not
    positions.
    """
    rows_I = torch.full_like(r.rows_I, 1 << STRETCH_BITS) if r.dynamic else r.rows_I
    return starts(rows_I)[:-1]


def _locate(r: Routes, row_N: Tensor, strip_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the piece of each row of a strip, and its row in the owner's store."""
    bits = 64 - STRETCH_BITS if r.dynamic else 0
    least = -(1 << STRETCH_BITS - 1) if r.dynamic else 0
    first_K = (r.start_K >> bits) - least
    first_K = first_K + torch.repeat_interleave(
        _keys(r), r.piece_I1.diff(), output_size=len(r.start_K)
    )
    at_N = (row_N >> bits) - least + _keys(r)[strip_N]
    piece_N = torch.searchsorted(first_K, at_N, right=True) - 1
    return piece_N, row_N - r.start_K[piece_N] + r.base_K[piece_N]
