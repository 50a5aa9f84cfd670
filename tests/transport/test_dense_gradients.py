"""DDP's gradients averaged by messages between the ranks: what its own all-reduce makes of them."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recapp.data_parallel import wrap_dense
from recapp.transport.communicator import Comm
from recapp.transport.step_messages import AverageOverRanks, hook_of

STEPS = 3
SIZES = [7, 5, 1, 3]  # of layers: buckets of few numbers, one of fewer numbers than ranks


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Linear(a, b) for a, b in zip([4, *SIZES], SIZES, strict=False)]
    ).double()


def trained(model, rank):
    """All gradients of a few steps of SGD on this rank's batches, flat."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        model(torch.randn(6, 4, dtype=torch.float64)).square().sum().backward()
        told.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return torch.stack(told)


def wrapped(comm, static, hook):
    model = DistributedDataParallel(
        make_model(),
        process_group=comm.group,
        static_graph=static,
        gradient_as_bucket_view=True,
        bucket_cap_mb=1e-4,
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def both_ways(comm, transport, static):
    """Gradients by DDP's own all-reduce and by messages, and how many messages went."""
    from recapp.transport.shared_memory import SharedMemoryComm

    messages = SharedMemoryComm(comm.group) if transport == "shared_memory" else Comm(comm.group)
    hook = AverageOverRanks(messages)
    own = trained(wrapped(comm, static, None), comm.rank)
    return own, trained(wrapped(comm, static, hook), comm.rank), messages.calls, hook.waits


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_ddps_all_reduce_and_equal_on_all_ranks(
    ranks, world, transport, static
):
    told = ranks.run(both_ways, world, transport, static)
    for own, averaged, calls, waits in told:
        torch.testing.assert_close(averaged, own, rtol=1e-12, atol=1e-12)
        assert torch.equal(averaged, told[0][1])
        assert calls > 2 * STEPS, "there are several buckets, each of two messages"
        assert 0 < waits.waited_s["dense"] < waits.under_way_s["dense"]


def test_two_ranks_get_the_bits_of_the_all_reduce(ranks):
    for own, averaged, *_ in ranks.run(both_ways, 2, "shared_memory", True):
        assert torch.equal(averaged, own)


def every_transport(comm, static):
    """Gradients through either transport, wrapped as training wraps them."""
    from recapp.transport.shared_memory import SharedMemoryComm

    settings = {
        "process_group": comm.group,
        "static_graph": static,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 1e-4,
    }
    models = [
        wrap_dense(make_model(), transport, **settings)
        for transport in (Comm(comm.group), SharedMemoryComm(comm.group))
    ]
    return [type(hook_of(model)) for model in models], [
        trained(model, comm.rank) for model in models
    ]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_have_the_same_bits_through_either_transport(ranks, world, static):
    for hooks, (through_gloo, through_memory) in ranks.run(every_transport, world, static):
        assert hooks == [AverageOverRanks] * 2
        assert torch.equal(through_gloo, through_memory)
