"""The messages of a batch: the counts with a header per rank, and one flat buffer for both
directions.

`MessageLayout` lays a buffer out so that requests, answers and gradients use the same offsets:

    | requested by others, rank by rank | requested of itself | requested of others, rank by rank |
      answers leave, gradients arrive                           answers arrive, gradients leave

    a chunk per rank; in it a block per group, replicated groups last: they are not answered, so
    answers are a prefix of each chunk

A rank writes its requests to itself where it reads them. Elements are ids in the first message, and
numbers of the vectors in the other two messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.links import Counts, with_room
from recapp.sparse.transfer import to_device, to_host
from recapp.transport.communicator import Comm, Span

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
