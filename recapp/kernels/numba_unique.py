"""The home side of mode `unique`, compiled: which distinct rows a batch needs, of which ranks, and
which of their vectors each bag sums.

Strips of tables have no row in common, so each thread works on strips of its own. Each strip
numbers its distinct rows from 0 and keeps their properties from where its pairs begin; then the
properties of all strips are moved together (one thread alone leaves no gaps). The order is that of
the strips, whatever the number of threads. Letters are those of `numba_integers.py`.
"""

from typing import Any

import numpy as np
from numba import prange

from recapp.kernels.numba_cache import compiled
from recapp.kernels.numba_integers import find, hashing, piece_of
from recapp.kernels.simd import get, put

jit = compiled()
parallel_jit = compiled(parallel=True)


@jit
def route_strips(
    thread_I: Any,
    thread: Any,
    threads: Any,
    bucket_H: Any,
    rows_L: Any,
    first_S: Any,
    last_S: Any,
    slot_I1: Any,
    pair_I1: Any,
    rows_I: Any,
    piece_I1: Any,
    start_K: Any,
    rank_K: Any,
    base_K: Any,
    number_P: Any,
    row_P: Any,
    rank_P: Any,
    count_P: Any,
    bucket_P: Any,
    first_I: Any,
    found_I: Any,
    vectors_IW: Any,
) -> None:
    """Number the distinct rows of the strips of `thread`, each strip's from 0; count their
    uses and find their owners.

    The properties of a strip's distinct rows stand from first[i] on, found[i] of them.
    """
    end = 0
    for i in range(len(thread_I)):
        if thread_I[i] != thread:
            continue
        if threads > 1:
            end = pair_I1[i]
        begin = end
        p = pair_I1[i]
        multiplier, shift, mask = hashing(rows_I[i], pair_I1[i + 1] - p)
        for slot in range(slot_I1[i], slot_I1[i + 1]):
            for at in range(first_S[slot], last_S[slot]):
                row = get(rows_L, at)
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
                put(number_P, p, u - begin)
                p += 1
        first_I[i] = begin
        found_I[i] = end - begin
        _rows_at_owners(
            row_P,
            rank_P,
            bucket_P,
            begin,
            end,
            bucket_H,
            start_K,
            rank_K,
            base_K,
            piece_I1[i],
            piece_I1[i + 1],
            vectors_IW[i],
        )


@parallel_jit
def route_strips_on_threads(
    thread_I: Any,
    threads: Any,
    bucket_H: Any,
    rows_L: Any,
    first_S: Any,
    last_S: Any,
    slot_I1: Any,
    pair_I1: Any,
    rows_I: Any,
    piece_I1: Any,
    start_K: Any,
    rank_K: Any,
    base_K: Any,
    number_P: Any,
    row_P: Any,
    rank_P: Any,
    count_P: Any,
    bucket_P: Any,
    first_I: Any,
    found_I: Any,
    vectors_IW: Any,
) -> None:
    """Run `route_strips` on every thread, each with its part of the hash table."""
    size = len(bucket_H) // threads
    for t in prange(threads):
        # prange counts with an unsigned number, for which numba would compile `route_strips` anew
        route_strips(
            thread_I,
            np.int64(t),
            threads,
            bucket_H[t * size : (t + 1) * size],
            rows_L,
            first_S,
            last_S,
            slot_I1,
            pair_I1,
            rows_I,
            piece_I1,
            start_K,
            rank_K,
            base_K,
            number_P,
            row_P,
            rank_P,
            count_P,
            bucket_P,
            first_I,
            found_I,
            vectors_IW,
        )


@jit
def compact_rows(
    first_I: Any, found_I: Any, row_P: Any, rank_P: Any, count_P: Any, row_I1: Any
) -> Any:
    """Move the distinct rows of all strips together; return how many there are."""
    U = 0
    for i in range(len(found_I)):
        row_I1[i] = U
        if first_I[i] > U:
            for k in range(found_I[i]):
                put(row_P, U + k, get(row_P, first_I[i] + k))
                put(rank_P, U + k, get(rank_P, first_I[i] + k))
                put(count_P, U + k, get(count_P, first_I[i] + k))
        U += found_I[i]
    row_I1[len(found_I)] = U
    return U


@jit
def _rows_at_owners(
    row_U: Any,
    rank_U: Any,
    bucket_U: Any,
    begin: Any,
    end: Any,
    bucket_H: Any,
    start_K: Any,
    rank_K: Any,
    base_K: Any,
    first: Any,
    last: Any,
    vectors_W: Any,
) -> None:
    """Replace rows of a strip by rows of their owners' stores, count them by owner, and clear their
    buckets.
    """
    for u in range(begin, end):
        row = get(row_U, u)
        put(bucket_H, get(bucket_U, u), -1)
        k = piece_of(row, start_K, first, last)
        rank = get(rank_K, k)
        put(rank_U, u, rank)
        put(row_U, u, row - get(start_K, k) + get(base_K, k))
        put(vectors_W, rank, get(vectors_W, rank) + 1)


@jit
def write_row_requests(
    rank_U: Any, row_U: Any, U: Any, width: Any, vector_W: Any, row_W: Any, ids: Any, at_U: Any
) -> None:
    """Write each row to the next offset of its rank's request, and fix the offset of its vector.

    `row_W` and `vector_W` are the next offsets of each rank, and move on.
    """
    for u in range(U):
        rank = get(rank_U, u)
        put(at_U, u, get(vector_W, rank))
        put(vector_W, rank, get(vector_W, rank) + width)
        put(ids, get(row_W, rank), get(row_U, u))
        put(row_W, rank, get(row_W, rank) + 1)


@jit
def link_strips(
    thread_I: Any,
    thread: Any,
    number_P: Any,
    count_U: Any,
    source_U: Any,
    first_S: Any,
    slot_I1: Any,
    pair_I1: Any,
    row_I1: Any,
    bag_S: Any,
    bags_S1: Any,
    lengths_N: Any,
    where_M: Any,
    scale_M: Any,
    weights_L: Any,
    start_U1: Any,
    offsets_M1: Any,
    index_P: Any,
    order_P: Any,
    use_P: Any,
    use_T: Any,
    staged_S: Any,
    width: Any,
) -> None:
    """Write the matrix A and its transpose: bag m sums index[offsets[m] : offsets[m + 1]], and the
    gradient of vector u is summed from order[start[u] : start[u + 1]].

    Only strips of `thread` are written; where two strips meet, their threads write the same number.
    Where gradients are copied strip by strip, `staged_S` has the bag of its strip's copy with which
    each slot begins; else it is empty.
    """
    for i in range(len(thread_I)):
        if thread_I[i] != thread:
            continue
        start = pair_I1[i]
        base = row_I1[i]
        for u in range(base, row_I1[i + 1]):
            count = get(count_U, u)
            put(start_U1, u, start)
            put(count_U, u, start)  # now a cursor
            start += count
        put(start_U1, row_I1[i + 1], start)  # the next strip writes the same there
        p = pair_I1[i]
        for s in range(slot_I1[i], slot_I1[i + 1]):
            at = first_S[s]
            bag = bag_S[s]
            m = bags_S1[s]
            for b in range(bags_S1[s + 1] - m):
                put(offsets_M1, m, p)
                where = int(get(where_M, m)) if len(staged_S) == 0 else (staged_S[s] + b) * width
                for _ in range(get(lengths_N, bag + b)):
                    u = base + int(get(number_P, p))
                    k = int(get(count_U, u))
                    put(count_U, u, k + 1)
                    put(index_P, p, get(source_U, u))
                    put(order_P, k, where)
                    if use_P is not None:
                        use = scale_M[m] if weights_L is None else scale_M[m] * weights_L[at]
                        put(use_P, p, use)
                        put(use_T, k, use)
                    p += 1
                    at += 1
                m += 1
        put(offsets_M1, bags_S1[slot_I1[i + 1]], p)


@parallel_jit
def link_strips_on_threads(
    thread_I: Any,
    threads: Any,
    number_P: Any,
    count_U: Any,
    source_U: Any,
    first_S: Any,
    slot_I1: Any,
    pair_I1: Any,
    row_I1: Any,
    bag_S: Any,
    bags_S1: Any,
    lengths_N: Any,
    where_M: Any,
    scale_M: Any,
    weights_L: Any,
    start_U1: Any,
    offsets_M1: Any,
    index_P: Any,
    order_P: Any,
    use_P: Any,
    use_T: Any,
    staged_S: Any,
    width: Any,
) -> None:
    """Run `link_strips` on every thread."""
    for t in prange(threads):
        link_strips(
            thread_I,
            np.int64(t),
            number_P,
            count_U,
            source_U,
            first_S,
            slot_I1,
            pair_I1,
            row_I1,
            bag_S,
            bags_S1,
            lengths_N,
            where_M,
            scale_M,
            weights_L,
            start_U1,
            offsets_M1,
            index_P,
            order_P,
            use_P,
            use_T,
            staged_S,
            width,
        )
