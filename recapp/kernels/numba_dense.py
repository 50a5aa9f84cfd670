"""Kernels of dense parts on CPUs, each one pass over memory where torch takes several.

    dropping        x times 0 or a constant, by random bits      dropout, forward and backward
    masking         x + factor * ([h, h * m] + bias)             a layer of FCN
    masking_back    its gradients
    pairing         <v_i,j, v_j,i> of all pairs of fields        FFM, ONN
    pairing_back    their gradients

The arithmetic is that of `recapp/models`, which has each of them in torch's words, too. The loops
inside of a row read few arrays each, so that LLVM turns them into vectors. Results have the same
bits for every number of threads.

Shapes: N rows, L columns of h, F fields, D columns of a vector.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from recapp.kernels.constants import SUMMED_ROWS
from recapp.kernels.numba_cache import inlined
from recapp.kernels.simd import broadcast, get, load, put, store, zeros


@lru_cache(None)
def dropping() -> Callable[..., None]:
    """Return the function that multiplies the numbers first .. last by `factor` where a number of
    16 random bits is at least `least`, and by 0 elsewhere.
    """

    @inlined()
    def drops(entries: Any, bits: Any, found: Any, numbers: Any, first: Any, last: Any) -> None:
        least, factor, zero = numbers
        for n in range(first, last):
            kept = factor
            if get(bits, n) < least:
                kept = zero
            put(found, n, get(entries, n) * kept)

    return drops


@lru_cache(None)
def masking() -> Callable[..., None]:
    """Return the function that computes the blocks of rows first .. last of a masked cross.

    The arrays are x and the factor [N, 2 L], h and m [N, L], the bias [2 L], and the result.
    """

    @inlined()
    def masks(crossed: Any, halves: Any, bias: Any, found: Any, first: Any, last: Any) -> None:
        x, factor = crossed
        half, mask, columns = halves
        last_row = min(last * SUMMED_ROWS, len(half) // columns)
        for n in range(first * SUMMED_ROWS, last_row):
            row = n * columns
            at = 2 * row
            for c in range(columns):
                gate = get(half, row + c) + get(bias, c)
                put(found, at + c, get(x, at + c) + get(factor, at + c) * gate)
            at += columns
            for c in range(columns):
                gate = get(half, row + c) * get(mask, row + c) + get(bias, columns + c)
                put(found, at + c, get(x, at + c) + get(factor, at + c) * gate)

    return masks


@lru_cache(None)
def masking_back() -> Callable[..., None]:
    """Return the function that computes the gradients of the blocks first .. last of `masking`.

    The results are the gradient times (gate + base), for the factor (base 0) or for x that is its
    own factor (base 1); the gradients of h and m; and the sums of each block, for the bias.
    """

    @inlined()
    def masks_back(given: Any, bias: Any, found: Any, base: Any, first: Any, last: Any) -> None:
        grad, factor, half, mask, columns = given
        of_factor, of_half, of_mask, of_bias = found
        for block in range(first, last):
            begin = block * SUMMED_ROWS
            total = block * 2 * columns
            for n in range(begin, min(begin + SUMMED_ROWS, len(half) // columns)):
                row = n * columns
                at = 2 * row
                right = at + columns
                for c in range(columns):
                    slope = get(grad, at + c) * get(factor, at + c)
                    put(of_half, row + c, slope)
                    put(of_bias, total + c, get(of_bias, total + c) + slope)
                for c in range(columns):
                    slope = get(grad, right + c) * get(factor, right + c)
                    put(of_mask, row + c, slope)
                    put(of_bias, total + columns + c, get(of_bias, total + columns + c) + slope)
                for c in range(columns):
                    gate = get(half, row + c) + get(bias, c)
                    slope = get(grad, at + c)
                    put(of_factor, at + c, slope * base + slope * gate)
                for c in range(columns):
                    gate = get(half, row + c) * get(mask, row + c) + get(bias, columns + c)
                    slope = get(grad, right + c)
                    put(of_factor, right + c, slope * base + slope * gate)
                for c in range(columns):
                    slope = get(of_mask, row + c)
                    put(of_half, row + c, get(of_half, row + c) + slope * get(mask, row + c))
                    put(of_mask, row + c, slope * get(half, row + c))

    return masks_back


@lru_cache(None)
def pairing(dim: int, own: int) -> Callable[..., None]:
    """Return the function that computes the dot products of the samples first .. last.

    Args:
        dim: The columns of a vector.
        own: 1 where the vectors of the fields for themselves come before the products; else 0.
    """

    @inlined(dim, own)
    def pairing(vectors: Any, found: Any, fields: Any, like: Any, first: Any, last: Any) -> None:
        at = first * (own * fields * dim + fields * (fields - 1) // 2)
        for sample in range(first, last):
            begin = sample * fields * fields * dim
            for i in range(own * fields):
                row = load(vectors, begin + i * (fields + 1) * dim, like, dim)
                store(found, at + i * dim, row)
            at += own * fields * dim
            for i in range(1, fields):
                for j in range(i):
                    one = begin + (i * fields + j) * dim
                    other = begin + (j * fields + i) * dim
                    total = get(vectors, one) * get(vectors, other)
                    for c in range(1, dim):
                        total += get(vectors, one + c) * get(vectors, other + c)
                    put(found, at, total)
                    at += 1

    return pairing


@lru_cache(None)
def pairing_back(dim: int, own: int) -> Callable[..., None]:
    """Return the function that computes the gradients of the vectors of the samples first .. last.

    Arguments are those of `pairing`.
    """

    @inlined(dim, own)
    def pairing_back(
        vectors: Any, grad: Any, found: Any, numbers: Any, first: Any, last: Any
    ) -> None:
        fields, like = numbers
        at = first * (own * fields * dim + fields * (fields - 1) // 2)
        for sample in range(first, last):
            begin = sample * fields * fields * dim
            for i in range(fields):
                row = zeros(like, dim)
                if own:
                    row = load(grad, at + i * dim, like, dim)
                store(found, begin + i * (fields + 1) * dim, row)
            at += own * fields * dim
            for i in range(1, fields):
                for j in range(i):
                    one = begin + (i * fields + j) * dim
                    other = begin + (j * fields + i) * dim
                    slope = broadcast(grad, at, like, dim)
                    at += 1
                    store(found, one, slope * load(vectors, other, like, dim))
                    store(found, other, slope * load(vectors, one, like, dim))

    return pairing_back
