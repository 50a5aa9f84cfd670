"""A swap of one collective puts the bytes where a pair of operations for each other rank puts them.
Ranks of CPUs run it here, because their process group knows the same collective.
"""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transport.test_message_layout import layouts
from transport.test_shared_memory import random_spans

from recapp.transport.communicator import Comm
from recapp.transport.join_ranks import make_comm
from recapp.transport.nccl import NcclComm


def same_as_pairs(comm, packs):
    one = NcclComm(comm.group)
    rng = random.Random(3)
    for seed in range(4):
        answered = 2 if packs else 3  # groups that are not answered leave gaps between spans
        layout = layouts(comm.world, 3, answered, seed)[1][comm.rank]
        cases = [(layout.numel, *layout.requests()), (layout.numel, *layout.answers())]
        if packs:
            send_W, recv_W, numel = random_spans(comm.world, comm.rank, rng, 50)
            cases.append((numel, send_W, recv_W))
        for numel, send_W, recv_W in cases:
            buffers = [torch.arange(numel) + 1000 * comm.rank for _ in range(2)]
            comm.swap(buffers[0], send_W, recv_W)()
            with (
                mock.patch.object(torch, "cat", wraps=torch.cat) as joins,
                mock.patch.object(
                    dist, "all_to_all_single", wraps=dist.all_to_all_single
                ) as collective,
            ):
                one.swap(buffers[1], send_W, recv_W)()
            assert torch.equal(*buffers)
            assert collective.call_count == 1 and (packs or not joins.call_count)
    assert (one.calls, one.bytes_sent) == (comm.calls, comm.bytes_sent)
    return one.bytes_sent


@pytest.mark.parametrize("packs", [False, True])
def test_one_collective_brings_what_pairs_of_operations_bring(ranks, packs):
    assert min(ranks.run(same_as_pairs, 4, packs)) > 0


def test_ranks_of_nccl_swap_by_one_collective(monkeypatch):
    monkeypatch.setattr(Comm, "all_gather", None)  # nobody asks for shared memory
    names = {"nccl": NcclComm, "gloo": Comm}
    for name, kind in names.items():
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "get_backend", lambda group, name=name: name)
        assert type(make_comm(device=torch.device("cuda"))) is kind
