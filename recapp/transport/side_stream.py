"""The side stream: it copies a batch to a GPU and runs its input exchange, in parallel to the
compute stream.

    side    | copy 1, route 1 |  | ids 1, serve 1 | copy 2, route 2 |  | ids 2, serve 2 |
    compute | step 0 .......................      | step 1 .................................| step 2
                                                  ^ waits for the side                      ^

Every input exchange runs on the side stream, in look-ahead or not. So only one stream writes the
tensors that an exchange keeps (buffers of ids, offsets of bags), and they need no synchronisation.
Tensors that one stream makes and the other uses follow one rule in each direction:

- From side to compute: `hand_over`. Compute waits for the side stream, and each tensor is recorded
  on compute (`record_stream`). So after the tensor is freed, the allocator reuses its memory only
  when compute has done the work that it had at that time.
- From compute to side: `follow`, before an exchange outside of look-ahead reads tensors of compute.
  An exchange in look-ahead reads only tensors from before the epoch (`LookAhead` calls `follow`
  when the epoch begins), because this stream exists to avoid a wait for compute in every step.
  Compute may write such tensors again after `hand_over`, at the end of every exchange.

NCCL: operations of one communicator run in the order of their calls. Each operation waits for the
stream that is current at the call. `wait()` blocks the stream that is current at the call of
`wait()`. Both are called on the stream that made the buffer: side for counts and ids, compute for
vectors and gradients.

Tables whose rows come and go (`finds_rows`) have no side stream (`Comm.work_in_order`). Their
exchange gives rows to new keys, reuses rows that the last update freed, and may move all rows to
larger memory. So it would have to wait for compute in every step.

The host waits for counts only on the side stream, while compute still has work.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from recapp.sparse.bags import on_host

_HERE = nullcontext()


class SideStream:
    """The side stream of a CPU, which has no streams: work runs at its call.

    `overlaps` tells whether work on the side stream runs in parallel to the host and the other
    stream.
    """

    overlaps = False

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context manager that sends work to the side stream. It may be nested."""
        return _HERE

    def follow(self) -> None:
        """Make later work of the side stream wait for all work that the current stream has now."""

    def mark(self) -> Any:
        """Return a mark of this point in the work of the side stream, for `hand_over`."""
        return None

    def hand_over(self, made: Any, mark: Any = None) -> None:
        """Make later work of the current stream wait for the side stream, so that it may use
        tensors that the side stream made.

        Args:
            made: The tensors, in lists, tuples, mappings, iterators and dataclasses of any depth,
                or objects with `record_stream`.
            mark: The mark up to which to wait; None waits for all work that the side stream has
                now.
        """


class GpuSideStream(SideStream):
    """The side stream of a GPU.

    Args:
        stream: The stream.
        current: Returns the current stream.
        use: Returns a context manager that makes a stream the current one.
    """

    overlaps = True

    def __init__(
        self,
        stream: Any,
        current: Callable[[], Any],
        use: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        self._stream = stream
        self._current = current
        self._use = use

    def beside(self) -> AbstractContextManager[Any]:
        """See `SideStream`."""
        return self._use(self._stream)

    def follow(self) -> None:
        """See `SideStream`. Do nothing where the side stream itself is current."""
        if (current := self._current()) != self._stream:
            self._stream.wait_stream(current)

    def mark(self) -> Any:
        """See `SideStream`; the mark is an event."""
        return self._stream.record_event()

    def hand_over(self, made: Any, mark: Any = None) -> None:
        """See `SideStream`."""
        current = self._current()
        current.wait_event(self.mark() if mark is None else mark)
        for thing in _with_memory(made):
            thing.record_stream(current)


def side_stream(device: torch.device) -> SideStream:
    """Return the side stream of a device.

    The work of the side stream is short and the host waits for it, so the stream has priority over
    the queued work of compute.
    """
    if device.type != "cuda":
        return SideStream()
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return GpuSideStream(stream, lambda: torch.cuda.current_stream(device), torch.cuda.stream)


def _with_memory(thing: Any) -> Iterator[Any]:
    """Yield the GPU tensors in a nested object, and the objects that record a stream themselves.

    Search objects with `to`, too, because Lightning moves them to the device.
    """
    if isinstance(thing, Tensor):
        if not on_host(thing):
            yield thing
    elif hasattr(thing, "record_stream"):
        yield thing
    elif isinstance(thing, Mapping):
        yield from _with_memory(list(thing.values()))
    elif isinstance(thing, list | tuple | Iterator):
        for part in thing:
            yield from _with_memory(part)
    elif is_dataclass(thing):
        yield from _with_memory([getattr(thing, field.name) for field in fields(thing)])
    elif hasattr(thing, "to") and hasattr(thing, "__dict__"):
        yield from _with_memory(vars(thing))
