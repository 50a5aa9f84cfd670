"""The constants of tables that the kernels for all groups at once read: of slots, of pieces, and of
the pieces of each group (`recapp/kernels/batch_arrays.py`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from recapp.engine.dynamic_keys import MOST_SLOTS
from recapp.engine.state import EngineState
from recapp.kernels.batch_arrays import MODES, GroupRequests, PieceNumbers, SlotNumbers
from recapp.kernels.links import Counts, Routes, starts
from recapp.sparse.transfer import to_device
from recapp.tables.config import PoolingType
from recapp.tables.ids import RULE_NUMBERS, rule_of
from recapp.tables.positions import STRETCHES, stretches_of


def rows_of_stores(state: EngineState) -> list[int]:
    """Return the rows of each group on the rank that has most of them, or the most slots of a store
    that finds rows.
    """
    groups = searched(state)
    return [
        MOST_SLOTS if g in groups else max(group.rows_W)
        for g, group in enumerate(state.layout.groups)
    ]


def rows_of_strips(r: Routes) -> Tensor:
    """Return the rows of the strips of a group: the stretches of dynamic tables."""
    return torch.full_like(r.rows_I, STRETCHES) if r.dynamic else r.rows_I


def searched(state: EngineState) -> list[int]:
    """Return the groups of dynamic tables, whose stores find rows."""
    return [g for g, r in enumerate(state.routes) if r.dynamic]


def numbers_of_slots(state: EngineState) -> list[SlotNumbers]:
    """Return the constants of the slots, group by group. Where this rank has all rows of a group,
    keys are rows of the store; where a search finds the rows, the key of a slot is its strip.
    """
    layout = state.layout
    lookups_before = set[int]()
    numbers = []
    for r in state.routes:
        first_I = starts(rows_of_strips(r)).tolist()
        local = state.comm.world == 1 or r.mode == "replicated"
        base_I = r.base_K[r.piece_I1[:-1]].tolist() if local else first_I
        for f, strip in zip(r.lookups, r.strip_S.tolist(), strict=True):
            x = layout.lookups[f]
            order = state.mixed.order_F[f]
            alone = strip if r.dynamic else base_I[strip]
            key = alone if state.comm.world == 1 else first_I[strip]
            numbers.append(
                SlotNumbers(
                    *(f, RULE_NUMBERS[rule_of(x)], x.table.num_embeddings, x.table.min_key),
                    *((order.multiplier, order.shift, order.rows) if order else (1, 0, 0)),
                    *(base_I[strip], key, not x.columns, x.pooling is PoolingType.MEAN),
                    *(f not in lookups_before, x.hotness or 1, x.dim if x.hotness else 0),
                )
            )
            lookups_before.add(f)
    return numbers


def numbers_of_pieces(state: EngineState, pooled: Sequence[int] = ()) -> list[PieceNumbers]:
    """Return the constants of the pieces, group by group.

    Args:
        state: The engine state of the tables.
        pooled: The groups whose owners sum bags: there an owner is a piece.
    """
    numbers = []
    for g, r in enumerate(state.routes):
        if g in pooled:
            numbers += [PieceNumbers(g, w, w + 1, 0, w) for w in range(state.comm.world)]
            continue
        first_I1 = starts(rows_of_strips(r))
        first_K = torch.repeat_interleave(
            first_I1[:-1], r.piece_I1.diff(), output_size=len(r.start_K)
        )
        keys = first_K + (stretches_of(r.start_K) if r.dynamic else r.start_K)
        edge_K1 = [*keys.tolist(), int(first_I1[-1])]  # pieces tile the strips
        rank_K = torch.full_like(r.rank_K, -1) if r.mode == "replicated" else r.rank_K
        pieces = zip(pairwise(edge_K1), r.base_K.tolist(), rank_K.tolist(), strict=True)
        numbers += [PieceNumbers(g, *edge, base, rank) for edge, base, rank in pieces]
    return numbers


def numbers_of_own_pieces(state: EngineState) -> list[PieceNumbers]:
    """Return the pieces of this rank's stores whose strips exchange row statistics."""
    statistics = state.row_statistics
    return [
        PieceNumbers(g, piece.base, piece.base + len(piece.rows), piece.base, state.comm.rank)
        for g in range(len(state.routes))
        if statistics and statistics.means_G[g]
        for piece in state.layout.pieces_of(state.comm.rank, g)
    ]


def numbers_of_tables(state: EngineState) -> tuple[Counts, Counts]:
    """Return the number of each slot's table, where each group numbers its tables behind those of
    the groups before, and the first number of each group.
    """
    tables = len(state.layout.tables)
    number = {t.name: n for n, t in enumerate(state.layout.tables)}
    table_F = [number[x.table.name] for x in state.layout.lookups]
    of_slots = [g * tables + table_F[f] for g, r in enumerate(state.routes) for f in r.lookups]
    known_T, table_S = np.unique(of_slots, return_inverse=True)
    return table_S, np.searchsorted(known_T, np.arange(len(state.routes)) * tables)


def pieces_on_device(
    state: EngineState, pieces: Sequence[PieceNumbers], modes: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return pieces, int64 [K x `PieceNumbers`], and those of each group, int64 [G x
    `GroupRequests`].
    """
    edge_G1 = np.searchsorted([p.group for p in pieces], range(len(state.routes) + 1))
    groups = [
        GroupRequests(*edge, r.width, MODES.index(mode))
        for edge, r, mode in zip(pairwise(edge_G1.tolist()), state.routes, modes, strict=True)
    ]
    device = state.comm.device
    return to_device(np.array(pieces, np.int64), device), to_device(np.array(groups), device)
