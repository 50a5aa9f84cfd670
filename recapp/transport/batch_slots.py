"""A batch reaches a GPU in one copy, into a buffer that later batches use again.

    host        | dense | ids | lengths | label |      page-locked
                     |  one copy, on a stream of its own; lengths of 1 are one number
    device      | dense | ids | lengths | label |      the tensors of the batch are views

recapp's reader writes its batches into such a memory (`recapp/dataset/chunk_store.py`); others are
packed into one. torch keeps page-locked memory, and uses it again when the copies from it are done.

A buffer of the device is a slot. A slot is free when nobody has a tensor of its batch any more, and
when the streams that used the batch have done the work that they had at that time. So a caller may
keep a batch, or a part of it, for as long as it likes: other batches then take other slots. There
are as many slots as batches under way, and no memory is allocated or page-locked in a step.

    slot 0   | copy 0 | step 0 .......... | free |  | copy 3 |
    slot 1        | copy 1 |                | step 1 .......... |
    slot 2                                  | copy 2 |     | step 2 ...

No GPU has run this file yet: the tests show the round trip, and the order of streams on streams
that are not there.
"""

from typing import Any

import torch
from torch import Tensor

from recapp.sparse.bags import on_host
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.transfer import memory_of, places_of, view_of
from recapp.transport.communicator import SideStream, side_stream

MOST_SLOTS = 8  # the batches that the host may be ahead of the GPU before it waits


class BatchSlots:
    """The slots through which the batches of a rank reach its device.

    Args:
        device: The device.
        copies: The stream of the copies; None makes it.
    """

    def __init__(self, device: torch.device, copies: SideStream | None = None) -> None:
        self.device = device
        self.copies = copies or side_stream(device)
        self._slots: list[_Slot] = []  # the one that is in use for the longest time comes first

    def to_device(self, batch: Batch) -> Batch:
        """Return the samples on the device, for work of the current stream from now on. Another
        stream must wait for the current one, and needs `record_stream` of the batch.

        A batch moves by its own `to` if the device has no streams, if a part is on a device
        already, or if a part needs a gradient.

        Args:
            batch: The samples. Nobody may write to their lengths on the device, because lengths
                of 1 are one number there.
        """
        tensors = batch.tensors() if self.copies.overlaps else []
        if not tensors or not all(on_host(t) and not t.requires_grad for t in tensors):
            return batch.to(self.device, non_blocking=True)
        short = batch.short()
        memory = self._memory_of(short)
        if memory is None:
            short = batch.packed(self.device.type == "cuda").short()
            memory = self._memory_of(short)
            assert memory is not None
        slot = self._take(memory.numel())
        with self.copies.beside():
            slot.there[: memory.numel()].copy_(memory, non_blocking=True)
        places = places_of(short.tensors())
        there = short.each(lambda tensor: view_of(slot.there, places[id(tensor)], tensor))
        there = there.as_long_as(batch)
        there.streams = slot.streams
        self.copies.hand_over(there)
        return there

    def _memory_of(self, short: Batch) -> Tensor | None:
        """Return the one memory of a batch from which a copy needs no wait; None without."""
        tensors = short.tensors()
        places = places_of(tensors)
        memory = memory_of(tensors, [places[id(x)] for x in tensors])
        is_pinned = memory is not None and (self.device.type != "cuda" or memory.is_pinned())
        return memory if is_pinned else None

    def _take(self, size: int) -> "_Slot":
        """Return a slot of at least `size` bytes that is free."""
        free = [slot for slot in self._slots if slot.is_left()]
        slot = next((slot for slot in free if slot.is_done()), None)
        if slot is None and free and len(self._slots) >= MOST_SLOTS:
            slot = free[0]
            for end in slot.ends or ():
                end.synchronize()
        if slot is not None:
            self._slots.remove(slot)
        if slot is None or slot.there.numel() < size:
            slot = _Slot(size + size // 4, self.device)  # bags of the next batch may be longer
            self.copies.follow()  # the memory may have been of a tensor of the current stream
        self._slots.append(slot)
        slot.take()
        return slot


class _Streams(set[Any]):
    """Streams. A copy of a batch has none, because it has memory of its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Slot:
    """A buffer. `streams` are those that use the batch, and `ends` the events behind
    their work with it, once it is left.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.there = torch.empty(size, dtype=torch.uint8, device=device)
        self.take()
        self._storage = self.there.untyped_storage()
        self._own = self._holders()

    def _holders(self) -> int:
        """Return the number of tensors and other objects that have the device's memory."""
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def take(self) -> None:
        """Begin the next use."""
        self.streams = _Streams()
        self.ends: list[Any] | None = None

    def is_left(self) -> bool:
        """Return whether nobody has a tensor of the batch. Work on its tensors may be queued."""
        if self.ends is None and self._holders() == self._own:
            self.ends = [stream.record_event() for stream in self.streams]
        return self.ends is not None

    def is_done(self) -> bool:
        """Return whether the streams have done the work that they had when the batch was left."""
        return all(end.query() for end in self.ends or ())
