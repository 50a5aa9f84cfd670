"""What a training step of sharded tables gives a GPU to do: it may become less, and no more."""

import pytest
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
