"""Row statistics of rows that are cut into strips: the sum of squares of each touched row, the
row's piece, and the sum over its strips. A part is the sum of squares of a row within one strip.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba.extending import register_jitable

from recapp.kernels.numba_cache import compiled
from recapp.kernels.numba_integers import piece_of
from recapp.kernels.numba_vectors import Matrix, Touched, held_row, summed
from recapp.kernels.simd import get, load, put, sqrt, square_total

jit = compiled()


@lru_cache(None)
def squares(width: int) -> Callable[..., None]:
    """Return the kernel that writes the fp64 sum of squares of each touched row's gradient.

    The strips of one row exchange these sums.
    """
    total = summed(width)

    @jit
    def squares(gradients: Any, matrix: Any, like: Any, U: Any, square_U: Any) -> None:
        m = Matrix(*matrix)
        for u in range(U):
            g = total(gradients, 1, m, get(m.offsets_M1, u), get(m.offsets_M1, u + 1), like)
            put(square_U, u, square_total(g))

    return squares


def _bound_squares(
    expression: Callable[..., tuple[Any, ...]], constants: tuple[float, ...]
) -> Callable[..., Any]:
    """Return a rule's expression `squares` with the constants filled in."""
    register_jitable(error_model="numpy")(expression)

    @register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
    def bound_squares(w: Any, g: Any, lr: Any, state: Any) -> Any:
        return expression(w, g, lr, sqrt, *(constants + state))

    return bound_squares  # type: ignore[no-any-return]


@lru_cache(None)
def row_squares(
    expression: Callable[..., tuple[Any, ...]],
    constants: tuple[float, ...],
    state: tuple[str, ...],
    means: int,
    width: int,
) -> Callable[..., None]:
    """Return the kernel that writes the fp64 sums of squares of the tensors that a rule squares,
    [K, U]. It reads the rows before their update.

    Args:
        expression: The rule's expression `squares`.
        constants: The constants of the rule.
        state: "row" or "element" for each state tensor; one or two.
        means: The number of sums, 2 or 4.
        width: The columns of the store.
    """
    squared = _bound_squares(expression, constants)
    total = summed(width)
    first_kind, second_kind = (*state, "none")[:2]
    read0, _ = held_row(first_kind, width)
    read1, _ = held_row(second_kind, width)

    @jit
    def row_squares(gradients: Any, matrix: Any, rows: Any, lr: Any, square_KU: Any) -> None:
        m = Matrix(*matrix)
        t = Touched(*rows)
        U = len(t.row_U)
        for u in range(U):
            g = total(gradients, 1, m, get(m.offsets_M1, u), get(m.offsets_M1, u + 1), t.like)
            row = int(get(t.row_U, u))
            w = load(t.weights, row * width, t.like, width)
            e = read0(t.state0, row, t.like)
            if second_kind == "none":
                squares_K = squared(w, g, lr, (e,))
            else:
                squares_K = squared(w, g, lr, (e, read1(t.state1, row, t.like)))
            put(square_KU, u, square_total(squares_K[0]))
            put(square_KU, U + u, square_total(squares_K[1]))
            if means == 4:
                put(square_KU, 2 * U + u, square_total(squares_K[2]))
                put(square_KU, 3 * U + u, square_total(squares_K[3]))

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
def scatter_parts(part_U: Any, first_K: Any, piece_U: Any, nth_U: Any, parts: Any) -> None:
    """Write the part of each row at the offset of its piece plus its number within the piece."""
    for u in range(len(part_U)):
        put(parts, get(first_K, get(piece_U, u)) + get(nth_U, u), get(part_U, u))


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
