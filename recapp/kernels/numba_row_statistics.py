"""Row statistics of rows that are cut into strips: the piece of each touched row, and the sums over
its strips. A part is the sum of squares of a row within one strip.
"""

from typing import Any

from recapp.kernels.numba_cache import compiled
from recapp.kernels.numba_integers import piece_of
from recapp.kernels.simd import get, put

jit = compiled()


@jit
def find_pieces(row_U: Any, base_K: Any, piece_U: Any, nth_U: Any, n_K: Any) -> None:
    """Write the piece of each row and its number among the piece's rows; count those in `n_K`."""
    for u in range(len(row_U)):
        k = piece_of(get(row_U, u), base_K, 0, len(base_K))
        put(piece_U, u, k)
        put(nth_U, u, get(n_K, k))
        put(n_K, k, get(n_K, k) + 1)


@jit
def scatter_parts(part_U: Any, first_K: Any, piece_U: Any, nth_U: Any, parts: Any) -> None:
    """Write the part of each row at the offset of its piece plus its number among the piece's."""
    for u in range(len(part_U)):
        put(parts, get(first_K, get(piece_U, u)) + get(nth_U, u), get(part_U, u))


@jit
def mean_of_parts(
    parts: Any, begin_JK: Any, piece_U: Any, nth_U: Any, dim_K: Any, mean_U: Any
) -> None:
    """Write the mean over the whole row: its parts, added in the order of its strips, by columns.

    Strip j of piece k has its parts from offset `begin_JK[j, k]` on; below 0 there is no strip.
    """
    for u in range(len(piece_U)):
        total = 0.0
        k = int(get(piece_U, u))
        for j in range(begin_JK.shape[0]):
            begin = begin_JK[j, k]
            if begin >= 0:
                total += get(parts, begin + get(nth_U, u))
        mean_U[u] = total / get(dim_K, k)
