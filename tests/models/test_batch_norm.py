"""Batch norm of batches of any size."""

import pytest
import torch
from torch import nn

from recapp.models.layers import MLP, BatchNorm


@pytest.mark.parametrize("shape", [(5, 3), (1, 3, 4), (4, 3, 2)])
def test_batches_of_several_values_are_those_of_torch(shape):
    values = torch.randn(shape)
    own = BatchNorm(3)
    other = nn.BatchNorm1d(3)
    assert torch.equal(own(values), other(values))
    assert torch.equal(own.running_var, other.running_var)
    assert torch.equal(own.eval()(values), other.eval()(values))


def test_one_row_is_normalised_by_the_running_values_which_stay():
    norm = BatchNorm(3)
    norm(torch.randn(50, 3) * 2 + 1)
    before = norm.running_mean.clone()
    row = torch.randn(1, 3, requires_grad=True)
    found = norm(row)
    found.sum().backward()
    assert torch.equal(norm.running_mean, before)
    assert torch.equal(found, norm.eval()(row)) and row.grad.abs().min() > 0


@pytest.mark.parametrize("rows", [0, 1])
def test_a_tower_with_batch_norm_trains_on_one_row_and_on_none(rows):
    assert MLP(3, [4, 2], batch_norm=True)(torch.ones(rows, 3)).shape == (rows, 2)
