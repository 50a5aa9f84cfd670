"""The memory of the integers of all groups, which later batches use again: no batch writes to it
while another stream reads it. Kernels run in Triton's interpreter, on streams that are not there.
"""

from unittest import mock

import pytest
import torch
from engine.engine_cases import make_tables, same_bits, sharded
from engine.streams import watched
from engine.test_side_stream import trained
from torch.utils._python_dispatch import _disable_current_modes

from recapp.engine.fused_integers import FusedIntegers
from recapp.kernels.triton_launch import Launch
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


@pytest.mark.full
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_memory_is_used_again_when_the_streams_of_its_batch_are_done(depth):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here")
    assert unordered(depth) == []
