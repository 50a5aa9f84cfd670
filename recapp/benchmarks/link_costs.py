"""The costs of messages on this machine: the engine's all-to-all and the all-reduce of dense
gradients, by size and by number of ranks.

    seconds = latency + bytes / rate      bytes: those that one rank sends (all-to-all),
                                          those that the ranks sum (all-reduce)

Ranks 0, 1, ... of the first hosts take part; the others wait. Messages between hosts can be
measured only where the ranks are on several hosts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from recapp.benchmarks.kernel_costs import fit, synchroniser, typical
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks

# the bytes that one rank sends to another in an all-to-all, and the bytes that an all-reduce sums
SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
TURN_SECONDS = 0.02  # for one size in one round
MOST_REPEATS = 50
OVERLAP_BYTES = 1 << 21  # the dense gradients of a click model: half a million numbers

Kind = Literal["all_to_all", "all_reduce"]


@dataclass(frozen=True)
class LinkCost:
    """The cost of one kind of message among a number of ranks.

    Args:
        ranks: The number of ranks that take part.
        latency_us: The microseconds of an empty message.
        gb_per_s: The rate, which adds the time of the bytes.
        error: The median relative error of the fit of latency and rate.
    """

    ranks: int
    latency_us: float
    gb_per_s: float
    error: float


def first_ranks(world: int, transport: str, device: torch.device) -> Comm | None:
    """Return a Comm of the first ranks, or None on the other ranks. Every rank calls this function.

    Args:
        world: The number of ranks in the Comm.
        transport: The name of the transport; `auto` chooses one.
        device: The device of the messages, which decides the backend of the process group.

    Raises:
        LaunchError: The transport is given by name, and does not work here.
    """
    group = dist.new_group(list(range(world)), backend="nccl" if device.type == "cuda" else "gloo")
    return make_comm(group, device, transport) if dist.get_rank() < world else None


def reducer(comm: Comm) -> Callable[[torch.Tensor], Callable[[], object]]:
    """Return a function that starts an all-reduce of a tensor, as training reduces dense gradients.

    The returned function itself returns a function that waits for the result.
    """
    average = AverageOverRanks(comm) if comm.device.type == "cpu" else None

    def start(tensor: torch.Tensor) -> Callable[[], object]:
        if average is not None:
            average.start(tensor)
            return average.finish
        work: dist.Work = dist.all_reduce(tensor, group=comm.group, async_op=True)
        return work.wait

    return start


def measured_world_sizes(local: int, world: int) -> list[int]:
    """Return the world sizes at which messages are measured.

    These are 2, 4, ... and all ranks of one host; then all ranks of two, four, ... and all hosts.

    Args:
        local: The ranks of a host.
        world: All ranks.
    """

    def up_to(most: int) -> list[int]:
        return [min(2**i, most) for i in range(1, most.bit_length() + 1)]

    return sorted(
        {n for n in (*up_to(local), *(local * hosts for hosts in up_to(world // local))) if n > 1}
    )


def measure_link(
    kind: Kind,
    comm: Comm,
    device: torch.device,
    world: int,
    transport: str,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
) -> LinkCost | None:
    """Return latency and rate of messages among the first ranks, or None on the other ranks.

    Every rank calls this function.

    Args:
        kind: The kind of message.
        comm: All ranks.
        device: The device of the messages.
        world: The number of ranks that take part.
        transport: The value of `engine.transport`.
        sizes: The sizes of messages in bytes.
        rounds: The number of rounds; each size has one turn in each round.
    """
    ranks = first_ranks(world, transport, device)
    cost = None
    if ranks is not None:
        turns = [_message(kind, ranks, size) for size in sizes]
        once = [max(ranks.all_gather(_time(ranks, turn, 2))) for turn in turns]
        repeats = [min(MOST_REPEATS, max(2, math.ceil(TURN_SECONDS / s))) for s in once]
        times: list[list[float]] = [[] for _ in sizes]
        for _ in range(rounds):
            for i, turn in enumerate(turns):
                times[i].append(max(ranks.all_gather(_time(ranks, turn, repeats[i]))))
        sent = [size * (world - 1) if kind == "all_to_all" else size for size in sizes]
        (latency, byte), error = fit([[1, n] for n in sent], [typical(t) for t in times])
        cost = LinkCost(world, latency * 1e6, 1e-9 / max(byte, 1e-15), error)
    comm.barrier()
    return cost


def _message(kind: Kind, ranks: Comm, size: int) -> Callable[[], object]:
    n = max(1, size // 4)
    if kind == "all_reduce":
        tensor = torch.zeros(n, device=ranks.device)
        reduce = reducer(ranks)
        return lambda: reduce(tensor)()
    buffer = torch.zeros(2 * ranks.world * n, device=ranks.device)
    send_W, recv_W = (
        [(offset + r * n, offset + (r + 1) * n) for r in range(ranks.world)]
        for offset in (0, ranks.world * n)
    )
    return lambda: ranks.swap(buffer, send_W, recv_W)()


def _time(ranks: Comm, turn: Callable[[], object], repeats: int) -> float:
    """Call `turn` several times in a row, and return the mean seconds of a call on this rank."""
    synchronise = synchroniser(ranks.device)
    ranks.barrier()
    turn()
    synchronise()
    began = time.perf_counter()
    for _ in range(repeats):
        turn()
    synchronise()
    return (time.perf_counter() - began) / repeats


def measure_overlap(comm: Comm, device: torch.device, transport: str, rounds: int = 5) -> float:
    """Return the share of an all-reduce that overlaps with a rank's computation, 0 to 1.

    The share is 0 where the core of a rank does both one after the other. Every rank calls this
    function.

    Args:
        comm: All ranks.
        device: The device of the gradients and of the computation.
        transport: The value of `engine.transport`.
        rounds: The number of rounds; computing, summing and both together have one turn in each
            round.
    """
    ranks = first_ranks(comm.world, transport, device)
    assert ranks is not None
    reduce = reducer(ranks)
    tensor = torch.zeros(OVERLAP_BYTES // 4, device=device)
    square = torch.randn(256, 256, device=device)
    alone = max(ranks.all_gather(_time(ranks, lambda: reduce(tensor)(), 3)))
    product = _time(ranks, lambda: square @ square, 10)
    products = max(ranks.all_gather(max(1, round(alone / product))))

    def compute() -> None:
        for _ in range(products):
            square @ square

    def both() -> None:
        wait = reduce(tensor)
        compute()
        wait()

    parts: dict[str, list[float]] = {"computing": [], "summing": [], "together": []}
    for _ in range(rounds):
        for part, turn in zip(parts, (compute, lambda: reduce(tensor)(), both), strict=True):
            parts[part].append(max(ranks.all_gather(_time(ranks, turn, 3))))
    computing, summing, together = map(typical, parts.values())
    return min(1.0, max(0.0, (computing + summing - together) / min(computing, summing)))
