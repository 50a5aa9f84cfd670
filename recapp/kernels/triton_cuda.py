"""The GPU backend: the reference's integers, which run on any device, and Triton kernels for the
arithmetic.

`recapp/kernels/reference.py` documents what the functions mean, `triton_vectors.py` how the kernels
work. Nothing here waits for the device: grids and buffers follow from sizes that the host knows.
Kernels are compiled at their first call with new types or a new width, and kept on disk by Triton.
Triton's interpreter (TRITON_INTERPRET=1) runs them on CPU tensors: slowly, for tests.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels import triton_vectors as vectors
from recapp.kernels.constants import SQUARE_BLOCK
from recapp.kernels.links import Links, Rate, Rule, decay_of
from recapp.kernels.quantised import QuantisedRows
from recapp.kernels.reference import TorchBackend

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


class _Source(NamedTuple):
    """Vectors as kernels read them.

    Args:
        memory: The flat buffer, or the bytes of records.
        stride: What an index counts in: elements of the buffer, or bytes of records.
        width: The columns of a vector.
        numbers: The memory of records in the type of their scales and biases; None for floats.
        bits: The bits of a packed value; 0 for floats.
    """

    memory: Tensor
    stride: int
    width: int
    numbers: Tensor | None = None
    bits: int = 0


class TritonBackend(TorchBackend):
    """The backend for tensors on a GPU."""

    name = "triton"

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
        """See the reference."""
        _pool(_Source(source, stride, width), links, target, dtype, scale, in_lines)

    def pool_quantised(
        self,
        rows: QuantisedRows,
        links: Links,
        target: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        in_lines: bool = False,
    ) -> None:
        """See the reference."""
        records_RK = rows.records_RK
        source = _Source(records_RK, records_RK.shape[1], rows.width, rows.numbers_RN, rows.bits)
        _pool(source, links, target, dtype, scale, in_lines)

    def square_sums(
        self, gradients: Tensor, width: int, links: Links, dtype: torch.dtype
    ) -> Tensor:
        """See the reference."""
        total_U = torch.empty(links.bags, dtype=torch.float64, device=gradients.device)
        if links.bags:
            bags, columns = vectors.tile(width)
            partial = _partial_sums(_Source(gradients, 1, width), links, dtype)
            with _current(gradients.device):
                vectors.square_sums[triton.cdiv(links.bags, bags),](
                    gradients,
                    links.index_N,
                    links.offsets_M1,
                    links.weights_N,
                    partial,
                    total_U,
                    links.bags,
                    TYPES[dtype],
                    width,
                    vectors.RUN,
                    bags,
                    columns,
                    _folds(columns),
                    vectors.AT_ONCE,
                    enable_fp_fusion=False,
                )
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
        rule: Rule,
    ) -> None:
        """See the reference. A rule has two state tensors at most.

        Rules with squares of their own (LAMB, LARS) are computed as the reference does.
        """
        if not links.bags:
            return
        if rule.squares is not None:
            super().update(gradients, links, row_U, mean_U, weights_RD, state, dtype, lr, rule)
            return
        rates = lr if isinstance(lr, tuple) else (lr,)
        width = weights_RD.shape[1]
        kind0, kind1, *_ = [*(kind for _, kind in rule.state), None, None]
        bags, columns = vectors.tile(width)
        partial = _partial_sums(_Source(gradients, 1, width), links, dtype)
        state0, state1, *_ = [*state, None, None]
        constants = tuple(tl.constexpr(c) for c in rule.constants)
        with _current(weights_RD.device):
            vectors.update[triton.cdiv(links.bags, bags),](
                gradients,
                links.index_N,
                links.offsets_M1,
                links.weights_N,
                partial,
                row_U,
                mean_U,
                weights_RD,
                state0,
                state1,
                constants,
                links.bags,
                *(*rates, 0.0, 0.0)[:3],
                decay_of(lr, rule.decay),
                len(rates),
                rule.decay > 0,
                vectors.device_function(rule.step),
                vectors.sqrt,
                kind0,
                kind1,
                rule.means > 0,
                TYPES[dtype],
                width,
                vectors.RUN,
                bags,
                columns,
                _folds(columns),
                vectors.AT_ONCE,
                enable_fp_fusion=False,
            )


def _pool(
    source: _Source, links: Links, target: Tensor, dtype: torch.dtype, scale: float, in_lines: bool
) -> None:
    if not links.bags:
        return
    bags, columns = vectors.tile(source.width)
    partial = _partial_sums(source, links, dtype)
    with _current(target.device):
        vectors.pool[triton.cdiv(links.bags, bags), triton.cdiv(source.width, columns)](
            source.memory,
            source.numbers,
            links.index_N,
            links.offsets_M1,
            links.weights_N,
            partial,
            target,
            links.at_M,
            links.bags,
            scale,
            TYPES[dtype],
            source.width,
            source.stride,
            source.bits,
            in_lines,
            vectors.RUN,
            bags,
            columns,
            vectors.AT_ONCE,
            enable_fp_fusion=False,
        )


def _partial_sums(source: _Source, links: Links, dtype: torch.dtype) -> Tensor | None:
    """Return the sums of the runs of long bags (see `triton_vectors.py`), or None where no bag can
    be long.
    """
    entries = len(links.index_N)
    if links.offsets_M1 is None or entries <= vectors.RUN:
        return None
    positions = 2 * triton.cdiv(entries, vectors.RUN)
    columns = vectors.tile(source.width)[1]
    partial = torch.empty(positions * source.width, dtype=dtype, device=source.memory.device)
    with _current(source.memory.device):
        vectors.sum_runs[positions, triton.cdiv(source.width, columns)](
            source.memory,
            source.numbers,
            links.index_N,
            links.offsets_M1,
            links.weights_N,
            partial,
            links.bags,
            TYPES[dtype],
            source.width,
            source.stride,
            source.bits,
            vectors.RUN,
            columns,
            vectors.AT_ONCE,
            enable_fp_fusion=False,
        )
    return partial


def _folds(columns: int) -> int:
    """Return how often a block of squares in a tile is halved until one column is left."""
    return min(columns, SQUARE_BLOCK).bit_length() - 1


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one.

    Triton launches on the current GPU, whichever GPU its arguments lie on.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
