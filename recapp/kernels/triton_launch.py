"""Launches of Triton kernels that cost the host little.

For each launch, Triton finds the compiled form of a kernel anew, and takes records of arguments
apart: longer than the driver needs for the launch. A `Launch` keeps the compiled forms. It tells
apart whatever Triton tells apart: the device, the type of an array, whether it begins at a multiple
of 16 bytes, whether a number is 1, a multiple of 16 or wider than 32 bits, and every constant.

Kernels take flat arguments: arrays (None stands for an absent one) and numbers, then constants.
Triton's interpreter and a compilation without a GPU return no compiled form, so nothing is kept
there.
"""

from collections import Counter
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# How often each kernel was launched in this process, by name.
LAUNCHES: Counter[str] = Counter()
ALIGNMENT = 16  # bytes, and the divisor of numbers that Triton tells apart


class Launch:
    """A kernel to launch. No addition is fused with a multiplication.

    Args:
        kernel: The function, decorated by `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...],
        warps: int = 4,
    ) -> None:
        """Launch the kernel on the device of its first argument.

        Args:
            grid: The number of programs, in one to three dimensions.
            arguments: The arrays and numbers of the kernel, an array first. All arrays lie on one
                device.
            constants: The arguments behind them, for which the kernel is compiled.
            warps: The warps of a program.
        """
        LAUNCHES[self._kernel.fn.__name__] += 1
        device = arguments[0].device
        kind: list[Hashable] = [constants, warps, device]
        addresses = []
        for argument in arguments:  # a loop without calls: it runs once for each launch of a step
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                kind += argument.dtype, address % ALIGNMENT == 0
                addresses.append(address)
                continue
            if isinstance(argument, int):
                kind += argument == 1, argument % ALIGNMENT == 0, argument.bit_length() > 31
            else:
                kind.append(argument is None)
            addresses.append(argument)
        key = tuple(kind)
        with _current(device):
            if compiled := self._compiled.get(key):
                compiled[(*grid, 1, 1)](*addresses, *constants)
                return
            self._compiled[key] = self._kernel[grid](
                *arguments, *constants, num_warps=warps, enable_fp_fusion=False
            )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one.

    Triton launches on the current GPU, whichever GPU its arguments lie on.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
