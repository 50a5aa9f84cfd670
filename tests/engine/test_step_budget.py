"""What a training step gives a GPU to do: it may become less, and no more. As CUDA graphs want it,
the work follows from the shape of a batch, and a record of it trains on another batch.
"""

import pytest
import torch
from tiers import one_of

from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

COUNTS = (
    *("launches", "sorts", "waits", "copies", "operations", "messages", "pins", "record_streams"),
)
BARS = {  # by part, mode, ranks and groups, in the order of COUNTS
    ("tables", "eager", 1, 1): (8, 1, 1, 2, 3, 0, 0, 0),
    ("tables", "eager", 1, 2): (12, 1, 1, 2, 3, 0, 0, 0),
    ("tables", "eager", 1, 3): (16, 1, 1, 2, 3, 0, 0, 0),
    ("tables", "eager", 2, 1): (15, 2, 1, 4, 4, 4, 0, 0),
    ("tables", "eager", 2, 2): (21, 2, 1, 4, 4, 4, 0, 0),
    ("tables", "eager", 2, 3): (27, 2, 1, 4, 4, 4, 0, 0),
    ("sums", "eager", 2, 1): (15, 2, 1, 4, 4, 4, 0, 0),
    ("sums", "eager", 2, 3): (25, 2, 1, 4, 4, 4, 0, 0),
    ("drops", "eager", 1, 1): (11, 1, 1, 2, 5, 0, 0, 0),
    ("drops", "eager", 2, 3): (30, 2, 1, 4, 6, 4, 0, 0),
    # a larger hash table, which few steps make, is a launch and three operations
    ("dynamic", "eager", 1, 1): (11, 1, 1, 3, 7, 0, 0, 0),
    # one copy, of the number of rows, in some steps
    ("dynamic", "recorded", 1, 1): (1, 0, 0, 2, 2, 0, 0, 0),
    ("seen", "eager", 1, 1): (11, 1, 1, 4, 7, 0, 0, 0),
    ("seen", "recorded", 1, 1): (1, 0, 0, 3, 2, 0, 0, 0),
    ("limits", "eager", 1, 1): (11, 1, 1, 3, 7, 0, 0, 0),
    ("limits", "recorded", 1, 1): (1, 0, 0, 2, 2, 0, 0, 0),
    ("ttl", "recorded", 1, 1): (1, 0, 0, 2, 2, 0, 0, 0),
    ("model", "eager", 1, 1): (10, 1, 1, 2, 43, 0, 0, 0),
    ("model", "eager", 1, 2): (14, 1, 1, 2, 47, 0, 0, 0),
    ("model", "eager", 1, 3): (18, 1, 1, 2, 50, 0, 0, 0),
    # operations copy the batch into the graph, and its result out of it
    ("model", "recorded", 1, 1): (1, 0, 0, 1, 2, 0, 0, 0),
    ("model", "recorded", 1, 3): (1, 0, 0, 1, 2, 0, 0, 0),
    ("model", "recorded", 2, 1): (16, 2, 1, 5, 16, 5, 0, 0),
    ("model", "recorded", 2, 3): (28, 2, 1, 5, 16, 5, 0, 0),
}
# messages between ranks have the size of the requests; it may become less
DEPEND = {1: set(), 2: {"ask", "swap", "serve", "pool", "sum_blocks", "update"}}
# the host's part in a step of one rank: sizes that follow from the shape, and a check
HOST = ("on_device", "to_host", "record_stream")


@pytest.fixture(autouse=True)
def interpreter():
    """Skip the test where kernels do not run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here: python -m tests.gpu_first")


@pytest.mark.parametrize(("part", "mode", "ranks", "groups"), one_of(12, BARS))
def test_a_step_gives_a_gpu_no_more_to_do_than_before(part, mode, ranks, groups):
    from gpu_first.counts import record

    few = mode == "recorded" or part in ("dynamic", "seen", "limits", "ttl")
    samples = {"samples": 20} if few else {}  # a launch is one, whatever is in it
    counts = record(ranks, groups, part=part, mode=mode, **samples).counts()
    bars = dict(zip(COUNTS, BARS[part, mode, ranks, groups], strict=True))
    assert not {name: (n, bars[name]) for name, n in counts.items() if n > bars[name]}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_bags_that_have_an_id_each_as_the_host_knows_are_less_work(ranks):
    from gpu_first.counts import batch_of, recorded, sharded, tables_alone

    tables = sharded(ranks, 1)
    step = tables_alone(tables, 20)
    counts = []
    for seed in range(2):
        batch = batch_of(seed, 20)
        counts.append(recorded(step, tables, batch)[0].counts())
        lengths = batch.lengths()[:1].expand(60)
        batch = KeyedJaggedTensor(batch.keys(), batch.values(), lengths=lengths)
        counts.append(recorded(step, tables, batch)[0].counts())
    *_, dense, known = counts
    assert dense["launches"] - known["launches"] == 1  # where bags begin
    assert dense["operations"] - known["operations"] == 2  # sums of lengths


@pytest.mark.full
@pytest.mark.parametrize("ranks", DEPEND)
def test_the_work_of_a_step_follows_from_the_shape_of_a_batch(ranks):
    from gpu_first.counts import record

    first, second = (record(ranks, 1, seed, samples=40) for seed in (1, 2))
    assert first.differing(second) <= DEPEND[ranks]


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "groups", "samples"),
    [("model", 1, 20), ("model", 3, 20), ("tables", 1, 300), ("tables", 3, 20)],
)
def test_the_record_of_a_step_trains_on_another_batch_as_the_step_does(part, groups, samples):
    from gpu_first.counts import PARTS, batch_of, recorded, sharded, tf32

    replayed, eager = sharded(1, groups), sharded(1, groups)
    step, eager_step = (PARTS[part](tables, samples) for tables in (replayed, eager))
    batch = batch_of(2, samples)
    with tf32():
        # where nothing is recorded, layers compute as on a CPU
        expected = [
            recorded(eager_step, eager, batch_of(seed, samples))[1] for seed in (1, 2, 3, 4)
        ]
        recorded(step, replayed, batch_of(1, samples))
        record, result = recorded(step, replayed, batch)
        for seed in (3, 4):
            batch.values().copy_(batch_of(seed, samples).values())
            record.replay(without=HOST)
            assert torch.equal(result, expected[seed - 1])
    for mine, its in zip(replayed.shared.stores, eager.shared.stores, strict=True):
        assert torch.equal(mine.weights, its.weights)
        assert all(map(torch.equal, mine.state, its.state))
