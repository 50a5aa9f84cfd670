"""The arithmetic half of the compiled backend: `pool` and `update`, each made for one width.

One source serves every width, type and rule; LLVM keeps a row in registers. One thread sums a whole
bag or touched row and adds its entries in their order, so results are the same bits for every
number of threads. Threads are those of OpenMP's pool, which torch uses as well: two pools would
compete for the cores.

The functions here return kernels. A kernel for one thread takes the bags, touched rows or strips
that it works on as its last arguments; a kernel on threads shares all of them out.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import prange
from numba.extending import register_jitable

from recapp.kernels.numba_cache import compiled, inlined
from recapp.kernels.quantised import NUMBER_TYPES, bytes_of_record
from recapp.kernels.simd import (
    broadcast,
    cast,
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

WIDE_COLUMNS = 64  # the sum of a wider row takes nearly all registers of AVX2
# How many vectors before its use a vector is prefetched (4 to 64 were tried: 16 to 32 are best, by
# up to a quarter over 12).
AHEAD = 24
# How many records before its use a record is fetched into the second level of the caches, and how
# many before into the first. Together they take a random record of 136 bytes from 27 to 9.5 ns (one
# level, 24 ahead: 27; the second alone: 16; 4 to 16 and 48 to 96 were tried).
FAR_RECORDS = 48
NEAR_RECORDS = 12
ROWS_AHEAD = 6  # how many rows before its update a row of the store is prefetched

jit = compiled()
parallel_jit = compiled(parallel=True)


def on_one_thread(make: Callable[..., Callable[..., None]]) -> Any:
    """Return a function that makes kernels for one thread.

    Args:
        make: Makes the function that is compiled; kernels on threads contain the same one.
    """
    return lru_cache(None)(lambda *made_for: jit(make(*made_for)))


@lru_cache(None)
def summed(width: int) -> Callable[..., Any]:
    """Return the function that sums weights[k] * source[index[k] * stride : +width] over k in
    begin .. end, in that order.

    For wide rows the prefetches have a loop of their own: beside the additions they take registers,
    and LLVM keeps the sum in memory (the lookup of workload W2 took 1.4 times as long with AVX2).
    For narrow rows a second loop costs more, 5 to 25 %.
    """
    prefetch_loop = width > WIDE_COLUMNS

    @inlined(width)
    def summed(
        source: Any, stride: Any, index_N: Any, weights_N: Any, begin: Any, end: Any, like: Any
    ) -> Any:
        row = zeros(like, width)
        weighted = len(weights_N) > 0
        N = len(index_N)
        if prefetch_loop:
            for k in range(begin + AHEAD, min(end + AHEAD, N)):
                prefetch(source, get(index_N, k) * stride, width)
        for k in range(begin, end):
            if not prefetch_loop and k + AHEAD < N:
                prefetch(source, get(index_N, k + AHEAD) * stride, width)
            here = load(source, get(index_N, k) * stride, like, width)
            if weighted:
                here = here * get(weights_N, k)
            row = row + here
        return row

    return summed


@lru_cache(None)
def summed_packed(width: int, bits: int) -> Callable[..., Any]:
    """Return the function that sums packed rows as `summed` sums floats.

    Its `source` is the records' memory as (bytes, numbers), its `stride` the bytes of a record. The
    values of a row are computed where it is added (`recapp/kernels/quantised.py`).
    """
    size = bytes_of_record(width, bits)
    numbers = size // NUMBER_TYPES[bits].itemsize

    @inlined(width, bits)
    def summed_packed(
        source: Any, stride: Any, index_N: Any, weights_N: Any, begin: Any, end: Any, like: Any
    ) -> Any:
        packed, held = source
        row = zeros(like, width)
        weighted = len(weights_N) > 0
        N = len(index_N)
        for k in range(begin, end):
            if k + FAR_RECORDS < N:
                prefetch_far(packed, get(index_N, k + FAR_RECORDS) * size, size)
            if k + NEAR_RECORDS < N:
                prefetch(packed, get(index_N, k + NEAR_RECORDS) * size, size)
            r = int(get(index_N, k))
            scale = broadcast(held, r * numbers + (numbers - 2), like, width)
            bias = broadcast(held, r * numbers + (numbers - 1), like, width)
            here = load_packed(packed, r * size, like, width, bits) * scale + bias
            if weighted:
                here = here * get(weights_N, k)
            row = row + here
        return row

    return summed_packed


@lru_cache(None)
def pooling(width: int, streamed: bool, bits: int) -> Callable[..., None]:
    """Return the function that pools bags first .. last: target[at[m] : +width] = scale * sum of
    weights[k] * source[index[k] * stride : +width] over k in offsets[m] .. offsets[m + 1].

    It is lookup, combine and, on transposes, the segment sums of backward. Empty offsets: one entry
    per bag; empty weights: ones; empty `at`: bags side by side. (None instead of empty arrays would
    compile a kernel for each combination.)

    Args:
        width: The columns of a vector.
        streamed: Whether results are written past the caches, 2 times as fast where the target is
            larger than these (measured; 4 times on a busy machine).
        bits: The bits of packed rows; 0 where the source holds floats.
    """
    total = summed_packed(width, bits) if bits else summed(width)
    size = bytes_of_record(width, bits) if bits else 0

    @inlined(width, streamed, bits)
    def pooling(
        source: Any,
        stride: Any,
        index_N: Any,
        offsets_M1: Any,
        weights_N: Any,
        target: Any,
        at_M: Any,
        scale: Any,
        first: Any,
        last: Any,
    ) -> None:
        bags = len(offsets_M1) > 0
        scattered = len(at_M) > 0
        begin = first
        if bags:
            begin = int(get(offsets_M1, first))
        if bits:  # a small batch ends before what is fetched ahead of use would help it
            for k in range(begin, min(begin + FAR_RECORDS, len(index_N))):
                prefetch_far(source[0], get(index_N, k) * stride, size)
        for m in range(first, last):
            end = m + 1
            if bags:
                end = int(get(offsets_M1, m + 1))
            at = m * width
            if scattered:
                at = int(get(at_M, m))
            row = total(source, stride, index_N, weights_N, begin, end, scale) * scale
            if streamed:
                stream(target, at, row)
            else:
                store(target, at, row)
            begin = end
        if streamed:
            fence()

    return pooling


pool = on_one_thread(pooling)


@lru_cache(None)
def pool_on_threads(width: int, streamed: bool, bits: int) -> Callable[..., None]:
    """Return the kernel that runs `pooling` of bags edge[t] .. edge[t + 1] on each thread t."""
    serial = pooling(width, streamed, bits)

    @parallel_jit
    def pool_on_threads(
        source: Any,
        stride: Any,
        index_N: Any,
        offsets_M1: Any,
        weights_N: Any,
        target: Any,
        at_M: Any,
        scale: Any,
        edge_T1: Any,
    ) -> None:
        for t in prange(len(edge_T1) - 1):
            serial(
                source,
                stride,
                index_N,
                offsets_M1,
                weights_N,
                target,
                at_M,
                scale,
                edge_T1[t],
                edge_T1[t + 1],
            )

    return pool_on_threads


@lru_cache(None)
def stage(width: int) -> Callable[..., None]:
    """Return the function that copies vectors from their offsets in a buffer side by side."""

    @inlined(width)
    def stage(source: Any, where_M: Any, first: Any, last: Any, like: Any, copy: Any) -> None:
        for m in range(first, last):
            if m + AHEAD < last:
                prefetch(source, get(where_M, m + AHEAD), width)
            store(copy, (m - first) * width, load(source, get(where_M, m), like, width))

    return stage


@lru_cache(None)
def pooling_staged(width: int) -> Callable[..., None]:
    """Return the function that runs `pooling` for the strips of `thread`, from copies of the
    vectors of their bags.
    """
    serial = pooling(width, False, 0)
    copied = stage(width)

    @inlined(width)
    def pooling_staged(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        offsets_M1: Any,
        weights_N: Any,
        target: Any,
        at_M: Any,
        scale: Any,
        copy: Any,
        thread_I: Any,
        thread: Any,
    ) -> None:
        for i in range(len(thread_I)):
            if thread_I[i] == thread:
                copied(source, where_M, bag_I1[i], bag_I1[i + 1], scale, copy)
                serial(
                    copy,
                    1,
                    index_N,
                    offsets_M1,
                    weights_N,
                    target,
                    at_M,
                    scale,
                    row_I1[i],
                    row_I1[i + 1],
                )

    return pooling_staged


pool_staged = on_one_thread(pooling_staged)


@lru_cache(None)
def pool_staged_on_threads(width: int) -> Callable[..., None]:
    """Return the kernel that runs `pooling_staged` on all threads, each with a part of `copies`."""
    serial = pooling_staged(width)

    @parallel_jit
    def pool_staged_on_threads(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        offsets_M1: Any,
        weights_N: Any,
        target: Any,
        at_M: Any,
        scale: Any,
        copies: Any,
        thread_I: Any,
        threads: Any,
    ) -> None:
        size = len(copies) // threads
        for t in prange(threads):
            serial(
                source,
                where_M,
                bag_I1,
                row_I1,
                index_N,
                offsets_M1,
                weights_N,
                target,
                at_M,
                scale,
                copies[t * size : (t + 1) * size],
                thread_I,
                t,
            )

    return pool_staged_on_threads


def _bound(
    step: Callable[..., tuple[Any, ...]], constants: tuple[float, ...], decays: bool
) -> Callable[..., Any]:
    """Return a rule's expression with its constants filled in, as kernels are compiled with it; if
    weights decay, `lr` is the part that they lose, and the rule's rates.
    """
    # the expression stays a plain function: the cache on disk finds it by its name
    register_jitable(error_model="numpy")(step)

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound(w: Any, g: Any, mean: Any, lr: Any, state: Any) -> Any:
        return step(w, g, mean, lr, sqrt, *(constants + state))

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound_bare(w: Any, g: Any, mean: Any, lr: Any, state: Any) -> Any:
        return step(w, g, mean, lr, sqrt, *state)

    plain = bound if constants else bound_bare

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound_decaying(w: Any, g: Any, mean: Any, lr: Any, state: Any) -> Any:
        return plain(w - lr[0] * w, g, mean, lr[1], state)

    return bound_decaying if decays else plain  # type: ignore[no-any-return]


@lru_cache(None)
def held_row(kind: str, width: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the functions that read and write a row's state: one number of it, or `width`."""
    if kind == "row":

        @inlined(kind, width)
        def read_held(held: Any, row: Any, like: Any) -> Any:
            return get(held, row)

        @inlined(kind, width)
        def write_held(held: Any, row: Any, value: Any) -> None:
            put(held, row, value)

    else:

        @inlined(kind, width)
        def read_held(held: Any, row: Any, like: Any) -> Any:
            return load(held, row * width, like, width)

        @inlined(kind, width)
        def write_held(held: Any, row: Any, value: Any) -> None:
            store(held, row * width, value)

    return read_held, write_held


@lru_cache(None)
def means_of_row(means: int, squares: bool, width: int) -> Callable[..., Any]:
    """Return the function that finds the mean squares of a row: those given, or that of its
    gradient where none are.

    Args:
        means: How many the rule reads.
        squares: Whether they are of other things than the gradient: then all are given.
        width: The columns of the store.
    """
    if squares:

        @inlined(means, squares, width)
        def means_of_row(mean_KU: Any, g: Any, u: Any, like: Any) -> Any:
            U = len(mean_KU) // means
            if means == 2:
                return get(mean_KU, u), get(mean_KU, U + u)
            return (
                get(mean_KU, u),
                get(mean_KU, U + u),
                get(mean_KU, 2 * U + u),
                get(mean_KU, 3 * U + u),
            )

    else:

        @inlined(means, squares, width)
        def means_of_row(mean_KU: Any, g: Any, u: Any, like: Any) -> Any:
            mean = like
            if len(mean_KU) == 0:
                if means:
                    mean = cast(like, square_total(g) / width)
            else:
                mean = get(mean_KU, u)
            return mean

    return means_of_row


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

    Its `mean_KU` is empty where rows are whole, its state arrays are empty where the rule has none.

    Args:
        step: The rule's expression.
        constants: The constants of the rule.
        decays: Whether weights decay.
        state: "row" or "element" for each state tensor; at most two.
        means: How many mean squares of the row the expression uses.
        squares: Whether they are of other things than the gradient: then they are given.
        width: The columns of the store.
    """
    rule = _bound(step, constants, decays)
    total = summed(width)
    first_kind, second_kind = (*state, "none", "none")[:2]
    read0, write0 = held_row(first_kind, width)
    read1, write1 = held_row(second_kind, width)
    means_of = means_of_row(means, squares, width)

    @inlined(step, constants, decays, state, means, squares, width)
    def updating(
        gradients: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_KU: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        first: Any,
        last: Any,
    ) -> None:
        for u in range(first, last):
            if u + ROWS_AHEAD < last:
                soon = get(row_U, u + ROWS_AHEAD)
                prefetch(weights, soon * width, width)
                if first_kind == "row":  # a cache miss of its own: a tenth of the update's time
                    prefetch(state0, soon, 1)
                elif first_kind == "element":
                    prefetch(state0, soon * width, width)
                if second_kind == "row":
                    prefetch(state1, soon, 1)
                elif second_kind == "element":
                    prefetch(state1, soon * width, width)
            g = total(gradients, 1, index_N, use_N, get(start_U1, u), get(start_U1, u + 1), like)
            row = int(get(row_U, u))
            at = row * width
            mean = means_of(mean_KU, g, u, like)
            w = load(weights, at, like, width)
            if first_kind == "none":
                (w,) = rule(w, g, mean, lr, ())
            elif second_kind == "none":
                w, e = rule(w, g, mean, lr, (read0(state0, row, like),))
                write0(state0, row, e)
            else:
                w, e, f = rule(w, g, mean, lr, (read0(state0, row, like), read1(state1, row, like)))
                write0(state0, row, e)
                write1(state1, row, f)
            store(weights, at, w)

    return updating


update = on_one_thread(updating)


@lru_cache(None)
def update_on_threads(*made_for: Any) -> Callable[..., None]:
    """Return the kernel that runs `updating` of rows edge[t] .. edge[t + 1] on each thread t."""
    serial = updating(*made_for)

    @parallel_jit
    def update_on_threads(
        gradients: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_KU: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        edge_T1: Any,
    ) -> None:
        for t in prange(len(edge_T1) - 1):
            serial(
                gradients,
                index_N,
                start_U1,
                use_N,
                row_U,
                mean_KU,
                weights,
                state0,
                state1,
                lr,
                like,
                edge_T1[t],
                edge_T1[t + 1],
            )

    return update_on_threads


@lru_cache(None)
def updating_staged(*made_for: Any) -> Callable[..., None]:
    """Return the function that runs `updating` for the strips of `thread`, from copies of the
    gradients of their bags.
    """
    serial = updating(*made_for)
    copied = stage(made_for[-1])

    @inlined(*made_for)
    def updating_staged(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_KU: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        copy: Any,
        thread_I: Any,
        thread: Any,
    ) -> None:
        for i in range(len(thread_I)):
            if thread_I[i] == thread:
                copied(source, where_M, bag_I1[i], bag_I1[i + 1], like, copy)
                serial(
                    copy,
                    index_N,
                    start_U1,
                    use_N,
                    row_U,
                    mean_KU,
                    weights,
                    state0,
                    state1,
                    lr,
                    like,
                    row_I1[i],
                    row_I1[i + 1],
                )

    return updating_staged


update_staged = on_one_thread(updating_staged)


@lru_cache(None)
def update_staged_on_threads(*made_for: Any) -> Callable[..., None]:
    """Return the kernel that runs `updating_staged` on all threads, each with a part of
    `copies`.
    """
    serial = updating_staged(*made_for)

    @parallel_jit
    def update_staged_on_threads(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_KU: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        copies: Any,
        thread_I: Any,
        threads: Any,
    ) -> None:
        size = len(copies) // threads
        for t in prange(threads):
            serial(
                source,
                where_M,
                bag_I1,
                row_I1,
                index_N,
                start_U1,
                use_N,
                row_U,
                mean_KU,
                weights,
                state0,
                state1,
                lr,
                like,
                copies[t * size : (t + 1) * size],
                thread_I,
                t,
            )

    return update_staged_on_threads
