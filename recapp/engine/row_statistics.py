"""Statistics over whole rows of tables that are cut into column strips.

Mean squares over whole table rows make row-wise Adagrad, LAMB and similar rules exact where rows
are cut into column strips. A rule names the squared values: gradients or others.

The owner of each strip sums the squares of its columns in fp64. It sends the sums to the owners of
the row's other strips: 8 bytes per touched row and statistic, in one small collective for all
groups. The collective runs only where a table is cut by columns and its rule needs a row-wide
statistic. The same ranks request all strips of a row, and the strips have the same row cuts. So
their owners have the same touched rows in the same order, and the message needs neither ids nor
counts. Every strip adds the parts in column order, so all copies of the state stay equal bit for
bit.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.backend import Backend
from recapp.kernels.links import Counts
from recapp.sharding.layout import Layout, Piece
from recapp.sparse.transfer import to_device
from recapp.transport.communicator import Comm


class RowPieces(NamedTuple):
    """The pieces of tables to which the touched rows of a store belong.

    Args:
        piece_U: The piece of each row, numbered within the store.
        nth_U: The row's number among the touched rows of its piece.
        rows_K: The number of touched rows of each piece.
    """

    piece_U: Tensor
    nth_U: Tensor
    rows_K: Counts


class RowStatistics:
    """Sum squares over whole rows, for the pieces on this rank.

    Args:
        layout: The places of the rows of all tables.
        comm: Communicator of the ranks.
        backend: Kernels.
        means_G: The number K of row statistics that the rule of each group needs.
    """

    def __init__(
        self, layout: Layout, comm: Comm, backend: Backend, means_G: Sequence[int]
    ) -> None:
        self.comm = comm
        self.backend = backend
        self.means_G = list(means_G)
        mine_G = [
            layout.pieces_of(comm.rank, g) if means else [] for g, means in enumerate(means_G)
        ]
        mine = [p for pieces in mine_G for p in pieces]
        edges = accumulate((len(pieces) for pieces in mine_G), initial=0)
        self.span_G = [slice(*edge) for edge in pairwise(edges)]
        bands: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for p in layout.pieces:
            group = layout.groups[layout.strips[p.strip].group]
            if group.mode != "replicated" or p.rank == comm.rank:
                bands[layout.strips[p.strip].table, p.rows.start].append(p)
        band_P = [
            sorted(
                bands[layout.strips[p.strip].table, p.rows.start],
                key=lambda q: layout.strips[q.strip].cols.start,
            )
            for p in mine
        ]
        self.base_G = [
            torch.tensor([p.base for p in pieces], dtype=torch.int64, device=comm.device)
            for pieces in mine_G
        ]
        self.dim_G = [
            torch.tensor(
                [layout.tables[layout.strips[p.strip].table].embedding_dim for p in pieces],
                device=comm.device,
            )
            for pieces in mine_G
        ]
        siblings = [
            (i, p, q)
            for i, (p, band) in enumerate(zip(mine, band_P, strict=True))
            for q in band
            if q.rank != comm.rank
        ]
        # once to each rank, however many strips of the row it holds
        out = sorted({(q.rank, p.rows.start, p.strip, i) for i, p, q in siblings})
        into = sorted({(q.rank, q.rows.start, q.strip): i for i, _, q in siblings}.items())
        # the rank and the piece of each part; for one that arrives, an own piece of the same rows
        self.out_2N = _columns((rank, i) for rank, _, _, i in out)
        self.into_2A = _columns((rank, i) for (rank, _, _), i in into)
        # own pieces are numbered first, then arriving parts
        names = [(p.strip, p.rows.start) for p in mine]
        names += [(strip, row) for (_, row, strip), _ in into]
        number = {name: i for i, name in enumerate(names)}
        depth = max(map(len, band_P), default=0)
        self.source_JP = np.array(
            [
                [number[b[j].strip, b[j].rows.start] if j < len(b) else -1 for b in band_P]
                for j in range(depth)
            ],
            np.int64,
        ).reshape(depth, len(mine))

    def find(self, group: int, row_U: Tensor) -> RowPieces | None:
        """Return the pieces of a group's touched rows, which are in the order of the requests; None
        where the rule of the group needs no row statistics.

        Args:
            group: Number of the group.
            row_U: The rows, in the numbers of `RowStore.piece_keys`.
        """
        if not self.means_G[group]:
            return None
        return RowPieces(*self.backend.find_pieces(row_U, self.base_G[group]))

    def mean_squares(
        self,
        found_G: Sequence[RowPieces | None],
        squares_GKU: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> list[Tensor | None]:
        """Return mean squares over whole rows, with one collective. Every rank calls it.

        Args:
            found_G: The pieces of the touched rows, by group; None for groups without an exchange.
            squares_GKU: The fp64 sums of squares over the strip's columns, [K, U].
            dtype: Type of the result.

        Returns:
            The means over the whole row, [K, U], for the touched rows of each group.
        """
        n_P = np.concatenate(
            [
                pieces.rows_K * means
                for pieces, means in zip(found_G, self.means_G, strict=True)
                if pieces
            ]
        )
        first_P = n_P.cumsum() - n_P
        part = torch.empty(int(n_P.sum()), dtype=torch.float64, device=self.comm.device)
        for span, pieces, squares_KU in zip(self.span_G, found_G, squares_GKU, strict=True):
            if pieces is None or squares_KU is None:
                continue
            piece_U, nth_U, n_K = pieces
            for k, squares_U in enumerate(squares_KU):
                first_K = to_device(first_P[span] + k * n_K, part.device)
                part.index_copy_(0, first_K.index_select(0, piece_U) + nth_U, squares_U)
        arrived, first_A = self._exchange(part, n_P, first_P)
        parts = torch.cat([part, arrived])
        # the offset of each strip's part, for the strips beside each own piece; -1: no such strip
        begin_JP = np.concatenate([first_P, len(part) + first_A, [-1]])[self.source_JP]
        means: list[Tensor | None] = []
        for span, pieces, dim_K, count in zip(
            self.span_G, found_G, self.dim_G, self.means_G, strict=True
        ):
            if pieces is None:
                means.append(None)
                continue
            piece_U, nth_U, n_K = pieces
            first_JK = begin_JP[:, span]
            of_group = []
            for k in range(count):
                # strips of one row hold equally many touched rows
                begin_JK = to_device(np.where(first_JK < 0, -1, first_JK + k * n_K), part.device)
                of_group.append(
                    self.backend.mean_of_parts(parts, begin_JK, piece_U, nth_U, dim_K, dtype)
                )
            means.append(torch.stack(of_group))
        return means

    def _exchange(self, part: Tensor, n_P: Counts, first_P: Counts) -> tuple[Tensor, Counts]:
        """Return the parts of the sibling strips on other ranks, and the offset of each part."""
        world = self.comm.world
        of_parts = np.stack([first_P, n_P], 1)[self.out_2N[1]].tolist()
        sent = [part[first : first + n] for first, n in of_parts]
        n_A = n_P[self.into_2A[1]]
        buffer = torch.cat([*sent, part.new_empty(int(n_A.sum()))])
        n_2W = [np.bincount(rank_N, n_P[i_N], world) for rank_N, i_N in (self.out_2N, self.into_2A)]
        edges = [0, *np.concatenate(n_2W).astype(np.int64).cumsum().tolist()]
        spans = [*pairwise(edges)]
        self.comm.swap(buffer, spans[:world], spans[world:])()
        return buffer[edges[world] :], n_A.cumsum() - n_A


def _columns(pairs: Iterable[tuple[int, int]]) -> Counts:
    """Return pairs as the two rows of an array."""
    return np.array([*pairs], np.int64).reshape(-1, 2).T
