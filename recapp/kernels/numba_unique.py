"""The home side of mode `unique`, compiled: the distinct rows that a batch needs, their owners, and
the vectors that each bag sums.

Strips of tables share no row, so each thread works on its own strips. The distinct rows of a strip
are numbered from 0, and their properties are written from the offset of the strip's first pair on.
Then the properties of all strips are moved together (a single thread leaves no gaps). The order is
that of the strips, whatever the number of threads. Letters are those of `numba_integers.py`.
"""

from typing import Any, NamedTuple

from recapp.kernels.numba_cache import compiled, inlined
from recapp.kernels.numba_integers import Slots, Strips, find, hashing, piece_of
from recapp.kernels.numba_vectors import ThreadedKernel
from recapp.kernels.simd import get, put

jit = compiled()


class Found(NamedTuple):
    """Memory for the distinct rows. Strip i has found[i] distinct rows, from first[i] on.

    Args:
        number_P: The number of each pair's row among the distinct rows of its strip.
        row_P: The distinct rows.
        rank_P: The owner of each distinct row.
        count_P: The number of pairs of each distinct row.
        bucket_P: The bucket of each distinct row in the hash table.
        first_I: Where the distinct rows of each strip begin.
        found_I: The number of distinct rows of each strip.
        vectors_IW: The number of distinct rows of each strip that each rank owns.
        pair_I1: Strip i has the (slot, id) pairs pair[i] .. pair[i + 1].
        thread_I: The thread that works on each strip.
    """

    number_P: Any
    row_P: Any
    rank_P: Any
    count_P: Any
    bucket_P: Any
    first_I: Any
    found_I: Any
    vectors_IW: Any
    pair_I1: Any
    thread_I: Any


class Unique(NamedTuple):
    """The distinct rows of a group in one batch, strip by strip.

    Args:
        number_P: The number of each pair's row among the distinct rows of its strip.
        row_U: The number of each row in its owner's store.
        rank_U: The owner of each row.
        count_U: The number of pairs of each row.
        pair_I1: Strip i has the pairs pair[i] .. pair[i + 1].
        row_I1: Strip i has the distinct rows row[i] .. row[i + 1].
        thread_I: The thread that works on each strip.
    """

    number_P: Any
    row_U: Any
    rank_U: Any
    count_U: Any
    pair_I1: Any
    row_I1: Any
    thread_I: Any


class Matrices(NamedTuple):
    """Memory for the matrix A and its transpose: bag m sums index[offsets[m] : offsets[m + 1]], and
    the gradient of row u is summed from order[start[u] : start[u + 1]].

    Args:
        source_U: Where the vector of each row stands.
        where_M: The offset of each bag in the output.
        scale_M: The factor of each bag; empty: all are 1, and no entries are written.
        weights_L: The weight of each id; empty: all are 1.
        staged_S: The number of each slot's first bag within the copy of its strip; empty if
            gradients are read from the output.
        width: The columns of a vector.
        offsets_M1: Where the entries of each bag begin, written like the following arrays.
        index_P: Where the vector of each entry of A stands.
        use_P: The entries of A; empty where all are 1.
        start_U1: Where the entries of each row begin in the transpose.
        order_P: Where the vector of each entry of the transpose stands.
        use_T: The entries of the transpose; empty where all are 1.
    """

    source_U: Any
    where_M: Any
    scale_M: Any
    weights_L: Any
    staged_S: Any
    width: Any
    offsets_M1: Any
    index_P: Any
    use_P: Any
    start_U1: Any
    order_P: Any
    use_T: Any


@inlined()
def route_strips(
    slots: Any, group: Any, row_arrays: Any, bucket_TH: Any, first: Any, last: Any
) -> None:
    """Number the distinct rows of each strip from 0, count their pairs and find their owners, for
    the strips of threads first .. last. Each thread has its part of the hash table. The first three
    arguments have the fields of `Slots`, `Strips` and `Found`.
    """
    b = Slots(*slots)
    strips = Strips(*group)
    f = Found(*row_arrays)
    end = 0
    for i in range(len(f.thread_I)):
        thread = f.thread_I[i]
        if thread < first or thread >= last:
            continue
        bucket_H = bucket_TH[thread]
        if len(bucket_TH) > 1:
            end = f.pair_I1[i]
        begin = end
        pair = f.pair_I1[i]
        multiplier, shift, mask = hashing(strips.rows_I[i], f.pair_I1[i + 1] - pair)
        for slot in range(strips.slot_I1[i], strips.slot_I1[i + 1]):
            for at in range(b.first_S[slot], b.last_S[slot]):
                row = get(b.rows_L, at)
                h = find(row, bucket_H, f.row_P, multiplier, shift, mask)
                u = int(get(bucket_H, h))
                if u < 0:
                    u = end
                    put(bucket_H, h, u)
                    put(f.bucket_P, u, h)
                    put(f.row_P, u, row)
                    put(f.count_P, u, 0)
                    end += 1
                put(f.count_P, u, get(f.count_P, u) + 1)
                put(f.number_P, pair, u - begin)
                pair += 1
        f.first_I[i] = begin
        f.found_I[i] = end - begin
        vectors_W = f.vectors_IW[i]
        for u in range(begin, end):  # from rows of the strip to rows of the owners' stores
            row = get(f.row_P, u)
            put(bucket_H, get(f.bucket_P, u), -1)
            k = piece_of(row, strips.start_K, strips.piece_I1[i], strips.piece_I1[i + 1])
            rank = get(strips.rank_K, k)
            put(f.rank_P, u, rank)
            put(f.row_P, u, row - get(strips.start_K, k) + get(strips.base_K, k))
            put(vectors_W, rank, get(vectors_W, rank) + 1)


route = ThreadedKernel(lambda: route_strips)


@jit
def compact_rows(row_arrays: Any, row_I1: Any) -> Any:
    """Move the distinct rows of all strips together; return their number."""
    f = Found(*row_arrays)
    U = 0
    for i in range(len(f.found_I)):
        row_I1[i] = U
        first = f.first_I[i]
        if first > U:
            for k in range(f.found_I[i]):
                put(f.row_P, U + k, get(f.row_P, first + k))
                put(f.rank_P, U + k, get(f.rank_P, first + k))
                put(f.count_P, U + k, get(f.count_P, first + k))
        U += f.found_I[i]
    row_I1[len(f.found_I)] = U
    return U


@jit
def write_row_requests(
    rank_U: Any, row_U: Any, U: Any, width: Any, vector_W: Any, row_W: Any, ids: Any, at_U: Any
) -> None:
    """Write each row at the next offset of its owner's request, and fix the offset of its vector.

    `row_W` and `vector_W` are the next offsets of each rank; this function advances them.
    """
    for u in range(U):
        rank = get(rank_U, u)
        put(at_U, u, get(vector_W, rank))
        put(vector_W, rank, get(vector_W, rank) + width)
        put(ids, get(row_W, rank), get(row_U, u))
        put(row_W, rank, get(row_W, rank) + 1)


@jit
def _begin_rows(start_U1: Any, count_U: Any, first: Any, last: Any, start: Any) -> None:
    """Write the offset of the first entry of each of the rows first .. last, counted from `start`.
    The offset replaces the row's count and is its cursor.
    """
    for u in range(first, last):
        count = get(count_U, u)
        put(start_U1, u, start)
        put(count_U, u, start)
        start += count
    put(start_U1, last, start)  # the next strip writes the same number


@inlined()
def link_strips(slots: Any, group: Any, rows: Any, matrices: Any, first: Any, last: Any) -> None:
    """Write the parts of the matrices for the strips of threads first .. last. At the border of two
    strips both threads write the same number. The first four arguments have the fields of `Slots`,
    `Strips`, `Unique` and `Matrices`.
    """
    b = Slots(*slots)
    strips = Strips(*group)
    unique = Unique(*rows)
    m = Matrices(*matrices)
    scaled = len(m.scale_M) > 0
    weighted = len(m.weights_L) > 0
    for i in range(len(unique.thread_I)):
        if unique.thread_I[i] < first or unique.thread_I[i] >= last:
            continue
        base = unique.row_I1[i]
        _begin_rows(m.start_U1, unique.count_U, base, unique.row_I1[i + 1], unique.pair_I1[i])
        p = unique.pair_I1[i]
        for s in range(strips.slot_I1[i], strips.slot_I1[i + 1]):
            at = b.first_S[s]
            of_lookup = b.bag_S[s]
            bag = b.bags_S1[s]
            for nth in range(b.bags_S1[s + 1] - bag):
                put(m.offsets_M1, bag, p)
                where = int(get(m.where_M, bag))
                if len(m.staged_S) > 0:
                    where = (m.staged_S[s] + nth) * m.width
                for _ in range(get(b.lengths_N, of_lookup + nth)):
                    u = base + int(get(unique.number_P, p))
                    k = int(get(unique.count_U, u))
                    put(unique.count_U, u, k + 1)
                    put(m.index_P, p, get(m.source_U, u))
                    put(m.order_P, k, where)
                    if scaled:
                        use = get(m.scale_M, bag)
                        if weighted:
                            use = use * get(m.weights_L, at)
                        put(m.use_P, p, use)
                        put(m.use_T, k, use)
                    p += 1
                    at += 1
                bag += 1
        put(m.offsets_M1, b.bags_S1[strips.slot_I1[i + 1]], p)


link = ThreadedKernel(lambda: link_strips)
