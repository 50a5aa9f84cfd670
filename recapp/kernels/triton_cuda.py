"""The GPU backend: Triton kernels for the arithmetic, and the integer functions of the reference,
which run on any device.

`recapp/kernels/reference.py` documents the functions, `triton_vectors.py` the kernels. No function
waits for the device: the host knows the sizes from which grids and buffers follow. Triton compiles
a kernel at its first call with new types or a new width, and keeps it on disk. Triton's interpreter
(TRITON_INTERPRET=1) runs them on CPU tensors: slowly, for tests.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from recapp.kernels import triton_integers
from recapp.kernels import triton_vectors as vectors
from recapp.kernels.links import Links, decay_of
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.reference import TorchBackend
from recapp.kernels.triton_key_index import DeviceKeyIndex
from recapp.kernels.triton_start_values import begin_rows
from recapp.optim.rules import Rate, RowRule

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


class TritonBackend(TorchBackend):
    """The backend for tensors on a GPU."""

    name = "triton"
    fused_integers = triton_integers
    key_index = DeviceKeyIndex
    begin_rows = staticmethod(begin_rows)

    @override
    def pool(
        self,
        source: Tensor,
        stride: int,
        width: int,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        form = vectors.form(width, TYPES[dtype], stride)
        _pool(vectors.VectorSource(source, None), form, links, target, dtype, scale, in_lines)

    @override
    def pool_quantised(
        self,
        rows: QuantisedRows,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        form = vectors.form(rows.width, TYPES[dtype], rows.packed_RK.shape[1], rows.bits)
        source = vectors.VectorSource(rows.packed_RK, rows.numbers_RN)
        _pool(source, form, links, target, dtype, scale, in_lines)

    @override
    def square_sums(
        self, gradients: Tensor, width: int, links: Links, dtype: torch.dtype
    ) -> Tensor:
        total_U = torch.empty(links.bags, dtype=torch.float64, device=gradients.device)
        if links.bags:
            form = vectors.form(width, TYPES[dtype])
            source = vectors.VectorSource(gradients, None)
            matrix = _matrix(source, form, links, dtype)
            grid = (triton.cdiv(links.bags, form.BAGS),)
            vectors.square_sums(grid, (*source, *matrix, total_U, links.bags), (form,))
        return total_U

    def update(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        mean_U: Tensor | None,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> None:
        """See the reference. A rule has two state tensors at most.

        The reference computes rules with an expression `squares` (LAMB, LARS).
        """
        if not links.bags:
            return
        if rule.squares is not None:
            super().update(gradients, links, row_U, mean_U, weights_RD, state, dtype, lr, rule)
            return
        rates = lr if isinstance(lr, tuple) else (lr,)
        form = vectors.form(weights_RD.shape[1], TYPES[dtype])
        source = vectors.VectorSource(gradients, None)
        row0, row1, *_ = [*(kind == "row" for _, kind in rule.state), False, False]
        state0, state1, *_ = [*state, None, None]
        matrix = _matrix(source, form, links, dtype)
        rows = vectors.DeviceRows(row_U, mean_U, weights_RD, state0, state1)
        numbers = (links.bags, *(*rates, 0.0, 0.0)[:3], decay_of(lr, rule.decay))
        vectors.update(
            (triton.cdiv(links.bags, form.BAGS),),
            (*source, *matrix, *rows, *numbers),
            (
                vectors.device_function(rule.step, rule.constants),
                vectors.sqrt,
                vectors.RuleForm(len(rates), rule.decay > 0, row0, row1, rule.means > 0),
                form,
            ),
        )

    def catch_up(
        self,
        row_N: Tensor | None,
        steps_R: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        rates_TK: Tensor,
        first: int,
        rule: RowRule,
    ) -> None:
        """See the reference. The kernel passes over rows that are not behind, so the host waits for
        nothing.
        """
        now = first + len(rates_TK)
        row_S = None if row_N is None else _each_once(row_N)
        rows = len(steps_R) if row_S is None else len(row_S)
        if not rows:
            return
        form = vectors.form(weights_RD.shape[1], TYPES[dtype])
        state0, state1, *_ = [*state, None, None]
        vectors.catch_up(
            (triton.cdiv(rows, form.BAGS),),
            (weights_RD, row_S, state0, state1, steps_R, rates_TK, rows, first, now),
            (
                vectors.device_function(rule.step, rule.constants),
                vectors.sqrt,
                vectors.RuleForm(rates_TK.shape[1], False, False, False, False),
                form,
            ),
        )


def _each_once(row_N: Tensor) -> Tensor:
    """Return sorted rows, with -1 in the place of each repeated one."""
    row_S = row_N.long().sort().values
    row_S[1:].masked_fill_(row_S[1:] == row_S[:-1], -1)
    return row_S


def _pool(
    source: vectors.VectorSource,
    form: vectors.Form,
    links: Links,
    target: Tensor,
    dtype: torch.dtype,
    scale: float,
    in_lines: bool,
) -> None:
    if links.used is not None and links.offsets_M1 is not None:
        n = int(links.used)
        links = links._replace(bags=n, offsets_M1=links.offsets_M1[: n + 1], used=None)
    if not links.bags:
        return
    matrix = _matrix(source, form, links, dtype)
    grid = triton.cdiv(links.bags, form.BAGS), triton.cdiv(form.WIDTH, form.COLUMNS)
    arguments = (*source, *matrix, target, links.at_M, links.bags, scale)
    vectors.pool(grid, arguments, (form, in_lines))


def _matrix(
    source: vectors.VectorSource, form: vectors.Form, links: Links, dtype: torch.dtype
) -> vectors.DeviceMatrix:
    """Return a sparse matrix in the form for kernels. If some bag can be long, it has the sums of
    the runs of long bags (see `triton_vectors.py`).
    """
    matrix = vectors.DeviceMatrix(links.index_N, links.offsets_M1, links.weights_N, None)
    entries = len(links.index_N)
    if links.offsets_M1 is None or entries <= form.RUN:
        return matrix
    positions = 2 * triton.cdiv(entries, form.RUN)
    partial = torch.empty(positions * form.WIDTH, dtype=dtype, device=source.memory.device)
    matrix = matrix._replace(partial=partial)
    grid = positions, triton.cdiv(form.WIDTH, form.COLUMNS)
    vectors.sum_runs(grid, (*source, *matrix, links.bags), (form,))
    return matrix
