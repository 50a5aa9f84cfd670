"""The rows of keys that were added without telling the host (`DeviceKeyIndex.add`): in one launch,
start values of rows and of their optimiser's state are written, keys counted, and entries get their
slots. Entries that are not new cost a read and two writes.

Letters: P entries, R rows of the store, D columns, K tensors of state, A stretches of all strips.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels import triton_key_index
from recapp.kernels.reference import SortedIndex
from recapp.kernels.triton_integers import BELOW_STRETCH, KEY
from recapp.kernels.triton_key_index import TAKEN, NewKeys, counted, entries_of, first_entries
from recapp.kernels.triton_launch import Launch
from recapp.kernels.triton_start_values import COLUMNS, key_of, start_values_of
from recapp.tables.positions import STRETCHES

ENTRIES = 32  # of a program
_STRETCHES = tl.constexpr(STRETCHES)


def begin_new(
    new: NewKeys,
    index: SortedIndex,
    row_P: Tensor,
    key_P: Tensor,
    group: Tensor,
    weights_RD: Tensor,
    state: Sequence[Tensor],
    starts: tuple[Tensor, Tensor, Tensor],
    start_K: Tensor,
    counts_A: tuple[Tensor, Tensor],
) -> None:
    """Begin the rows of keys that were added, and write the slot of each entry. The host knows
    neither the number of keys nor that of entries.

    Args:
        new: The entries of the keys.
        index: The index, with the position and strip of each slot.
        row_P: Filled with the slots of the entries; memory may have room for more.
        key_P: Filled with the slots behind the first key of the group.
        group: The place of the group, int64 [`GroupPlace`].
        weights_RD: The rows by slot, in a type of at most 32 bits.
        state: At most two tensors of state by slot, [R, D] or [R, 1].
        starts: The hash, first column and distance of values of each strip (`begin_rows`).
        start_K: The start value of each of these tensors, fp64.
        counts_A: Two numbers of rows of each stretch of each strip, to which the keys are added.
    """
    n = len(row_P)
    width = weights_RD.shape[1]
    if n:
        state0, state1 = (*state, None, None)[:2]
        by_row = [x is not None and x.shape[1] == 1 for x in (state0, state1)]
        arrays = *new, index.positions.rows, index.strips.rows, row_P, key_P, group, weights_RD
        arguments = *arrays, state0, state1, start_K, *starts, *counts_A, n, width
        _begin_new(
            (triton.cdiv(n, ENTRIES),),
            arguments,
            (*by_row, triton_key_index.LANES, ENTRIES, COLUMNS),
        )


@triton.jit
def _fill(state, start, slot_M, column_D, here_MD, is_new_M, width, BY_ROW: tl.constexpr):
    """Write the start value of the state of a tile of rows x columns."""
    if BY_ROW:
        tl.store(state + slot_M, tl.where(is_new_M, start, 0.0), mask=is_new_M)
    else:
        start_MD = tl.where(here_MD, start, 0.0)
        tl.store(state + (slot_M * width)[:, None] + column_D[None, :], start_MD, mask=here_MD)


@Launch
@triton.jit(do_not_specialize=["n"])
def _begin_new(
    slot,
    claims,
    cell,
    counts,
    numbers,
    positions,
    strips,
    row,
    key,
    group,
    weights,
    state0,
    state1,
    start,
    hashes,
    columns,
    scales,
    added,
    admitted,
    n,
    width,
    BY_ROW0: tl.constexpr,
    BY_ROW1: tl.constexpr,
    LANES: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the slots of a block of entries, and begin the rows of those that are the first entry
    of a new key.
    """
    at_M = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    here_M = at_M < entries_of(group)
    is_new_M, first_M = first_entries(claims, cell, at_M, n)
    from_M = tl.where(first_M >= 0, first_M, at_M)
    slot_M = tl.load(slot + from_M, mask=here_M, other=0)
    tl.store(row + at_M, slot_M, mask=here_M)
    tl.store(key + at_M, slot_M + tl.load(group + KEY), mask=here_M)
    if tl.max(is_new_M.to(tl.int32), 0) > 0:
        strip_M = tl.load(strips + slot_M, mask=is_new_M, other=0)
        position_M = tl.load(positions + slot_M, mask=is_new_M, other=0)
        part_M = strip_M.to(tl.int64) * _STRETCHES
        part_M += (position_M >> BELOW_STRETCH) + _STRETCHES // 2
        tl.atomic_add(added + part_M, part_M * 0 + 1, mask=is_new_M, sem="relaxed")
        tl.atomic_add(admitted + part_M, part_M * 0 + 1, mask=is_new_M, sem="relaxed")
        key_M = key_of(position_M)
        for begin in range(0, width, COLUMNS):
            column_D = begin + tl.arange(0, COLUMNS)
            here_MD = is_new_M[:, None] & (column_D < width)[None, :]
            value_MD = start_values_of(key_M, strip_M, column_D, hashes, columns, scales)
            tl.store(
                weights + (slot_M * width)[:, None] + column_D[None, :], value_MD, mask=here_MD
            )
            if state0 is not None:
                at0 = tl.load(start)
                _fill(state0, at0, slot_M, column_D, here_MD, is_new_M, width, BY_ROW0)
            if state1 is not None:
                at1 = tl.load(start + 1)
                _fill(state1, at1, slot_M, column_D, here_MD, is_new_M, width, BY_ROW1)
    if tl.program_id(0) == 0:
        taken = tl.load(numbers + TAKEN)
        tl.store(numbers + TAKEN, taken + counted(counts, tl.cdiv(n, LANES), LANES))
