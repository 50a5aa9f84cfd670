"""The one collective of the engine, an all-to-all: every rank sends a span of a flat buffer to
every other rank and fills one from each.

One process is not a special case: with one rank there is nobody to swap with, and the same code
runs. `calls` and `bytes_sent` count, so that tests and reports state what a step costs instead of
guessing it.
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

LOOK_S = 0.01  # longer than a thread waits for the GIL before it asks again (5 ms)
PATIENCE_S = 10.0


class Comm:
    """The ranks of a process group, and the messages between them.

    Args:
        group: A process group for these messages alone, which have an order of their own; None is
            the default group, or one rank where there is no process group at all.
        device: The device of message buffers: the CPU with gloo, the rank's GPU with NCCL.
        tag: The tag of the messages. Messages of one tag are in order; gloo keeps those of
            different tags apart, NCCL does not.
        alone: Whether this process is the only rank, even where there is a process group.

    Attributes:
        rank: The number of this rank.
        world: The number of ranks.
        transport: The name of the backend, or `none` for one rank.
        fallback: Why `recapp.transport.choose_transport` chose no faster transport; else empty.
        calls: The swaps started so far.
        bytes_sent: The bytes that this rank has sent in swaps so far.
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
        """Return whether the host waits for messages: NCCL has a stream of the GPU wait instead."""
        return self.transport != "nccl"

    def work_in_order(self) -> None:
        """Have no side stream from now on, as on a CPU: for tables whose rows come and go, which
        an exchange reads and writes where the last update may still be under way. To be called
        before the first batch.
        """
        self.side = SideStream()

    def swap(
        self, buffer: Tensor, send_W: Sequence[Span], recv_W: Sequence[Span]
    ) -> Callable[[], None]:
        """Start an all-to-all: send `buffer[send_W[r]]` to each other rank r and fill
        `buffer[recv_W[r]]` from it.

        Both ends know the lengths. Spans to send and to receive may not overlap. On a GPU the
        stream that is current when it starts has to be the one on which it is waited for
        (`recapp/transport/side_stream.py`).

        Args:
            buffer: The flat buffer.
            send_W: The span to send to each rank; this rank's own is not used.
            recv_W: The span to fill from each rank; this rank's own is not used.

        Returns:
            A function that waits until every span has arrived and left.
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
        """Return the same ranks and transport for other messages, with an order of their own.

        It works on CPUs only. Every rank calls it.
        """
        return Comm(self.group, self.device, self.tag + 1)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(self.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank (an all-gather of objects).

        It is for set-up and checkpoints, not for steps.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return self.all_gather(value)[0]


def wait_for_all() -> None:
    """Wait for all ranks of the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def leave_process_group() -> None:
    """Destroy the default process group, if there is one, and all groups made of it.

    Gloo has no exit hook of its own.
    """
    if dist.is_available() and dist.is_initialized():
        # DDP may hold the last reference, and destroys a group while it holds the GIL
        let_gloo_finish()
        dist.destroy_process_group()


@atexit.register
def let_gloo_finish() -> None:
    """Wait, before the interpreter ends, until gloo's threads have dropped the tensors of the last
    collectives.

    Such a thread wakes the main thread when a collective is done and drops its tensors after that,
    for which it needs the GIL. Where that coincides with the end of Python, it is unwound below C++
    frames that may not throw, and the process aborts after all its work: "terminate called without
    an active exception" (PyTorch issue 190489). `destroy_process_group` does not join these
    threads, only the destructor of the last reference to a group does, and models and DDP refer to
    theirs to the end.

    A thread that has slept from one look to the next, while nobody held the GIL, has dropped them.
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
    """Return for each worker thread of gloo whether it sleeps and how often it has left a core."""
    threads = []
    for task in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it has ended
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
