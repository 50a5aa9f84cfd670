"""`Comm.swap` between GPUs: one collective a message, where two operations for each other rank cost
the host as many objects.

Messages of a step have their spans one behind the other, in the order of ranks, so they leave from
the buffer itself and arrive in it. Other spans are packed into a tensor of their own.

The tests run it between CPUs. No run on several GPUs has tried it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from recapp.transport.communicator import Comm, Span


class NcclComm(Comm):
    """The ranks of a process group of NCCL. Every rank takes part in every swap, also with nothing
    to send or to receive.
    """

    @override
    def swap(
        self, buffer: Tensor, send_W: Sequence[Span], recv_W: Sequence[Span]
    ) -> Callable[[], None]:
        self.calls += 1
        of_others = [
            [(0, 0) if rank == self.rank else span for rank, span in enumerate(spans)]
            for spans in (send_W, recv_W)
        ]
        outgoing, incoming = ([buffer[slice(*s)] for s in spans] for spans in of_others)
        sent, arrived = (_in_line(buffer, spans) for spans in of_others)
        packed = arrived is None
        if sent is None:
            sent = torch.cat(outgoing)
        if arrived is None:
            arrived = buffer.new_empty(sum(map(len, incoming)))
        self.bytes_sent += sent.nbytes
        into = [len(part) for part in incoming]
        work = dist.all_to_all_single(
            arrived, sent, into, [len(part) for part in outgoing], self.group, async_op=True
        )

        def wait() -> None:
            work.wait()
            if packed:
                torch._foreach_copy_(incoming, list(torch.split(arrived, into)))

        return wait


def _in_line(buffer: Tensor, spans: Sequence[Span]) -> Tensor | None:
    """Return the part of a buffer that has some spans one behind the other; None if it has not."""
    filled = [span for span in spans if span[1] > span[0]]
    if any(before[1] != span[0] for before, span in pairwise(filled)):
        return None
    return buffer[filled[0][0] : filled[-1][1]] if filled else buffer[:0]
