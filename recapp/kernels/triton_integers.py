"""The integers of a batch on a GPU for all groups at once: a few launches and a sort, whatever the
number of tables.

    entries_of_ids       ids -> rows, keys, offsets of gradients: `rows`; one launch
    bags_of              where the entries of each bag begin, where its vector lies; one launch
    distinct_rows        equal keys together: a stable sort, `count_heads`, `write_heads`

`batch_arrays.py` explains slots, entries and regions. Keys number the rows of all groups one after
the other, and each group has a key more: the entries between the end of a group and the end of its
region take this key, and the sort leaves every group in its region. The distinct rows of a group,
and where they begin, stand at the start of its region. The only results that programs of one launch
read of those of another are counts of heads, and no size goes to the host. What ranks request of
each other follows from these arrays (`triton_requests.py`).

Where owners sum bags, the pairs of an owner and a bag take the place of rows: the key of an entry
is owner x bags + bag, so a sort brings the rows together that an owner sums for a bag.

`recapp/tables/ids.py` defines the rules, and `reference.py` the other functions: results are equal
integer by integer. The kernels add integers alone by atomic operations.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.batch_arrays import (
    BLOCK,
    MODES,
    NOTHING,
    DistinctRows,
    Entries,
    GroupPlace,
    GroupRequests,
    PieceNumbers,
    Sizes,
    SlotNumbers,
    SlotPlace,
)
from recapp.kernels.triton_launch import Launch
from recapp.kernels.triton_start_values import position_of
from recapp.sparse.missing_ids import MISSING, MISSING_INT32
from recapp.tables.positions import STRETCH_BITS, STRETCHES

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
# A function that returns memory by name, size and type, undefined.
Take = Callable[[str, int, torch.dtype], Tensor]

# For kernels: the columns of the records, and how many each has.
LOOKUP, RULE, SIZE, MIN_KEY, FACTOR, SHIFT, MIXED, BASE, STRIP_KEY, *OF_BAGS = (
    tl.constexpr(i) for i in range(len(SlotNumbers._fields))
)
SEQUENCE, MEAN, FIRST, PLACES, APART = OF_BAGS
ID, ENTRY, BAG, VECTOR, STEP, ENDS, WEIGHTS = (
    tl.constexpr(i) for i in range(len(SlotPlace._fields))
)
SLOTS, SLOTS_END, BLOCKS, ENTRIES_END, BAG_BLOCKS, BAGS_END, STRIPS, KEY, NO_KEY = (
    tl.constexpr(i) for i in range(len(GroupPlace._fields))
)
OF_GROUP, PIECE_KEY, PIECE_KEY_END, PIECE_BASE, RANK = (
    tl.constexpr(i) for i in range(len(PieceNumbers._fields))
)
PIECES, PIECES_END, WIDTH, MODE = (tl.constexpr(i) for i in range(len(GroupRequests._fields)))
_, REPLICATED, POOLED = (tl.constexpr(i) for i in range(len(MODES)))
SLOT, PLACE, GROUP, PIECE, OUT = (
    tl.constexpr(len(record._fields))
    for record in (SlotNumbers, SlotPlace, GroupPlace, PieceNumbers, GroupRequests)
)
ERROR, HASH, CLAMP, _, DYNAMIC = (
    tl.constexpr(i) for i in range(5)
)  # `RULE_NUMBERS` of tables/ids.py
NO_ID = tl.constexpr(MISSING)
NO_INT32 = tl.constexpr(MISSING_INT32)
NONE = tl.constexpr(NOTHING)
BELOW_STRETCH = tl.constexpr(64 - STRETCH_BITS)
MIDDLE = tl.constexpr(STRETCHES // 2)


def entries_of_ids(
    ids_L: Tensor,
    edge_N1: Tensor,
    kept_L: Tensor | None,
    weights_L: Tensor | None,
    samples: int,
    slots: Tensor,
    places: Tensor,
    groups: Tensor,
    owners: tuple[Tensor | None, Tensor | None],
    report: Tensor,
    stopped: Tensor | None,
    scale: torch.dtype | None,
    sizes: Sizes,
    take: Take,
) -> Entries:
    """Return the entries of a batch by the rules of their tables.

    Args:
        ids_L: The raw ids, lookup by lookup.
        edge_N1: Where the ids of each bag of the batch begin, [F x B + 1].
        kept_L: The ids that count, whose bags these are; None: all of them.
        weights_L: A weight for each id, or None.
        samples: The samples, B.
        slots: The constants of the slots, int64 [S x `SlotNumbers`].
        places: The places of the slots, int64 [S x `SlotPlace`].
        groups: The places of the groups, int64 [G x `GroupPlace`].
        owners: The constants of the pieces, int64 [K x `PieceNumbers`], and the pieces of each
            group, int64 [G x `GroupRequests`]; None where no owner sums bags.
        report: Filled with the index of the first id that is an error (`NOTHING` before), and the
            number of changed ids of each lookup (0 before).
        stopped: An integer that is set if an id is an error; None sets nothing.
        scale: The type of the weights of entries; None where all are 1.
        sizes: The sizes of the batch.
        take: Memory for the results.
    """
    entries = Entries(
        take("key", sizes.entries, sizes.key),
        take("index", sizes.entries, sizes.row),
        take("where", sizes.entries, sizes.offset),
        None if scale is None else take("weight", sizes.entries, scale),
    )
    rows(
        (sizes.entries // BLOCK,),
        (
            *(ids_L, edge_N1, kept_L, weights_L, slots, places, groups, *owners, report, stopped),
            *(*entries, samples, sizes.groups),
        ),
        (None if scale is None else TYPES[scale], BLOCK),
    )
    return entries


def bags_of(
    edge_N1: Tensor,
    samples: int,
    slots: Tensor,
    places: Tensor,
    groups: Tensor,
    scale: torch.dtype | None,
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return where the entries of each bag begin, counted from the group's first, the offset of
    each bag's vector in the output, and the factor of the bag's sum. Behind a group's last bag
    stands the number of its entries.

    Args:
        edge_N1: As for `entries_of_ids`, like the others.
        scale: The type of the factors; None if nobody asks for them.
    """
    offset_M = take("offset", sizes.bags, torch.int32)
    at_M = take("at", sizes.bags, sizes.offset)
    scale_M = None if scale is None else take("scale", sizes.bags, scale)
    bags(
        (sizes.bags // BLOCK,),
        (edge_N1, slots, places, groups, offset_M, at_M, scale_M, samples, sizes.groups),
        (None if scale is None else TYPES[scale], BLOCK),
    )
    return offset_M, at_M, scale_M


def distinct_rows(
    entries: Entries,
    groups: Tensor,
    sizes: Sizes,
    take: Take,
    numbers: bool,
    position_P: Tensor | None = None,
) -> DistinctRows:
    """Return the distinct rows of a batch.

    Args:
        entries: The entries.
        groups: The places of the groups.
        sizes: The sizes of the batch.
        take: Memory for the results.
        numbers: Whether to number the row of each entry.
        position_P: The position of each entry of a dynamic table, whose key is that of a stretch;
            0 for others. None if ranks request no positions.
    """
    n = sizes.entries
    blocks = n // BLOCK
    sorted_P = take("sorted", n, sizes.key)
    order_P = take("order", n, torch.int64)
    if position_P is None:
        torch.sort(entries.key_P, stable=True, out=(sorted_P, order_P))
    else:
        first_P = position_P.argsort(stable=True)
        torch.sort(entries.key_P[first_P], stable=True, out=(sorted_P, order_P))
        order_P = first_P[order_P]
    head_J = take("heads", blocks, torch.int32)
    in_order = sorted_P, order_P, position_P
    count_heads((blocks,), (*in_order, groups, head_J, sizes.groups), (BLOCK,))
    weight_P = entries.weight_P
    distinct = DistinctRows(
        take("row", n, sizes.key),
        take("start", n, torch.int32),
        take("gradient", n, entries.where_P.dtype),
        None if weight_P is None else take("gradient_weight", n, weight_P.dtype),
        take("count", sizes.groups, torch.int32),
        take("number", n, torch.int32) if numbers else None,
        None if position_P is None else take("position", n, torch.int64),
    )
    write_heads(
        (blocks,),
        (*in_order, entries.where_P, weight_P, head_J, groups, *distinct, sizes.groups),
        (BLOCK,),
    )
    return distinct


@triton.jit
def _here(groups, count, FIELD: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number and the place of the group that has this program's block of entries or
    bags, and the numbers of these entries or bags.
    """
    block = tl.program_id(0)
    number = 0
    for other in range(1, count):
        number += (tl.load(groups + other * GROUP + FIELD) <= block).to(tl.int32)
    return number, groups + number * GROUP, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _first_above(edges, stride, low_N, high_N, value_N):
    """Return the first number in low .. high whose edge is above a value; edges ascend, and that of
    `high` counts as above.
    """
    while tl.max(high_N - low_N, 0) > 0:
        open_N = low_N < high_N
        middle_N = (low_N + high_N) // 2
        above_N = tl.load(edges + middle_N * stride, mask=open_N, other=0) > value_N
        high_N = tl.where(open_N & above_N, middle_N, high_N)
        low_N = tl.where(open_N & (above_N == 0), middle_N + 1, low_N)
    return low_N


@triton.jit
def _part_of(value_N, edges, stride, record):
    """Return in which slot of a group, or in which piece of a group's requests, each value lies: in
    the last one whose edge is not above it. The first two numbers of a record are the first slot or
    piece and the one behind the last.
    """
    low_N = tl.load(record + SLOTS) + value_N * 0
    high_N = tl.load(record + SLOTS_END) + value_N * 0
    return tl.maximum(_first_above(edges, stride, low_N, high_N, value_N) - 1, low_N)


@triton.jit
def _as_int64(id_P):
    """Return ids as int64: `as_int64` of `recapp/sparse/keyed_jagged_tensor.py`."""
    missing = NO_INT32 if id_P.dtype == tl.int32 else NO_ID
    return tl.where(id_P.to(tl.int64) == missing, NO_ID, id_P.to(tl.int64))


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
def _note_outside(outside_P, id_at_P, slot_P, report, stopped):
    """Keep the first id that is an error, and count changed ids, once for each lookup."""
    if tl.max(outside_P.to(tl.int32), 0) > 0:
        rule_P = tl.load(slot_P + RULE, mask=outside_P, other=0)
        wrong_P = outside_P & (rule_P == ERROR)
        first = tl.min(tl.where(wrong_P, id_at_P, NONE), 0)
        tl.atomic_min(report, first)
        if stopped is not None:
            tl.atomic_max(stopped, (first < NONE).to(tl.int32))
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


@Launch
@triton.jit(do_not_specialize=["samples", "group_count"])
def rows(
    ids,
    edges,
    kept,
    weights,
    slots,
    places,
    groups,
    pieces,
    requests,
    report,
    stopped,
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
    of_group, group, p_P = _here(groups, group_count, BLOCKS, BLOCK)
    here_P = p_P < tl.load(group + ENTRIES_END)
    s_P = _part_of(p_P, places + ENTRY, PLACE, group)
    slot_P = slots + s_P * SLOT
    place_P = places + s_P * PLACE
    nth_P = p_P - tl.load(place_P + ENTRY, mask=here_P, other=0)
    bag_P, in_bag_P, length_P, at_P = _bag_of(nth_P, edges, slot_P, samples, here_P)
    id_at_P = tl.load(place_P + ID, mask=here_P, other=0) + nth_P
    if kept is not None:
        id_at_P = tl.load(kept + at_P, mask=here_P, other=0).to(tl.int64)
    id_P = _as_int64(tl.load(ids + id_at_P, mask=here_P, other=0))
    row_P, outside_P = _rows_of(id_P, slot_P, here_P)
    _note_outside(outside_P, id_at_P, slot_P, report, stopped)
    position_P = _positions_of(row_P, slot_P, here_P)
    store_P = position_P + tl.load(slot_P + BASE, mask=here_P, other=0)
    key_P = tl.load(slot_P + STRIP_KEY, mask=here_P, other=0) + position_P
    sequence_P = tl.load(slot_P + SEQUENCE, mask=here_P, other=0) > 0
    where_P = (
        tl.load(place_P + VECTOR, mask=here_P, other=0)
        + tl.load(place_P + STEP, mask=here_P, other=0) * tl.where(sequence_P, nth_P, bag_P)
        + tl.load(slot_P + APART, mask=here_P, other=0) * in_bag_P
    )
    if requests is not None and tl.load(requests + of_group * OUT + MODE) == POOLED:
        bag_P += tl.load(place_P + BAG, mask=here_P, other=0)
        key_P, where_P = _of_owner(key_P, bag_P, pieces, requests + of_group * OUT, group, BLOCK)
        length_P = p_P * 0 + 1  # the owner's part of a sum has sample weights alone
    key_P += tl.load(group + KEY)
    # a search takes position and strip
    if tl.load(slots + tl.load(group + SLOTS) * SLOT + RULE) == DYNAMIC:
        store_P = position_of(id_P)
        # the stretch of the strip, where ranks hold stretches
        stretch_P = tl.load(group + KEY) + (store_P >> BELOW_STRETCH) + MIDDLE
        key_P = tl.load(slot_P + STRIP_KEY, mask=here_P, other=0) + tl.where(
            tl.load(group + STRIPS) > 0, stretch_P, 0
        )
    key_P = tl.where(here_P, key_P, tl.load(group + NO_KEY))
    tl.store(key + p_P, key_P.to(key.dtype.element_ty))
    # behind the entries of a group stands a row that exists: lists of rows may end there
    tl.store(index + p_P, store_P.to(index.dtype.element_ty))
    tl.store(where + p_P, where_P.to(where.dtype.element_ty), mask=here_P)
    if SCALE is not None:
        means_P = tl.load(slot_P + MEAN, mask=here_P, other=0) > 0
        use_P = _reciprocal(tl.where(means_P, length_P, 1).to(SCALE))
        if weights is not None:
            use_P = use_P * tl.load(weights + id_at_P, mask=here_P, other=0.0).to(SCALE)
        tl.store(use + p_P, use_P, mask=here_P)


@triton.jit
def _bag_of(nth_P, edges, slot_P, samples, here_P):
    """Return the sample of each entry, the ids of its bag before it, all ids of the bag, and the
    number of the entry's id in a batch without free room.
    """
    bags = edges + tl.load(slot_P + LOOKUP, mask=here_P, other=0) * samples
    at_P = tl.load(bags, mask=here_P, other=0) + nth_P
    zero_P = nth_P * 0
    bag_P = _first_above(bags, 1, zero_P, zero_P + tl.where(here_P, samples, 0), at_P) - 1
    begin_P = tl.load(bags + bag_P, mask=here_P, other=0)
    length_P = tl.load(bags + bag_P + 1, mask=here_P, other=1) - begin_P
    return bag_P, at_P - begin_P, length_P, at_P


@triton.jit
def _of_owner(key_P, bag_P, pieces, request, group, BLOCK: tl.constexpr):
    """Return the key of each entry by its owner and bag, and its row in the owner's store."""
    piece_P = pieces + _part_of(key_P, pieces + PIECE_KEY, PIECE, request) * PIECE
    first_bag = tl.load(group + BAG_BLOCKS) * BLOCK
    bags = tl.load(group + BAGS_END) - first_bag
    row_P = key_P - tl.load(piece_P + PIECE_KEY) + tl.load(piece_P + PIECE_BASE)
    return tl.load(piece_P + RANK) * bags + bag_P - first_bag, row_P


@triton.jit
def _reciprocal(x):
    """Return the correctly rounded 1 / x: `/` approximates it in single precision."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(x * 0 + 1.0, x)


@Launch
@triton.jit(do_not_specialize=["samples", "group_count"])
def bags(
    edges,
    slots,
    places,
    groups,
    offset,
    at,
    scale,
    samples,
    group_count,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write where the entries of a block of bags begin, where their vectors lie, and the factors
    of their sums.
    """
    _, group, m_M = _here(groups, group_count, BAG_BLOCKS, BLOCK)
    end = tl.load(group + BAGS_END)
    here_M = m_M < end
    s_M = _part_of(m_M, places + BAG, PLACE, group)
    slot_M = slots + s_M * SLOT
    place_M = places + s_M * PLACE
    nth_M = m_M - tl.load(place_M + BAG, mask=here_M, other=0)
    bag_M = edges + tl.load(slot_M + LOOKUP, mask=here_M, other=0) * samples
    pooled_M = here_M & (tl.load(slot_M + SEQUENCE, mask=here_M, other=0) == 0)
    places_M = tl.load(slot_M + PLACES, mask=here_M, other=1)
    sample_M = nth_M // places_M
    number_M = nth_M % places_M
    ids_M = tl.load(bag_M + sample_M, mask=pooled_M, other=0)
    behind_M = tl.load(bag_M + sample_M + 1, mask=pooled_M, other=0)
    if scale is not None:
        means_M = tl.load(slot_M + MEAN, mask=here_M, other=0) > 0
        length_M = tl.where(means_M, tl.maximum(behind_M - ids_M, 1), 1)
        tl.store(scale + m_M, _reciprocal(length_M.to(SCALE)), mask=here_M)
    ids_M = tl.minimum(ids_M + number_M, behind_M)
    ids_M = ids_M - tl.load(bag_M, mask=pooled_M, other=0)
    before_M = tl.where(pooled_M, ids_M, nth_M)
    before_M += tl.load(place_M + ENTRY, mask=here_M, other=0)
    first = tl.load(group + BLOCKS) * BLOCK
    behind = tl.load(group + ENTRIES_END)
    offset_M = tl.where(here_M, before_M, behind) - first
    tl.store(offset + m_M, offset_M.to(tl.int32), mask=m_M <= end)
    at_M = tl.load(place_M + VECTOR, mask=here_M, other=0)
    at_M += sample_M * tl.load(place_M + STEP, mask=here_M, other=0)
    at_M += number_M * tl.load(slot_M + APART, mask=here_M, other=0)
    tl.store(at + m_M, at_M.to(at.dtype.element_ty), mask=here_M)


@triton.jit
def _heads(sorted_keys, order, positions, groups, group_count, BLOCK: tl.constexpr):
    """Return the number and the place of the group that has this program's block, the positions and
    keys of the block's entries, whether each has a row, and whether it is the first of its row, or
    of those without.
    """
    number, group, p_P = _here(groups, group_count, BLOCKS, BLOCK)
    key_P = tl.load(sorted_keys + p_P)
    here_P = key_P != tl.load(group + NO_KEY)
    inner_P = p_P > tl.load(group + BLOCKS) * BLOCK
    head_P = key_P != tl.load(sorted_keys + p_P - 1, mask=inner_P, other=-1)
    if positions is not None:
        inner_P = inner_P & here_P
        at_P = tl.load(order + p_P, mask=inner_P, other=0)
        before_P = tl.load(order + p_P - 1, mask=inner_P, other=0)
        head_P |= inner_P & (tl.load(positions + at_P) != tl.load(positions + before_P))
    return number, group, p_P, key_P, here_P, head_P


@Launch
@triton.jit(do_not_specialize=["group_count"])
def count_heads(sorted_keys, order, positions, groups, heads, group_count, BLOCK: tl.constexpr):
    """Write the number of entries of a block that are the first of their row."""
    _, _, _, _, here_P, head_P = _heads(sorted_keys, order, positions, groups, group_count, BLOCK)
    tl.store(heads + tl.program_id(0), tl.sum((here_P & head_P).to(tl.int32), 0))


@Launch
@triton.jit(do_not_specialize=["group_count"])
def write_heads(
    sorted_keys,
    order,
    positions,
    where,
    use,
    heads,
    groups,
    row,
    start,
    gradient,
    gradient_use,
    count,
    number,
    position,
    group_count,
    BLOCK: tl.constexpr,
):
    """Write the distinct rows of a block of sorted entries, where the entries of each begin, and
    the offset and weight of each entry's gradient. The block with the first entry that has no row
    writes the number of the group's distinct rows.
    """
    of_group, group, p_P, key_P, here_P, head_P = _heads(
        sorted_keys, order, positions, groups, group_count, BLOCK
    )
    block = tl.program_id(0)
    first_block = tl.load(group + BLOCKS)
    before = 0
    for begin in range(first_block, block, BLOCK):
        at_J = begin + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(heads + at_J, mask=at_J < block, other=0), 0)
    first = first_block * BLOCK
    ends_P = head_P & (here_P == 0)
    head_P = head_P & here_P
    nth_P = before + tl.cumsum(head_P.to(tl.int32), 0) - 1
    u_P = first + nth_P
    row_P = (key_P - tl.load(group + KEY)).to(row.dtype.element_ty)
    tl.store(row + u_P, row_P, mask=head_P)
    tl.store(start + u_P, (p_P - first).to(tl.int32), mask=head_P)
    tl.store(start + u_P + 1, (p_P - first).to(tl.int32), mask=ends_P)
    tl.store(count + of_group + p_P * 0, (nth_P + 1).to(tl.int32), mask=ends_P)
    entry_P = tl.load(order + p_P, mask=here_P, other=0)
    tl.store(gradient + p_P, tl.load(where + entry_P, mask=here_P, other=0), mask=here_P)
    if position is not None:
        tl.store(position + u_P, tl.load(positions + entry_P), mask=head_P)
    if number is not None:
        tl.store(number + entry_P, nth_P.to(tl.int32), mask=here_P)
    if use is not None:
        use_P = tl.load(use + entry_P, mask=here_P, other=0.0)
        tl.store(gradient_use + p_P, use_P, mask=here_P)
