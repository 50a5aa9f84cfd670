"""The process group of ranks that are no training: those of a server."""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from recapp.processes.rank_environment import RankInfo
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.pulse import Pulses


def join_ranks(here: RankInfo, device: torch.device) -> tuple[Comm, Comm, Pulses]:
    """Join all ranks that the environment names. Every rank calls it.

    Args:
        here: This rank, as the environment says.
        device: Where this rank computes.

    Returns:
        The ranks for words between batches, and for the messages of tables, by the fastest
        transport. Both wait for a silent rank as long as torch does, because comparing the
        checksums of large tables takes minutes; one that has ended is noticed at once. The third
        are the pulses, which tell a rank that is stopped from one that is busy.
    """
    dist.init_process_group("gloo")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    # a connection of its own: that of the process group may be waiting
    store = TCPStore(here.address, here.port, is_master=False)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store
    pulses = Pulses(PrefixStore(f"recapp/pulse/{start}", store), here.rank, here.world)
    return Comm(), make_comm(group, device), pulses
