"""The local functions of the engine in torch: they define the result that every faster backend must
reproduce, and run on any device.

    integers    route, write, link      home: which rows a batch needs, of whom, and which vectors
                                        make which bag
                serve, group            owner: what was requested, and the distinct rows to update
    arithmetic  pool                    sums of vectors along a sparse matrix: lookup, combine,
                                        segment sums of backward
                update                  weights and state of each touched row, once

A bag's entries are summed one after the other in their order, whatever the width: that is what
makes results equal bit for bit under every way of cutting a table. Types and letters are those of
`recapp/kernels/links.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.kernels.links import Bags, Counts, Links, Routes, Rule, Scratch
from recapp.kernels.quantised import QuantisedRows, dequantise
from recapp.kernels.ragged import Grouped, gather, group, numbered, runs, starts
from recapp.sparse.transfer import to_device, to_host

# gathered at a time where vectors are scattered over a buffer: 64 MB in fp32
CHUNK_ELEMENTS = 1 << 24
SQUARE_BLOCK = 64  # columns; as wide as a vertical strip is by default (recapp/sharding/tilings.py)


class UniqueRows(NamedTuple):
    """Distinct rows of a group in one batch: their numbers in their owners' stores, the owners, how
    many rows the owner has before each, the pairs of each.
    """

    row_U: Tensor
    rank_U: Tensor
    nth_U: Tensor
    grouped: Grouped


class _BagRows(NamedTuple):
    """The pairs of a group in one batch, grouped to vectors, one per (bag, owner), owners within
    bags.

    Owner, row there, position in the batch and number among the owner's, of pairs in that order;
    owner, number among the owner's, bag and pairs of each vector; how many pairs and vectors each
    rank owns.
    """

    rank_P: Tensor
    row_P: Tensor
    pair_P: Tensor
    nth_P: Tensor
    rank_V: Tensor
    nth_V: Tensor
    bag_V: Tensor
    length_V: Tensor
    count_W2: Tensor


class TorchBackend:
    """The reference. Functions take a `Scratch` for results that stay from batch to batch; this
    backend allocates fresh ones.
    """

    name = "torch"
    rows_of_ids = None  # id rules have their own torch operations

    def sizes(self) -> list[tuple[int, int]]:
        """Return (bags or touched rows, ids) of the smallest batch of each kind that has kernels of
        its own.
        """
        return [(1, 1)]

    def route_rows(
        self, r: Routes, b: Bags, world: int, take: Scratch
    ) -> tuple[UniqueRows, Counts]:
        """Return the distinct rows that a group needs, and how many of each rank.

        Args:
            r: The group.
            b: The batch.
            world: Number of ranks W.
            take: Memory for results.

        Returns:
            What `write_row_requests` and `link_rows` of this backend go on with (its `row_U`: rows
            in their owners' stores), and counts [W].
        """
        row_P, strip_P, _ = _pairs(r, b)
        distinct = group(row_P + _keys(r)[strip_P])
        strip_U = strip_P[distinct.order_N[distinct.start_U1[:-1].long()]]
        rank_U, row_U = _locate(r, distinct.key_U - _keys(r)[strip_U], strip_U)
        nth_U, n_W = numbered(rank_U, world)
        return UniqueRows(row_U, rank_U, nth_U, distinct), to_host(n_W).numpy()

    def write_row_requests(
        self,
        r: Routes,
        d: UniqueRows,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> Tensor:
        """Write the requests of distinct rows into a message and fix the offsets of their vectors.

        Args:
            r: The group.
            d: From `route_rows`.
            ids: The message of ids; each rank's request is written at its offset.
            id_first_W: Those offsets.
            vector_first_W: Offset of each rank's first vector of the group in the message of
                vectors.
            offset_dtype: Type of the offsets.
            take: Memory for results.

        Returns:
            Offsets of the vectors, [U].
        """
        first_W, first_vector_W = to_device(
            np.stack([id_first_W, vector_first_W]), ids.device
        ).unbind()
        ids[first_W[d.rank_U] + d.nth_U] = d.row_U.to(ids.dtype)
        return (first_vector_W[d.rank_U] + d.nth_U * r.width).to(offset_dtype)

    def link_rows(
        self, r: Routes, b: Bags, d: UniqueRows, source_U: Tensor, dtype: torch.dtype, take: Scratch
    ) -> tuple[Links, Links]:
        """Return the matrix A and its transpose.

        Args:
            r: The group.
            b: The batch.
            d: From `route_rows`.
            source_U: Where each distinct row's vector stands: its offset in a message, or its row
                of the store.
            dtype: Type of the matrices' entries.
            take: Memory for results.

        Returns:
            Links of the bags to vectors, with the bags' offsets in the output, and of the distinct
            rows to offsets in the output's gradient.
        """
        offsets_M1 = starts(_lengths(r, b)).int()
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
        order = d.grouped.order_N
        gradient_links = Links(
            b.where_M[bag_P[order]],
            d.grouped.start_U1,
            None if use_P is None else use_P[order],
            None,
            len(d.row_U),
        )
        return Links(
            source_U[d.grouped.number_N], offsets_M1, use_P, b.where_M, len(b.where_M)
        ), gradient_links

    def route_bags(self, r: Routes, b: Bags, world: int, take: Scratch) -> tuple[_BagRows, Counts]:
        """Find what each bag of a group wants of each rank; arguments as of `route_rows`.

        Returns:
            What `write_bag_requests` of this backend goes on with, and rows and vectors requested
            of each rank, [W, 2].
        """
        row_P, strip_P, pair_P = _pairs(r, b)
        rank_P, local_P = _locate(r, row_P, strip_P)
        bag_P = torch.repeat_interleave(
            torch.arange(len(b.where_M), device=row_P.device),
            _lengths(r, b),
            output_size=len(row_P),
        )
        vector = group(bag_P * world + rank_P)
        rank_V = vector.key_U % world
        bag_V = vector.key_U // world
        order = vector.order_N
        rank_P = rank_P[order]
        local_P = local_P[order]
        pair_P = pair_P[order]
        nth_P, rows_W = numbered(rank_P, world)
        nth_V, vectors_W = numbered(rank_V, world)
        count_W2 = torch.stack([rows_W, vectors_W], 1)
        found = _BagRows(
            rank_P, local_P, pair_P, nth_P, rank_V, nth_V, bag_V, vector.start_U1.diff(), count_W2
        )
        return found, to_host(count_W2).numpy()

    def write_bag_requests(
        self,
        r: Routes,
        b: Bags,
        found: _BagRows,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        words_L: Tensor | None,
        offset_dtype: torch.dtype,
        take: Scratch,
    ) -> tuple[Links, Links]:
        """Write the requests of bags into a message: to each rank its rows, bag lengths and the
        bits of the sample weights.

        Args:
            r: The group.
            b: The batch.
            found: From `route_bags`.
            ids: The message of ids; each rank's request is written at its offset.
            id_first_W: Those offsets.
            vector_first_W: Offset of each rank's first vector of the group in the message of
                vectors.
            words_L: Sample weights as integers of the message's type, [L, words], or None.
            offset_dtype: Type of the offsets.
            take: Memory for results.

        Returns:
            Links of the bags to vectors, and of the vectors, with their offsets in the message, to
            offsets in the output's gradient.
        """
        device = ids.device
        rank_P, row_P, pair_P, nth_P, rank_V, nth_V, bag_V, length_V, count_W2 = found
        first_W, first_vector_W = to_device(np.stack([id_first_W, vector_first_W]), device).unbind()
        rows_W, vectors_W = count_W2.unbind(1)
        ids[first_W[rank_P] + nth_P] = row_P.to(ids.dtype)
        ids[(first_W + rows_W)[rank_V] + nth_V] = length_V.to(ids.dtype)
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
        """Return the matrix S: what all ranks request of a group's store here, in rank order, with
        the offsets of the answers in the message of vectors.

        Args:
            ids: The message of ids.
            id_first_W: Offset of each rank's request in it.
            counts_W3: Rows, vectors and words of each request.
            vector_first_W: Offset of each rank's first answer in the message of vectors.
            width: Of the group.
            pooled: Whether requests carry bag lengths.
            words: Integers per sample weight, 0 without.
            weights: Type of the weights.
            offset_dtype: Type of the offsets.
            take: Memory for results.
        """
        requests = [
            ids[first : first + n]
            for first, n in zip(id_first_W.tolist(), counts_W3[:, 2].tolist(), strict=True)
        ]
        parts = (
            [
                (q[:n], q[n : n + v], q[n + v :])
                for q, (n, v, _) in zip(requests, counts_W3.tolist(), strict=True)
            ]
            if pooled
            else []
        )
        row_N = torch.cat([rows for rows, _, _ in parts] if pooled else requests)
        at_V = torch.cat(
            [
                first + width * torch.arange(v, device=ids.device)
                for first, v in zip(vector_first_W.tolist(), counts_W3[:, 1].tolist(), strict=True)
            ]
        ).to(offset_dtype)
        offsets = starts(torch.cat([lengths for _, lengths, _ in parts])).int() if pooled else None
        use_N = torch.cat([bits for _, _, bits in parts]).view(weights) if words else None
        return Links(row_N, offsets, use_N, at_V, len(at_V))

    def group_rows(self, rows: int, asked: Links, take: Scratch) -> tuple[Tensor, Links]:
        """Return the distinct rows that were requested, and the links that sum their gradients.

        Args:
            rows: How many the store has.
            asked: From `serve`: rows, and the offset of each vector's gradient.
            take: Memory for results.

        Returns:
            Rows [U] in an order that depends on the requests alone, and links of each to offsets of
            gradients, in the order of the requests.
        """
        assert asked.at_M is not None
        distinct = group(asked.index_N)
        at_N = asked.at_M
        if asked.offsets_M1 is not None:
            at_N = torch.repeat_interleave(
                at_N, asked.offsets_M1.diff(), output_size=len(asked.index_N)
            )
        use_T = None if asked.weights_N is None else asked.weights_N[distinct.order_N]
        return distinct.key_U, Links(
            at_N[distinct.order_N], distinct.start_U1, use_T, None, len(distinct.key_U)
        )

    def pool(
        self,
        source: Tensor,
        unit: int,
        width: int,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        """target[at[m] : +width] = scale * sum of weights[k] * source[index[k] * unit : +width]
        over k in offsets[m] .. offsets[m + 1].

        Args:
            source: Flat buffer; 16-bit floats are read as fp32.
            unit: The width where `index` holds rows, 1 where it holds offsets.
            width: Of a vector.
            links: The sparse matrix.
            target: Flat buffer, written in its own type.
            dtype: Type that is computed in, fp32 or fp64.
            scale: Factor of all sums.
            in_lines: Every result fills whole cache lines of a target that begins with one, and is
                not read soon: a hint.
        """
        step = max(1, CHUNK_ELEMENTS // width)
        for first in range(0, links.bags, step):
            last = min(first + step, links.bags)
            rows_MD = _sums(source, unit, width, links, dtype, first, last) * scale
            if links.at_M is None:
                target[first * width : last * width] = rows_MD.view(-1).to(target.dtype)
            else:
                column_D = torch.arange(width, device=target.device)
                target[links.at_M[first:last, None].long() + column_D] = rows_MD.to(target.dtype)

    def pool_quantised(
        self,
        rows: QuantisedRows,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        """Sum packed rows along a sparse matrix: `pool` with rows in 8 or 4 bits as its source.

        Args:
            rows: Packed rows of a store.
            links: The sparse matrix; its `index_N` holds rows.
            target: Flat buffer, written in its own type.
            dtype: Type that values and sums are computed in, fp32 or fp64.
            scale: Factor of all sums.
            in_lines: As of `pool`.
        """
        values_ND = dequantise(rows, links.index_N, dtype)
        each = torch.arange(len(values_ND), device=values_ND.device)
        links = links._replace(index_N=each)
        self.pool(values_ND.view(-1), rows.width, rows.width, links, target, dtype, scale)

    def square_sums(
        self, gradients: Tensor, width: int, links: Links, dtype: torch.dtype
    ) -> Tensor:
        """Return the fp64 sum of squares of every touched row's gradient, [U]: within blocks of
        `SQUARE_BLOCK` columns, then block by block.

        So a table cut into such strips, whose owners add each other's sums, gets the bits of an
        uncut one.
        """
        return _squares(_sums(gradients, 1, width, links, dtype, 0, links.bags))

    def find_pieces(self, row_U: Tensor, base_K: Tensor) -> tuple[Tensor, Tensor, Counts]:
        """Return the piece of each row of a store (`base_K`: first row of each piece), the row's
        number among the piece's rows here, and rows per piece.
        """
        piece_U = torch.bucketize(row_U, base_K, right=True) - 1
        nth_U, n_K = numbered(piece_U, len(base_K))
        return piece_U, nth_U, to_host(n_K).numpy()

    def scatter_parts(
        self, part_U: Tensor, first_K: Tensor, piece_U: Tensor, nth_U: Tensor, parts: Tensor
    ) -> None:
        """Write each row's own part: parts[first of the row's piece + the row's number in it]."""
        parts[first_K[piece_U] + nth_U] = part_U

    def mean_of_parts(
        self,
        parts: Tensor,
        begin_JK: Tensor,
        piece_U: Tensor,
        nth_U: Tensor,
        dim_K: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the parts of each row, added in the order J of its strips (-1: no such strip),
        over the columns of the whole row.
        """
        total_U = torch.zeros(len(piece_U), dtype=torch.float64, device=parts.device)
        for begin_K in begin_JK:
            there_U = begin_K[piece_U] >= 0
            total_U += torch.where(
                there_U, parts[torch.where(there_U, begin_K[piece_U] + nth_U, 0)], 0.0
            )
        return (total_U / dim_K[piece_U]).to(dtype)

    def update(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        mean_U: Tensor | None,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: float,
        rule: Rule,
    ) -> None:
        """Sum each touched row's gradient and apply a rule (`recapp/optim/rules.py`) to it, once.

        Args:
            gradients: Flat message or output gradient.
            links: The sparse matrix that sums the gradient of each touched row.
            row_U: Distinct rows of the store.
            mean_U: Mean of the squared gradient over the whole logical row where the row here is a
                strip of it; else None.
            weights_RD: The store, changed in place; half types are read as `dtype` and rounded
                back.
            state: Its state tensors, [R, 1] or [R, D], changed in place.
            dtype: Type that is computed in.
            lr: Learning rate of this update.
            rule: Its expression, constants and kinds of state.
        """
        row_U = row_U.long()
        held = [weights_RD, *state]
        width = weights_RD.shape[1]
        grad_UD = _sums(gradients, 1, width, links, dtype, 0, links.bags)
        mean_U1 = (_squares(grad_UD) / width if mean_U is None else mean_U).to(dtype)[:, None]
        w_UD, *s = (x.index_select(0, row_U).to(dtype) for x in held)
        new = rule.step(w_UD, grad_UD, mean_U1, lr, torch.sqrt, *rule.constants, *s)
        for x, value in zip(held, new, strict=True):
            x.index_copy_(0, row_U, value.to(x.dtype))


def _sums(
    source: Tensor, unit: int, width: int, links: Links, dtype: torch.dtype, first: int, last: int
) -> Tensor:
    """Bags first..last of `pool`, unscaled: [last - first, width]."""
    begin = first
    end = last
    if links.offsets_M1 is not None:  # they are read only where bags come in several chunks
        begin = int(to_host(links.offsets_M1[first])) if first else 0
        end = int(to_host(links.offsets_M1[last])) if last < links.bags else len(links.index_N)
    if begin == end:
        return source.new_zeros(last - first, width, dtype=dtype)
    gathered_ND = gather(source, unit, width, links.index_N[begin:end], dtype)
    if links.offsets_M1 is None and links.weights_N is None:
        return gathered_ND
    offsets = torch.arange(end - begin + 1, device=source.device)
    if links.offsets_M1 is not None:
        offsets = links.offsets_M1[first : last + 1].long() - begin
    weights = None if links.weights_N is None else links.weights_N[begin:end].to(dtype)
    return F.embedding_bag(
        torch.arange(end - begin, device=source.device),
        gathered_ND,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights,
    )


def _squares(grad_UD: Tensor) -> Tensor:
    total_U = torch.zeros(len(grad_UD), dtype=torch.float64, device=grad_UD.device)
    for block_UC in torch.split(grad_UD, SQUARE_BLOCK, 1):
        total_U += block_UC.to(torch.float64, copy=True).square_().sum(1)
    return total_U


def _pairs(r: Routes, b: Bags) -> tuple[Tensor, Tensor, Tensor]:
    """Row, strip and position in the batch of every pair of a group, slot by slot; a strip asks for
    its feature again.
    """
    device = b.rows_L.device
    first_S, last_S = to_device(np.stack([b.first_S, b.last_S]), device).unbind()
    pair_P = runs(first_S, last_S - first_S, b.pairs)
    strip_P = torch.repeat_interleave(r.strip_S, last_S - first_S, output_size=len(pair_P))
    return b.rows_L[pair_P].long(), strip_P, pair_P


def _lengths(r: Routes, b: Bags) -> Tensor:
    return b.lengths_FB[r.feature_S].flatten().long()


def _keys(r: Routes) -> Tensor:
    """A number for the first row of each strip, such that rows of all strips are numbered without
    gaps.
    """
    return starts(r.rows_I)[:-1]


def _locate(r: Routes, row_N: Tensor, strip_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of strips to (owner, row of the owner's store)."""
    first_K = r.start_K + torch.repeat_interleave(
        _keys(r), r.piece_I1.diff(), output_size=len(r.start_K)
    )
    piece_N = torch.searchsorted(first_K, row_N + _keys(r)[strip_N], right=True) - 1
    return r.rank_K[piece_N], row_N - r.start_K[piece_N] + r.base_K[piece_N]
