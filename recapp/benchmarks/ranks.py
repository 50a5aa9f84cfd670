"""The process groups of a benchmark's ranks, as `Comm`s for the measurements."""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks


def join() -> Comm:
    """Join the process group of all ranks, if there are several, and return it as a Comm."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return Comm()


def open_transports(names: Sequence[str]) -> dict[str, Comm]:
    """Return a Comm for each transport, with a process group of its own. Every rank calls this
    function.

    Args:
        names: The names of transports; `auto` chooses one.

    Returns:
        The Comms by the names of their transports; the chosen one replaces `auto`.

    Raises:
        LaunchError: A transport that `names` gives by name does not work here.
    """
    comms = [
        make_comm(dist.new_group() if dist.is_initialized() else None, transport=name)
        for name in names
    ]
    return {comm.transport: comm for comm in comms}


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
