"""The arithmetic half of the compiled backend: `pool` and `update`, each made for one width.

One source serves every width, type and rule; LLVM keeps a row in registers. One thread sums a whole
bag or touched row, and adds the entries in their order: so results have the same bits for every
number of threads. Threads are those of OpenMP's pool, which torch uses as well: two pools would
compete for the cores.

The functions here return kernels, all of one form:

    kernel(source, matrix, result, number, first, last)

A kernel sums vectors of the source along a sparse matrix for the results first .. last. `pool`
writes the sums to memory; its `number` is the stride of the source. `update` takes the sums as
gradients of `Touched` rows; its `number` is the learning rate. A staged kernel reads copies of
vectors and works for the threads first .. last. On threads, `edge_T1` stands for `first, last`:
thread t has edge[t] .. edge[t + 1].

Callers pass the fields of a record as a plain tuple, and the kernel makes the record: numba takes
1.5 us longer to find the types in a named tuple (measured).

Row statistics of rows that are cut into strips: the sum of squares of each touched row, the
row's piece, and the sum over its strips. A part is the sum of squares of a row within one strip.

Work is divided over threads by cost, not by the number of parts.

The ids of a bag differ a hundredfold (MLPerf's tables have 1 to 100 per sample): with equal numbers
of bags or tables, one of two threads would wait for half of the step. The partition changes no
result.

A function for one thread or several takes the part `first .. last` of the work and four arguments
a, b, c and d, whose meaning is its own, such as store, requests, output and sizes. Each is an array
or a tuple of arrays and numbers, as many as a kernel needs: numba passes no nested tuples to
threads.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange
from numba.extending import register_jitable

from recapp.kernels.numba_cache import compiled, inlined
from recapp.kernels.numba_integers import piece_of
from recapp.kernels.quantised import NUMBER_TYPES, bytes_of_packed_row
from recapp.kernels.simd import (
    fence,
    get,
    load,
    load_packed,
    prefetch,
    prefetch_far,
    put,
    sqrt,
    square_total,
    store,
    stream,
    zeros,
)

jit = compiled()
# A function that takes the numbers of a closure and returns a function to inline into kernels.
Make = Callable[..., Callable[..., None]]


class ThreadedKernel:
    """A kernel for one thread and one for several, each made when it is first called.

    Args:
        make: A function that takes the numbers of a closure, and returns a function to inline,
            f(a, b, c, d, first, last).
    """

    def __init__(self, make: Make) -> None:
        self.make = make
        self.on_one_thread = lru_cache(None)(lambda *made_for: jit(make(*made_for)))
        self.on_threads = lru_cache(None)(lambda *made_for: _on_threads(make(*made_for)))

    def __call__(self, made_for: tuple[Any, ...], arguments: tuple[Any, ...], edge_T1: Any) -> None:
        """Run the kernel. Thread t works on the part edge[t] .. edge[t + 1].

        Args:
            made_for: The arguments of `make`.
            arguments: The kernel's arguments a, b, c and d.
            edge_T1: The parts, as an array if there are several.
        """
        if len(edge_T1) == 2:
            self.on_one_thread(*made_for)(*arguments, *edge_T1)
            return
        numba.set_num_threads(len(edge_T1) - 1)
        self.on_threads(*made_for)(*arguments, edge_T1)


def _on_threads(serial: Callable[..., None]) -> Any:
    """Return the kernel that calls a function on several threads."""

    def kernel(a: Any, b: Any, c: Any, d: Any, edge_T1: Any) -> None:
        for t in prange(len(edge_T1) - 1):
            serial(a, b, c, d, edge_T1[t], edge_T1[t + 1])

    kernel.__name__ = kernel.__qualname__ = f"{serial.__name__}_on_threads"
    return compiled(parallel=True)(kernel)


def assign_threads(cost_I: Any, threads: int) -> Any:
    """Return the thread of each strip: the most expensive strip first, each to the thread with the
    least work (Graham's longest processing time first).

    Args:
        cost_I: The cost of each strip, in any unit.
        threads: The number of threads.
    """
    thread_I = np.zeros(len(cost_I), np.int64)
    # numpy sorts here, because numba would take 1.5 seconds to compile a sort
    if threads > 1:
        _assign_in_order(
            cost_I, np.argsort(-cost_I, kind="stable"), np.zeros(threads, np.int64), thread_I
        )
    return thread_I


@jit
def _assign_in_order(cost_I: Any, order_I: Any, load_T: Any, thread_I: Any) -> None:
    """Write the thread of each strip, in the given order of strips."""
    for i in order_I:
        thread_I[i] = np.argmin(load_T)
        load_T[thread_I[i]] += cost_I[i]


@jit
def split_bags(offsets_M1: Any, M: Any, threads: Any) -> Any:
    """Return where the bags of each thread begin: thread t has bags edge[t] .. edge[t + 1].

    The sum of entries and results is about the same for all threads.

    Args:
        offsets_M1: The offsets of the bags' entries; empty: one entry per bag.
        M: The number of bags.
        threads: The number of threads.
    """
    edge_T1 = np.zeros(threads + 1, np.int64)
    edge_T1[threads] = M
    for t in range(1, threads):
        if len(offsets_M1) == 0:
            edge_T1[t] = M * t // threads
            continue
        first = 0
        last = M
        begin = int(get(offsets_M1, 0))
        share = (int(get(offsets_M1, M)) - begin + M) * t // threads
        while first < last:
            middle = (first + last) >> 1
            if int(get(offsets_M1, middle)) - begin + middle < share:
                first = middle + 1
            else:
                last = middle
        edge_T1[t] = first
    return edge_T1


WIDE_COLUMNS = 64  # the sum of a wider row takes nearly all registers of AVX2
# A vector is prefetched this many vectors before its use (of 4 to 64, 16 to 32 are best, up to a
# quarter faster than 12).
AHEAD = 24
# A packed row is fetched into the second level of the caches FAR_AHEAD before its use, into the
# first level NEAR_AHEAD before. Together they take a random row of 136 bytes from 27 to 9.5 ns (one
# level, 24 ahead: 27; the second alone: 16; 4 to 16 and 48 to 96 were tried).
FAR_AHEAD = 48
NEAR_AHEAD = 12
ROWS_AHEAD = 6  # a row of the store is prefetched this many rows before its update


class Matrix(NamedTuple):
    """A sparse matrix in arrays (`recapp/kernels/links.py`: `Links`).

    Args:
        index_N: The index of each entry's vector in the source.
        offsets_M1: Where the entries of each result begin and end; empty: one entry per result.
        weights_N: The weight of each entry; empty: ones.
    """

    index_N: Any
    offsets_M1: Any
    weights_N: Any


class Touched(NamedTuple):
    """The rows of a store that a batch updates.

    Args:
        row_U: The rows.
        mean_KU: K mean squares of each row; empty where rows are whole.
        weights: The weights of the store.
        state0: The first state tensor of the rule; empty where it has none.
        state1: The second state tensor.
        decay: The part of their weights that rows lose before the rule's step.
        like: Any number in the type of the arithmetic.
    """

    row_U: Any
    mean_KU: Any
    weights: Any
    state0: Any
    state1: Any
    decay: Any
    like: Any


@lru_cache(None)
def summed(width: int, bits: int = 0) -> Callable[..., Any]:
    """Return the function that sums weights[k] * source[index[k] * stride : +width] over k in
    begin .. end, in that order.

    For wide rows of floats the prefetches have a loop of their own: in the loop of the additions
    they take registers, and LLVM keeps the sum in memory (the lookup of workload W2 took 1.4 times
    as long with AVX2). For narrow rows a second loop is 5 to 25 % slower.

    Args:
        width: The columns of a vector.
        bits: The bits of packed rows; 0 where the source holds floats. The memory of packed rows is
            (bytes, numbers), and their values are computed when a row is added
            (`recapp/kernels/quantised.py`).
    """
    prefetch_loop = width > WIDE_COLUMNS and not bits
    size = bytes_of_packed_row(width, bits) if bits else 0
    numbers = size // NUMBER_TYPES[bits].itemsize if bits else 0

    @inlined(width, bits)
    def summed(source: Any, stride: Any, m: Matrix, begin: Any, end: Any, like: Any) -> Any:
        index_N = m.index_N
        row = zeros(like, width)
        weighted = len(m.weights_N) > 0
        N = len(index_N)
        if prefetch_loop:
            for k in range(begin + AHEAD, min(end + AHEAD, N)):
                prefetch(source, get(index_N, k) * stride, width)
        for k in range(begin, end):
            if bits:
                packed, floats = source
                if k + FAR_AHEAD < N:
                    prefetch_far(packed, get(index_N, k + FAR_AHEAD) * size, size)
                if k + NEAR_AHEAD < N:
                    prefetch(packed, get(index_N, k + NEAR_AHEAD) * size, size)
                r = int(get(index_N, k))
                scale = load(floats, r * numbers + (numbers - 2), like, 1)
                bias = load(floats, r * numbers + (numbers - 1), like, 1)
                here = load_packed(packed, r * size, like, width, bits) * scale + bias
            else:
                if not prefetch_loop and k + AHEAD < N:
                    prefetch(source, get(index_N, k + AHEAD) * stride, width)
                here = load(source, get(index_N, k) * stride, like, width)
            if weighted:
                here = here * get(m.weights_N, k)
            row = row + here
        return row

    return summed


@lru_cache(None)
def pooling(width: int, streamed: bool, bits: int) -> Callable[..., None]:
    """Return the function that pools bags first .. last: target[at[m] : +width] = scale * sum of
    weights[k] * source[index[k] * stride : +width] over k in offsets[m] .. offsets[m + 1].

    The target has a flat buffer `memory`, the offset of each sum there, `at_M` (empty: sums stand
    side by side), and the factor `scale` of all sums, in the type of the arithmetic.

    The function serves the lookup, the combine and, with transposed matrices, the segment sums of
    backward. An absent array is an empty one, because None would need a kernel for each
    combination.

    Args:
        width: The columns of a vector.
        streamed: Whether results are written past the caches, 2 times as fast where the target is
            larger than the caches (measured; 4 times on a busy machine).
        bits: The bits of packed rows; 0 where the source holds floats.
    """
    total = summed(width, bits)
    size = bytes_of_packed_row(width, bits) if bits else 0

    @inlined(width, streamed, bits)
    def pooling(source: Any, matrix: Any, target: Any, stride: Any, first: Any, last: Any) -> None:
        m = Matrix(*matrix)
        memory, at_M, scale = target
        bags = len(m.offsets_M1) > 0
        scattered = len(at_M) > 0
        begin = first
        if bags:
            begin = int(get(m.offsets_M1, first))
        if bits:  # a small batch ends before the prefetches in the loop help
            for k in range(begin, min(begin + FAR_AHEAD, len(m.index_N))):
                prefetch_far(source[0], get(m.index_N, k) * stride, size)
        for b in range(first, last):
            end = b + 1
            if bags:
                end = int(get(m.offsets_M1, b + 1))
            at = b * width
            if scattered:
                at = int(get(at_M, b))
            row = total(source, stride, m, begin, end, scale) * scale
            if streamed:
                stream(memory, at, row)
            else:
                store(memory, at, row)
            begin = end
        if streamed:
            fence()

    return pooling


@lru_cache(None)
def staging(
    width: int, make: Callable[..., Callable[..., None]], *made_for: Any
) -> Callable[..., None]:
    """Return the function that runs `pooling` or `updating` for the strips of the threads
    first .. last, from copies of the vectors of their bags.

    Its source has the flat buffer `memory`, in which the vector of each bag lies at `where_M`.
    Strip i has the bags bag[i] .. bag[i + 1], the results row[i] .. row[i + 1] and a thread.
    `copies_TC` is memory for the copies of a strip on each thread, in the type of the arithmetic.

    Args:
        width: The columns of a vector.
        make: `pooling` or `updating`.
        made_for: The arguments of `make` after the width.
    """
    serial = make(*made_for)

    @inlined(serial)
    def staging(source: Any, matrix: Any, result: Any, number: Any, first: Any, last: Any) -> None:
        memory, where_M, bag_I1, row_I1, thread_I, copies_TC = source
        for thread in range(first, last):
            copy = copies_TC[thread]
            like = get(copy, 0)
            for i in range(len(thread_I)):
                if thread_I[i] == thread:
                    begin = bag_I1[i]
                    end = bag_I1[i + 1]
                    for b in range(begin, end):
                        if b + AHEAD < end:
                            prefetch(memory, get(where_M, b + AHEAD), width)
                        vector = load(memory, get(where_M, b), like, width)
                        store(copy, (b - begin) * width, vector)
                    serial(copy, matrix, result, number, row_I1[i], row_I1[i + 1])

    return staging


def bound_rule(
    step: Callable[..., tuple[Any, ...]], constants: tuple[float, ...], states: int
) -> Callable[..., Any]:
    """Return a rule's expression with its constants filled in, as kernels compile it: it takes and
    returns two values of state, of which the rule leaves those behind its own as they are.
    """
    # the expression stays a plain function: the cache on disk finds it by its name
    register_jitable(error_model="numpy")(step)

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound(w: Any, g: Any, mean: Any, lr: Any, e: Any, f: Any) -> Any:
        state = (e, f)[:states]
        return step(w, g, mean, lr, sqrt, *(constants + state)) + (e, f)[states:]

    return bound  # type: ignore[no-any-return]


@lru_cache(None)
def held_row(
    kind: str, width: int, columns: int
) -> tuple[Callable[..., None], Callable[..., Any], Callable[..., None]]:
    """Return the functions that fetch, read and write what a store holds for a row.

    Args:
        kind: "row" for one number, "element" for `columns` numbers, "none" for nothing.
        width: The columns of the store.
        columns: The columns that are read and written, from the first one of the row on.
    """

    @inlined(kind, width, columns)
    def fetch_held(values: Any, row: Any) -> None:
        if kind == "row":  # a cache miss of its own: a tenth of the update's time
            prefetch(values, row, 1)
        elif kind == "element":
            prefetch(values, row * width, columns)

    @inlined(kind, width, columns)
    def read_held(values: Any, row: Any, like: Any) -> Any:
        if kind == "row":
            return get(values, row)
        if kind == "none":
            return like
        return load(values, row * width, like, columns)

    @inlined(kind, width, columns)
    def write_held(values: Any, row: Any, value: Any) -> None:
        if kind == "row":
            put(values, row, value)
        elif kind == "element":
            store(values, row * width, value)

    return fetch_held, read_held, write_held


@lru_cache(None)
def updating(
    step: Callable[..., tuple[Any, ...]],
    constants: tuple[float, ...],
    decays: bool,
    state: tuple[str, ...],
    means: int,
    squares: bool,
    width: int,
) -> Callable[..., None]:
    """Return the function that updates touched rows first .. last: it sums the gradients of each
    and applies the rule to its weights and state, in one pass over memory.

    Args:
        step: The rule's expression.
        constants: The constants of the rule.
        decays: Whether weights decay.
        state: "row" or "element" for each state tensor; at most two.
        means: The number of mean squares of the row that the expression uses, at most four. If none
            are given, the row's is that of its gradient.
        squares: Whether the rule squares other tensors than the gradient: then the means are given.
        width: The columns of the store.
    """
    rule = bound_rule(step, constants, len(state))
    total = summed(width)
    first_kind, second_kind = (*state, "none", "none")[:2]
    fetch0, read0, write0 = held_row(first_kind, width, width)
    fetch1, read1, write1 = held_row(second_kind, width, width)
    most = means - 1

    @inlined(step, constants, decays, state, means, squares, width)
    def updating(gradients: Any, matrix: Any, rows: Any, lr: Any, first: Any, last: Any) -> None:
        m = Matrix(*matrix)
        t = Touched(*rows)
        for u in range(first, last):
            if u + ROWS_AHEAD < last:
                soon = get(t.row_U, u + ROWS_AHEAD)
                prefetch(t.weights, soon * width, width)
                fetch0(t.state0, soon)
                fetch1(t.state1, soon)
            g = total(gradients, 1, m, get(m.offsets_M1, u), get(m.offsets_M1, u + 1), t.like)
            row = int(get(t.row_U, u))
            if squares:
                U = len(t.mean_KU) // means
                four = (
                    get(t.mean_KU, u),
                    get(t.mean_KU, min(1, most) * U + u),
                    get(t.mean_KU, min(2, most) * U + u),
                    get(t.mean_KU, min(3, most) * U + u),
                )
                mean = four[:means]
            elif means == 0:
                mean = t.like
            elif len(t.mean_KU) == 0:
                mean = type(t.like)(square_total(g) / width)
            else:
                mean = get(t.mean_KU, u)
            w = load(t.weights, row * width, t.like, width)
            if decays:
                w = w - t.decay * w
            e = read0(t.state0, row, t.like)
            f = read1(t.state1, row, t.like)
            w, e, f = rule(w, g, mean, lr, e, f)
            write0(t.state0, row, e)
            write1(t.state1, row, f)
            store(t.weights, row * width, w)

    return updating


pool = ThreadedKernel(pooling)
update = ThreadedKernel(updating)
run_staged = ThreadedKernel(staging)


@lru_cache(None)
def row_squares(
    expression: Callable[..., tuple[Any, ...]] | None,
    constants: tuple[float, ...],
    state: tuple[str, ...],
    means: int,
    width: int,
) -> Callable[..., None]:
    """Return the kernel that writes the fp64 sums of squares of the tensors that a rule squares,
    [K, U]. It reads the rows before their update. The strips of one row exchange these sums.

    Args:
        expression: The rule's expression `squares`; None squares the gradient.
        constants: The constants of the rule.
        state: "row" or "element" for each state tensor; at most two.
        means: The number of sums.
        width: The columns of the store.
    """
    states = len(state)
    if expression is not None:
        register_jitable(error_model="numpy")(expression)
    total = summed(width)
    first_kind, second_kind = (*state, "none", "none")[:2]
    _, read0, _ = held_row(first_kind, width, width)
    _, read1, _ = held_row(second_kind, width, width)

    @jit
    def row_squares(gradients: Any, matrix: Any, rows: Any, lr: Any, square_KU: Any) -> None:
        m = Matrix(*matrix)
        t = Touched(*rows)
        U = len(t.row_U)
        for u in range(U):
            g = total(gradients, 1, m, get(m.offsets_M1, u), get(m.offsets_M1, u + 1), t.like)
            row = int(get(t.row_U, u))
            if expression is None:
                put(square_KU, u, square_total(g))
            else:
                w = load(t.weights, row * width, t.like, width)
                both = read0(t.state0, row, t.like), read1(t.state1, row, t.like)
                squares_K = expression(w, g, lr, sqrt, *(constants + both[:states]))
                for k in range(means):
                    put(square_KU, k * U + u, square_total(squares_K[k]))

    return row_squares


@jit
def find_pieces(row_U: Any, base_K: Any, piece_U: Any, nth_U: Any, n_K: Any) -> None:
    """Write the piece of each row and its number within the piece; count the rows of each piece in
    `n_K`.
    """
    for u in range(len(row_U)):
        k = piece_of(get(row_U, u), base_K, 0, len(base_K))
        put(piece_U, u, k)
        put(nth_U, u, get(n_K, k))
        put(n_K, k, get(n_K, k) + 1)


@jit
def mean_of_parts(
    parts: Any, begin_JK: Any, piece_U: Any, nth_U: Any, dim_K: Any, mean_U: Any
) -> None:
    """Write the mean over the whole row: the sum of its parts in the order of the strips, divided
    by its columns.

    The parts of piece k in strip j begin at offset `begin_JK[j, k]`; a negative offset means no
    strip.
    """
    for u in range(len(piece_U)):
        total = 0.0
        k = int(get(piece_U, u))
        for j in range(begin_JK.shape[0]):
            begin = begin_JK[j, k]
            if begin >= 0:
                total += get(parts, begin + get(nth_U, u))
        mean_U[u] = total / get(dim_K, k)
