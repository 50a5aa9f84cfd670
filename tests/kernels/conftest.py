"""Triton's kernels on CPU tensors, through its interpreter."""

import numpy as np
import pytest
import torch
from interpreter import quicken

from recapp.kernels.backend import backend

MATCHING = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rounded(values, before, after, rounding_mode):
    """Return values rounded as a GPU does, to the nearest, ties to even.

    The interpreter would cut bits off.
    """
    bits = torch.from_numpy(
        np.ascontiguousarray(values)
        .reshape(-1)
        .view(np.uint32 if before.name == "fp32" else np.uint16)
    )
    made = bits.view(MATCHING[before.name]).to(MATCHING[after.name])
    return (
        made.view(torch.uint32 if after.name == "fp32" else torch.uint16)
        .numpy()
        .reshape(values.shape)
    )


@pytest.fixture
def interpreted(monkeypatch):
    """Return the backend `triton` in its interpreter, or skip the test with the reason."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here: tests/kernels/test_on_gpu.py")
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", rounded)
    quicken()
    return backend("triton", torch.device("cpu"))
