"""The stream that copies a batch to a GPU and runs its input exchange, beside the stream that
computes.

    side    | copy 1, route 1 |  | ids 1, serve 1 | copy 2, route 2 |  | ids 2, serve 2 |
    compute | step 0 .......................      | step 1 .................................| step 2
                                                  ^ waits for the side                      ^

Every input exchange runs on the side stream, whether it was started ahead or not, so the tensors
that it keeps (buffers of ids, offsets of bags) are written by one stream only and need no
synchronisation. Tensors that one stream makes and the other uses follow one rule in each direction:

- From side to compute: `hand_over`. Compute waits for the side, and each tensor is recorded on it
  (`record_stream`): when it is freed, wherever that happens, the allocator gives its memory away
  only after the work that compute had by then.
- From compute to side: `follow`, before an exchange that is not ahead of its turn reads what
  compute has made. One that is ahead reads nothing of compute's but what was there before the epoch
  (`LookAhead` follows once when it begins): to wait for compute in every step is what this stream
  exists to avoid. Compute may write such tensors again after `hand_over`, which comes at the end of
  every exchange.

NCCL: operations of one communicator run in the order in which they were issued; each waits for the
stream that is current when it is issued, and `wait()` makes the then current stream wait. Both are
called on the stream that made the buffer: side for counts and ids, compute for vectors and
gradients.

Tables whose rows come and go (`finds_rows`) have no side stream (`Comm.work_in_order`): an exchange
gives rows to new keys, takes those that the last update has freed, and may move all to larger
memory, so it would have to wait for compute in every step.

The host waits for counts on the side stream alone, while compute still has work.
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
    """The side stream of a CPU, which has none: work is done when it is called."""

    overlaps = False
    """Whether work on it runs while the host and the other stream go on."""

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context manager inside which work goes to the side stream; it may be nested."""
        return _HERE

    def follow(self) -> None:
        """Have the side's work from now on wait for all work that the current stream has by now."""

    def mark(self) -> Any:
        """Return a mark of this point of the side stream's work, for `hand_over`."""
        return None

    def hand_over(self, made: Any, mark: Any = None) -> None:
        """Have the current stream's work from now on wait for the side's, so that it may use what
        the side has made.

        Args:
            made: The tensors, in lists, tuples, mappings, iterators and dataclasses of any depth,
                or things with `record_stream`.
            mark: Wait only for the work up to this mark; None waits for all that the side has by
                now.
        """


class GpuSideStream(SideStream):
    """The side stream of a GPU.

    Args:
        stream: The stream.
        current: Returns the stream that work goes to now.
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
        """See `SideStream`; it does nothing where the side stream itself is current."""
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

    Its work is short and the host waits for it, so it has priority over what compute has queued.
    """
    if device.type != "cuda":
        return SideStream()
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return GpuSideStream(stream, lambda: torch.cuda.current_stream(device), torch.cuda.stream)


def _with_memory(thing: Any) -> Iterator[Any]:
    """Yield the tensors on a GPU in a nested thing, and objects that record a stream themselves.

    Objects with `to`, which Lightning moves to the device, are searched as well.
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
