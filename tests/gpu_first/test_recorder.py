"""The recorder finds what a step would have a GPU do, and what a host would wait for."""

import numpy as np
import pytest
import torch

from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.sparse import transfer

HERE = torch.device("cpu")
NOTHING = dict.fromkeys(
    ("launches", "sorts", "waits", "copies", "operations", "messages", "pins", "record_streams"), 0
)


@pytest.fixture(autouse=True)
def interpreter():
    """Skip the test where kernels do not run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here: python -m tests.gpu_first")


def recorded(step, *arguments):
    from gpu_first.recorder import Recorder

    recorder = Recorder()
    with recorder.recording():
        step(*arguments)
    return recorder


X = torch.arange(12.0)
MASK = X > 5


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (lambda: X.view(3, 4)[1:].T.detach(), {}),
        (lambda: torch.empty_like(X).new_empty(3), {}),
        (lambda: X[:0] + 1, {}),
        (lambda: X.add(1).mul_(2), {"operations": 2}),
        (lambda: torch._foreach_add_([torch.zeros(2)], 1), {"operations": 2}),
        (lambda: X.sort(), {"operations": 1, "sorts": 1}),
        (lambda: torch.searchsorted(X, X), {"operations": 1}),
        (lambda: float(X[3]), {"waits": 1, "copies": 1}),
        (lambda: X[MASK], {"waits": 1, "copies": 1, "operations": 1}),
        (lambda: MASK.nonzero(), {"waits": 1, "copies": 1, "operations": 1}),
        (lambda: X.bool().unique(), {"waits": 1, "copies": 1, "operations": 2, "sorts": 1}),
        (
            lambda: torch.repeat_interleave(X, MASK.int()),
            {"waits": 1, "copies": 1, "operations": 3},
        ),
        (
            lambda: torch.repeat_interleave(X, MASK.int(), output_size=6),
            {"operations": 3},
        ),
        (lambda: transfer.to_host(X), {"waits": 1, "copies": 1}),
        (lambda: int((2 * transfer.to_host(X))[3]), {"waits": 1, "copies": 1}),
        (lambda: transfer.to_device(np.arange(3), HERE), {"copies": 1, "pins": 1}),
        (lambda: transfer.true_indices(MASK), {"waits": 1, "copies": 1, "operations": 6}),
        (lambda: X.pin_memory(), {"pins": 1}),
        (lambda: X.record_stream(None), {"record_streams": 1}),
    ],
)
def test_what_is_planted_is_counted(step, counts):
    assert recorded(step).counts() == NOTHING | counts


def pooled(index_N, rows_RD, sums):
    """Sum bags of two by a kernel, and what comes of them by torch."""
    links = Links(index_N, torch.tensor([0, 2, 4]).int(), None, None, 2)
    target = torch.empty(2 * rows_RD.shape[1])
    kernels = backend("triton", HERE)
    kernels.pool(rows_RD.view(-1), *2 * (rows_RD.shape[1],), links, target, torch.float32)
    sums.copy_(target.cumsum(0)).add_(1)


def batch(seed):
    return torch.randint(9, (4,), generator=torch.Generator().manual_seed(seed)).int()


def test_a_launch_is_one_whatever_it_calls():
    counts = recorded(pooled, batch(1), torch.ones(9, 3), torch.zeros(6)).counts()
    assert counts["launches"] == 1 and counts["waits"] == 0


def test_another_batch_of_one_shape_gives_the_same_record_and_another_shape_does_not():
    rows_RD, sums = torch.randn(9, 3), torch.zeros(6)
    first, second = (recorded(pooled, batch(seed), rows_RD, sums) for seed in (1, 2))
    assert first.difference(second) is None
    wider = recorded(pooled, batch(1), torch.randn(9, 4), torch.zeros(8))
    assert "pool" in first.difference(wider)
    assert first.differing(wider) >= {"pool", "cumsum"} and first.differing(second) == set()
    shorter = recorded(lambda: torch.zeros(6).add_(1))
    assert shorter.difference(recorded(lambda: torch.zeros(6).add_(1).mul_(2))) == ("2 entries / 3")
    other_place = recorded(lambda both: both[0].add_(both[0]), torch.ones(2, 3))
    assert "memory 0 + 3" in other_place.difference(
        recorded(lambda both: both[0].add_(both[1]), torch.ones(2, 3))
    )


def test_a_record_runs_again_on_another_batch_in_the_same_memory():
    rows_RD, sums, slot = torch.randn(9, 3), torch.zeros(6), batch(1)
    record = recorded(pooled, slot, rows_RD, sums)
    slot.copy_(batch(3))
    record.replay()
    expected = torch.zeros(6)
    pooled(batch(3), rows_RD, expected)
    assert torch.equal(sums, expected)


def test_a_record_with_a_read_of_the_host_does_not_run_again():
    record = recorded(lambda: X + float(X[1]))
    with pytest.raises(ValueError, match="a wait"):
        record.replay()
