"""What ranks request of each other on a GPU, for all groups at once, from the distinct rows of a
batch (`triton_integers.py`).

    count_requests       how many rows are requested of each rank, into the message of counts
    find_pieces          the pieces of distinct rows, whose strips exchange row statistics
    write_requests       the message of ids, and the offsets of requested vectors: `ask`
    first_sums           where the sums of each bag begin, where owners sum bags: `link`
    entries_of_requests  the requests of all ranks -> rows, keys, offsets of vectors: `serve`
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.batch_arrays import BLOCK, DistinctRows, Entries, PiecePlace, Sizes
from recapp.kernels.triton_integers import (
    BAG,
    BAG_BLOCKS,
    BAGS_END,
    BLOCKS,
    ENDS,
    ENTRIES_END,
    ENTRY,
    GROUP,
    ID,
    KEY,
    MODE,
    NO_KEY,
    NONE,
    OF_GROUP,
    OUT,
    PIECE,
    PIECE_BASE,
    PIECE_KEY,
    PIECE_KEY_END,
    PIECES,
    PIECES_END,
    PLACE,
    POOLED,
    RANK,
    REPLICATED,
    STEP,
    STRIPS,
    VECTOR,
    WEIGHTS,
    WIDTH,
    Take,
    _first_above,
    _here,
    _part_of,
)
from recapp.kernels.triton_launch import Launch

# For kernels: the columns of `PiecePlace`, and how many there are.
FIRST_ROW, FIRST_ID, FIRST_VECTOR, FIRST_ENTRY, FIRST_END, FIRST_WEIGHT = (
    tl.constexpr(i) for i in range(len(PiecePlace._fields))
)
AT = tl.constexpr(len(PiecePlace._fields))


def count_requests(
    distinct: DistinctRows,
    pieces: Tensor,
    requests: Tensor,
    groups: Tensor,
    world: int,
    words: int,
    message: Tensor,
    ids_L: Tensor,
    first_F1: Tensor,
    report: Tensor,
    count_K: Tensor,
) -> None:
    """Count the rows to request of each piece, and add the numbers of rows, vectors and words to
    the message of counts. An id that is an error is noted in the headers of the message.

    Args:
        distinct: The distinct rows.
        pieces: The constants of the pieces, int64 [K x `PieceNumbers`].
        requests: The pieces of each group, int64 [G x `GroupRequests`].
        groups: The places of the groups.
        world: The ranks, W.
        words: The integers of a sample weight in a request; 0 without weights.
        message: The counts for every rank, [W x numbers], behind a header each.
        ids_L: The raw ids.
        first_F1: The first id of each lookup, and the end of the last.
        report: The report of `entries_of_ids`.
        count_K: Filled with the number of distinct rows of each piece.
    """
    numbers = len(message) // world
    plan(
        (len(count_K) // BLOCK + 1,),
        (
            *(distinct.row_U, distinct.start_U, distinct.count_G, pieces, requests, groups),
            *(message, ids_L, first_F1, report, count_K, len(count_K), len(distinct.count_G)),
            *(world, numbers, len(report) - 1, words),
        ),
        (BLOCK,),
    )


def find_pieces(
    distinct: DistinctRows,
    pieces: Tensor,
    requests: Tensor,
    groups: Tensor,
    count_K: Tensor,
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor]:
    """Count the distinct rows of each piece. Return the piece of each distinct row, counted from
    the first piece of its group, and the number of distinct rows of the piece before it.

    Args:
        distinct: The distinct rows.
        pieces: The constants of the pieces, int64 [K x `PieceNumbers`].
        requests: The pieces of each group, int64 [G x `GroupRequests`].
        groups: The places of the groups.
        count_K: Filled with the number of distinct rows of each piece.
        sizes: The sizes of the batch.
        take: Memory for the results.
    """
    plan(
        (len(count_K) // BLOCK + 1,),
        (
            *(distinct.row_U, distinct.start_U, distinct.count_G, pieces, requests, groups),
            *(*[count_K] * 5, len(count_K), len(distinct.count_G), 0, 0, 0, 0),
        ),
        (BLOCK,),
    )
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
    at_M: Tensor,
    scale_M: Tensor | None,
    bits_P: Tensor | None,
    words: int,
    ids: Tensor,
    sizes: Sizes,
    take: Take,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write the requests of all groups into the message of ids.

    Args:
        distinct: The distinct rows, with the numbers of the entries.
        pieces: The constants of the pieces.
        groups: The places of the groups.
        at: The places of the pieces' requests, int64 [K x `PiecePlace`].
        requests: The groups' requests, int64 [G x `GroupRequests`].
        words_WG: The offset of each rank's request in the message, for groups of which all ranks
            get all requests.
        at_M: The offset of each bag's vector in the output.
        scale_M: The factor of each bag; None where all are 1, or no owner sums bags.
        bits_P: The sample weights of the entries as integers of the message, row by row, for
            groups whose owners sum bags.
        words: The number of integers of a sample weight.
        ids: The message of ids, which is written.
        sizes: The sizes of the batch; `offset` is the type of offsets in the message of vectors
            and, where owners sum bags, in the output.
        take: Memory for the results.

    Returns:
        The offset of each distinct row's vector, and of each entry's vector in the order of the
        batch. Where owners sum bags, the offset of each sum, bag by bag, the offset of its gradient
        in the output's, and its factor.
    """
    at_U = take("vector", sizes.entries, sizes.offset)
    source_P = take("source", sizes.entries, sizes.offset)
    world = len(words_WG) // sizes.groups
    use_V = None if scale_M is None else take("sum scale", sizes.entries, scale_M.dtype)
    ask(
        (sizes.entries // BLOCK,),
        (
            *(distinct.row_U, distinct.position_U, distinct.start_U, distinct.gradient_P),
            *(distinct.count_G, distinct.number_P, pieces, groups, at, requests, words_WG),
            *(at_M, scale_M, bits_P, ids, at_U, source_P, use_V, sizes.groups, world),
        ),
        (words, BLOCK),
    )
    return at_U, source_P, use_V


def first_sums(
    distinct: DistinctRows, groups: Tensor, at: Tensor, requests: Tensor, sizes: Sizes, take: Take
) -> Tensor:
    """Return where the sums of each bag begin, counted from the first sum of its group, if owners
    sum the bags of the group. Behind a group's last bag stands the number of its sums.

    Args:
        distinct: The distinct pairs of owner and bag.
        groups: As for `write_requests`, like the others.
    """
    offset_M = take("first sum", sizes.bags, torch.int32)
    link(
        (sizes.bags // BLOCK,),
        (distinct.row_U, distinct.count_G, groups, at, requests, offset_M, sizes.groups),
        (BLOCK,),
    )
    return offset_M


def entries_of_requests(
    ids: Tensor,
    places: Tensor,
    groups: Tensor,
    wire: torch.dtype | None,
    scale: torch.dtype,
    sizes: Sizes,
    take: Take,
) -> tuple[Entries, Tensor, Tensor]:
    """Return the rows that the ranks request of this rank.

    Args:
        ids: The message of ids.
        places: The places of the requests, int64 [W G x `SlotPlace`]: `id` and `vector` are offsets
            in the messages, and `step` is the width. Only requests for sums have bags. Those of
            dynamic tables begin with the number of rows of each strip.
        groups: The places of the groups.
        wire: The type in which sample weights travel with requests for sums; None: without any.
        scale: The type of the weights of entries.
        sizes: The sizes; `offset` is the type of offsets in the message of vectors.
        take: Memory for the results.

    Returns:
        The entries, whose weights only requests for sums have, where the rows of each sum begin,
        and the offset of each sum.
    """
    n = sizes.entries
    words = wire.itemsize // ids.dtype.itemsize if wire else 0
    bits = take("bits", n * words, ids.dtype)
    of_rows = take("key", n, sizes.key), take("index", n, sizes.row), take("where", n, sizes.offset)
    offset_V = take("offset", sizes.bags, torch.int32)
    at_V = take("at", sizes.bags, sizes.offset)
    serve(
        (n // BLOCK,),
        (ids, places, groups, *of_rows, offset_V, at_V, bits, sizes.groups),
        (words, BLOCK),
    )
    weight_P = take("weight", n, scale).copy_(bits.view(wire)) if wire else None
    return Entries(*of_rows, weight_P), offset_V, at_V


@Launch
@triton.jit(
    do_not_specialize=["piece_count", "group_count", "world", "numbers", "lookups", "words"]
)
def plan(
    row,
    start,
    count,
    pieces,
    requests,
    groups,
    message,
    ids,
    firsts,
    report,
    count_of_piece,
    piece_count,
    group_count,
    world,
    numbers,
    lookups,
    words,
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
    place_K = groups + group_K * GROUP
    sums_K = here_K & (tl.load(requests + group_K * OUT + MODE, mask=here_K, other=0) == POOLED)
    bags_K = tl.load(place_K + BAGS_END, mask=sums_K, other=1)
    bags_K -= tl.load(place_K + BAG_BLOCKS, mask=sums_K, other=0) * BLOCK
    key_K = tl.load(piece_K + PIECE_KEY, mask=here_K, other=0) * bags_K
    key_end_K = tl.load(piece_K + PIECE_KEY_END, mask=here_K, other=0) * bags_K
    low_K = _first_above(row, 1, first_K, end_K, key_K - 1)
    high_K = _first_above(row, 1, low_K, end_K, key_end_K - 1)
    vectors_K = high_K - low_K
    rows_K = tl.load(start + high_K, mask=sums_K, other=0)
    rows_K -= tl.load(start + low_K, mask=sums_K, other=0)
    rows_K = tl.where(sums_K, rows_K, vectors_K)
    words_K = rows_K + tl.where(sums_K, rows_K * words + vectors_K, 0)
    tl.store(count_of_piece + k_K, vectors_K, mask=here_K)
    owner_K = tl.load(piece_K + RANK, mask=here_K, other=0)
    header = numbers - 3 * group_count  # the numbers before the counts
    for rank in range(world):
        asked_K = here_K & ((owner_K == rank) | (owner_K < 0))
        to_K = message + rank * numbers + header + group_K * 3
        tl.atomic_add(to_K, rows_K, mask=asked_K)
        tl.atomic_add(to_K + 1, vectors_K, mask=asked_K)
        tl.atomic_add(to_K + 2, words_K, mask=asked_K)
    at = tl.load(report, mask=world > 0, other=NONE)
    if (tl.program_id(0) == 0) & (at < NONE):
        zero = tl.zeros([1], tl.int64)
        lookup = _first_above(firsts, 1, zero, zero + lookups, zero + at) - 1
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
    of_group, group, p_P = _here(groups, group_count, BLOCKS, BLOCK)
    first = tl.load(group + BLOCKS) * BLOCK
    request = requests + of_group * OUT
    first_piece = tl.load(request + PIECES)
    here_P = p_P < first + tl.load(count + of_group)
    here_P &= first_piece < tl.load(request + PIECES_END)  # a group may have no pieces here
    row_P = tl.load(row + p_P, mask=here_P, other=0).to(tl.int64)
    k_P = _part_of(row_P, pieces + PIECE_KEY, PIECE, request)
    key_P = tl.load(pieces + k_P * PIECE + PIECE_KEY, mask=here_P, other=0)
    start_P = _first_above(row, 1, tl.where(here_P, first, p_P), p_P, key_P - 1)
    tl.store(piece + p_P, k_P - first_piece, mask=here_P)
    tl.store(nth + p_P, p_P - start_P, mask=here_P)


@triton.jit
def _piece_of(n_P, at, request, here_P, FIELD: tl.constexpr):
    """Return the piece of each distinct row or entry of a group, and its number in the piece."""
    k_P = _part_of(n_P, at + FIELD, AT, request)
    return k_P, n_P - tl.load(at + k_P * AT + FIELD, mask=here_P, other=0)


@triton.jit
def _sums_before(bag_N, owner_N, row, first, end, at, request, bags):
    """Return the number of sums before the one of an owner, in the order of bags, then owners."""
    before_N = bag_N * 0
    first_piece = tl.load(request + PIECES)
    for k in range(first_piece, tl.load(request + PIECES_END)):
        owner = k - first_piece
        key_N = owner * bags + bag_N + (owner < owner_N).to(tl.int64)
        low_N = first + tl.load(at + k * AT + FIRST_ROW) + bag_N * 0
        before_N += _first_above(row, 1, low_N, end + bag_N * 0, key_N - 1) - low_N
    return before_N


@triton.jit
def _ask_for_sums(
    p_P,
    u_P,
    row_P,
    k_P,
    nth_P,
    row,
    start,
    gradient,
    at,
    request,
    group,
    bits,
    ids,
    end,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the requested rows of a block of sorted entries, their sample weights, and where the
    rows of a block of sums end. Return the place of each sum in the order of bags, and its bag.
    """
    here_P = p_P < end
    end_P = tl.load(start + p_P + 1, mask=here_P, other=0)
    end_P -= tl.load(at + k_P * AT + FIRST_ENTRY, mask=here_P, other=0)
    to_P = tl.load(at + k_P * AT + FIRST_END, mask=here_P, other=0) + nth_P
    tl.store(ids + to_P, end_P.to(ids.dtype.element_ty), mask=here_P)
    first_bag = tl.load(group + BAG_BLOCKS) * BLOCK
    bags = tl.load(group + BAGS_END) - first_bag
    owner_P = k_P - tl.load(request + PIECES)
    bag_P = row_P - owner_P * bags
    first = tl.load(group + BLOCKS) * BLOCK
    sum_P = first + _sums_before(bag_P, owner_P, row, first, end, at, request, bags)
    entry_P = p_P < tl.load(group + ENTRIES_END)
    k_P, nth_P = _piece_of(u_P, at, request, entry_P, FIRST_ENTRY)
    asked_P = tl.load(gradient + p_P, mask=entry_P, other=0)
    to_P = tl.load(at + k_P * AT + FIRST_ID, mask=entry_P, other=0) + nth_P
    tl.store(ids + to_P, asked_P.to(ids.dtype.element_ty), mask=entry_P)
    to_P = tl.load(at + k_P * AT + FIRST_WEIGHT, mask=entry_P, other=0) + nth_P * WORDS
    for word in tl.static_range(WORDS):
        word_P = tl.load(bits + p_P * WORDS + word, mask=entry_P, other=0)
        tl.store(ids + to_P + word, word_P, mask=entry_P)
    return sum_P, first_bag + bag_P


@Launch
@triton.jit(do_not_specialize=["group_count", "world"])
def ask(
    row,
    position,
    start,
    gradient,
    count,
    number,
    pieces,
    groups,
    at,
    requests,
    words,
    where,
    scale,
    bits,
    ids,
    vector,
    source,
    use,
    group_count,
    world,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the requests of a block of distinct rows, and the offsets of their vectors; and for a
    block of entries, the offsets of the vectors that they read.

    Where owners sum bags, write the requested rows of a block of sorted entries, their sample
    weights, and for a block of sums the ends of their rows, and how they are linked to their bags.
    """
    of_group, group, p_P = _here(groups, group_count, BLOCKS, BLOCK)
    request = requests + of_group * OUT
    mode = tl.load(request + MODE)
    width = tl.load(request + WIDTH)
    first = tl.load(group + BLOCKS) * BLOCK
    u_P = p_P - first
    here_P = u_P < tl.load(count + of_group)
    entry_P = p_P < tl.load(group + ENTRIES_END)
    k_P, nth_P = _piece_of(u_P, at, request, here_P, FIRST_ROW)
    row_P = tl.load(row + p_P, mask=here_P, other=0).to(tl.int64)
    vector_P = tl.load(at + k_P * AT + FIRST_VECTOR, mask=here_P, other=0) + nth_P * width
    if mode == POOLED:
        end = first + tl.load(count + of_group)
        sum_P, bag_P = _ask_for_sums(
            p_P,
            u_P,
            row_P,
            k_P,
            nth_P,
            row,
            start,
            gradient,
            at,
            request,
            group,
            bits,
            ids,
            end,
            WORDS,
            BLOCK,
        )
        where_P = tl.load(where + bag_P, mask=here_P, other=0)
        tl.store(vector + sum_P, vector_P.to(vector.dtype.element_ty), mask=here_P)
        tl.store(source + sum_P, where_P.to(source.dtype.element_ty), mask=here_P)
        if scale is not None:
            tl.store(use + sum_P, tl.load(scale + bag_P, mask=here_P, other=0.0), mask=here_P)
    else:
        row_P = row_P - tl.load(pieces + k_P * PIECE + PIECE_KEY, mask=here_P, other=0)
        row_P = row_P + tl.load(pieces + k_P * PIECE + PIECE_BASE, mask=here_P, other=0)
        if position is not None:
            found_P = here_P & (tl.load(group + STRIPS) > 0)
            row_P = tl.where(found_P, tl.load(position + p_P, mask=found_P, other=0), row_P)
        if mode == REPLICATED:
            for rank in range(world):
                to_P = tl.load(words + rank * group_count + of_group) + u_P
                tl.store(ids + to_P, row_P.to(ids.dtype.element_ty), mask=here_P)
        else:
            to_P = tl.load(at + k_P * AT + FIRST_ID, mask=here_P, other=0) + nth_P
            tl.store(ids + to_P, row_P.to(ids.dtype.element_ty), mask=here_P)
        tl.store(vector + p_P, vector_P.to(vector.dtype.element_ty), mask=here_P)
        v_P = tl.load(number + p_P, mask=entry_P, other=0).to(tl.int64)
        k_P, nth_P = _piece_of(v_P, at, request, entry_P, FIRST_ROW)
        source_P = tl.load(at + k_P * AT + FIRST_VECTOR, mask=entry_P, other=0) + nth_P * width
        tl.store(source + p_P, source_P.to(source.dtype.element_ty), mask=entry_P)


@Launch
@triton.jit(do_not_specialize=["group_count"])
def link(row, count, groups, at, requests, offset, group_count, BLOCK: tl.constexpr):
    """Write where the sums of a block of bags begin."""
    of_group, group, m_M = _here(groups, group_count, BAG_BLOCKS, BLOCK)
    request = requests + of_group * OUT
    if tl.load(request + MODE) == POOLED:
        first_bag = tl.load(group + BAG_BLOCKS) * BLOCK
        bags = tl.load(group + BAGS_END) - first_bag
        nth_M = m_M - first_bag
        first = tl.load(group + BLOCKS) * BLOCK
        end = first + tl.load(count + of_group)
        before_M = _sums_before(nth_M, nth_M * 0, row, first, end, at, request, bags)
        tl.store(offset + m_M, before_M.to(tl.int32), mask=nth_M <= bags)


@Launch
@triton.jit(do_not_specialize=["group_count"])
def serve(
    ids,
    places,
    groups,
    key,
    index,
    where,
    offset,
    at,
    bits,
    group_count,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row, the sort key, the offset of the vector and the weight of a block of requested
    rows, and where each sum begins; of dynamic tables the position and the strip.
    """
    _, group, p_P = _here(groups, group_count, BLOCKS, BLOCK)
    end = tl.load(group + ENTRIES_END)
    here_P = p_P < end
    place_P = places + _part_of(p_P, places + ENTRY, PLACE, group) * PLACE
    nth_P = p_P - tl.load(place_P + ENTRY, mask=here_P, other=0)
    ids_P = ids + tl.load(place_P + ID, mask=here_P, other=0)
    strips = tl.load(group + STRIPS)
    row_P = tl.load(ids_P + strips + nth_P, mask=here_P, other=0).to(tl.int64)
    key_P = tl.load(group + KEY) + row_P
    if strips > 0:  # a search takes position and strip
        key_P = nth_P * 0
        end_P = nth_P * 0
        for strip in range(strips):
            end_P += tl.load(ids_P + strip, mask=here_P, other=0).to(tl.int64)
            key_P += (end_P <= nth_P).to(tl.int64)
    key_P = tl.where(here_P, key_P, tl.load(group + NO_KEY))
    tl.store(key + p_P, key_P.to(key.dtype.element_ty))
    tl.store(index + p_P, row_P.to(index.dtype.element_ty), mask=here_P)
    where_P = tl.load(place_P + VECTOR, mask=here_P, other=0)
    step_P = tl.load(place_P + STEP, mask=here_P, other=0)
    end_bag = tl.load(group + BAGS_END)
    if end_bag > tl.load(group + BAG_BLOCKS) * BLOCK:
        ends_P = tl.load(place_P + ENDS, mask=here_P, other=0)
        weights_P = tl.load(place_P + WEIGHTS, mask=here_P, other=0)
        v_P = _first_above(ids + ends_P, 1, p_P * 0, weights_P - ends_P, nth_P)
        begin_P = tl.load(ids + ends_P + v_P - 1, mask=here_P & (v_P > 0), other=0)
        where_P += v_P * step_P
        first_P = here_P & (nth_P == begin_P)
        to_P = tl.where(here_P, tl.load(place_P + BAG, mask=here_P, other=0) + v_P, end_bag)
        tl.store(at + to_P, where_P.to(at.dtype.element_ty), mask=first_P)
        n_P = (p_P - tl.load(group + BLOCKS) * BLOCK).to(tl.int32)
        tl.store(offset + to_P, n_P, mask=first_P | (p_P == end))
        for word in tl.static_range(WORDS):
            word_P = tl.load(ids + weights_P + nth_P * WORDS + word, mask=here_P, other=0)
            tl.store(bits + p_P * WORDS + word, word_P, mask=here_P)
    else:
        where_P += nth_P * step_P
    tl.store(where + p_P, where_P.to(where.dtype.element_ty), mask=here_P)
