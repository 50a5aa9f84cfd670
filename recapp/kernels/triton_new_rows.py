"""The rows of new keys of dynamic tables on a GPU, those of all strips in one launch: start values
are written. Where keys were added without telling the host (`DeviceKeyIndex.add`), entries also get
their slots. An entry that is not new costs a read and two writes there. Where eviction needs the
use of rows, each entry swaps the number of the step into the last use of its row: of all entries of
the row, the one that gets another number back counts the use.

Letters: I strips, M rows to begin or entries, R rows of the store, D columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.triton_integers import ENTRIES_END, KEY, NO_KEY
from recapp.kernels.triton_key_index import NEXT, STEP, USED, first_entries
from recapp.kernels.triton_launch import Launch
from recapp.kernels.triton_start_values import key_of, start_values_of

ROWS = 32  # of a program
COLUMNS = 64


def begin_rows(
    weights_RD: Tensor,
    starts_I: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    added: tuple[Tensor, ...] = (),
    entry: int = 0,
    of_use: tuple[Tensor, ...] = (),
) -> None:
    """Write the start values of keys of dynamic tables to their slots.

    Args:
        weights_RD: The rows by slot, in a type of at most 32 bits.
        starts_I: The hash of seed and table name (`start_hash`) of each strip, int64; its first
            column, int64; and the distance of two values, fp32.
        rows: The slots, positions and strips of the keys. Where the host knows neither the number
            of new keys nor that of entries, the slots of entries, and the positions and strips of
            all slots.
        added: In this case, what else `DeviceKeyIndex.add` has returned, and the numbers of the
            index; positions, which are filled with the slots of the entries, and strips, which are
            filled with the slots behind the first key of the group, or with its `no_key` where a
            key has no row yet; the place of the group, int64 [`GroupPlace`]; and an integer or
            None: where it is set, no use of rows is noted.
        entry: The number of the first entry of the group.
        of_use: By slot the number of the step that used the row last, and of the steps that did,
            int32, where these are noted.
    """
    n = len(added[3]) if added else len(rows[0])
    width = weights_RD.shape[1]
    if n:
        arguments = weights_RD, *starts_I, *rows, *(added or [None] * 7), *(of_use or [None] * 2)
        begin((triton.cdiv(n, ROWS),), (*arguments, entry, n, width), (ROWS, COLUMNS))


@Launch
@triton.jit(do_not_specialize=["entry", "n"])
def begin(
    weights,
    hashes,
    columns,
    scales,
    slot,
    positions,
    strips,
    claims,
    cell,
    numbers,
    row,
    key,
    group,
    stopped,
    last_used,
    uses,
    entry,
    n,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Begin a block of rows; with `claims` the rows of those entries of a block that are the first
    one of a new key, and write the slots of all.
    """
    at_M = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_new_M = at_M < n
    from_M = at_M
    here_M = is_new_M
    if claims is not None:
        is_new_M, first_M = first_entries(claims, cell, at_M, n)
        from_M = tl.where(first_M >= 0, first_M, at_M)
        here_M = at_M < tl.load(group + ENTRIES_END) - entry
    slot_M = tl.load(slot + from_M, mask=here_M, other=0)
    place_M = at_M
    if claims is not None:
        place_M = slot_M
        has_row_M = slot_M < tl.maximum(tl.load(numbers + NEXT), tl.load(numbers + USED))
        number_M = tl.where(has_row_M, slot_M + tl.load(group + KEY), tl.load(group + NO_KEY))
        tl.store(row + at_M, slot_M, mask=here_M)
        tl.store(key + at_M, number_M, mask=here_M)
        if last_used is not None:
            uses_M = here_M & has_row_M
            if stopped is not None:
                uses_M &= tl.load(stopped) == 0
            step = tl.load(numbers + STEP).to(tl.int32)
            step_M = tl.full((ROWS,), step, tl.int32)
            before_M = tl.atomic_xchg(last_used + slot_M, step_M, mask=uses_M, sem="relaxed")
            one_M = uses_M & (before_M != step)  # of the entries of a row
            times_M = tl.load(uses + slot_M, mask=one_M & (first_M < 0), other=0)
            tl.store(uses + slot_M, times_M + 1, mask=one_M)
    if tl.max(is_new_M.to(tl.int32), 0) > 0:
        strip_M = tl.load(strips + place_M, mask=is_new_M, other=0)
        position_M = tl.load(positions + place_M, mask=is_new_M, other=0)
        key_M = key_of(position_M)
        for begins in range(0, width, COLUMNS):
            column_D = begins + tl.arange(0, COLUMNS)
            here_MD = is_new_M[:, None] & (column_D < width)[None, :]
            value_MD = start_values_of(key_M, strip_M, column_D, hashes, columns, scales)
            at_MD = (slot_M * width)[:, None] + column_D[None, :]
            tl.store(weights + at_MD, value_MD, mask=here_MD)
