"""`Comm.swap` between ranks of one host through shared memory: one copy in, one copy out, no socket
and no other thread.

    rank 0's file | counters | ring to 1 | ring to 2 |    each rank owns one and writes its messages
    rank 1's file | counters | ring to 0 | ring to 2 |    there; the others map its counters and the
    rank 2's file | counters | ring to 0 | ring to 1 |    ring that leads to them

The file is a `memfd`. It has no name, so nothing is left of it after any end of a rank, and it
needs no room in /dev/shm, which often has 64 MB in a container. Peers open it through /proc while
the owner runs. Its pages are reserved before their use: too little memory is an error at the start,
and not a SIGBUS later. All functions but `swap` use the process group.

A waiting rank polls for some microseconds, then yields its core to other threads, then sleeps
between looks. Meanwhile Python handles signals, and the rank notices peers that have died.
"""

import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from recapp.errors import LaunchError, RankError
from recapp.processes.faults import timeout_message
from recapp.transport.communicator import Comm, SecondsSeen, Span
from recapp.transport.ring import DONE, IDLE, LANE, LEFT, LINE, LOOKS, SWAP, pump

FILE_NAME = "recapp"  # the name in /proc
# fits in the caches; with 1 to 8 MiB a swap of 13 MB took the time of its two copies
RING_BYTES = 8 << 20
RINGS_BYTES = 32 << 20  # the most that all rings of a rank take
COUNTER_BYTES = 2 * LINE  # from one counter to the next, because processors fetch lines in pairs
PATIENCE_SECONDS = default_pg_timeout.total_seconds()  # gloo's; `launch.timeout` replaces it
LOOK_SECONDS = 1e-3  # a rank polls for this time before it sleeps between looks
REST_SECONDS = (5e-5, 1e-3)  # limits of a sleep, which takes 1 / 20 of the time waited so far


def ring_bytes(world: int) -> int:
    """Return the bytes of the ring from one rank to another."""
    return min(RING_BYTES, RINGS_BYTES // max(1, world - 1)) // mmap.PAGESIZE * mmap.PAGESIZE


def file_bytes(world: int) -> int:
    """Return the bytes of the file that a rank reserves."""
    return _counters_bytes(world) + (world - 1) * ring_bytes(world)


def _counters_bytes(world: int) -> int:
    return -(-2 * world * COUNTER_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryComm(Comm):
    """`Comm` whose `swap` goes through memory that the ranks share.

    Args:
        group: The process group: several ranks on one host, in one process namespace.
        patience_s: The timeout: the seconds without a moved byte after which a rank stops waiting.

    Raises:
        LaunchError: The memory cannot be reserved or shared; it is raised on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, patience_s: float = PATIENCE_SECONDS
    ) -> None:
        super().__init__(group)
        self.transport = "shared_memory"
        self.patience_s = patience_s
        self._mapped: list[mmap.mmap] = []
        # file descriptors of the peers' processes, to notice their end
        self._process_W: list[int] = [-1] * self.world
        weakref.finalize(self, _close, self._process_W)
        self._lanes_L3 = np.zeros((2 * self.world, 3), np.int64)
        self._busy_L = np.zeros(2 * self.world, np.int64)
        self._work_N4 = np.zeros((0, 4), np.int64)
        self._swaps = 0  # started so far
        self._buffers = dict[int, Tensor]()  # of the swaps under way
        self._ring_bytes = ring_bytes(self.world)
        self._pump(0, looks=0)  # compiles, or reads the compiled code: now and not in a step
        with ExitStack() as opened:
            file_W = self._on_all_ranks(partial(self._reserve, opened))
            self._on_all_ranks(partial(self._map, file_W))

    @override
    def twin(self) -> "SharedMemoryComm":
        return SharedMemoryComm(self.group, self.patience_s)

    def _on_all_ranks(self, step: Callable[..., tuple[int, int]]) -> list[tuple[int, int]]:
        """Run a step of the set-up, and return the results of all ranks.

        Raises:
            LaunchError: The step failed on a rank; it is raised on all ranks.
        """
        result: tuple[int, int] | str
        try:
            result = step()
        except OSError as error:
            result = f"rank {self.rank}: {error.strerror or error}"
        result_W = self.all_gather(result)
        for outcome in result_W:
            if isinstance(outcome, str):
                raise LaunchError(outcome)
        return result_W

    def _reserve(self, opened: ExitStack) -> tuple[int, int]:
        """Make the file of this rank. Return the process id and the descriptor with which the
        others open it.
        """
        file = os.memfd_create(FILE_NAME)
        opened.callback(os.close, file)
        os.posix_fallocate(file, 0, file_bytes(self.world))
        return os.getpid(), file

    def _map(self, file_W: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Map the file of this rank, and of the other files the counters and the ring to this rank.

        Args:
            file_W: The process and descriptor of each rank's file.
        """
        me = self.rank
        counters = _counters_bytes(self.world)
        own_counters = self._view(file_W[me][1], 0, counters)
        rings = self._view(file_W[me][1], counters, file_bytes(self.world) - counters)
        for r, (process, number) in enumerate(file_W):
            if r == me:
                continue
            self._process_W[r] = os.pidfd_open(process)
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                theirs = self._view(file, 0, counters)
                ring = self._view(
                    file, counters + self._ring_bytes * (me - (me > r)), self._ring_bytes
                )
            finally:
                os.close(file)
            # two counters in the file for each peer: the bytes sent to it, the bytes taken from it
            self._lanes_L3[r] = (
                rings + self._ring_bytes * (r - (r > me)),
                own_counters + 2 * r * COUNTER_BYTES,
                theirs + (2 * me + 1) * COUNTER_BYTES,
            )
            self._lanes_L3[self.world + r] = (
                ring,
                own_counters + (2 * r + 1) * COUNTER_BYTES,
                theirs + 2 * me * COUNTER_BYTES,
            )
        return file_W[me]

    def _view(self, file: int, offset: int, length: int) -> int:
        """Map a part of a file and return its address.

        Child processes do not inherit the mapping, because a data worker would keep it alive.
        """
        mapped = mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        mapped.madvise(mmap.MADV_DONTFORK)
        self._mapped.append(mapped)
        return int(np.frombuffer(mapped, np.uint8).ctypes.data)

    def swap(
        self, buffer: Tensor, send_W: Sequence[Span], recv_W: Sequence[Span]
    ) -> Callable[[], None]:
        """See `Comm`. Bytes that fit into the rings are sent at once. The rest moves during the
        wait for this or a later swap.
        """
        self.calls += 1
        self._swaps += 1
        assert buffer.is_contiguous() and buffer.device.type == "cpu", "spans are ranges of bytes"
        address = buffer.data_ptr()
        size = buffer.element_size()
        work = []
        for i in range(1, self.world):
            to = (self.rank + i) % self.world
            source = (self.rank - i) % self.world
            for lane, (begin, end) in ((to, send_W[to]), (self.world + source, recv_W[source])):
                if end > begin:
                    work.append((lane, address + begin * size, (end - begin) * size, self._swaps))
            self.bytes_sent += max(0, send_W[to][1] - send_W[to][0]) * size
        if work:
            self._work_N4 = np.concatenate([self._work_N4, np.array(work, np.int64)])
            self._buffers[self._swaps] = buffer
            self._pump(self._swaps, looks=0)
        return partial(self._finish, self._swaps)

    def _pump(self, swap: int, looks: int) -> int:
        state: int = pump(
            self._work_N4, self._lanes_L3, self._busy_L, self._ring_bytes, swap, looks
        )
        return state

    def _finish(self, swap: int) -> None:
        """Wait for a swap. Messages of earlier swaps move meanwhile.

        Raises:
            RankError: A rank of the swap has ended, or no byte has moved for `patience_s`.
        """
        idle: SecondsSeen | None = None
        ended: set[int] = set()
        while (state := self._pump(swap, LOOKS)) != DONE:
            if state != IDLE:
                idle = None
                continue
            # the ranks to or from which bytes of the swap have yet to move
            rest = (self._work_N4[:, SWAP] == swap) & (self._work_N4[:, LEFT] > 0)
            needed = set((self._work_N4[rest, LANE] % self.world).tolist())
            if needed & ended:  # all bytes that it had sent are read by now
                raise RankError(
                    f"rank {min(needed & ended)} has ended while rank {self.rank} waited for it"
                )
            idle = idle or SecondsSeen()
            waited = idle.look([swap])[swap]
            if waited < LOOK_SECONDS:
                continue
            if waited > self.patience_s:
                raise RankError(timeout_message(self.rank, min(needed), self.patience_s))
            ended = self._ended(needed)
            if not ended:
                time.sleep(min(max(REST_SECONDS[0], waited / 20), REST_SECONDS[1]))
        self._work_N4 = self._work_N4[self._work_N4[:, LEFT] > 0]
        under_way = set(self._work_N4[:, SWAP].tolist())
        self._buffers = {n: buffer for n, buffer in self._buffers.items() if n in under_way}

    def _ended(self, ranks: set[int]) -> set[int]:
        poll = select.poll()
        for r in ranks:
            poll.register(self._process_W[r], select.POLLIN)
        gone = {number for number, _ in poll.poll(0)}
        return {r for r in ranks if self._process_W[r] in gone}


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
