"""What travels: the counts with a header per rank, and one flat buffer for both directions of a
batch.

`MessageLayout` lays a buffer out so that requests, answers and gradients use the same offsets:

    | requested by others, rank by rank | requested of itself | requested of others, rank by rank |
      answers leave, gradients arrive                           answers arrive, gradients leave

    a chunk per rank; in it a block per group, replicated groups last: they are not answered, so
    answers are a prefix of each chunk

What a rank requests of itself is written where it is read. Elements are ids in the first message,
vectors' numbers in the other two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.links import Counts
from recapp.sparse.transfer import to_device, to_host
from recapp.transport.communicator import Comm, Span

# status, rows in this batch, wanted, sample weights, pair and id of the first id outside its table
HEADER = 6


@dataclass(slots=True)
class Header:
    """What ranks send each other with the counts of every batch, and nowhere else.

    `wanted` is what this rank asks of all (a stop, a save; bits are the caller's); `rows_W` and
    `wanted_W` are those of all ranks with the last batch.
    """

    wanted: int = 0
    rows_W: list[int] = field(default_factory=list)
    wanted_W: list[int] = field(default_factory=list)


def swap_counts(
    comm: Comm, header: Sequence[int], counts_WG3: Counts
) -> Callable[[], tuple[Counts, Counts]]:
    """Start to send each rank the counts of what is requested of it, and all ranks this rank's
    header.

    Args:
        comm: Communicator of the ranks.
        header: This rank's `HEADER` numbers.
        counts_WG3: Rows, vectors and words requested of each rank, by group.

    Returns:
        A function that waits for [W, HEADER] headers and the [W, G, 3] counts that each rank
        requests of this one.
    """
    world = comm.world
    n = HEADER + counts_WG3[0].size
    out = np.concatenate(
        [np.tile(np.asarray(header, np.int64), (world, 1)), counts_WG3.reshape(world, -1)], 1
    )
    # a rank alone stays at home
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
    """Offsets in one flat buffer of what this rank requests and of what it serves.

    Args:
        asked_WG: Elements this rank requests of each rank, by group.
        served_WG: Elements each rank requests of this one, by group.
        rank: This rank.
        answered: How many groups are answered, the first ones.

    `asked_WG1[w, g]` .. `asked_WG1[w, g + 1]` is what this rank requests of rank w in group g;
    `served_WG1` likewise.
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
        """Return the spans to send and to receive on the way to the owners: ids, gradients."""
        return self.asked_WG1[:, [0, -1]].tolist(), self.served_WG1[:, [0, -1]].tolist()

    def answers(self) -> tuple[list[Span], list[Span]]:
        """Return the spans to send and to receive on the way home: vectors."""
        return self.served_WG1[:, [0, self.answered]].tolist(), self.asked_WG1[
            :, [0, self.answered]
        ].tolist()


class Buffers:
    """Message memory that stays: a fresh buffer costs a page fault per 4 KB, more than the
    arithmetic done in it (measured).

    A buffer is lent to one message and given back when the message was used, so messages in flight
    never share one.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a flat buffer of `numel` elements, contents undefined."""
        for i, held in enumerate(self._free):
            if held.dtype == dtype and held.device == device and held.numel() >= numel:
                return self._free.pop(i)[:numel]
        # all of this type are too small now
        self._free = [b for b in self._free if b.dtype != dtype][-8:]
        return self._fresh(numel, dtype, device)[:numel]

    @staticmethod
    @torch.inference_mode(False)
    def _fresh(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory made in inference mode could not be written outside of it."""
        return torch.empty(numel + numel // 5 + 64, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back, to be lent again. The caller keeps no view."""
        base = buffer._base if buffer._base is not None else buffer
        self._free.append(base)

    def free(self) -> Sequence[Tensor]:
        """Return the buffers that are lent to no message now."""
        return self._free
