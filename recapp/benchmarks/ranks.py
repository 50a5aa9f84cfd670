"""The process groups of a benchmark's ranks: made here, handed down as `Comm`s."""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks


def join() -> Comm:
    """Meet the other ranks, if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return Comm()


def open_transports(names: Sequence[str]) -> dict[str, Comm]:
    """A Comm for each transport, with a process group of its own; under the name of what it turned
    out to be. Every rank calls it.

    Raises:
        LaunchError: a transport that was asked for by name cannot be had.
    """
    comms = [
        make_comm(dist.new_group() if dist.is_initialized() else None, transport=name)
        for name in names
    ]
    return {comm.transport: comm for comm in comms}


def first_ranks(world: int, transport: str, device: torch.device) -> Comm | None:
    """A Comm of the first ranks, whose process group fits the device; None for the others. Every
    rank calls it.

    Raises:
        LaunchError: the transport was asked for by name and cannot be had.
    """
    group = dist.new_group(list(range(world)), backend="nccl" if device.type == "cuda" else "gloo")
    return make_comm(group, device, transport) if dist.get_rank() < world else None


def reducer(comm: Comm) -> Callable[[torch.Tensor], Callable[[], object]]:
    """What starts to add a tensor up over the ranks, as training does with dense gradients; what
    that returns waits for it.
    """
    if comm.device.type == "cpu":
        average = AverageOverRanks(comm)

        def start(tensor: torch.Tensor) -> Callable[[], object]:
            average.start(tensor)
            return average.finish

        return start

    def start_ddps(tensor: torch.Tensor) -> Callable[[], object]:
        work: dist.Work = dist.all_reduce(tensor, group=comm.group, async_op=True)
        return work.wait

    return start_ddps
