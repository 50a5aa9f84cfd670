"""Copies between the host and a GPU. Copies to the GPU do not wait; one function waits for copies
to the host.

    to_device, copy_to_device    down, through page-locked memory: from any other the driver copies
                                 first and holds the host up
    to_host                      up: the ONE function in which the host waits for a device, and only
                                 until the current stream has come here
    start_to_host                up, without waiting
    true_indices                 where a mask is true; their number comes up by `to_host`
    places_of, view_of           tensors that lie in one memory, to move at once

Every other operation of a training step on a GPU queues work and goes on;
`torch.cuda.set_sync_debug_mode("error")` finds an operation that waits. Some of torch's operations
wait: `nonzero` and masks as indices, `bincount`, `repeat_interleave` without `output_size`,
`torch.tensor(..., device=)`, reading a number. On the CPU the functions here return their argument.

torch uses page-locked memory again only when copies from it are done, so callers need not keep it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recapp.sparse.bags import on_host

ALIGNMENT = 64  # bytes, of each tensor in one memory: kernels load 16 at once


def to_device(numbers: NDArray[np.int64] | Sequence[int], device: torch.device) -> Tensor:
    """Return integers of the host on a device, int64 of the same shape.

    On the CPU the tensor shares the memory of an array.
    """
    tensor = (
        torch.from_numpy(numbers)
        if isinstance(numbers, np.ndarray)
        else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    )
    return copy_to_device(tensor, device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for the copy.

    If the tensor is there already, this returns the tensor itself.
    """
    if device.type == "cuda" and on_host(tensor):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that the host can read, of the same shape.

    This waits for the work that is queued on the current stream, and for no other stream. An
    exported program waits where it reads.
    """
    if on_host(tensor) or torch.compiler.is_exporting():
        return tensor
    copy = tensor.to("cpu", non_blocking=True)  # into page-locked memory
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return copy


def start_to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Start to copy tensors to the host, and return the copies and the event at their end, for
    which the host waits before it reads them; None on the CPU.
    """
    if all(on_host(tensor) for tensor in tensors):
        return [tensor.clone() for tensor in tensors], None
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
    return copies, torch.cuda.current_stream(tensors[0].device).record_event()


def true_indices(mask_N: Tensor) -> Tensor:
    """Return the indices at which a mask is true: int64, ascending.

    On a GPU the host reads the number of indices once.
    """
    if on_host(mask_N) or torch.compiler.is_exporting():
        return mask_N.nonzero().view(-1)
    number_N = mask_N.cumsum(0)
    count = sum(to_host(number_N[-1:]).tolist())
    # Indices at which the mask is false go to the last entry, which is cut off.
    indices = torch.empty(count + 1, dtype=torch.int64, device=mask_N.device)
    return indices.index_copy_(
        0, torch.where(mask_N, number_N - 1, count), torch.arange(len(mask_N), device=mask_N.device)
    )[:count]


def places_of(tensors: Sequence[Tensor]) -> dict[int, slice]:
    """Return the bytes of each tensor in one memory, by the identity of the tensor."""
    places: dict[int, slice] = {}
    end = 0
    for tensor in tensors:
        if id(tensor) not in places:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + tensor.nbytes
            places[id(tensor)] = slice(begin, end)
    return places


def view_of(memory: Tensor, place: slice, like: Tensor) -> Tensor:
    """Return bytes of a memory as a tensor of the dtype and shape of another."""
    return memory[place].view(like.dtype).view(like.shape)
