"""Copies between the host and a GPU. Copies to the GPU do not wait; one function waits for copies
to the host.

    to_device, copy_to_device    down, through page-locked memory: from any other the driver copies
                                 first and holds the host up
    to_host                      up: the ONE function in which the host waits for a device, and only
                                 until the current stream has come here
    start_to_host                up, without waiting
    true_indices                 where a mask is true; their number comes up by `to_host`
    places_of, view_of           tensors that lie in one memory, to move at once
    made_together, memory_of     new tensors that lie so; their memory
    Packed                       copies of tensors that lie so
    copy_each, copied            copies, of those of one type by one launch

Every other operation of a training step on a GPU queues work and goes on;
`torch.cuda.set_sync_debug_mode("error")` finds an operation that waits. Some of torch's operations
wait: `nonzero` and masks as indices, `bincount`, `repeat_interleave` without `output_size`,
`torch.tensor(..., device=)`, reading a number. On the CPU the functions here return their argument.

torch uses page-locked memory again only when copies from it are done, so callers need not keep it.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

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


def made_together(like: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Return new tensors on the host, which lie in one memory as `places_of` places them.

    Args:
        like: Tensors of the same shapes and dtypes.
        pinned: Whether the memory is page-locked.
    """
    places = places_of(like)
    size = max((place.stop for place in places.values()), default=0)
    memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return [view_of(memory, places[id(x)], x) for x in like]


def memory_of(tensors: Sequence[Tensor], places: Sequence[slice]) -> Tensor | None:
    """Return the bytes of a memory in which tensors lie at places; None if they do not."""
    first = tensors[0]
    begin = first.storage_offset() * first.itemsize
    for x, place in zip(tensors, places, strict=True):
        is_beside = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        at = x.storage_offset() * x.itemsize - begin
        if not (is_beside and at == place.start and x.is_contiguous()):
            return None
    size = max(place.stop for place in places)
    return first.detach().reshape(-1).view(torch.uint8).as_strided((size,), (1,), begin)


def view_of(memory: Tensor, place: slice, like: Tensor) -> Tensor:
    """Return bytes of a memory as a tensor of the dtype and shape of another."""
    return memory[place].view(like.dtype).view(like.shape)


@torch.no_grad()
def copy_each(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same types and shapes, those of one type by one launch."""
    for dtype in dict.fromkeys(x.dtype for x in to):
        pairs = [(x, y) for x, y in zip(to, of, strict=True) if x.dtype == dtype]
        torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs], non_blocking=True)


def copied(nested: Any) -> Any:
    """Return something nested with copies of its tensors, without gradients. Each has memory of its
    own, so who keeps one keeps no other.
    """
    tensors = [x for x in tree_leaves(nested) if isinstance(x, Tensor)]
    made = [torch.empty_like(x, requires_grad=False) for x in tensors]
    copy_each(made, tensors)
    left = iter(made)
    return tree_map_only(Tensor, lambda _: next(left), nested)


class Packed:
    """Copies of the tensors of something nested, in one memory, so that one launch copies all of
    them again.

    Args:
        nested: The tensors, in tuples, lists and dicts, also beside other things.
        device: Their device.

    `memory` has the bytes of all, and `nested` the copies in the place of the tensors, contiguous,
    without gradients, and for autograd each with values of its own.
    """

    def __init__(self, nested: Any, device: torch.device) -> None:
        tensors = [x for x in tree_leaves(nested) if isinstance(x, Tensor)]
        places = places_of(tensors)
        self._places = [places[id(x)] for x in tensors]
        size = max((place.stop for place in self._places), default=0)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.nested = self._placed(nested)
        copy_each(self._tensors(), tensors)

    def copy(self) -> Self:
        """Return copies of these copies."""
        made = copy(self)
        made.memory = self.memory.clone()
        made.nested = made._placed(self.nested)
        return made

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Take the values of other tensors, of the same types and shapes; by one copy if they lie
        in one memory as these do, else by one of each type.
        """
        memory = memory_of(tensors, self._places)
        if memory is None:
            copy_each(self._tensors(), tensors)
        else:
            self.memory.copy_(memory, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves(self.nested) if isinstance(x, Tensor)]

    def _placed(self, nested: Any) -> Any:
        """Return something nested with tensors in the memory in the place of others."""
        places = iter(self._places)
        return tree_map_only(Tensor, lambda x: view_of(self.memory, next(places), x).data, nested)
