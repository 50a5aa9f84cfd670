"""The integers of a batch on a GPU for all groups at once: a few launches and a sort, whatever the
number of tables.

    entries_of_ids       ids -> rows, keys, offsets of gradients: `rows`; one launch
    bags_of              where the entries of each bag begin, where its vector lies; one launch
    distinct_rows        equal keys together: a stable sort, `count_heads`, `write_heads`
    count_requests       how many rows are requested of each rank, into the message of counts
    find_pieces          the pieces of distinct rows, whose strips exchange row statistics
    write_requests       the message of ids, and the offsets of requested vectors
    entries_of_requests  the requests of all ranks -> rows, keys, offsets of vectors: `serve`

`batch_arrays.py` explains slots, entries and regions. Keys number the rows of all groups one after
the other, and each group has a key more: the entries between the end of a group and the end of its
region take this key, and the sort leaves every group in its region. The distinct rows of a group,
and where they begin, stand at the start of its region. The only results that programs of one launch
read of those of another are counts of heads, and no size goes to the host.

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
    NOTHING,
    DistinctRows,
    Entries,
    GroupPlace,
    GroupRequests,
    PieceNumbers,
    PiecePlace,
    Sizes,
    SlotNumbers,
    SlotPlace,
)
from recapp.kernels.triton_launch import Launch
from recapp.kernels.triton_start_values import position_of
from recapp.sparse.keyed_jagged_tensor import MISSING, MISSING_INT32

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
# A function that returns memory by name, size and type, undefined.
Take = Callable[[str, int, torch.dtype], Tensor]

# For kernels: the columns of the records, and how many each has.
LOOKUP, RULE, SIZE, MIN_KEY, FACTOR, SHIFT, MIXED, BASE, STRIP_KEY, *OF_BAGS = (
    tl.constexpr(i) for i in range(len(SlotNumbers._fields))
)
SEQUENCE, MEAN, FIRST, PLACES, APART = OF_BAGS
ID, ENTRY, BAG, VECTOR, STEP = (tl.constexpr(i) for i in range(len(SlotPlace._fields)))
SLOTS, SLOTS_END, BLOCKS, ENTRIES_END, BAG_BLOCKS, BAGS_END, KEY, NO_KEY = (
    tl.constexpr(i) for i in range(len(GroupPlace._fields))
)
OF_GROUP, PIECE_KEY, PIECE_KEY_END, PIECE_BASE, RANK = (
    tl.constexpr(i) for i in range(len(PieceNumbers._fields))
)
FIRST_ROW, FIRST_ID, FIRST_VECTOR = (tl.constexpr(i) for i in range(len(PiecePlace._fields)))
PIECES, PIECES_END, WIDTH, EVERYWHERE = (tl.constexpr(i) for i in range(len(GroupRequests._fields)))
SLOT, PLACE, GROUP, PIECE, AT, OUT = (
    tl.constexpr(len(record._fields))
    for record in (SlotNumbers, SlotPlace, GroupPlace, PieceNumbers, PiecePlace, GroupRequests)
)
ERROR, HASH, CLAMP, _, DYNAMIC = (
    tl.constexpr(i) for i in range(5)
)  # `RULE_NUMBERS` of tables/ids.py
NO_ID = tl.constexpr(MISSING)
NO_INT32 = tl.constexpr(MISSING_INT32)
NONE = tl.constexpr(NOTHING)


def entries_of_ids(
    ids_L: Tensor,
    edge_N1: Tensor,
    weights_L: Tensor | None,
    samples: int,
    slots: Tensor,
    places: Tensor,
    groups: Tensor,
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
        weights_L: A weight for each id, or None.
        samples: The samples, B.
        slots: The constants of the slots, int64 [S x `SlotNumbers`].
        places: The places of the slots, int64 [S x `SlotPlace`].
        groups: The places of the groups, int64 [G x `GroupPlace`].
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
            *(ids_L, edge_N1, weights_L, slots, places, groups, report, stopped),
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
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor]:
    """Return where the entries of each bag begin, counted from the group's first, and the offset of
    each bag's vector in the output. Behind a group's last bag stands the number of its entries.

    Args:
        edge_N1: As for `entries_of_ids`, like the others.
    """
    offset_M = take("offset", sizes.bags, torch.int32)
    at_M = take("at", sizes.bags, sizes.offset)
    bags(
        (sizes.bags // BLOCK,),
        (edge_N1, slots, places, groups, offset_M, at_M, samples, sizes.groups),
        (BLOCK,),
    )
    return offset_M, at_M


def distinct_rows(
    entries: Entries, groups: Tensor, sizes: Sizes, take: Take, numbers: bool
) -> DistinctRows:
    """Return the distinct rows of a batch.

    Args:
        entries: The entries.
        groups: The places of the groups.
        sizes: The sizes of the batch.
        take: Memory for the results.
        numbers: Whether to number the row of each entry.
    """
    n = sizes.entries
    blocks = n // BLOCK
    sorted_P = take("sorted", n, sizes.key)
    order_P = take("order", n, torch.int64)
    torch.sort(entries.key_P, stable=True, out=(sorted_P, order_P))
    head_J = take("heads", blocks, torch.int32)
    count_heads((blocks,), (sorted_P, groups, head_J, sizes.groups), (BLOCK,))
    weight_P = entries.weight_P
    distinct = DistinctRows(
        take("row", n, sizes.key),
        take("start", n, torch.int32),
        take("gradient", n, entries.where_P.dtype),
        None if weight_P is None else take("gradient_weight", n, weight_P.dtype),
        take("count", sizes.groups, torch.int32),
        take("number", n, torch.int32) if numbers else None,
    )
    write_heads(
        (blocks,),
        (sorted_P, order_P, entries.where_P, weight_P, head_J, groups, *distinct, sizes.groups),
        (BLOCK,),
    )
    return distinct


def count_requests(
    distinct: DistinctRows,
    pieces: Tensor,
    groups: Tensor,
    world: int,
    message: Tensor,
    ids_L: Tensor,
    edge_N1: Tensor,
    samples: int,
    report: Tensor,
    count_K: Tensor,
) -> None:
    """Count the rows to request of each piece, and add the numbers of rows, vectors and words to
    the message of counts. An id that is an error is noted in the headers of the message.

    Args:
        distinct: The distinct rows.
        pieces: The constants of the pieces, int64 [K x `PieceNumbers`].
        groups: The places of the groups.
        world: The ranks, W.
        message: The counts for every rank, [W x numbers], behind a header each.
        ids_L: The raw ids.
        edge_N1: Where the ids of each bag begin.
        samples: The samples, B.
        report: The report of `entries_of_ids`.
        count_K: Filled with the number of distinct rows of each piece.
    """
    numbers = len(message) // world
    plan(
        (len(count_K) // BLOCK + 1,),
        (
            *(distinct.row_U, distinct.count_G, pieces, groups, message, ids_L, edge_N1, report),
            *(count_K, len(count_K), len(distinct.count_G), world, numbers, len(report) - 1),
            samples,
        ),
        (BLOCK,),
    )


def count_rows(distinct: DistinctRows, pieces: Tensor, groups: Tensor, count_K: Tensor) -> None:
    """Count the distinct rows of each piece.

    Args:
        distinct: The distinct rows.
        pieces: The constants of the pieces, int64 [K x `PieceNumbers`].
        groups: The places of the groups.
        count_K: Filled with the number of distinct rows of each piece.
    """
    message = (count_K, count_K, count_K, count_K)  # for no rank
    plan(
        (len(count_K) // BLOCK + 1,),
        (
            *(distinct.row_U, distinct.count_G, pieces, groups, *message, count_K),
            *(len(count_K), len(distinct.count_G), 0, 0, 0, 0),
        ),
        (BLOCK,),
    )


def find_pieces(
    distinct: DistinctRows,
    pieces: Tensor,
    requests: Tensor,
    groups: Tensor,
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor]:
    """Return the piece of each distinct row, counted from the first piece of its group, and the
    number of distinct rows of the piece before it.

    Args:
        distinct: The distinct rows.
        pieces: The constants of the pieces, int64 [K x `PieceNumbers`].
        requests: The pieces of each group, int64 [G x `GroupRequests`].
        groups: The places of the groups.
        sizes: The sizes of the batch.
        take: Memory for the results.
    """
    piece_U = take("piece", sizes.entries, torch.int64)
    nth_U = take("nth", sizes.entries, torch.int64)
    find(
        (sizes.entries // BLOCK,),
        (distinct.row_U, distinct.count_G, pieces, requests, groups, piece_U, nth_U, sizes.groups),
        (BLOCK,),
    )
    return piece_U, nth_U


def write_requests(
    distinct: DistinctRows,
    pieces: Tensor,
    groups: Tensor,
    at: Tensor,
    requests: Tensor,
    words_WG: Tensor,
    ids: Tensor,
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor]:
    """Write the requests of all groups into the message of ids.

    Args:
        distinct: The distinct rows, with the numbers of the entries.
        pieces: The constants of the pieces.
        groups: The places of the groups.
        at: The places of the pieces' requests, int64 [K x `PiecePlace`].
        requests: The groups' requests, int64 [G x `GroupRequests`].
        words_WG: The offset of each rank's request in the message, for groups of which all ranks
            get all requests.
        ids: The message of ids, which is written.
        sizes: The sizes of the batch; `offset` is the type of offsets in the message of vectors.
        take: Memory for the results.

    Returns:
        The offset of each distinct row's vector, and of each entry's vector in the order of the
        batch.
    """
    at_U = take("vector", sizes.entries, sizes.offset)
    source_P = take("source", sizes.entries, sizes.offset)
    world = len(words_WG) // sizes.groups
    ask(
        (sizes.entries // BLOCK,),
        (
            *(distinct.row_U, distinct.count_G, distinct.number_P, pieces, groups, at, requests),
            *(words_WG, ids, at_U, source_P, sizes.groups, world),
        ),
        (BLOCK,),
    )
    return at_U, source_P


def entries_of_requests(
    ids: Tensor, places: Tensor, groups: Tensor, sizes: Sizes, take: Take
) -> Entries:
    """Return the rows that the ranks request of this rank.

    Args:
        ids: The message of ids.
        places: The places of the requests, int64 [W G x `SlotPlace`]: `id` and `vector` are offsets
            in the messages, and `step` is the width.
        groups: The places of the groups.
        sizes: The sizes; `offset` is the type of offsets in the message of vectors.
        take: Memory for the results.
    """
    entries = Entries(
        take("key", sizes.entries, sizes.key),
        take("index", sizes.entries, sizes.row),
        take("where", sizes.entries, sizes.offset),
        None,
    )
    serve(
        (sizes.entries // BLOCK,),
        (ids, places, groups, *entries[:3], sizes.groups),
        (BLOCK,),
    )
    return entries


@triton.jit
def _group_of(block, groups, count, FIELD: tl.constexpr):
    """Return the number of the group that has a block."""
    number = 0
    for other in range(1, count):
        number += (tl.load(groups + other * GROUP + FIELD) <= block).to(tl.int32)
    return number


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
def _slot_of(at_N, places, group, FIELD: tl.constexpr):
    """Return the slot of each entry or bag of a group."""
    low_N = tl.load(group + SLOTS) + at_N * 0
    high_N = tl.load(group + SLOTS_END) + at_N * 0
    return tl.maximum(_first_above(places + FIELD, PLACE, low_N, high_N, at_N) - 1, low_N)


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
    weights,
    slots,
    places,
    groups,
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
    block = tl.program_id(0)
    group = groups + _group_of(block, groups, group_count, BLOCKS) * GROUP
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_P = p_P < tl.load(group + ENTRIES_END)
    s_P = _slot_of(p_P, places, group, ENTRY)
    slot_P = slots + s_P * SLOT
    place_P = places + s_P * PLACE
    nth_P = p_P - tl.load(place_P + ENTRY, mask=here_P, other=0)
    id_at_P = tl.load(place_P + ID, mask=here_P, other=0) + nth_P
    id_P = _as_int64(tl.load(ids + id_at_P, mask=here_P, other=0))
    row_P, outside_P = _rows_of(id_P, slot_P, here_P)
    _note_outside(outside_P, id_at_P, slot_P, report, stopped)
    position_P = _positions_of(row_P, slot_P, here_P)
    store_P = position_P + tl.load(slot_P + BASE, mask=here_P, other=0)
    first_P = tl.load(slot_P + STRIP_KEY, mask=here_P, other=0) + tl.load(group + KEY)
    key_P = first_P + position_P
    first_slot = slots + tl.load(group + SLOTS) * SLOT
    if tl.load(first_slot + RULE) == DYNAMIC:  # a search takes position and strip
        store_P = position_of(id_P)
        key_P = tl.load(slot_P + STRIP_KEY, mask=here_P, other=0)
    key_P = tl.where(here_P, key_P, tl.load(group + NO_KEY))
    tl.store(key + p_P, key_P.to(key.dtype.element_ty))
    tl.store(index + p_P, store_P.to(index.dtype.element_ty), mask=here_P)
    bags = edges + tl.load(slot_P + LOOKUP, mask=here_P, other=0) * samples
    at_P = tl.load(bags, mask=here_P, other=0) + nth_P  # `id_at_P`, unless features have free room
    zero_P = p_P * 0
    bag_P = _first_above(bags, 1, zero_P, zero_P + tl.where(here_P, samples, 0), at_P) - 1
    sequence_P = tl.load(slot_P + SEQUENCE, mask=here_P, other=0) > 0
    where_P = tl.load(place_P + STEP, mask=here_P, other=0) * tl.where(sequence_P, nth_P, bag_P)
    where_P += tl.load(place_P + VECTOR, mask=here_P, other=0)
    begin_P = tl.load(bags + bag_P, mask=here_P, other=0)
    where_P += (at_P - begin_P) * tl.load(slot_P + APART, mask=here_P, other=0)
    tl.store(where + p_P, where_P.to(where.dtype.element_ty), mask=here_P)
    if SCALE is not None:
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


@Launch
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
    places_M = tl.load(slot_M + PLACES, mask=here_M, other=1)
    sample_M = nth_M // places_M
    number_M = nth_M % places_M
    ids_M = tl.load(bag_M + sample_M, mask=pooled_M, other=0)
    behind_M = tl.load(bag_M + sample_M + 1, mask=pooled_M, other=0)
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


@Launch
@triton.jit(do_not_specialize=["group_count"])
def count_heads(sorted_keys, groups, heads, group_count, BLOCK: tl.constexpr):
    """Write the number of entries of a block that are the first of their row."""
    _, _, _, _, head_P = _heads(sorted_keys, groups, group_count, BLOCK)
    tl.store(heads + tl.program_id(0), tl.sum(head_P.to(tl.int32), 0))


@Launch
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
    number,
    group_count,
    BLOCK: tl.constexpr,
):
    """Write the distinct rows of a block of sorted entries, where the entries of each begin, and
    the offset and weight of each entry's gradient. The last block of a group writes the number of
    its distinct rows.
    """
    of_group, p_P, key_P, here_P, head_P = _heads(sorted_keys, groups, group_count, BLOCK)
    group = groups + of_group * GROUP
    block = tl.program_id(0)
    first_block = tl.load(group + BLOCKS)
    before = 0
    for begin in range(first_block, block, BLOCK):
        at_J = begin + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(heads + at_J, mask=at_J < block, other=0), 0)
    first = first_block * BLOCK
    here = tl.sum(head_P.to(tl.int32), 0)
    nth_P = before + tl.cumsum(head_P.to(tl.int32), 0) - 1
    u_P = first + nth_P
    row_P = (key_P - tl.load(group + KEY)).to(row.dtype.element_ty)
    tl.store(row + u_P, row_P, mask=head_P)
    tl.store(start + u_P, (p_P - first).to(tl.int32), mask=head_P)
    entry_P = tl.load(order + p_P, mask=here_P, other=0)
    tl.store(gradient + p_P, tl.load(where + entry_P, mask=here_P, other=0), mask=here_P)
    if number is not None:
        tl.store(number + entry_P, nth_P.to(tl.int32), mask=here_P)
    if use is not None:
        use_P = tl.load(use + entry_P, mask=here_P, other=0.0)
        tl.store(gradient_use + p_P, use_P, mask=here_P)
    end = tl.load(group + ENTRIES_END)
    if (end >= block * BLOCK) & (end < (block + 1) * BLOCK):
        tl.store(count + of_group, before + here)
        tl.store(start + first + before + here, (end - first).to(tl.int32))


@Launch
@triton.jit(
    do_not_specialize=["piece_count", "group_count", "world", "numbers", "lookups", "samples"]
)
def plan(
    row,
    count,
    pieces,
    groups,
    message,
    ids,
    edges,
    report,
    count_of_piece,
    piece_count,
    group_count,
    world,
    numbers,
    lookups,
    samples,
    BLOCK: tl.constexpr,
):
    """Count the distinct rows of a block of pieces, for the ranks that own them; program 0 notes an
    id that is an error in every header.
    """
    k_K = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here_K = k_K < piece_count
    piece_K = pieces + k_K * PIECE
    group_K = tl.load(piece_K + OF_GROUP, mask=here_K, other=0)
    first_K = tl.load(groups + group_K * GROUP + BLOCKS, mask=here_K, other=0) * BLOCK
    end_K = first_K + tl.load(count + group_K, mask=here_K, other=0)
    key_K = tl.load(piece_K + PIECE_KEY, mask=here_K, other=0)
    key_end_K = tl.load(piece_K + PIECE_KEY_END, mask=here_K, other=0)
    low_K = _first_above(row, 1, first_K, end_K, key_K - 1)
    rows_K = _first_above(row, 1, low_K, end_K, key_end_K - 1) - low_K
    tl.store(count_of_piece + k_K, rows_K, mask=here_K)
    owner_K = tl.load(piece_K + RANK, mask=here_K, other=0)
    header = numbers - 3 * group_count  # the numbers before the counts
    for rank in range(world):
        asked_K = here_K & ((owner_K == rank) | (owner_K < 0))
        for number in tl.static_range(3):
            to_K = message + rank * numbers + header + group_K * 3 + number
            tl.atomic_add(to_K, rows_K, mask=asked_K)
    at = tl.load(report, mask=world > 0, other=NONE)
    if (tl.program_id(0) == 0) & (at < NONE):
        zero = tl.zeros([1], tl.int64)
        lookup = _first_above(edges, samples, zero, zero + lookups, zero + at) - 1
        number = tl.load(ids + at + zero).to(tl.int64)
        for rank in range(world):
            to = message + rank * numbers + zero
            tl.store(to, zero + 1)
            tl.store(to + header - 2, lookup)
            tl.store(to + header - 1, number)


@Launch
@triton.jit(do_not_specialize=["group_count"])
def find(row, count, pieces, requests, groups, piece, nth, group_count, BLOCK: tl.constexpr):
    """Write the piece of a block of distinct rows, and how many rows of the piece come before."""
    block = tl.program_id(0)
    of_group = _group_of(block, groups, group_count, BLOCKS)
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(groups + of_group * GROUP + BLOCKS) * BLOCK
    first_piece = tl.load(requests + of_group * OUT + PIECES)
    end = tl.load(requests + of_group * OUT + PIECES_END)  # a group may have no pieces here
    here_P = (p_P < first + tl.load(count + of_group)) & (first_piece < end)
    row_P = tl.load(row + p_P, mask=here_P, other=0).to(tl.int64)
    low_P = first_piece + p_P * 0
    high_P = end + p_P * 0
    k_P = tl.maximum(_first_above(pieces + PIECE_KEY, PIECE, low_P, high_P, row_P) - 1, low_P)
    key_P = tl.load(pieces + k_P * PIECE + PIECE_KEY, mask=here_P, other=0)
    start_P = _first_above(row, 1, tl.where(here_P, first, p_P), p_P, key_P - 1)
    tl.store(piece + p_P, k_P - first_piece, mask=here_P)
    tl.store(nth + p_P, p_P - start_P, mask=here_P)


@triton.jit
def _piece_of(u_P, at, request, here_P):
    """Return the piece of each distinct row of a group, and its number in the piece."""
    low_P = tl.load(request + PIECES) + u_P * 0
    high_P = tl.load(request + PIECES_END) + u_P * 0
    k_P = tl.maximum(_first_above(at + FIRST_ROW, AT, low_P, high_P, u_P) - 1, low_P)
    return k_P, u_P - tl.load(at + k_P * AT + FIRST_ROW, mask=here_P, other=0)


@Launch
@triton.jit(do_not_specialize=["group_count", "world"])
def ask(
    row,
    count,
    number,
    pieces,
    groups,
    at,
    requests,
    words,
    ids,
    vector,
    source,
    group_count,
    world,
    BLOCK: tl.constexpr,
):
    """Write the requests of a block of distinct rows, and the offsets of their vectors; and for a
    block of entries, the offsets of the vectors that they read.
    """
    block = tl.program_id(0)
    of_group = _group_of(block, groups, group_count, BLOCKS)
    group = groups + of_group * GROUP
    request = requests + of_group * OUT
    width = tl.load(request + WIDTH)
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u_P = p_P - tl.load(group + BLOCKS) * BLOCK
    here_P = u_P < tl.load(count + of_group)
    k_P, nth_P = _piece_of(u_P, at, request, here_P)
    row_P = tl.load(row + p_P, mask=here_P, other=0)
    row_P = row_P - tl.load(pieces + k_P * PIECE + PIECE_KEY, mask=here_P, other=0)
    row_P = row_P + tl.load(pieces + k_P * PIECE + PIECE_BASE, mask=here_P, other=0)
    if tl.load(request + EVERYWHERE) > 0:
        for rank in range(world):
            to_P = tl.load(words + rank * group_count + of_group) + u_P
            tl.store(ids + to_P, row_P.to(ids.dtype.element_ty), mask=here_P)
    else:
        to_P = tl.load(at + k_P * AT + FIRST_ID, mask=here_P, other=0) + nth_P
        tl.store(ids + to_P, row_P.to(ids.dtype.element_ty), mask=here_P)
    vector_P = tl.load(at + k_P * AT + FIRST_VECTOR, mask=here_P, other=0) + nth_P * width
    tl.store(vector + p_P, vector_P.to(vector.dtype.element_ty), mask=here_P)
    entry_P = p_P < tl.load(group + ENTRIES_END)
    v_P = tl.load(number + p_P, mask=entry_P, other=0).to(tl.int64)
    k_P, nth_P = _piece_of(v_P, at, request, entry_P)
    source_P = tl.load(at + k_P * AT + FIRST_VECTOR, mask=entry_P, other=0) + nth_P * width
    tl.store(source + p_P, source_P.to(source.dtype.element_ty), mask=entry_P)


@Launch
@triton.jit(do_not_specialize=["group_count"])
def serve(ids, places, groups, key, index, where, group_count, BLOCK: tl.constexpr):
    """Write the row, the sort key and the offset of the vector of a block of requested rows."""
    block = tl.program_id(0)
    group = groups + _group_of(block, groups, group_count, BLOCKS) * GROUP
    p_P = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_P = p_P < tl.load(group + ENTRIES_END)
    place_P = places + _slot_of(p_P, places, group, ENTRY) * PLACE
    nth_P = p_P - tl.load(place_P + ENTRY, mask=here_P, other=0)
    id_P = tl.load(place_P + ID, mask=here_P, other=0) + nth_P
    row_P = tl.load(ids + id_P, mask=here_P, other=0).to(tl.int64)
    key_P = tl.where(here_P, tl.load(group + KEY) + row_P, tl.load(group + NO_KEY))
    tl.store(key + p_P, key_P.to(key.dtype.element_ty))
    tl.store(index + p_P, row_P.to(index.dtype.element_ty), mask=here_P)
    where_P = tl.load(place_P + VECTOR, mask=here_P, other=0)
    where_P += nth_P * tl.load(place_P + STEP, mask=here_P, other=0)
    tl.store(where + p_P, where_P.to(where.dtype.element_ty), mask=here_P)
