"""The process groups of a benchmark's ranks: made here, handed down as `Comm`s."""

import os
from collections.abc import Sequence

import torch.distributed as dist

from recapp.distributed.comm import Comm
from recapp.distributed.transport import make_comm


def join() -> Comm:
    """Meet the other ranks, if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return Comm()


def open_transports(names: Sequence[str]) -> dict[str, Comm]:
    """A Comm for each transport, with a process group of its own; under the name of what it turned out to be. Every rank calls it.

    Raises:
        LaunchError: a transport that was asked for by name cannot be had.
    """
    comms = [make_comm(dist.new_group() if dist.is_initialized() else None, transport=name) for name in names]
    return {comm.transport: comm for comm in comms}
