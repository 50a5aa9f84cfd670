"""How a group of tables asks: three ways to split `out = A . S . rows` between home (A) and owner (S). Local arithmetic, no collectives.

| mode       | a requested vector is              | the owner (S)  | home (A)       |
|------------|------------------------------------|----------------|----------------|
| unique     | one distinct row                   | selects rows   | sums bags      |
| pooled     | what one bag wants of one owner    | sums rows      | sums owners    |
| replicated | one distinct row, read from the own store; its gradient goes to all ranks |

Vectors are numbered by owner, ranks ascending: the vectors asked of one rank stand behind each other, in the request, in the answer and
in the gradient. Letters: P (slot, id) pairs, M bags (slots x B), V vectors, U distinct rows, W ranks, K pieces.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from recapp.kernels.reference import Links, group, starts
from recapp.sharding.layout import Group, Layout
from recapp.tables.ids import Rows


class Routes:
    """A group as arrays on a device: which features it serves and where every row of its strips lives."""

    def __init__(self, layout: Layout, number: int, rank: int, device: torch.device) -> None:
        self.group: Group = layout.groups[number]
        self.mode = self.group.mode
        slots = self.group.slots
        self.features = [s.feature for s in slots]
        self.key_S = torch.tensor([layout.strips[s.strip].key for s in slots], device=device)
        self.all_features = self.features == list(range(sum(len(t.feature_names) for t in layout.tables)))
        pieces = [p for p in layout.pieces if layout.strips[p.strip].group == number and (self.mode != "replicated" or p.rank == rank)]
        self.first_K = torch.tensor([layout.strips[p.strip].key + p.rows.start for p in pieces], device=device)
        self.rank_K = torch.tensor([p.rank for p in pieces], device=device)
        self.shift_K = torch.tensor([p.base - layout.strips[p.strip].key - p.rows.start for p in pieces], device=device)
        self.key_dtype = torch.int32 if int(self.first_K[-1]) + len(pieces[-1].rows) < 2**31 else torch.int64
        self.row_dtype = torch.int32 if max(max(g.rows_W) for g in layout.groups) < 2**31 else torch.int64      # one message, one type

    def locate(self, key_N: Tensor) -> tuple[Tensor, Tensor]:
        """Row keys to (owner, row of the owner's store)."""
        piece_N = torch.searchsorted(self.first_K, key_N.long(), right=True) - 1
        return self.rank_K[piece_N], (key_N + self.shift_K[piece_N]).to(self.row_dtype)


@dataclass(slots=True)
class Asked:
    """Home's side of one group: A and its transpose over vectors 0..V, and what to tell each rank."""

    combine: Links                  # [M, V]
    spread: Links                   # its transpose, rows in the order of `by_rank_V`'s numbers
    by_rank_V: Tensor | None        # row of `spread` that is vector v; None: they stand in order already
    ids_W: list[Tensor]             # rows asked of each rank [, pooled: bag lengths, bits of the weights]
    counts_W3: Tensor               # rows, vectors, words of `ids`, on the host


@dataclass(slots=True)
class Owned:
    """The owner's side of one group: S for the answers; the distinct rows and S's transpose for the update, in rank order."""

    answer: Links
    row_U: Tensor
    learn: Links


def ask(routes: Routes, rows: Rows, world: int, mode: str) -> Asked:
    """Split a batch's lookups in one group into requests to owners.

    Args:
        routes: the group.
        rows: of the whole batch.
        world: ranks W.
        mode: the group's, or "unique" where weights need a gradient, which is taken at home.
    """
    row_P, length_M, weights_P, per_S = _pairs(routes, rows)
    key_P = (row_P + torch.repeat_interleave(routes.key_S, per_S, output_size=len(row_P))).to(routes.key_dtype)
    bag_P = torch.repeat_interleave(torch.arange(len(length_M), dtype=torch.int32, device=row_P.device), length_M, output_size=len(row_P))
    if mode == "pooled":
        return _ask_pooled(routes, key_P, bag_P, len(length_M), weights_P, world)
    distinct = group(key_P)
    offsets_M1 = starts(length_M.int())
    spread = distinct.transpose(bag_P, weights_P)
    if mode == "replicated":
        row_U = routes.locate(distinct.key_U)[1]
        n = len(row_U)
        return Asked(Links(distinct.number_N, offsets_M1, weights_P), spread, None, [row_U] * world, torch.full((world, 3), n))
    rank_U, row_U = routes.locate(distinct.key_U)
    by_rank_V = torch.argsort(rank_U, stable=True)
    vector_U = torch.empty_like(by_rank_V, dtype=torch.int32)
    vector_U[by_rank_V] = torch.arange(len(by_rank_V), dtype=torch.int32, device=row_P.device)
    n_W = torch.bincount(rank_U, minlength=world).cpu()
    ids_W = list(torch.split(row_U[by_rank_V], n_W.tolist()))
    return Asked(Links(vector_U[distinct.number_N], offsets_M1, weights_P), spread, by_rank_V, ids_W, n_W[:, None].repeat(1, 3))


def _pairs(routes: Routes, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The rows, bag lengths and weights of the group's slots, slot by slot; a strip asks for its feature again."""
    per_S = torch.tensor([rows.per_F[f] for f in routes.features], device=rows.rows_L.device)
    if routes.all_features:
        return rows.rows_L, rows.lengths_FB.flatten(), rows.weights_L, per_S
    edge = [0, *accumulate(rows.per_F)]
    take = [slice(edge[f], edge[f + 1]) for f in routes.features]
    weights_P = None if rows.weights_L is None else torch.cat([rows.weights_L[t] for t in take])
    return torch.cat([rows.rows_L[t] for t in take]), rows.lengths_FB[routes.features].flatten(), weights_P, per_S


def _ask_pooled(routes: Routes, key_P: Tensor, bag_P: Tensor, bags: int, weights_P: Tensor | None, world: int) -> Asked:
    rank_P, row_P = routes.locate(key_P)
    vector = group(bag_P.long() * world + rank_P)
    rank_V, bag_V = vector.key_U % world, (vector.key_U // world).int()
    by_rank_V = torch.argsort(rank_V, stable=True)
    by_rank_P = vector.order_N[torch.argsort(rank_P[vector.order_N], stable=True)]               # by rank, then by vector
    v_W, p_W = (torch.bincount(x, minlength=world).cpu() for x in (rank_V, rank_P))
    length_V = vector.start_U1.diff()[by_rank_V].to(routes.row_dtype)
    parts = [torch.split(row_P[by_rank_P], p_W.tolist()), torch.split(length_V, v_W.tolist())]
    if weights_P is not None:
        bits = weights_P[by_rank_P].to(weights_on_wire(weights_P.dtype, routes.row_dtype)).view(routes.row_dtype)
        parts.append(torch.split(bits, (p_W * (len(bits) // max(1, len(row_P)))).tolist()))
    ids_W = [torch.cat(p) for p in zip(*parts, strict=True)]
    number_V = torch.empty_like(by_rank_V, dtype=torch.int32)
    number_V[by_rank_V] = torch.arange(len(by_rank_V), dtype=torch.int32, device=key_P.device)
    combine = Links(number_V, starts(torch.bincount(bag_V, minlength=bags)).int())
    return Asked(combine, Links(bag_V), by_rank_V, ids_W, torch.stack([p_W, v_W, torch.tensor([len(i) for i in ids_W])], 1))


def weights_on_wire(weights: torch.dtype, rows: torch.dtype) -> torch.dtype:
    """Sample weights travel as bits among the row numbers, so they may not be narrower than one."""
    return torch.float64 if rows == torch.int64 else weights


def own(mode: str, ids_W: list[Tensor], counts_W3: Tensor, weights_dtype: torch.dtype, rank: int) -> Owned:
    """What a rank answers and learns, from the requests of all ranks in rank order.

    Args:
        mode: as in `ask`.
        ids_W: what each rank sent.
        counts_W3: rows, vectors and words each rank sent, on the host.
        weights_dtype: of sample weights that ride along in pooled requests.
        rank: this one.
    """
    if mode != "pooled":
        row_N = torch.cat(ids_W)
        distinct = group(row_N)
        answer = Links(ids_W[rank] if mode == "replicated" else row_N)
        return Owned(answer, distinct.key_U.long(), Links(distinct.order_N.int(), distinct.start_U1))
    parts = [torch.split(ids, [p, v, n - p - v]) for ids, (p, v, n) in zip(ids_W, counts_W3.tolist(), strict=True)]
    row_N, length_V, bits = (torch.cat(p) for p in zip(*parts, strict=True))
    weights_N = bits.view(weights_on_wire(weights_dtype, row_N.dtype)).to(weights_dtype) if len(bits) else None
    distinct = group(row_N)
    number_V = torch.arange(len(length_V), dtype=torch.int32, device=row_N.device)
    vector_N = torch.repeat_interleave(number_V, length_V, output_size=len(row_N))
    answer = Links(row_N, starts(length_V).to(row_N.dtype), weights_N)
    return Owned(answer, distinct.key_U.long(), distinct.transpose(vector_N, weights_N))
