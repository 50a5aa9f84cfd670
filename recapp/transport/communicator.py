"""The hidden share of an exchange: the time that messages were under way, and the part of that time
in which the host waited.

    sent                                  wanted      there
     |------- the host does other work -----|-- waits --|

The first part, divided by the whole, is the hidden share. Messages for which a GPU stream waits
instead of the host are not counted, because the host cannot measure them.

The side stream: it runs the input exchange of a batch, in parallel to the compute stream. Another
stream has copied the batch to the GPU (`recapp/transport/batch_slots.py`).

    copies  | 1 |                                 | 2 |
    side        | route 1 |      | ids 1, serve 1 |   | route 2 |      | ids 2, serve 2 |
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

The only collective of the engine, an all-to-all: every rank sends a span of a flat buffer to
every other rank, and fills another span from each.

One process is not a special case: with a single rank the same code runs and sends nothing. `calls`
and `bytes_sent` count messages and bytes, so tests and reports state the measured cost of a step.
"""

import atexit
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from recapp.errors import RankError, RecappError
from recapp.processes.faults import SILENT, timeout_message
from recapp.sparse.bags import on_host

Arrived = TypeVar("Arrived")
T = TypeVar("T")


class Sent(NamedTuple, Generic[Arrived]):
    """A message under way.

    Args:
        since: The time of sending, in seconds of `time.perf_counter`.
        arrive: A function that waits for the message and returns its contents.
    """

    since: float
    arrive: Callable[[], Arrived]


class Waits:
    """The times since the start that messages were under way and that the host waited, by phase.

    Args:
        phases: The names of the phases in which the host waits.

    Attributes:
        waited_s: The seconds in which the host waited, by phase.
        under_way_s: The seconds from sending to arrival, by phase.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self.waited_s = dict.fromkeys(phases, 0.0)
        self.under_way_s = dict.fromkeys(phases, 0.0)

    @staticmethod
    def sent(arrive: Callable[[], Arrived]) -> Sent[Arrived]:
        """Return the record of a message that was just sent.

        Args:
            arrive: Waits for the message and returns its contents.
        """
        return Sent(time.perf_counter(), arrive)

    def arrived(self, phase: str, message: Sent[Arrived]) -> Arrived:
        """Wait for a message and return its contents. Count the time if the host waits in this
        phase.
        """
        if phase not in self.waited_s:
            return message.arrive()
        began = time.perf_counter()
        arrived = message.arrive()
        now = time.perf_counter()
        self.waited_s[phase] += now - began
        self.under_way_s[phase] += now - message.since
        return arrived

    def hidden(self) -> dict[str, float]:
        """Return the hidden share of each phase with messages: the part of their time under way in
        which the host did other work.
        """
        return {
            phase: 1 - self.waited_s[phase] / seconds
            for phase, seconds in self.under_way_s.items()
            if seconds
        }


def mean_hidden(waits: Iterable[Waits]) -> dict[str, float]:
    """Return the mean of `Waits.hidden` over several exchanges, by phase."""
    shares: dict[str, list[float]] = {}
    for one in waits:
        for phase, share in one.hidden().items():
            shares.setdefault(phase, []).append(share)
    return {phase: sum(values) / len(values) for phase, values in shares.items()}


# The most time that counts between two looks. A longer gap shows that this process itself was
# stopped or too busy, so it cannot blame others for that time.
LONGEST_LOOK_SECONDS = 2.0


class SecondsSeen:
    """For each item, such as a stopped rank, the seconds for which every look has seen the item.

    Time in which this process itself was stopped does not count: a user who stops a whole job may
    continue it days later.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._seconds: dict[int, float] = {}

    def look(self, seen: Iterable[int]) -> Mapping[int, float]:
        """Return the seconds of each item that is seen now, 0 for a new one.

        Args:
            seen: The items that are seen now. The seconds of every other item are forgotten.
        """
        now = time.monotonic()
        passed = min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        before = self._seconds
        self._seconds = {one: before[one] + passed if one in before else 0.0 for one in seen}
        return self._seconds


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

    def mark_current(self) -> Any:
        """Return a mark of this point in the work of the current stream, for `wait_for`."""
        return None

    def wait_for(self, mark: Any) -> None:
        """Make later work of the current stream wait for a mark; None waits for nothing."""

    def hand_over(self, result: Any, mark: Any = None) -> None:
        """Make later work of the current stream wait for the side stream, so that it may use
        tensors that the side stream made.

        Args:
            result: The tensors, in lists, tuples, mappings, iterators and dataclasses of any depth,
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

    @override
    def beside(self) -> AbstractContextManager[Any]:
        return self._use(self._stream)

    @override
    def follow(self) -> None:
        # nothing where the side stream itself is current
        if (current := self._current()) != self._stream:
            self._stream.wait_stream(current)

    @override
    def mark(self) -> Any:
        return self._stream.record_event()

    @override
    def mark_current(self) -> Any:
        return self._current().record_event()

    @override
    def wait_for(self, mark: Any) -> None:
        if mark is not None:
            self._current().wait_event(mark)

    @override
    def hand_over(self, result: Any, mark: Any = None) -> None:
        current = self._current()
        current.wait_event(self.mark() if mark is None else mark)
        for thing in _with_memory(result):
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


# Begin and end of a part of a flat buffer, in elements.
Span = tuple[int, int]

LOOK_S = 0.01  # longer than the switch interval of the GIL (5 ms)
PATIENCE_S = 10.0


class Comm:
    """The ranks of a process group, and the messages between them.

    Args:
        group: A process group that carries only these messages, which have an order of their own.
            None takes the default group, or a single rank where there is no process group.
        device: The device of message buffers: the CPU with gloo, the rank's GPU with NCCL.
        tag: The tag of the messages. Messages of one tag are in order. Gloo separates messages of
            different tags; NCCL does not.
        alone: Whether this process is a single rank even though there is a process group.

    Attributes:
        rank: The number of this rank.
        world: The number of ranks.
        transport: The name of the backend, or `none` for one rank.
        fallback: The reason why `recapp.transport.join_ranks` chose no faster transport; else
            empty.
        calls: The number of swaps started so far.
        bytes_sent: The number of bytes that this rank sent in swaps so far.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        tag: int = 0,
        alone: bool = False,
    ) -> None:
        self.group = group
        self.tag = tag
        alone = alone or (group is None and not (dist.is_available() and dist.is_initialized()))
        self.rank, self.world = (
            (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        )
        self.device = device or torch.device("cpu")
        self.transport = "none" if self.world == 1 else str(dist.get_backend(group))
        self.fallback = ""
        self.calls = 0
        self.bytes_sent = 0

    @cached_property
    def side(self) -> SideStream:
        """The stream on which the input exchange runs."""
        return side_stream(self.device)

    @property
    def host_waits(self) -> bool:
        """Return whether the host waits for messages. With NCCL a GPU stream waits instead."""
        return self.transport != "nccl"

    def work_in_order(self) -> None:
        """Use no side stream from now on, as on a CPU. Call this before the first batch for tables
        whose rows come and go: an exchange reads and writes such rows, and on a side stream the
        last update might still run.
        """
        self.side = SideStream()

    def swap(
        self, buffer: Tensor, send_W: Sequence[Span], recv_W: Sequence[Span]
    ) -> Callable[[], None]:
        """Start an all-to-all: send `buffer[send_W[r]]` to each other rank r and fill
        `buffer[recv_W[r]]` from it.

        Both ends know the lengths. Spans to send and to receive may not overlap. On a GPU, start
        the swap and wait for it on the same stream.

        Args:
            buffer: The flat buffer.
            send_W: The span to send to each rank; the entry of this rank is not used.
            recv_W: The span to fill from each rank; the entry of this rank is not used.

        Returns:
            A function that waits until every span is sent and received.
        """
        self.calls += 1
        operations = []
        for i in range(1, self.world):
            to = (self.rank + i) % self.world
            source = (self.rank - i) % self.world
            if send_W[to][1] > send_W[to][0]:
                sent = buffer[slice(*send_W[to])]
                self.bytes_sent += sent.numel() * sent.element_size()
                operations.append(self._operation(dist.isend, sent, to))
            if recv_W[source][1] > recv_W[source][0]:
                operations.append(
                    self._operation(dist.irecv, buffer[slice(*recv_W[source])], source)
                )
        works = dist.batch_isend_irecv(operations) if operations else []

        peers = (
            [operation.group_peer for operation in operations]
            if len(works) == len(operations)
            else []
        )

        def wait() -> None:
            for number, work in enumerate(works):
                try:
                    work.wait()
                except RuntimeError as error:
                    if not (silent := SILENT.search(str(error))) or not peers:
                        raise
                    raise RankError(
                        timeout_message(self.rank, peers[number], int(silent[1]) / 1000)
                    ) from error

        return wait

    def _operation(self, kind: Callable[..., Any], span: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, span, group=self.group, tag=self.tag, group_peer=peer)

    def twin(self) -> "Comm":
        """Return a communicator of the same ranks and transport for other messages, with an order
        of their own.

        It works on CPUs only. Every rank calls it.
        """
        return Comm(self.group, self.device, self.tag + 1)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(self.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank (an all-gather of objects).

        Use it in set-up and checkpoints, not in steps.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        return self.all_gather(value)[0]


def raise_together(mine: Exception | None, error_W: Sequence[str | None], failed: str) -> None:
    """Raise an error on every rank if a step has failed on any of them.

    Args:
        mine: The error of this rank; None if its step succeeded.
        error_W: The text of each rank's error; None for a rank whose step succeeded.
        failed: The predicate of the message about another rank, such as `could not read DIR`.

    Raises:
        Exception: The error of this rank.
        RankError: The step has failed on another rank only.
    """
    if mine is not None:
        raise mine
    for rank, text in enumerate(error_W):
        if text is not None:
            raise RankError(f"rank {rank} {failed}: {text}")


def together(comm: Comm, step: Callable[[], T], failed: str) -> T:
    """Run a step on each rank and return its result; either all ranks return, or all raise.

    Args:
        comm: The ranks.
        step: The step; it must not communicate with other ranks.
        failed: The predicate of the message about another rank, as for `raise_together`.

    Raises:
        Exception: The step has failed on this rank.
        RankError: The step has failed on another rank.
    """
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:
        failure = error
    kind = "" if isinstance(failure, RecappError) else f"{type(failure).__name__}: "
    raise_together(failure, comm.all_gather(failure and f"{kind}{failure}"), failed)
    return result


def average_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their averages over the ranks, with one message for each dtype. All ranks
    get the same bits.

    Args:
        tensors: The tensors.
        group: The process group of the ranks; None takes the default one.
    """
    if not tensors or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in of_dtype])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = torch.split(flat, [tensor.numel() for tensor in of_dtype])
        averages = [part.view_as(tensor) for part, tensor in zip(parts, of_dtype, strict=True)]
        torch._foreach_copy_(of_dtype, averages)


def wait_for_all() -> None:
    """Wait for all ranks of the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def leave_process_group() -> None:
    """Destroy the default process group, if there is one, and all its subgroups.

    Gloo has no exit hook of its own.
    """
    if dist.is_available() and dist.is_initialized():
        # DDP may hold the last reference, and would destroy the group while it holds the GIL
        let_gloo_finish()
        dist.destroy_process_group()


@atexit.register
def let_gloo_finish() -> None:
    """Wait until gloo's threads have released the tensors of the last collectives, before the
    interpreter ends.

    Such a thread wakes the main thread when a collective is done, and then releases the tensors,
    for which it needs the GIL. If Python ends at that moment, it unwinds the thread below C++
    frames that may not throw, and the process aborts after all its work: "terminate called without
    an active exception" (PyTorch issue 190489). `destroy_process_group` does not join these
    threads. Only the destructor of the last reference to a group does, and models and DDP keep
    their references to the end.

    A thread that sleeps between two looks, while the GIL is free, has released its tensors.
    """
    before = [""]
    now = gloo_threads()
    late = time.monotonic() + PATIENCE_S
    while (
        now
        and (now != before or not all("S (sleeping)" in t for t in now))
        and time.monotonic() < late
    ):
        time.sleep(LOOK_S)
        before = now
        now = gloo_threads()


def gloo_threads() -> list[str]:
    """Return the state and the number of context switches of each worker thread of gloo."""
    threads = []
    for task in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            status = task.read_text()
            if status.startswith("Name:\tpt_gloo"):
                threads.append(
                    " ".join(
                        [
                            task.parent.name,
                            *re.findall(r"^(?:State|\w*ctxt_switches):.*", status, re.MULTILINE),
                        ]
                    )
                )
    return sorted(threads)
