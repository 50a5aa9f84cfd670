"""What a training step of sharded tables gives a GPU to do: it may become less, and no more."""

import pytest

COUNTS = (
    *("launches", "sorts", "waits", "copies", "operations", "messages", "pins", "record_streams"),
)
BARS = {  # by ranks and groups, in the order of COUNTS
    (1, 1): (8, 1, 2, 3, 3, 0, 1, 32),
    (1, 2): (12, 1, 3, 4, 3, 0, 1, 62),
    (1, 3): (16, 1, 4, 5, 3, 0, 1, 92),
    (2, 1): (6, 2, 5, 9, 138, 4, 4, 39),
    (2, 2): (12, 4, 8, 16, 276, 4, 8, 76),
    (2, 3): (18, 6, 11, 22, 406, 4, 11, 113),
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
