"""The process group of ranks that are no training: those of a server."""

import torch
import torch.distributed as dist

from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm


def join_ranks(device: torch.device) -> tuple[Comm, Comm]:
    """Join all ranks that the environment names. Every rank calls it.

    Args:
        device: Where this rank computes.

    Returns:
        The ranks for words between batches, and for the messages of tables, by the fastest
        transport. Both wait for a silent rank as long as torch does, because comparing the
        checksums of large tables takes minutes; one that has ended is noticed at once.
    """
    dist.init_process_group("gloo")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    return Comm(), make_comm(group, device)
