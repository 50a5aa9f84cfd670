"""The process group of the ranks of a server."""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from recapp.processes.rank_environment import RankInfo
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.pulse import Pulses


def join_ranks(here: RankInfo, device: torch.device) -> tuple[Comm, Comm, Pulses]:
    """Join the process group of all ranks that the environment names. Every rank calls it.

    Args:
        here: This rank, from the environment.
        device: The device of this rank.

    Returns:
        Two communicators and the pulses. The first communicator carries the commands between
        batches, the second the messages of tables, over the fastest transport. Both have torch's
        timeout for a silent rank, because comparing the checksums of large tables takes minutes;
        they notice at once when a rank has ended. The pulses distinguish a stopped rank from a busy
        one.
    """
    dist.init_process_group("gloo")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    # a connection of its own: the connection of the process group may block
    store = TCPStore(here.address, here.port, is_master=False)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun reuses its store
    pulses = Pulses(PrefixStore(f"recapp/pulse/{start}", store), here.rank, here.world)
    return Comm(), make_comm(group, device), pulses
