"""The dense part of a model's step beside its matrix products: what runs, and what is left out."""

import pytest
import torch
from torch import nn

from recapp.run.model import build_model
from recapp.settings.option_files import options

from . import dense_part
from .dense_part import DensePart, ProductRecorder, recipe_with

SOME = ("dlrm", "din", "ffm", "fcn")
"""Room before the vectors, histories, field-aware columns, losses of its own."""


def part_of(name, batch_size=3):
    """Return the dense part of a model that `bench train` measures."""
    recipe = recipe_with(name)
    return DensePart(build_model(recipe), recipe.built_task, len(recipe.schema.numbers), batch_size)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.full)
        for name in options("model", ())
    ],
)
def test_every_model_gets_gradients_for_all_dense_weights_and_its_vectors(name, monkeypatch):
    read = []
    monkeypatch.setattr(
        dense_part._FromTables, "backward", lambda ctx, grad: (read.append(grad), None)[1:] * 2
    )
    part = part_of(name)
    part.step()
    for key, parameter in part.model.named_parameters():
        assert parameter.is_meta or parameter.grad is not None, key
    assert read and all(len(grad) for grad in read)


def test_extra_losses_are_part_of_the_step():
    part = part_of("fcn")
    asked = []
    whole = part.model.extra_losses
    part.model.extra_losses = lambda *given: asked.append(whole(*given)) or asked[-1]
    part.step()
    assert len(asked[0]) == 2


def test_products_run_again_with_the_shapes_and_strides_that_they_had(monkeypatch):
    ran = []
    monkeypatch.setattr(
        dense_part.torch,
        "mm",
        lambda left, right, out: ran.append((left.shape, right.stride(), out.shape)),
    )
    layer = nn.Linear(5, 3)
    with ProductRecorder() as recorder:
        layer(torch.ones(4, 5)).sum().backward()
    for product in recorder.again:
        product()
    assert ran == [
        ((4, 5), (1, 5), (4, 3)),
        ((3, 4), (5, 1), (3, 5)),
    ]  # forward, and backward for the weight
    assert recorder.operations == 2 * 2 * 4 * 5 * 3


def test_attention_runs_again_forward_and_backward():
    query = torch.ones(1, 2, 3, 4, requires_grad=True)
    with ProductRecorder() as recorder:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    forward, backward = recorder.again
    assert forward()[0].shape == query.shape
    assert [grad.shape for grad in backward()] == [query.shape] * 3
    assert recorder.operations == (4 + 10) * 2 * 3 * 3 * 4
