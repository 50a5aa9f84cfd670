"""The GPU backend: Triton kernels for the arithmetic and for the integers of all groups at once
(`triton_integers.py`, `triton_requests.py`), and the integer functions of the reference, which run
on any device.

`recapp/kernels/reference.py` documents the functions, `triton_vectors.py` and `triton_update.py`
the kernels of the arithmetic, which adds in the order of `sums.py`. No function waits for the
device: the host knows the sizes from which grids and buffers follow, or the room for them
(`Links.used`). Triton compiles a kernel at its first call with new types or a new width, and keeps
it on disk. Triton's interpreter (TRITON_INTERPRET=1) runs them on CPU tensors: slowly, for tests.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from recapp.kernels import (
    triton_integers,
    triton_places,
    triton_requests,
    triton_update,
    triton_vectors,
)
from recapp.kernels.links import DeviceRate, Links, rate_numbers
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.reference import TorchBackend
from recapp.kernels.sums import GPU_ORDER
from recapp.kernels.triton_key_index import DeviceKeyIndex
from recapp.kernels.triton_new_rows import begin_rows
from recapp.kernels.triton_update import RuleForm
from recapp.kernels.triton_vectors import DeviceMatrix, Form
from recapp.optim.rules import Rate, RowRule

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
WARPS = 1


class TritonBackend(TorchBackend):
    """The backend for tensors on a GPU."""

    name = "triton"
    blocks = GPU_ORDER
    fused_integers = triton_integers
    fused_requests = triton_requests
    key_index = DeviceKeyIndex
    begin_rows = staticmethod(begin_rows)
    fused_places = triton_places

    @override
    def pool(
        self,
        source: Tensor | QuantisedRows,
        stride: int,
        width: int,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        if not links.bags:
            return
        if isinstance(source, QuantisedRows):
            packed_RK = source.packed_RK
            form = triton_vectors.form(width, TYPES[dtype], packed_RK.shape[1], source.bits)
            matrix = _matrix(packed_RK, form, links, dtype, source.numbers_RN)
        else:
            form = self._form(width, dtype, stride)
            matrix = _matrix(source, form, links, dtype)
        grid = triton_vectors.programs(links.bags, form), triton.cdiv(width, form.COLUMNS)
        triton_vectors.pool(grid, (*matrix, target, links.at_M, scale), (form, in_lines), WARPS)

    @override
    def row_squares(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate,
        rule: RowRule,
    ) -> Tensor:
        if rule.squares is not None:
            of_rows = row_U, weights_RD, state
            return super().row_squares(gradients, links, *of_rows, dtype, lr, rule)
        total_KU = torch.empty(1, links.bags, dtype=torch.float64, device=gradients.device)
        if links.bags:
            form = self._form(weights_RD.shape[1], dtype)
            matrix = _matrix(gradients, form, links, dtype)
            grid = (triton_vectors.programs(links.bags, form),)
            triton_vectors.square_sums(grid, (*matrix, total_KU), (form,), WARPS)
        return total_KU

    @override
    def on_device(
        self, rates: Sequence[Rate], rules: Sequence[RowRule], device: torch.device
    ) -> Sequence[Any]:
        """See the reference. One copy takes all rates to the device. Rules that the reference
        computes keep theirs.
        """
        tuples = [rate if isinstance(rate, tuple) else (rate,) for rate in rates]
        pairs = zip(rates, rules, strict=True)
        numbers = [rate_numbers(rate, rule.decay) for rate, rule in pairs]
        # so few numbers reach the device sooner from memory that is not page-locked
        numbers_K4 = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(
            device, non_blocking=True
        )
        return [
            DeviceRate(numbers_4, len(numbers)) if rule.squares is None else rate
            for numbers_4, numbers, rate, rule in zip(numbers_K4, tuples, rates, rules, strict=True)
        ]

    def update(
        self,
        gradients: Tensor,
        links: Links,
        row_U: Tensor,
        mean_U: Tensor | None,
        weights_RD: Tensor,
        state: Sequence[Tensor],
        dtype: torch.dtype,
        lr: Rate | DeviceRate,
        rule: RowRule,
    ) -> None:
        """See the reference. A rule has two state tensors at most.

        The reference computes rules with an expression `squares` (LAMB, LARS), and then the host
        waits for the count of the matrix.
        """
        if not links.bags:
            return
        if not isinstance(lr, DeviceRate):
            (lr,) = self.on_device([lr], [rule], weights_RD.device)
        if not isinstance(lr, DeviceRate):
            super().update(gradients, links, row_U, mean_U, weights_RD, state, dtype, lr, rule)
            return
        form = self._form(weights_RD.shape[1], dtype)
        row0, row1, *_ = [*(kind == "row" for _, kind in rule.state), False, False]
        state0, state1, *_ = [*state, None, None]
        matrix = _matrix(gradients, form, links, dtype)
        rows = triton_update.DeviceRows(weights_RD, row_U, mean_U, state0, state1)
        triton_update.update(
            (triton_vectors.programs(links.bags, form),),
            (*matrix, *rows, lr.numbers, lr.stopped),
            (
                triton_update.device_function(rule.step, rule.constants),
                triton_update.sqrt,
                RuleForm(lr.rates, rule.decay > 0, row0, row1, rule.means > 0),
                form,
            ),
            WARPS,
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
        form = triton_vectors.form(weights_RD.shape[1], TYPES[dtype])
        state0, state1, *_ = [*state, None, None]
        triton_update.catch_up(
            (triton.cdiv(rows, form.BAGS),),
            (weights_RD, row_S, state0, state1, steps_R, rates_TK, rows, first, now),
            (
                triton_update.device_function(rule.step, rule.constants),
                triton_update.sqrt,
                RuleForm(rates_TK.shape[1], False, False, False, False),
                form,
            ),
            WARPS,
        )

    def _form(self, width: int, dtype: torch.dtype, stride: int = 1) -> Form:
        """Return the constants for vectors of floats; rows of a store begin at multiples of their
        width, others at lines if all offsets do.
        """
        line = triton_vectors.LINE if self.in_lines and stride == 1 else 1
        return triton_vectors.form(width, TYPES[dtype], stride, line=line)


def _each_once(row_N: Tensor) -> Tensor:
    """Return sorted rows, with -1 in the place of each repeated one."""
    row_S = row_N.long().sort().values
    row_S[1:].masked_fill_(row_S[1:] == row_S[:-1], -1)
    return row_S


def _matrix(
    source: Tensor, form: Form, links: Links, dtype: torch.dtype, numbers: Tensor | None = None
) -> tuple[Any, ...]:
    """Return the source and a sparse matrix as the first arguments of kernels. If some bag can be
    long, the sums of the blocks of long bags are among them (see `triton_vectors.py`).
    """
    entries = len(links.index_N)
    longest = entries if links.longest is None else links.longest
    arrays = links.index_N, links.offsets_M1, links.weights_N
    matrix = DeviceMatrix(source, numbers, *arrays, None, None)
    bags = links.bags, links.used
    span = form.BLOCK
    for name in ("sums", "sums2"):
        if links.offsets_M1 is None or longest <= span:
            break
        positions = 2 * triton.cdiv(entries, span)
        sums = torch.empty(positions * form.WIDTH, dtype=dtype, device=source.device)
        matrix = matrix._replace(**{name: sums})
        grid = positions, triton.cdiv(form.WIDTH, form.COLUMNS)
        triton_vectors.sum_blocks(grid, (*matrix, *bags), (form, span), WARPS)
        span *= form.BLOCK
    return *matrix, *bags
