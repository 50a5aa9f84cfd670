"""The arithmetic half of the compiled backend: `pool`, `update` and `squares`, made for one width
each.

One source serves every width, type and rule; LLVM keeps a row in registers. A bag or a touched row
is one task's whole work and its entries are added in their order, so results are the same bits for
every number of threads. A dispatch over threads goes to OpenMP, whose pool torch uses as well: two
pools would fight for the cores.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import prange
from numba.extending import register_jitable

from recapp.kernels.numba_cache import compiled, part
from recapp.kernels.quantised import bytes_of_row
from recapp.kernels.simd import (
    broadcast,
    cast,
    fence,
    get,
    load,
    load_packed,
    prefetch,
    put,
    sqrt,
    square_total,
    store,
    stream,
    zeros,
)

WIDE_COLUMNS = 64  # more than that and a row's sum takes nearly all registers of AVX2
# vectors fetched before they are needed (4 to 64 tried: 16 to 32 are best, by up to a quarter over
# 12)
AHEAD = 24
ROWS_AHEAD = 6  # rows of the store, in an update

jit = compiled()
spread = compiled(parallel=True)


def alone(make: Callable[..., Callable[..., None]]) -> Any:
    """What makes kernels for one thread, of what makes their common part with the other threads'
    kernels.
    """
    return lru_cache(None)(lambda *made_for: jit(make(*made_for)))


@lru_cache(None)
def summed(width: int) -> Callable[..., Any]:
    """The sum of weights[k] * source[index[k] * unit : +width] over k in begin .. end, added in
    that order.

    For wide rows asking the cache stands in a loop of its own: beside the additions it takes
    registers, and LLVM keeps the sum in memory (W2's lookup took 1.4 times as long with AVX2). For
    narrow ones a second loop costs more, 5 to 25 %.
    """
    apart = width > WIDE_COLUMNS

    @part(width)
    def summed(
        source: Any, unit: Any, index_N: Any, weights_N: Any, begin: Any, end: Any, like: Any
    ) -> Any:
        row = zeros(like, width)
        weighted = len(weights_N) > 0
        N = len(index_N)
        if apart:
            for k in range(begin + AHEAD, min(end + AHEAD, N)):
                prefetch(source, get(index_N, k) * unit, width)
        for k in range(begin, end):
            if not apart and k + AHEAD < N:
                prefetch(source, get(index_N, k + AHEAD) * unit, width)
            here = load(source, get(index_N, k) * unit, like, width)
            if weighted:
                here = here * get(weights_N, k)
            row = row + here
        return row

    return summed


@lru_cache(None)
def summed_packed(width: int, bits: int) -> Callable[..., Any]:
    """The same sum of packed rows: `source` is (bytes, scales, biases), `unit` the bytes of a row,
    and a row's values are computed where it is added (`recapp/kernels/quantised.py`).
    """
    size = bytes_of_row(width, bits)

    @part(width, bits)
    def summed_packed(
        source: Any, unit: Any, index_N: Any, weights_N: Any, begin: Any, end: Any, like: Any
    ) -> Any:
        packed, scales, biases = source
        row = zeros(like, width)
        weighted = len(weights_N) > 0
        N = len(index_N)
        for k in range(begin, end):
            if k + AHEAD < N:
                soon = get(index_N, k + AHEAD)
                prefetch(packed, soon * unit, size)
                prefetch(scales, soon, 1)
                prefetch(biases, soon, 1)
            r = get(index_N, k)
            here = load_packed(packed, r * unit, like, width, bits)
            here = here * broadcast(scales, r, like, width) + broadcast(biases, r, like, width)
            if weighted:
                here = here * get(weights_N, k)
            row = row + here
        return row

    return summed_packed


@lru_cache(None)
def pooling(width: int, streamed: bool, bits: int) -> Callable[..., None]:
    """target[at[m] : +width] = scale * sum of weights[k] * source[index[k] * unit : +width] over k
    in offsets[m] .. offsets[m + 1].

    Lookup, combine and, on transposes, the segment sums of backward. Empty offsets: one entry per
    bag; empty weights: ones; empty `at`: bags side by side. (None instead of empty would compile a
    kernel for each combination.) Returns what does bags first..last. `streamed`: results go past
    the caches, 2 times as fast where the target is larger than they are (measured; 4 times on a
    busy machine). `bits`: of packed rows; 0 where the source holds floats.
    """
    total = summed_packed(width, bits) if bits else summed(width)

    @part(width, streamed, bits)
    def pooling(
        source: Any,
        unit: Any,
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
        placed = len(at_M) > 0
        begin = first
        if bags:
            begin = int(get(offsets_M1, first))
        for m in range(first, last):
            end = m + 1
            if bags:
                end = int(get(offsets_M1, m + 1))
            at = m * width
            if placed:
                at = int(get(at_M, m))
            row = total(source, unit, index_N, weights_N, begin, end, scale) * scale
            if streamed:
                stream(target, at, row)
            else:
                store(target, at, row)
            begin = end
        if streamed:
            fence()

    return pooling


pool = alone(pooling)


@lru_cache(None)
def pool_on_threads(width: int, streamed: bool, bits: int) -> Callable[..., None]:
    """`pooling` of bags edge[t] .. edge[t + 1] on each thread."""
    serial = pooling(width, streamed, bits)

    @spread
    def pool_on_threads(
        source: Any,
        unit: Any,
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
                unit,
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
    """Copy vectors from offsets in a buffer, side by side."""

    @part(width)
    def stage(source: Any, where_M: Any, first: Any, last: Any, like: Any, copy: Any) -> None:
        for m in range(first, last):
            if m + AHEAD < last:
                prefetch(source, get(where_M, m + AHEAD), width)
            store(copy, (m - first) * width, load(source, get(where_M, m), like, width))

    return stage


@lru_cache(None)
def pooling_staged(width: int) -> Callable[..., None]:
    """`pooling` from copies of the bags of the strips that are thread `mine`'s."""
    serial = pooling(width, False, 0)
    copied = stage(width)

    @part(width)
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
        mine: Any,
    ) -> None:
        for i in range(len(thread_I)):
            if thread_I[i] == mine:
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


pool_staged = alone(pooling_staged)


@lru_cache(None)
def pool_staged_on_threads(width: int) -> Callable[..., None]:
    """`pooling_staged` of all strips, each by its thread, which has a part of `copies`."""
    serial = pooling_staged(width)

    @spread
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
    step: Callable[..., tuple[Any, ...]], constants: tuple[float, ...]
) -> Callable[..., Any]:
    """A rule's expression with its constants filled in, ready to be compiled into a kernel."""
    # stays a plain function: the disk cache knows it by its name
    register_jitable(error_model="numpy")(step)

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound(w: Any, g: Any, mean: Any, lr: Any, state: Any) -> Any:
        return step(w, g, mean, lr, sqrt, *(constants + state))

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound_bare(w: Any, g: Any, mean: Any, lr: Any, state: Any) -> Any:
        return step(w, g, mean, lr, sqrt, *state)

    return bound if constants else bound_bare  # type: ignore[no-any-return]


@lru_cache(None)
def updating(
    step: Callable[..., tuple[Any, ...]],
    constants: tuple[float, ...],
    state: tuple[str, ...],
    needs_row: bool,
    width: int,
) -> Callable[..., None]:
    """Sum the gradients of each touched row and apply the rule to its weights and state, in one
    pass over memory.

    Args:
        step: the rule's expression.
        constants: of the rule.
        state: "row" or "element" for each state tensor; at most two.
        needs_row: whether the rule asks for the mean square.
        width: of the store.

    Returns:
        What does touched rows first..last. `mean_U` is empty where rows are whole, state arrays are
        empty where the rule has none.
    """
    rule = _bound(step, constants)
    total = summed(width)
    first_kind, second_kind = (*state, "none", "none")[:2]

    @part(step, constants, state, needs_row, width)
    def updating(
        gradients: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_U: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        first: Any,
        last: Any,
    ) -> None:
        whole = len(mean_U) == 0
        for u in range(first, last):
            if u + ROWS_AHEAD < last:
                soon = get(row_U, u + ROWS_AHEAD)
                prefetch(weights, soon * width, width)
                if first_kind == "row":  # a miss of its own: a tenth of the update
                    prefetch(state0, soon, 1)
                elif first_kind == "element":
                    prefetch(state0, soon * width, width)
                if second_kind == "element":
                    prefetch(state1, soon * width, width)
            g = total(gradients, 1, index_N, use_N, get(start_U1, u), get(start_U1, u + 1), like)
            row = int(get(row_U, u))
            at = row * width
            mean = like
            if whole:
                if needs_row:
                    mean = cast(like, square_total(g) / width)
            else:
                mean = get(mean_U, u)
            w = load(weights, at, like, width)
            if first_kind == "none":
                (w,) = rule(w, g, mean, lr, ())
            elif first_kind == "row":
                w, s = rule(w, g, mean, lr, (get(state0, row),))
                put(state0, row, s)
            elif second_kind == "none":
                w, e = rule(w, g, mean, lr, (load(state0, at, like, width),))
                store(state0, at, e)
            else:
                w, e, f = rule(
                    w, g, mean, lr, (load(state0, at, like, width), load(state1, at, like, width))
                )
                store(state0, at, e)
                store(state1, at, f)
            store(weights, at, w)

    return updating


update = alone(updating)


@lru_cache(None)
def update_on_threads(*made_for: Any) -> Callable[..., None]:
    """`updating` of touched rows edge[t] .. edge[t + 1] on each thread."""
    serial = updating(*made_for)

    @spread
    def update_on_threads(
        gradients: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_U: Any,
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
                mean_U,
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
    """`updating` from copies of the bags of the strips that are thread `mine`'s."""
    serial = updating(*made_for)
    copied = stage(made_for[-1])

    @part(*made_for)
    def updating_staged(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_U: Any,
        weights: Any,
        state0: Any,
        state1: Any,
        lr: Any,
        like: Any,
        copy: Any,
        thread_I: Any,
        mine: Any,
    ) -> None:
        for i in range(len(thread_I)):
            if thread_I[i] == mine:
                copied(source, where_M, bag_I1[i], bag_I1[i + 1], like, copy)
                serial(
                    copy,
                    index_N,
                    start_U1,
                    use_N,
                    row_U,
                    mean_U,
                    weights,
                    state0,
                    state1,
                    lr,
                    like,
                    row_I1[i],
                    row_I1[i + 1],
                )

    return updating_staged


update_staged = alone(updating_staged)


@lru_cache(None)
def update_staged_on_threads(*made_for: Any) -> Callable[..., None]:
    """`updating_staged` of all strips, each by its thread, which has a part of `copies`."""
    serial = updating_staged(*made_for)

    @spread
    def update_staged_on_threads(
        source: Any,
        where_M: Any,
        bag_I1: Any,
        row_I1: Any,
        index_N: Any,
        start_U1: Any,
        use_N: Any,
        row_U: Any,
        mean_U: Any,
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
                mean_U,
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


@lru_cache(None)
def squares(width: int) -> Callable[..., None]:
    """fp64 sum of squares of each touched row's gradient: what strips of one row
    exchange.
    """
    total = summed(width)

    @jit
    def squares(
        gradients: Any, index_N: Any, start_U1: Any, use_N: Any, like: Any, U: Any, square_U: Any
    ) -> None:
        for u in range(U):
            g = total(gradients, 1, index_N, use_N, get(start_U1, u), get(start_U1, u + 1), like)
            put(square_U, u, square_total(g))

    return squares
