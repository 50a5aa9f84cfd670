"""The only collective of the engine, an all-to-all: every rank sends a span of a flat buffer to
every other rank, and fills another span from each.

One process is not a special case: with a single rank the same code runs and sends nothing. `calls`
and `bytes_sent` count messages and bytes, so tests and reports state the measured cost of a step.
"""

import atexit
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recapp.errors import RankError
from recapp.processes.faults import SILENT, timeout_message
from recapp.transport.side_stream import SideStream, side_stream

Span = tuple[int, int]
"""Begin and end of a part of a flat buffer, in elements."""

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
        fallback: The reason why `recapp.transport.choose_transport` chose no faster transport; else
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
        the swap and wait for it on the same stream (`recapp/transport/side_stream.py`).

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


def average_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace tensors of one dtype by their averages over the ranks of the default process group.
    All ranks get the same bits.
    """
    if not tensors or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, averaged in zip(tensors, parts, strict=True):
        tensor.copy_(averaged.view_as(tensor))


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
