"""The integer half of the compiled backend. It finds the rows that a batch needs, their owners, and
the offsets of their vectors in messages.

No kernel sorts. Equal rows meet in a small hash table, `bucket_H`, whose size follows the batch and
not the table (a table of a billion rows costs no more). A hash table with a bucket for every row of
a table is used without hashing. All buckets are -1 between calls: a kernel that fills buckets notes
them and clears them. So distinct rows come in the order of first appearance.

An *offset* counts elements of a flat buffer (a message, the output, its gradient); a *row* counts
in units of a width. Letters: S slots, I strips, K pieces, P (slot, id) pairs, M output bags, V
vectors, U distinct rows, W ranks, H buckets of the hash table.

The step in which equal rows meet is written out in both kernels that need it. As a function of its
own, inlined by numba, by LLVM or not at all, it makes routing five to ten times as slow (5.5
against 1.0 ms for 106,000 ids, measured). The home side of mode `unique` is in `numba_unique.py`.
"""

from typing import Any, NamedTuple

import numpy as np

from recapp.kernels.numba_cache import compiled
from recapp.kernels.simd import get, put

jit = compiled()
ERROR, HASH, CLAMP, DROP, DYNAMIC = range(5)  # the numbers of `recapp/tables/ids.py`
MISSING = np.int64(-(2**63))
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth's multiplicative hashing
GOLDEN_32 = np.uint32(0x9E3779B9)  # 2^32 / golden ratio


class Strips(NamedTuple):
    """The strips of a group, and the places of their rows (`recapp/kernels/links.py`: `Routes`).

    Args:
        strip_S: The strip of each slot.
        slot_I1: Strip i has the slots slot[i] .. slot[i + 1].
        rows_I: The rows of each strip.
        piece_I1: Strip i has the pieces piece[i] .. piece[i + 1].
        start_K: The first row of each piece within its strip.
        rank_K: The owner of each piece.
        base_K: The first row of each piece in the owner's store.
    """

    strip_S: Any
    slot_I1: Any
    rows_I: Any
    piece_I1: Any
    start_K: Any
    rank_K: Any
    base_K: Any


class Slots(NamedTuple):
    """The bags that the slots of a group read from a batch (`recapp/kernels/links.py`: `Bags`).

    Args:
        rows_L: The rows of the whole batch.
        first_S: Where the ids of each slot begin in `rows_L`.
        last_S: Where the ids of each slot end in `rows_L`.
        bag_S: The first bag of each slot in `lengths_N`.
        bags_S1: Slot s has the bags bags[s] .. bags[s + 1] of the group.
        lengths_N: The ids of each bag of the whole batch.
    """

    rows_L: Any
    first_S: Any
    last_S: Any
    bag_S: Any
    bags_S1: Any
    lengths_N: Any


@jit
def hashing(rows: Any, n: Any) -> Any:
    """Return (multiplier, shift, mask) of the hash function for n rows of a table.

    A quarter to half of the buckets are used, or each row of the table has its own bucket.
    """
    bits = 1
    while 1 << bits < 2 * n:
        bits += 1
    if rows <= 1 << bits:
        return np.uint64(1), np.uint64(0), np.uint64((1 << bits) - 1)
    return GOLDEN, np.uint64(64 - bits), np.uint64((1 << bits) - 1)


@jit
def find(row: Any, bucket_H: Any, row_U: Any, multiplier: Any, shift: Any, mask: Any) -> Any:
    """Return the bucket of a row, or the free bucket for it."""
    h = ((np.uint64(row) * multiplier) >> shift) & mask
    while True:
        u = get(bucket_H, np.int64(h))
        if u < 0 or get(row_U, u) == row:
            return np.int64(h)
        h = (h + np.uint64(1)) & mask


@jit
def piece_of(row: Any, start_K: Any, first: Any, last: Any) -> Any:
    """Return the last piece of first .. last that starts at or before a row."""
    while last - first > 1:
        middle = (first + last) >> 1
        if get(start_K, middle) <= row:
            first = middle
        else:
            last = middle
    return first


# ---- raw ids


@jit
def position_of(key: Any) -> Any:
    """Return the position of a key of a dynamic table (`recapp/tables/positions.py`)."""
    x = np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(x ^ (x >> np.uint64(31)))


@jit
def rows_of_ids(
    ids_L: Any, edge_F1: Any, size_F: Any, rule_F: Any, changed_F: Any, rows_L: Any
) -> Any:
    """Write the rows of ids by the id rules of `recapp/tables/ids.py`.

    Returns the position of the first id that is an error, or -1.
    """
    for f in range(len(size_F)):
        size = size_F[f]
        rule = rule_F[f]
        small = np.uint32(min(size - 1, 2**32 - 1))
        for at in range(edge_F1[f], edge_F1[f + 1]):
            number = get(ids_L, at)
            row = number
            if rule == DYNAMIC:
                row = position_of(number)
            elif number == MISSING:
                row = 0
            elif rule == HASH:
                if np.uint64(number) < 2**32 and size <= 2**32:
                    row = 1 + int(np.uint32(number) % small)  # several times faster than 64 bits
                else:
                    row = 1 + number % (size - 1)
            elif np.uint64(number) >= np.uint64(size):  # negative numbers too
                if rule == ERROR:
                    return at
                changed_F[f] += 1
                row = -1 if rule == DROP else 0 if number < 0 else size - 1
            put(rows_L, at, row)
    return -1


@jit
def positions_of_rows(rows_L: Any, edge_F1: Any, numbers_F3: Any, made_L: Any) -> Any:
    """Write the positions of rows (`recapp/tables/positions.py` defines them)."""
    for f in range(len(numbers_F3)):
        factor = np.uint64(numbers_F3[f, 0])
        shift = np.uint64(numbers_F3[f, 1])
        rows = np.uint64(max(numbers_F3[f, 2], 1))
        if numbers_F3[f, 2] == 0:
            for at in range(edge_F1[f], edge_F1[f + 1]):
                put(made_L, at, get(rows_L, at))
        elif rows <= 2**31:
            for at in range(edge_F1[f], edge_F1[f + 1]):
                put(made_L, at, np.int64((np.uint64(get(rows_L, at)) * factor + shift) % rows))
        else:  # products do not fit into 64 bits: eight bits at a time, for rows below 2^53
            for at in range(edge_F1[f], edge_F1[f + 1]):
                row = np.uint64(get(rows_L, at))
                product = np.uint64(0)
                for first in range(48, -1, -8):
                    digit = (row >> np.uint64(first)) & np.uint64(255)
                    product = ((product << np.uint64(8)) % rows + digit * factor) % rows
                put(made_L, at, np.int64((product + shift) % rows))


# ---- home in mode `pooled`: one vector per bag and owner


@jit
def walk_bags(
    slots: Any,
    group: Any,
    last_W: Any,
    row_W: Any,
    vector_W: Any,
    step: Any,
    written: Any,
    words_L: Any,
    scale_M: Any,
    use_V: Any,
) -> Any:
    """Count the rows and vectors to request of each rank, or write the requests: rows, the ends of
    bags among them and the bits of the weights. Return the number of vectors.

    Args:
        slots: The fields of `Slots`.
        group: The fields of `Strips`.
        last_W: Memory for the last bag that requests rows of each rank.
        row_W: The rows of each rank so far, from 0 on; where requests are written, from the offset
            of its rows in the message of ids on.
        vector_W: The same of vectors, `step` for each.
        step: 1, or the width of a vector.
        written: None to count. Otherwise, for each rank, the offset of its rows in the message, the
            offset before its first end of a bag, and that of its sample weights; the message
            `ids`; `where_M`, the offset of each bag in the output; `offsets_M1`, where the entries
            of each bag begin, after 0; `index_V`, the offset at which each vector will arrive;
            `source_V`, the offset of its gradient.
        words_L: The sample weights as integers, which go to the owners, because these sum the rows.
        scale_M: The factor of each bag.
        use_V: Memory for the entries of the matrix A, which are these factors alone.
    """
    b = Slots(*slots)
    strips = Strips(*group)
    last_W[:] = -1
    m = 0
    v = 0
    for s in range(len(strips.strip_S)):
        at = b.first_S[s]
        strip = strips.strip_S[s]
        bag = b.bag_S[s]
        first = strips.piece_I1[strip]
        last = strips.piece_I1[strip + 1]
        for nth in range(b.bags_S1[s + 1] - b.bags_S1[s]):
            for _ in range(get(b.lengths_N, bag + nth)):
                row = get(b.rows_L, at)
                k = piece_of(row, strips.start_K, first, last)
                rank = get(strips.rank_K, k)
                if get(last_W, rank) != m:
                    put(last_W, rank, m)
                    if written is not None:
                        begin_sum(v, m, rank, get(vector_W, rank), written, scale_M, use_V)
                    put(vector_W, rank, get(vector_W, rank) + step)
                    v += 1
                if written is not None:
                    row = row - get(strips.start_K, k) + get(strips.base_K, k)
                    ask_for_row(row, rank, get(row_W, rank), at, written, words_L)
                put(row_W, rank, get(row_W, rank) + 1)
                at += 1
            m += 1
            if written is not None:
                put(written[5], m, v)
    return v


@jit
def begin_sum(
    v: Any, m: Any, rank: Any, vector: Any, written: Any, scale_M: Any, use_V: Any
) -> None:
    """Begin the rows that a rank sums to vector v of bag m. Arguments as for `walk_bags`."""
    _, end_W, _, _, where_M, _, index_V, source_V = written
    put(end_W, rank, get(end_W, rank) + 1)
    put(index_V, v, vector)
    put(source_V, v, get(where_M, m))
    if use_V is not None:
        put(use_V, v, scale_M[m])


@jit
def ask_for_row(row: Any, rank: Any, to: Any, at: Any, written: Any, words_L: Any) -> None:
    """Write a row of a rank's sum, the sample weight of its id, and where the rows of the sum end
    for now. Arguments as for `walk_bags`.
    """
    first_W, end_W, word_W, ids, _, _, _, _ = written
    nth = to - get(first_W, rank)
    put(ids, to, row)
    put(ids, get(end_W, rank), nth + 1)
    if words_L is not None:
        for word in range(words_L.shape[1]):
            put(ids, get(word_W, rank) + nth * words_L.shape[1] + word, words_L[at, word])


# ---- owner


@jit
def group_rows(
    row_N: Any,
    offsets_V1: Any,
    at_V: Any,
    V: Any,
    use_N: Any,
    rows: Any,
    bucket_H: Any,
    row_U: Any,
    start_U1: Any,
    order_N: Any,
    use_T: Any,
    number_N: Any,
    bucket_U: Any,
) -> Any:
    """Write the distinct requested rows and, for each, the offsets of its gradients in the order of
    the requests. Return the number of distinct rows.
    """
    U = 0
    put(start_U1, 0, 0)
    put(start_U1, 1, 0)
    multiplier, shift, mask = hashing(rows, len(row_N))
    for n in range(len(row_N)):  # the entries of row u are counted in start[u + 2]
        row = get(row_N, n)
        h = find(row, bucket_H, row_U, multiplier, shift, mask)
        u = int(get(bucket_H, h))
        if u < 0:
            u = U
            put(bucket_H, h, u)
            put(bucket_U, u, h)
            put(row_U, u, row)
            put(start_U1, u + 2, 0)
            U += 1
        put(start_U1, u + 2, get(start_U1, u + 2) + 1)
        put(number_N, n, u)
    for u in range(U):
        put(start_U1, u + 2, get(start_U1, u + 2) + get(start_U1, u + 1))
        put(bucket_H, get(bucket_U, u), -1)
    n = 0
    for v in range(V):
        end = v + 1
        if offsets_V1 is not None:
            end = get(offsets_V1, v + 1)
        while n < end:  # start[u + 1] goes from the first entry of row u to the one behind its last
            u = int(get(number_N, n))
            k = int(get(start_U1, u + 1))
            put(start_U1, u + 1, k + 1)
            put(order_N, k, get(at_V, v))
            if use_N is not None:
                put(use_T, k, get(use_N, n))
            n += 1
    return U


# ---- start values: the bits of `recapp/tables/initial.py`


@jit
def mix(x: Any) -> Any:
    """Hash 32 bits."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def write_start_values(
    weights: Any, width: Any, slot_M: Any, key_M: Any, hashed: Any, column: Any, scale: Any
) -> None:
    """Write the start values of keys to their slots, fp32.

    Args:
        weights: Rows by slot, flat.
        width: Columns of a row.
        slot_M: The slots.
        key_M: The keys.
        hashed: The hash of seed and table name.
        column: The column of the table with which a row begins.
        scale: The distance of two values.
    """
    for m in range(len(slot_M)):
        key = np.uint64(key_M[m])
        high = mix(np.uint32(np.uint32(key >> np.uint64(32)) + hashed))
        row = mix(np.uint32(np.uint32(key & np.uint64(0xFFFFFFFF)) ^ high))
        at = slot_M[m] * width
        for d in range(width):
            bits = mix(np.uint32(row + np.uint32(np.uint32(column + d) * GOLDEN_32)))
            odd = np.int32(np.int32(bits >> np.uint32(7)) & np.int32(~1)) + np.int32(1 - 2**24)
            put(weights, at + d, np.float32(odd) * scale)
