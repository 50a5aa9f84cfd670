"""The process group of ranks that are no training: those of a server."""

from datetime import timedelta

import torch
import torch.distributed as dist

from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm


def join_ranks(device: torch.device, patience: timedelta) -> tuple[Comm, Comm]:
    """Join all ranks that the environment names. Every rank calls it.

    Args:
        device: Where this rank computes.
        patience: How long it waits for a silent rank in the middle of a batch.

    Returns:
        The ranks for words between batches, for which a rank waits as long as torch does; and for
        the messages of tables, by the fastest transport.
    """
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=patience, backend="nccl" if device.type == "cuda" else "gloo")
    return Comm(), make_comm(group, device, patience_s=patience.total_seconds())
