"""The average of dense gradients over ranks on CPUs, by a reduce-scatter and an all-gather. On GPUs
DDP's all-reduce does the same.

    a bucket is full     reduce-scatter: the bucket is scaled by 1 / W and cut into W parts; part r
                         leaves for rank r (while backward goes on)
    backward is over     all-gather: each rank adds all gradients of its own part in rank order;
                         the sum leaves for all ranks
    then                 all parts are there: DDP hands the bucket to the parameters

A rank sends and receives 2 (W - 1) / W of a bucket, the minimum of an all-reduce. In shared memory
each byte is copied twice. Through gloo's sockets the same bytes take a core two to four times as
long, and where every core runs a rank, nothing hides that time (measured on two ranks: 1.9 MB in
1.1 instead of 3.6 ms, 9.1 MB in 4.4 instead of 9.6 ms). Gradients are added in rank order, but
gloo's own all-reduce uses another order from three ranks on. So a run has the same bits with either
transport.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from recapp.transport.communicator import Comm, Sent, Span, Waits
from recapp.transport.message_layout import Buffers


@dataclass(frozen=True)
class _Bucket:
    """A bucket of gradients during the average.

    Args:
        gradients: The flat gradients, which their averages replace.
        message: The message buffer: the bucket, then the other ranks' shares of this rank's part.
        reduce_scatter: The exchange that runs during backward.
        done: The future that DDP waits for.
    """

    gradients: Tensor
    message: Tensor
    reduce_scatter: Sent[None]
    done: torch.futures.Future[Tensor]


class AverageOverRanks:
    """A communication hook for `DistributedDataParallel`: `ddp.register_comm_hook(None,
    AverageOverRanks(comm))`.

    Args:
        comm: The communicator. It carries no other messages, because these have an order of their
            own.

    Attributes:
        waits: The time that messages were under way, and the part that backward hid.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.messages = Buffers()
        self.waits = Waits(("dense",))
        self._under_way: list[_Bucket] = []
        self._first = True
        self._holds = False
        self.__name__ = self.__qualname__ = type(self).__name__  # DDP logs the name

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket, and return the future that DDP waits for.

        DDP calls it in backward, in the same order on all ranks.
        """
        if self._holds:
            self._first = self._first and not bucket.is_last()
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        done = self.start(bucket.buffer())
        # in the first step of a static graph, DDP sends the buckets after backward, and waits
        if bucket.is_last() and self._first:
            self.finish()
        elif bucket.is_last():  # after backward, before DDP waits
            Variable._execution_engine.queue_callback(self.finish)
        self._first = self._first and not bucket.is_last()
        return done

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave gradients as they are inside the context, because a step adds up those of later
        batches.
        """
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def start(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Start the reduce-scatter that begins to average a flat tensor in place.

        The next `finish` completes it. Every rank calls it.

        Args:
            gradients: The tensor [n].

        Returns:
            A future that `finish` completes with the tensor.
        """
        world = self.comm.world
        me = self.comm.rank
        n = len(gradients)
        part_W = _parts(n, world)
        part_size = part_W[me][1] - part_W[me][0]
        message = self.messages.take(n + part_size * (world - 1), gradients.dtype, gradients.device)
        torch.mul(gradients, 1 / world, out=message[:n])
        reduce_scatter = self.waits.sent(
            self.comm.swap(
                message, part_W, [_arrival_span(n, part_size, r, me) for r in range(world)]
            )
        )
        self._under_way.append(_Bucket(gradients, message, reduce_scatter, torch.futures.Future()))
        return self._under_way[-1].done

    def finish(self) -> None:
        """Finish averaging all tensors that were started, in their order. Every rank calls it.

        For each tensor, wait for the reduce-scatter, add the parts, and run the all-gather.
        """
        under_way = self._under_way
        self._under_way = []
        all_gathers = [self._start_all_gather(bucket) for bucket in under_way]
        for bucket, all_gather in zip(under_way, all_gathers, strict=True):
            self.waits.arrived("dense", all_gather)
            bucket.gradients.copy_(bucket.message[: len(bucket.gradients)])
            self.messages.give_back(bucket.message)
            bucket.done.set_result(bucket.gradients)

    def _start_all_gather(self, bucket: _Bucket) -> Sent[None]:
        """Wait for the reduce-scatter, add this rank's part in rank order, start the all-gather."""
        world = self.comm.world
        me = self.comm.rank
        n = len(bucket.gradients)
        part_W = _parts(n, world)
        self.waits.arrived("dense", bucket.reduce_scatter)
        mine = bucket.message[slice(*part_W[me])]
        first, *others, last = [
            mine if r == me else bucket.message[slice(*_arrival_span(n, len(mine), r, me))]
            for r in range(world)
        ]
        for part in others:
            first.add_(part)
        torch.add(first, last, out=mine)
        return self.waits.sent(self.comm.swap(bucket.message, [part_W[me]] * world, part_W))


def _parts(numel: int, world: int) -> list[Span]:
    """Return the span of each rank's part of a bucket."""
    return list(pairwise(numel * r // world for r in range(world + 1)))


def _arrival_span(numel: int, part_size: int, source: int, me: int) -> Span:
    """Return the span of the message in which another rank's share of this rank's part arrives.

    The span lies behind the bucket. It is empty for this rank.

    Args:
        numel: The number of elements of the bucket.
        part_size: The number of elements of this rank's part.
        source: The number of the other rank.
        me: The number of this rank.
    """
    if source == me:
        return numel, numel
    begin = numel + part_size * (source - (source > me))
    return begin, begin + part_size


def hook_of(module: torch.nn.Module) -> AverageOverRanks | None:
    """Return the `AverageOverRanks` hook of a DDP module, or None."""
    hooks = [hook for hook, _ in getattr(module, "_comm_hooks", [])]
    return next((hook for hook in hooks if isinstance(hook, AverageOverRanks)), None)
