"""The memory of the integers of all groups, which later batches use again: no batch writes to it
while another stream reads it. Kernels run in Triton's interpreter, on streams that are not there.
"""

from unittest import mock

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_plan, make_tables, same_bits, sharded
from engine.streams import watched
from engine.test_side_stream import copied, trained
from torch.utils._python_dispatch import _disable_current_modes

from recapp.engine.fused_integers import FusedIntegers
from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.kernels.triton_launch import Launch
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import PoolingType, TableLookup, lookups_of
from recapp.trainer.lookahead import LookAhead
from recapp.transport.communicator import Comm


def watched_launches(watch):
    """Let launches touch their arrays: those that they change, and those that they read."""
    launch = Launch.__call__

    def launched(kernel, grid, arguments, constants, warps=4):
        arrays = [x for x in arguments if isinstance(x, torch.Tensor)]
        with _disable_current_modes():
            before = [x.clone() for x in arrays]
            launch(kernel, grid, arguments, constants, warps)
            changed = {
                watch.memory(x)
                for x, old in zip(arrays, before, strict=True)
                if not same_bits(x, old)
            }
        read = {watch.memory(x) for x in arrays} - changed
        watch.touch(watch.streams.current, read, changed, kernel._kernel.fn.__name__)

    return mock.patch.object(Launch, "__call__", launched)


def unordered(depth):
    comm = Comm()
    tables = make_tables()
    collection = sharded(comm, tables, rule="rowwise_adagrad", backend="triton")
    assert FusedIntegers.takes(collection.shared.state)
    with watched(comm) as watch, watched_launches(watch):
        trained(comm, collection, tables, depth)
    return sorted(watch.found)


@pytest.fixture(autouse=True)
def interpreter():
    """Skip the test where kernels do not run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here")


@pytest.mark.full
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_memory_is_used_again_when_the_streams_of_its_batch_are_done(depth):
    assert unordered(depth) == []


def unordered_with_trained_weights(comm, kind):
    """What the watch finds of bags and concatenations whose sample weights get a gradient."""
    tables = make_tables()
    wide = [TableLookup(t, t.feature_names[0], t.name, PoolingType.CONCAT, 2, True) for t in tables]
    bags = EmbeddingBagCollection(
        tables, seed=1, lookups=(*lookups_of(tables), *wide), is_weighted=True
    )
    model = torch.nn.Sequential(bags)
    plan = make_plan(kind, tables, comm.world)
    shard_model(model, plan, comm, RULES["rowwise_adagrad"], "triton")
    shared = sharded_tables(model)[0]
    assert FusedIntegers.takes(shared.state)

    def moved(features):
        there = copied(features)
        there.weights().requires_grad_()
        return there

    plain = [batch_of(tables, 5 + step, step, weighted=True) for step in range(3)]
    with watched(comm) as watch, watched_launches(watch):
        for features in LookAhead(plain, 1, lambda: [shared], moved, comm.side):
            model(features).values().square().sum().backward()
        shared.forget_ahead()
    # autograd cuts weights on the stream that cut them, of which the watch does not know
    return sorted(line for line in watch.found if "index_put" not in line)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "table_wise"), (2, "row_wise"), (2, "column_wise")],
)
def test_what_the_gradient_of_sample_weights_reads_is_not_given_to_another_batch(
    ranks, world, kind
):
    if world == 1:
        assert unordered_with_trained_weights(Comm(), kind) == []
    else:
        assert ranks.run(unordered_with_trained_weights, world, kind) == [[]] * world
