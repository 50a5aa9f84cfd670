"""The integers of a batch for all groups of one rank on a GPU: four launches and a sort, whatever
the number of tables.

    rows          ids -> rows of the stores, sort keys, the offsets of the entries' gradients
    bags          where the entries of each bag begin, and where its vector lies in the output
    torch.sort    the keys of all groups at once, stable
    count_heads   the number of distinct rows in each block of sorted entries
    write_heads   the distinct rows, where the entries of each begin, and the offsets of their
                  gradients in the order of the rows

`batch_arrays.py` explains slots, entries and regions. Keys number the rows of all groups one after
the other, and each group has a key more: the entries between the end of a group and the end of its
region take this key, and the sort leaves every group in its region. The distinct rows of a group,
and where they begin, stand at the start of its region. The only results that programs of one launch
read of those of another are counts of heads, and no size goes to the host.

`recapp/tables/ids.py` defines the rules, and `reference.py` the distinct rows: results are equal
integer by integer.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.batch_arrays import (
    BLOCK,
    NOTHING,
    BatchArrays,
    BatchSizes,
    GroupPlace,
    SlotNumbers,
    SlotPlace,
)
from recapp.sparse.keyed_jagged_tensor import MISSING

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}

# For kernels: the columns of the three records, and how many each has.
LOOKUP, RULE, SIZE, MIN_KEY, FACTOR, SHIFT, MIXED, BASE, SEQUENCE, MEAN, FIRST = (
    tl.constexpr(i) for i in range(len(SlotNumbers._fields))
)
ID, ENTRY, BAG, VECTOR, STEP = (tl.constexpr(i) for i in range(len(SlotPlace._fields)))
SLOTS, SLOTS_END, BLOCKS, ENTRIES_END, BAG_BLOCKS, BAGS_END, KEY, NO_KEY = (
    tl.constexpr(i) for i in range(len(GroupPlace._fields))
)
SLOT, PLACE, GROUP = (
    tl.constexpr(len(record._fields)) for record in (SlotNumbers, SlotPlace, GroupPlace)
)
ERROR, HASH, CLAMP = (tl.constexpr(i) for i in range(3))  # `RULE_NUMBERS` of tables/ids.py
NO_ID = tl.constexpr(MISSING)
NONE = tl.constexpr(NOTHING)


def integers_of_batch(
    ids_L: Tensor,
    edge_N1: Tensor,
    weights_L: Tensor | None,
    slots: Tensor,
    header: Tensor,
    sizes: BatchSizes,
    scale_dtype: torch.dtype | None,
    take: Callable[[str, int, torch.dtype], Tensor],
) -> BatchArrays:
    """Return the integers of a batch. The host waits for nothing.

    Args:
        ids_L: The raw ids, lookup by lookup.
        edge_N1: Where the ids of each bag of the batch begin, [F x B + 1].
        weights_L: A weight for each id, or None.
        slots: The constants of the slots, int64 [S x `SlotNumbers`].
        header: The places of the slots and of the groups, and an empty report, which is filled:
            int64, one after the other.
        sizes: The sizes of the batch.
        scale_dtype: The type of the weights of entries; None where all are 1.
        take: A function that returns memory by name, size and type, undefined.
    """
    s = sizes
    first_group = s.slots * len(SlotPlace._fields)
    first_report = first_group + s.groups * len(GroupPlace._fields)
    places, groups, report = header.tensor_split((first_group, first_report))
    index_P = take("index", s.entries, s.row_dtype)
    where_P, gradient_P = (take(n, s.entries, s.offset_dtype) for n in ("where", "gradient"))
    weight_P, gradient_weight_P = (
        None if scale_dtype is None else take(name, s.entries, scale_dtype)
        for name in ("weight", "gradient_weight")
    )
    key_P, sorted_P = (take(name, s.entries, s.key_dtype) for name in ("key", "sorted"))
    blocks = s.entries // BLOCK
    rows[blocks,](
        *(ids_L, edge_N1, weights_L, slots, places, groups, report),
        *(key_P, index_P, where_P, weight_P, s.samples, s.groups),
        None if scale_dtype is None else TYPES[scale_dtype],
        BLOCK,
        enable_fp_fusion=False,
    )
    offset_M = take("offset", s.bags, torch.int32)
    at_M = take("at", s.bags, s.offset_dtype)
    bags[s.bags // BLOCK,](
        *(edge_N1, slots, places, groups, offset_M, at_M, s.samples, s.groups, BLOCK)
    )
    order_P = take("order", s.entries, torch.int64)
    torch.sort(key_P, stable=True, out=(sorted_P, order_P))
    head_J = take("heads", blocks, torch.int32)
    count_G = take("count", s.groups, torch.int32)
    count_heads[blocks,](sorted_P, groups, head_J, s.groups, BLOCK)
    row_U = take("row", s.entries, s.row_dtype)
    start_U = take("start", s.entries, torch.int32)
    write_heads[blocks,](
        *(sorted_P, order_P, where_P, weight_P, head_J, groups, row_U, start_U),
        *(gradient_P, gradient_weight_P, count_G, s.groups, BLOCK),
    )
    return BatchArrays(
        *(index_P, weight_P, offset_M, at_M, row_U, start_U),
        *(gradient_P, gradient_weight_P, count_G, report),
    )


@triton.jit
def _group_of(block, groups, count, FIELD: tl.constexpr):
    """Return the number of the group that has a block."""
    number = 0
    for other in range(1, count):
        number += (tl.load(groups + other * GROUP + FIELD) <= block).to(tl.int32)
    return number


@triton.jit
def _last_at_most(edges, STRIDE: tl.constexpr, low_N, high_N, most_N):
    """Return the last number in low .. high - 1 whose edge is at most `most`; edges ascend."""
    while tl.max(high_N - low_N, 0) > 1:
        open_N = high_N - low_N > 1
        middle_N = (low_N + high_N) // 2
        left_N = tl.load(edges + middle_N * STRIDE, mask=open_N, other=0) <= most_N
        low_N = tl.where(open_N & left_N, middle_N, low_N)
        high_N = tl.where(open_N & (left_N == 0), middle_N, high_N)
    return low_N


@triton.jit
def _slot_of(at_N, places, group, FIELD: tl.constexpr):
    """Return the slot of each entry or bag of a group."""
    zero_N = at_N * 0
    return _last_at_most(
        places + FIELD,
        PLACE,
        tl.load(group + SLOTS) + zero_N,
        tl.load(group + SLOTS_END) + zero_N,
        at_N,
    )


@triton.jit
def _rows_of(id_P, slot_P, here_P):
    """Return the row of each id by the rule of its table, and whether the id was outside."""
    size_P = tl.load(slot_P + SIZE, mask=here_P, other=1)
    first_P = tl.load(slot_P + MIN_KEY, mask=here_P, other=0)
    near_P = tl.minimum(tl.maximum(id_P, first_P - 1), first_P + size_P)
    missing_P = id_P == NO_ID
    wanted_P = tl.where(missing_P, 0, tl.where(first_P == 0, id_P, near_P - first_P))
    nearest_P = tl.minimum(tl.maximum(wanted_P, 0), size_P - 1)
    others_P = tl.maximum(size_P - 1, 1)
    rest_P = id_P % others_P
    rest_P += tl.where(rest_P < 0, others_P, 0)  # a remainder has the sign of the id
    hashed_P = tl.where(missing_P, 0, 1 + rest_P)
    hashes_P = tl.load(slot_P + RULE, mask=here_P, other=0) == HASH
    outside_P = here_P & (hashes_P == 0) & (nearest_P != wanted_P)
    return tl.where(hashes_P, hashed_P, nearest_P), outside_P


@triton.jit
def _note_outside(outside_P, id_at_P, slot_P, report):
    """Keep the first id that is an error, and count changed ids, once for each lookup."""
    if tl.max(outside_P.to(tl.int32), 0) > 0:
        rule_P = tl.load(slot_P + RULE, mask=outside_P, other=0)
        wrong_P = outside_P & (rule_P == ERROR)
        tl.atomic_min(report, tl.min(tl.where(wrong_P, id_at_P, NONE), 0))
        changed_P = outside_P & (rule_P == CLAMP)
        changed_P = changed_P & (tl.load(slot_P + FIRST, mask=outside_P, other=0) > 0)
        lookup_P = tl.load(slot_P + LOOKUP, mask=outside_P, other=0)
        tl.atomic_add(report + 1 + lookup_P, (lookup_P * 0 + 1), mask=changed_P)


@triton.jit
def _positions_of(row_P, slot_P, here_P):
    """Return the positions of rows: other numbers where the rows of a table are mixed."""
    mixed_P = tl.load(slot_P + MIXED, mask=here_P, other=0)
    factor_P = tl.load(slot_P + FACTOR, mask=here_P, other=1)
    shift_P = tl.load(slot_P + SHIFT, mask=here_P, other=0)
    position_P = (row_P * factor_P + shift_P) % tl.maximum(mixed_P, 1)
    return tl.where(mixed_P > 0, position_P, row_P)


@triton.jit(do_not_specialize=["samples", "group_count"])
def rows(
    ids,
    edges,
    weights,
    slots,
    places,
    groups,
    report,
    key,
    index,
    where,
    use,
    samples,
    group_count,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row, the sort key, the offset of the gradient and the weight of a block of entries.

    The bag of an id is found by bisection of the bags' edges. A mean divides by the ids of its bag.
    """
    block = tl.program_id(0)
    group = groups + _group_of(block, groups, group_count, BLOCKS) * GROUP
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_P = p_P < tl.load(group + ENTRIES_END)
    s_P = _slot_of(p_P, places, group, ENTRY)
    slot_P = slots + s_P * SLOT
    place_P = places + s_P * PLACE
    nth_P = p_P - tl.load(place_P + ENTRY, mask=here_P, other=0)
    id_at_P = tl.load(place_P + ID, mask=here_P, other=0) + nth_P
    id_P = tl.load(ids + id_at_P, mask=here_P, other=0).to(tl.int64)
    row_P, outside_P = _rows_of(id_P, slot_P, here_P)
    _note_outside(outside_P, id_at_P, slot_P, report)
    store_P = _positions_of(row_P, slot_P, here_P) + tl.load(slot_P + BASE, mask=here_P, other=0)
    key_P = tl.where(here_P, tl.load(group + KEY) + store_P, tl.load(group + NO_KEY))
    tl.store(key + p_P, key_P.to(key.dtype.element_ty))
    tl.store(index + p_P, store_P.to(index.dtype.element_ty), mask=here_P)
    bags = edges + tl.load(slot_P + LOOKUP, mask=here_P, other=0) * samples
    zero_P = p_P * 0
    bag_P = _last_at_most(bags, 1, zero_P, zero_P + tl.where(here_P, samples, 0), id_at_P)
    sequence_P = tl.load(slot_P + SEQUENCE, mask=here_P, other=0) > 0
    step_P = tl.load(place_P + STEP, mask=here_P, other=0)
    where_P = tl.load(place_P + VECTOR, mask=here_P, other=0)
    where_P += tl.where(sequence_P, nth_P, bag_P) * step_P
    tl.store(where + p_P, where_P.to(where.dtype.element_ty), mask=here_P)
    if SCALE is not None:
        begin_P = tl.load(bags + bag_P, mask=here_P, other=0)
        length_P = tl.load(bags + bag_P + 1, mask=here_P, other=1) - begin_P
        means_P = tl.load(slot_P + MEAN, mask=here_P, other=0) > 0
        use_P = _reciprocal(tl.where(means_P, length_P, 1).to(SCALE))
        if weights is not None:
            use_P = use_P * tl.load(weights + id_at_P, mask=here_P, other=0.0).to(SCALE)
        tl.store(use + p_P, use_P, mask=here_P)


@triton.jit
def _reciprocal(x):
    """Return the correctly rounded 1 / x: `/` approximates it in single precision."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(x * 0 + 1.0, x)


@triton.jit(do_not_specialize=["samples", "group_count"])
def bags(edges, slots, places, groups, offset, at, samples, group_count, BLOCK: tl.constexpr):
    """Write where the entries of a block of bags begin, and where their vectors lie."""
    block = tl.program_id(0)
    group = groups + _group_of(block, groups, group_count, BAG_BLOCKS) * GROUP
    m_M = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(group + BAGS_END)
    here_M = m_M < end
    s_M = _slot_of(m_M, places, group, BAG)
    slot_M = slots + s_M * SLOT
    place_M = places + s_M * PLACE
    nth_M = m_M - tl.load(place_M + BAG, mask=here_M, other=0)
    bag_M = edges + tl.load(slot_M + LOOKUP, mask=here_M, other=0) * samples
    pooled_M = here_M & (tl.load(slot_M + SEQUENCE, mask=here_M, other=0) == 0)
    ids_M = tl.load(bag_M + nth_M, mask=pooled_M, other=0)
    ids_M = ids_M - tl.load(bag_M, mask=pooled_M, other=0)
    before_M = tl.where(pooled_M, ids_M, nth_M)
    before_M += tl.load(place_M + ENTRY, mask=here_M, other=0)
    first = tl.load(group + BLOCKS) * BLOCK
    behind = tl.load(group + ENTRIES_END)
    offset_M = tl.where(here_M, before_M, behind) - first
    tl.store(offset + m_M, offset_M.to(tl.int32), mask=m_M <= end)
    at_M = tl.load(place_M + VECTOR, mask=here_M, other=0)
    at_M += nth_M * tl.load(place_M + STEP, mask=here_M, other=0)
    tl.store(at + m_M, at_M.to(at.dtype.element_ty), mask=here_M)


@triton.jit
def _heads(sorted_keys, groups, group_count, BLOCK: tl.constexpr):
    """Return the number of the group that has this program's block, the positions and keys of the
    block's entries, whether each is there, and whether it is the first of its row.
    """
    block = tl.program_id(0)
    number = _group_of(block, groups, group_count, BLOCKS)
    group = groups + number * GROUP
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_P = p_P < tl.load(group + ENTRIES_END)
    key_P = tl.load(sorted_keys + p_P, mask=here_P, other=-1)
    inner_P = here_P & (p_P > tl.load(group + BLOCKS) * BLOCK)
    before_P = tl.load(sorted_keys + p_P - 1, mask=inner_P, other=-1)
    return number, p_P, key_P, here_P, here_P & (key_P != before_P)


@triton.jit(do_not_specialize=["group_count"])
def count_heads(sorted_keys, groups, heads, group_count, BLOCK: tl.constexpr):
    """Write the number of entries of a block that are the first of their row."""
    _, _, _, _, head_P = _heads(sorted_keys, groups, group_count, BLOCK)
    tl.store(heads + tl.program_id(0), tl.sum(head_P.to(tl.int32), 0))


@triton.jit(do_not_specialize=["group_count"])
def write_heads(
    sorted_keys,
    order,
    where,
    use,
    heads,
    groups,
    row,
    start,
    gradient,
    gradient_use,
    count,
    group_count,
    BLOCK: tl.constexpr,
):
    """Write the distinct rows of a block of sorted entries, where the entries of each begin, and
    the offset and weight of each entry's gradient. The last block of a group writes the number of
    its distinct rows.
    """
    number, p_P, key_P, here_P, head_P = _heads(sorted_keys, groups, group_count, BLOCK)
    group = groups + number * GROUP
    block = tl.program_id(0)
    first_block = tl.load(group + BLOCKS)
    before = 0
    for begin in range(first_block, block, BLOCK):
        at_J = begin + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(heads + at_J, mask=at_J < block, other=0), 0)
    first = first_block * BLOCK
    here = tl.sum(head_P.to(tl.int32), 0)
    u_P = first + before + tl.cumsum(head_P.to(tl.int32), 0) - 1
    row_P = (key_P - tl.load(group + KEY)).to(row.dtype.element_ty)
    tl.store(row + u_P, row_P, mask=head_P)
    tl.store(start + u_P, (p_P - first).to(tl.int32), mask=head_P)
    entry_P = tl.load(order + p_P, mask=here_P, other=0)
    tl.store(gradient + p_P, tl.load(where + entry_P, mask=here_P, other=0), mask=here_P)
    if use is not None:
        use_P = tl.load(use + entry_P, mask=here_P, other=0.0)
        tl.store(gradient_use + p_P, use_P, mask=here_P)
    end = tl.load(group + ENTRIES_END)
    if (end >= block * BLOCK) & (end < (block + 1) * BLOCK):
        tl.store(count + number, before + here)
        tl.store(start + first + before + here, (end - first).to(tl.int32))
