"""What a training step of sharded tables gives a GPU to do: it may become less, and no more."""

import pytest

COUNTS = (
    *("launches", "sorts", "waits", "copies", "operations", "messages", "pins", "record_streams"),
)
BARS = {  # by ranks and groups, in the order of COUNTS
    (1, 1): (8, 1, 2, 3, 3, 0, 1, 28),
    (1, 2): (12, 1, 3, 4, 3, 0, 1, 54),
    (1, 3): (16, 1, 4, 5, 3, 0, 1, 80),
    (2, 1): (15, 2, 3, 6, 4, 4, 3, 31),
    (2, 2): (21, 2, 5, 8, 4, 4, 3, 60),
    (2, 3): (27, 2, 7, 10, 4, 4, 3, 89),
}


@pytest.fixture(autouse=True)
def interpreter():
    """Skip the test where kernels do not run in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled for the GPU here: python -m tests.gpu_first")


@pytest.mark.parametrize(("ranks", "groups"), BARS)
def test_a_step_gives_a_gpu_no_more_to_do_than_before(ranks, groups):
    from gpu_first.counts import record

    counts = record(ranks, groups).counts()
    bars = dict(zip(COUNTS, BARS[ranks, groups], strict=True))
    assert not {name: (n, bars[name]) for name, n in counts.items() if n > bars[name]}
