"""The home side of mode `unique`, compiled: the distinct rows that a batch needs, their owners, and
the vectors that each bag sums.

Strips of tables share no row, so each thread works on its own strips. The distinct rows of a strip
are numbered from 0, and their properties are written from the offset of the strip's first pair on.
Then the caller moves the properties of all strips together (a single thread leaves no gaps). The
order is that of the strips, whatever the number of threads. Letters are those of
`numba_integers.py`.
"""

from typing import Any, NamedTuple

from recapp.kernels.numba_cache import compiled, inlined
from recapp.kernels.numba_integers import Slots, Strips, find, hashing, piece_of
from recapp.kernels.numba_vectors import ThreadedKernel
from recapp.kernels.simd import get, put

jit = compiled()


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


@inlined()
def route_strips(
    slots: Any, group: Any, row_arrays: Any, bucket_TH: Any, first: Any, last: Any
) -> None:
    """Number the distinct rows of each strip from 0, count their pairs and find their owners, for
    the strips of threads first .. last.

    Args:
        slots: The fields of `Slots`.
        group: The fields of `Strips`.
        row_arrays: Memory for the distinct rows. Those of strip i stand from its first pair on; on
            one thread, behind those of the strip before.
            `number_P` has the number of each (slot, id) pair's row among the distinct rows of its
            strip; `row_P` the distinct rows, `rank_P` their owners, `count_P` the numbers of their
            pairs, `bucket_P` their buckets in the hash table; `n_IW` the number of distinct rows
            of each strip that each rank owns. Strip i has the pairs pair[i] .. pair[i + 1], and
            `thread_I` has its thread.
        bucket_TH: The hash table, of which each thread has a part.
        first: The first thread.
        last: The thread behind the last.
    """
    b = Slots(*slots)
    strips = Strips(*group)
    number_P, row_P, rank_P, count_P, bucket_P, n_IW, pair_I1, thread_I = row_arrays
    end = 0
    for i in range(len(thread_I)):
        thread = thread_I[i]
        if thread < first or thread >= last:
            continue
        bucket_H = bucket_TH[thread]
        if len(bucket_TH) > 1:
            end = pair_I1[i]
        begin = end
        pair = pair_I1[i]
        multiplier, shift, mask = hashing(strips.rows_I[i], pair_I1[i + 1] - pair)
        for slot in range(strips.slot_I1[i], strips.slot_I1[i + 1]):
            for at in range(b.first_S[slot], b.last_S[slot]):
                row = get(b.rows_L, at)
                h = find(row, bucket_H, row_P, multiplier, shift, mask)
                u = int(get(bucket_H, h))
                if u < 0:
                    u = end
                    put(bucket_H, h, u)
                    put(bucket_P, u, h)
                    put(row_P, u, row)
                    put(count_P, u, 0)
                    end += 1
                put(count_P, u, get(count_P, u) + 1)
                put(number_P, pair, u - begin)
                pair += 1
        rows_W = n_IW[i]
        for u in range(begin, end):  # from rows of the strip to rows of the owners' stores
            row = get(row_P, u)
            put(bucket_H, get(bucket_P, u), -1)
            k = piece_of(row, strips.start_K, strips.piece_I1[i], strips.piece_I1[i + 1])
            rank = get(strips.rank_K, k)
            put(rank_P, u, rank)
            put(row_P, u, row - get(strips.start_K, k) + get(strips.base_K, k))
            put(rows_W, rank, get(rows_W, rank) + 1)


route = ThreadedKernel(lambda: route_strips)


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
    """Write the parts of the matrix A and of its transpose for the strips of threads first .. last:
    bag m sums index[offsets[m] : offsets[m + 1]], and the gradient of row u is summed from
    order[start[u] : start[u + 1]]. At the border of two strips both threads write the same number.

    Args:
        slots: The fields of `Slots`.
        group: The fields of `Strips`.
        rows: The fields of `Unique`.
        matrices: What both matrices follow from, and their memory:
            `source_U`, where the vector of each row stands; `where_M`, the offset of each bag in
            the output; `scale_M`, the factor of each bag (empty: all are 1, and no entries are
            written); `weights_L`, the weight of each id (empty: all are 1); `staged_S`, the number
            of each slot's first bag within the copy of its strip (empty: gradients are read from
            the output); `width`, the columns of a vector;
            `offsets_M1`, where the entries of each bag begin; `index_P`, where the vector of each
            entry of A stands; `use_P`, the entries of A; `start_U1`, where the entries of each row
            begin in the transpose; `order_P`, where the vector of each entry of the transpose
            stands; `use_T`, the entries of the transpose.
        first: The first thread.
        last: The thread behind the last.
    """
    b = Slots(*slots)
    strips = Strips(*group)
    unique = Unique(*rows)
    (
        source_U,
        where_M,
        scale_M,
        weights_L,
        staged_S,
        width,
        offsets_M1,
        index_P,
        use_P,
        start_U1,
        order_P,
        use_T,
    ) = matrices
    scaled = len(scale_M) > 0
    weighted = len(weights_L) > 0
    for i in range(len(unique.thread_I)):
        if unique.thread_I[i] < first or unique.thread_I[i] >= last:
            continue
        base = unique.row_I1[i]
        _begin_rows(start_U1, unique.count_U, base, unique.row_I1[i + 1], unique.pair_I1[i])
        p = unique.pair_I1[i]
        for s in range(strips.slot_I1[i], strips.slot_I1[i + 1]):
            at = b.first_S[s]
            of_lookup = b.bag_S[s]
            bag = b.bags_S1[s]
            for nth in range(b.bags_S1[s + 1] - bag):
                put(offsets_M1, bag, p)
                where = int(get(where_M, bag))
                if len(staged_S) > 0:
                    where = (staged_S[s] + nth) * width
                for _ in range(get(b.lengths_N, of_lookup + nth)):
                    u = base + int(get(unique.number_P, p))
                    k = int(get(unique.count_U, u))
                    put(unique.count_U, u, k + 1)
                    put(index_P, p, get(source_U, u))
                    put(order_P, k, where)
                    if scaled:
                        use = get(scale_M, bag)
                        if weighted:
                            use = use * get(weights_L, at)
                        put(use_P, p, use)
                        put(use_T, k, use)
                    p += 1
                    at += 1
                bag += 1
        put(offsets_M1, b.bags_S1[strips.slot_I1[i + 1]], p)


link = ThreadedKernel(lambda: link_strips)
