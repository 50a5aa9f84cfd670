"""The messages of a step: of its tables, the counts with a header per rank and one flat buffer for
both directions; of its dense gradients, their average over ranks.

`MessageLayout` lays a buffer out so that requests, answers and gradients use the same offsets:

    | requested by others, rank by rank | requested of itself | requested of others, rank by rank |
      answers leave, gradients arrive                           answers arrive, gradients leave

    a chunk per rank; in it a block per group, replicated groups last: they are not answered, so
    answers are a prefix of each chunk

A rank writes its requests to itself where it reads them. Elements are ids in the first message, and
numbers of the vectors in the other two messages.

Dense gradients are averaged on CPUs by a reduce-scatter and an all-gather. On GPUs DDP's all-reduce
does the same.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from recapp.kernels.links import Counts, with_room
from recapp.sparse.transfer import to_device, to_host
from recapp.transport.communicator import Comm, Sent, Span, Waits

# status, rows of the batch, wanted, sample weights, pair and id of the first id outside its table
HEADER = 6


@dataclass(slots=True)
class Header:
    """The control data that ranks send each other, only with the counts of a batch.

    `wanted` has bits, defined by the caller, for the wishes of this rank: a stop or a save on all
    ranks. `rows_W` and `wanted_W` are the values of all ranks in the last batch.
    """

    wanted: int = 0
    rows_W: list[int] = field(default_factory=list)
    wanted_W: list[int] = field(default_factory=list)


def swap_counts(
    comm: Comm, header: Sequence[int], counts_WG3: Counts
) -> Callable[[], tuple[Counts, Counts]]:
    """Start to send each rank the counts of the requests to it, and all ranks the header of this
    rank.

    Args:
        comm: Communicator of the ranks.
        header: The `HEADER` numbers of this rank.
        counts_WG3: The numbers of rows, vectors and words requested of each rank, by group.

    Returns:
        A function that waits for the headers [W, HEADER] and the counts [W, G, 3] of the requests
        of each rank to this rank.
    """
    world = comm.world
    n = HEADER + counts_WG3[0].size
    out = np.concatenate(
        [np.tile(np.asarray(header, np.int64), (world, 1)), counts_WG3.reshape(world, -1)], 1
    )
    # a single rank sends nothing, so its counts stay on the CPU
    both = to_device(np.concatenate([out, out]), comm.device if world > 1 else torch.device("cpu"))
    wait = comm.swap(
        both.view(-1),
        *[[(at + r * n, at + (r + 1) * n) for r in range(world)] for at in (0, world * n)],
    )

    def arrived() -> tuple[Counts, Counts]:
        wait()
        got = to_host(both[world:]).numpy()
        return got[:, :HEADER], got[:, HEADER:].reshape(counts_WG3.shape)

    return arrived


class MessageLayout:
    """Offsets in one flat buffer, of the requests of this rank and of the requests that it serves.

    Args:
        asked_WG: The number of elements that this rank requests of each rank, by group.
        served_WG: The number of elements that each rank requests of this rank, by group.
        rank: This rank.
        answered: The number of groups that are answered; they are the first.

    `asked_WG1[w, g]` .. `asked_WG1[w, g + 1]` is the span of this rank's requests to rank w in
    group g. `served_WG1` has the spans of the requests that this rank serves.
    """

    def __init__(self, asked_WG: Counts, served_WG: Counts, rank: int, answered: int) -> None:
        world, groups = asked_WG.shape
        others = [r for r in range(world) if r != rank]
        sizes = np.concatenate([served_WG[others], asked_WG[[rank]], asked_WG[others]])
        edge = np.concatenate([[0], sizes.reshape(-1).cumsum()])
        edge_C = np.stack([edge[i * groups : (i + 1) * groups + 1] for i in range(2 * world - 1)])
        at_W = np.empty(world, np.int64)
        at_W[others] = np.arange(world - 1)
        at_W[rank] = world - 1
        self.served_WG1 = edge_C[at_W]
        self.asked_WG1 = edge_C[np.where(at_W < world - 1, at_W + world, at_W)]
        self.numel = int(edge[-1])
        self.answered = answered

    def requests(self) -> tuple[list[Span], list[Span]]:
        """Return the spans to send and to receive on the way to the owners: ids."""
        return self.gradients(range(self.asked_WG1.shape[1] - 1))

    def gradients(self, learning: range) -> tuple[list[Span], list[Span]]:
        """Return the spans to send and to receive of the gradients of some groups."""
        edges = [learning.start, learning.stop]
        return self.asked_WG1[:, edges].tolist(), self.served_WG1[:, edges].tolist()

    def answers(self) -> tuple[list[Span], list[Span]]:
        """Return the spans to send and to receive on the way home: vectors."""
        return self.served_WG1[:, [0, self.answered]].tolist(), self.asked_WG1[
            :, [0, self.answered]
        ].tolist()


class Buffers:
    """Message buffers that are reused. A fresh buffer costs a page fault per 4 KB, which takes
    longer than the arithmetic on the data (measured).

    A buffer is lent to one message and given back after the message was used. So messages in flight
    never share a buffer.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a flat buffer of `numel` elements with undefined contents."""
        for i, buffer in enumerate(self._free):
            if buffer.dtype == dtype and buffer.device == device and buffer.numel() >= numel:
                return self._free.pop(i)[:numel]
        # all free buffers of this type are too small
        self._free = [b for b in self._free if b.dtype != dtype][-8:]
        return with_room(numel, dtype, device)[:numel]

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back, to lend it again. The caller may keep no view."""
        base = buffer._base if buffer._base is not None else buffer
        self._free.append(base)

    def free(self) -> Sequence[Tensor]:
        """Return the buffers that are not lent now."""
        return self._free


# ---- the average of dense gradients


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
