"""Calls of compiled kernels: tensors as arrays, numbers in the type of the arithmetic, and bags
divided over threads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from recapp.kernels import numba_partition as partition
from recapp.kernels.constants import CACHE_LINE_BYTES
from recapp.kernels.links import Links
from recapp.optim.rules import Rate

STREAM_FROM_BYTES = 4 << 20  # smaller targets stay in the caches until they are read
# Waking a second thread takes 10 to 30 us: more than it gains with fewer bags or touched rows
THREADS_FROM_ROWS = 2048


def array(tensor: Tensor | None) -> Any:
    """Return a tensor's memory as an array; 16-bit floats get the integer types that `simd.py`
    reads.
    """
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def array_or_empty(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor's memory as an array, or an empty array of its type for None.

    So one compiled kernel serves both; None would need another kernel.
    """
    return _EMPTY[dtype] if tensor is None else tensor.numpy()


_EMPTY = {
    dtype: torch.empty(0, dtype=dtype).numpy()
    for dtype in (torch.int32, torch.float32, torch.float64)
}


def scalar(dtype: torch.dtype, value: float) -> Any:
    """Return a number in the type of the arithmetic."""
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


def rate_argument(lr: Rate) -> Any:
    """Return learning rates in the form for kernels: a number or a tuple of numbers."""
    return tuple(map(float, lr)) if isinstance(lr, tuple) else float(lr)


def past_caches(in_lines: bool, target: Tensor) -> bool:
    """Return whether results are written past the caches."""
    return (
        in_lines
        and target.nbytes >= STREAM_FROM_BYTES
        and target.data_ptr() % CACHE_LINE_BYTES == 0
    )


def matrix(links: Links, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the fields of `Matrix`, with entries in the type of the arithmetic."""
    return (
        array(links.index_N),
        array_or_empty(links.offsets_M1, torch.int32),
        array_or_empty(links.weights_N, dtype),
    )


def touched(
    row_U: Tensor,
    mean_KU: Tensor | None,
    weights_RD: Tensor,
    state: Sequence[Tensor],
    dtype: torch.dtype,
    decay: float = 0.0,
) -> tuple[Any, ...]:
    """Return the fields of `Touched`: the rows of a store that a batch updates."""
    none = array_or_empty(None, dtype)
    state0, state1, *_ = [*(array(s.view(-1)) for s in state), none, none]
    means = none if mean_KU is None else array(mean_KU.view(-1))
    rows = array(row_U), means, array(weights_RD.view(-1))
    return *rows, state0, state1, float(decay), scalar(dtype, 0)


def behind(
    steps_R: Tensor, weights_RD: Tensor, state: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return the fields of `Behind`: the rows of a store with missed steps."""
    none = array_or_empty(None, dtype)
    state0, state1, *_ = [*(array(s.view(-1)) for s in state), none, none]
    return array(steps_R), array(weights_RD.view(-1)), state0, state1, scalar(dtype, 0)


def threads_of_torch() -> int:
    """Return the number of threads that torch uses, at most those of numba's pool."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))


def run_bags(
    serial: Callable[..., Any],
    on_threads: Callable[..., Any],
    made_for: tuple[Any, ...],
    arguments: tuple[Any, ...],
    links: Links,
) -> None:
    """Run a kernel on as many threads as torch uses, or on one if there is too little work.

    Args:
        serial: The function that makes the kernel for one thread.
        on_threads: The function that makes the kernel for several threads.
        made_for: The arguments of `serial` and `on_threads`.
        arguments: The kernel's arguments before the bags.
        links: The sparse matrix.
    """
    threads = threads_of_torch()
    if threads == 1 or links.bags < THREADS_FROM_ROWS:
        serial(*made_for)(*arguments, 0, links.bags)
        return
    offsets_M1 = array_or_empty(links.offsets_M1, torch.int32)
    numba.set_num_threads(threads)
    on_threads(*made_for)(*arguments, partition.split_bags(offsets_M1, links.bags, threads))


def run_strips(
    serial: Callable[..., Any],
    on_threads: Callable[..., Any],
    arguments: tuple[Any, ...],
    threads: int,
) -> None:
    """Run a kernel whose strips have been assigned to threads.

    Args:
        serial: The kernel for one thread.
        on_threads: The kernel for several threads.
        arguments: The kernel's arguments before the threads.
        threads: The number of threads.
    """
    if threads == 1:
        serial(*arguments, 0, 1)
        return
    numba.set_num_threads(threads)
    on_threads(*arguments, np.arange(threads + 1))
