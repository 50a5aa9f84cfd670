"""Strips of one row agree on the mean square of its gradient, so that row-wise Adagrad is exact under column cuts.

Each strip's owner sums the squares of its columns in fp64 and tells the owners of the row's other strips: 8 bytes per touched row, one
small collective, and only where a table is cut by columns and the rule asks for a row-wide statistic. All strips of a row were asked for
by the same ranks and share their row cuts, so they hold the same touched rows in the same order: the message needs neither ids nor counts.
Every strip adds the parts in column order, so all copies of the state stay equal bit for bit.
"""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from recapp.distributed.comm import Comm
from recapp.distributed.message import Mail
from recapp.kernels.reference import runs, starts
from recapp.sharding.layout import Layout, Piece

Place = tuple[int, int]
"""A strip and its first row: one piece, wherever it lies."""


class SharedState:
    """Sums of squares over whole rows of the pieces on this rank.

    Args:
        layout: of all tables.
        comm: the ranks.
    """

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm
        self.mine_G = [layout.pieces_of(comm.rank, g) for g in range(len(layout.groups))]
        mine = [p for pieces in self.mine_G for p in pieces]
        number = {(p.strip, p.rows.start): i for i, p in enumerate(mine)}
        bands: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for p in layout.pieces:
            if not self._replicated(p) or p.rank == comm.rank:
                bands[layout.strips[p.strip].table, p.rows.start].append(p)
        band_P = [sorted(bands[layout.strips[p.strip].table, p.rows.start], key=lambda q: layout.strips[q.strip].cols.start) for p in mine]
        self.base_G = [torch.tensor([p.base for p in pieces] + [p.base + len(p.rows) for p in pieces[-1:]], dtype=torch.int64,
                                    device=comm.device) for pieces in self.mine_G]
        siblings = [(i, p, q) for i, (p, band) in enumerate(zip(mine, band_P, strict=True)) for q in band if q.rank != comm.rank]
        self.out = sorted({(q.rank, p.rows.start, p.strip, i) for i, p, q in siblings})         # once to each rank, whatever it holds
        into = sorted({(q.rank, q.rows.start, q.strip): i for i, _, q in siblings}.items())
        self.into_rank = [rank for (rank, _, _), _ in into]
        self.into_piece = torch.tensor([i for _, i in into], dtype=torch.int64)                 # an own piece of the same rows
        arrival: dict[Place, int] = {(strip, row): n for n, ((_, row, strip), _) in enumerate(into)}
        depth = max((len(b) for b in band_P), default=0)
        self.sources = [[self._source(band, j, number, arrival) for band in band_P] for j in range(depth)]

    def _replicated(self, p: Piece) -> bool:
        return self.layout.groups[self.layout.strips[p.strip].group].mode == "replicated"

    def _source(self, band: list[Piece], j: int, number: dict[Place, int], arrival: dict[Place, int]) -> tuple[str, int]:
        """Where strip j of a band comes from: an own piece, an arrived part, or nowhere."""
        if j >= len(band):
            return "none", 0
        place = band[j].strip, band[j].rows.start
        return ("own", number[place]) if band[j].rank == self.comm.rank else ("arrived", arrival[place])

    def __call__(self, row_GU: list[Tensor], squares_GU: list[Tensor]) -> list[Tensor]:
        """Sums over whole rows.

        Args:
            row_GU: touched rows of each group's store, in the order in which they were asked for.
            squares_GU: fp64 sums of squares over the strip's columns.

        Returns:
            fp64 sums of squares over the whole row, shaped as they came.
        """
        device = self.comm.device
        piece_GU = [torch.bucketize(row, base[:-1], right=True) - 1 for row, base in zip(row_GU, self.base_G, strict=True)]
        order_GU = [torch.argsort(piece, stable=True) for piece in piece_GU]
        n_P = torch.cat([torch.bincount(p, minlength=max(len(b) - 1, 0)) for p, b in zip(piece_GU, self.base_G, strict=True)]).cpu()
        first_P = starts(n_P)[:-1]
        part = torch.cat([squares[order] for squares, order in zip(squares_GU, order_GU, strict=True)])
        arrived, first_A = self._exchange(part, n_P, first_P)
        everything = torch.cat([part, arrived, part.new_zeros(1)])
        total = torch.zeros_like(part)
        for level in self.sources:
            begin_P = torch.tensor([_begin(kind, k, first_P, first_A, len(part)) for kind, k in level])
            present_P = torch.tensor([kind != "none" for kind, _ in level])
            index = runs(begin_P, torch.where(present_P, n_P, 0)).to(device)
            where = runs(first_P, torch.where(present_P, n_P, 0)).to(device)
            total[where] += everything[index]
        found = [torch.empty_like(squares) for squares in squares_GU]
        for whole, order, mine in zip(found, order_GU, torch.split(total, [len(r) for r in row_GU]), strict=True):
            whole[order] = mine
        return found

    def _exchange(self, part: Tensor, n_P: Tensor, first_P: Tensor) -> tuple[Tensor, Tensor]:
        """Parts of the siblings on other ranks, and where each begins."""
        world = self.comm.world
        asked, served = np.zeros((world, 1), np.int64), np.zeros((world, 1), np.int64)
        size = n_P.tolist()
        for rank, _, _, i in self.out:
            asked[rank] += size[i]
        for rank, i in zip(self.into_rank, self.into_piece.tolist(), strict=True):
            served[rank] += size[i]
        mail = Mail(asked, served, self.comm.rank, 1)
        buffer = torch.empty(mail.numel, dtype=part.dtype, device=part.device)
        at = mail.asked_WG1[:, 0].tolist()
        for rank, _, _, i in self.out:
            buffer[at[rank]:at[rank] + size[i]] = part[int(first_P[i]):int(first_P[i]) + size[i]]
            at[rank] += size[i]
        self.comm.swap(buffer, *mail.requests())()
        arrived = torch.cat([buffer[c[0]:c[1]] for r, c in enumerate(mail.served_WG1.tolist()) if r != self.comm.rank] or [buffer[:0]])
        return arrived, starts(n_P[self.into_piece])[:-1]


def _begin(kind: str, number: int, first_P: Tensor, first_A: Tensor, own: int) -> int:
    if kind == "own":
        return int(first_P[number])
    return own + int(first_A[number]) if kind == "arrived" else 0
