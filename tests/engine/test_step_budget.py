"""What a training step of sharded tables gives a GPU to do: it may become less, and no more."""

import pytest
import torch
from tiers import one_of

COUNTS = (
    *("launches", "sorts", "waits", "copies", "operations", "messages", "pins", "record_streams"),
)
BARS = {  # by ranks and groups, in the order of COUNTS
    (1, 1): (8, 1, 1, 2, 3, 0, 0, 2),
    (1, 2): (12, 1, 1, 2, 3, 0, 0, 2),
    (1, 3): (16, 1, 1, 2, 3, 0, 0, 2),
    (2, 1): (15, 2, 1, 4, 4, 4, 0, 2),
    (2, 2): (21, 2, 1, 4, 4, 4, 0, 2),
    (2, 3): (27, 2, 1, 4, 4, 4, 0, 2),
}


@pytest.fixture(autouse=True)
def interpreter():
    """Skip the test where kernels do not run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here: python -m tests.gpu_first")


@pytest.mark.parametrize(("ranks", "groups"), one_of(5, BARS))
def test_a_step_gives_a_gpu_no_more_to_do_than_before(ranks, groups):
    from gpu_first.counts import record

    counts = record(ranks, groups).counts()
    bars = dict(zip(COUNTS, BARS[ranks, groups], strict=True))
    assert not {name: (n, bars[name]) for name, n in counts.items() if n > bars[name]}


# messages between ranks have the size of the requests; it may become less
DEPEND = {1: set(), 2: {"ask", "swap", "serve", "pool", "sum_blocks", "update"}}
HOST = ("to_host", "to_device", "copy_to_device", "on_device", "record_stream")


@pytest.mark.parametrize("ranks", one_of(2, DEPEND))
def test_the_work_of_a_step_follows_from_the_shape_of_a_batch(ranks):
    from gpu_first.counts import record

    first, second = (record(ranks, 1, seed, samples=40) for seed in (1, 2))
    assert first.differing(second) <= DEPEND[ranks]


@pytest.mark.parametrize(("groups", "samples"), one_of(3, ((2, 20), (1, 300), (3, 20))))
def test_the_record_of_a_step_trains_on_another_batch_as_the_step_does(groups, samples):
    from gpu_first.counts import batch_of, recorded, sharded, train

    replayed, eager = sharded(1, groups), sharded(1, groups)
    for seed in (1, 2):
        train(eager, batch_of(seed, samples))
    expected_BK = train(eager, batch_of(3, samples))
    train(replayed, batch_of(1, samples))
    batch = batch_of(2, samples)
    record, vectors_BK = recorded(replayed, batch)
    batch.values().copy_(batch_of(3, samples).values())
    record.replay(without=HOST)
    assert torch.equal(vectors_BK, expected_BK)
    for mine, its in zip(replayed.shared.stores, eager.shared.stores, strict=True):
        assert torch.equal(mine.weights, its.weights)
        assert all(map(torch.equal, mine.state, its.state))
