"""Known answers of the dense layers, written out by hand."""

import pytest
import torch

from recapp.errors import ConfigError
from recapp.models.layers import MLP, DotInteraction, published_linear


def test_three_vectors_interact_in_the_order_f12_f13_f23():
    f1 = [1.0, 2.0]
    f2 = [3.0, -1.0]
    f3 = [0.0, 4.0]
    f12 = 1 * 3 + 2 * -1
    f13 = 1 * 0 + 2 * 4
    f23 = 3 * 0 + -1 * 4
    assert DotInteraction(3)(torch.tensor([[f1, f2, f3]])).tolist() == [[f12, f13, f23]]


def test_four_vectors_go_on_with_the_row_of_the_fourth():
    vectors = torch.tensor([[[1.0], [2.0], [3.0], [5.0]], [[0.0], [1.0], [-1.0], [2.0]]])
    assert DotInteraction(4)(vectors).tolist() == [[2, 3, 6, 5, 10, 15], [0, 0, -1, 0, 2, -2]]


def test_the_gradient_of_f12_is_the_other_vector():
    vectors = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [0.0, 4.0]]], requires_grad=True)
    DotInteraction(3)(vectors)[0, 0].backward()
    assert vectors.grad.tolist() == [[[3, -1], [1, 2], [0, 0]]]


def test_interaction_gradients_are_those_of_finite_differences():
    vectors = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction(5), vectors)
    assert torch.autograd.gradgradcheck(DotInteraction(5), vectors)


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 1, 2)])
def test_interaction_of_nothing_is_nothing(shape):
    vectors = torch.ones(shape, requires_grad=True)
    dots = DotInteraction(shape[1])(vectors)
    dots.sum().backward()
    assert dots.shape == (shape[0], shape[1] * (shape[1] - 1) // 2)
    assert vectors.grad.abs().sum() == 0


def test_interaction_under_bf16_autocast_has_gradients_of_the_input_dtype():
    vectors = torch.randn(4, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        dots = DotInteraction(3)(vectors)
    dots.float().sum().backward()
    others = vectors.detach().sum(1, keepdim=True) - vectors.detach()
    assert dots.dtype == torch.bfloat16
    torch.testing.assert_close(vectors.grad, others, rtol=0.02, atol=0.02)


def test_interaction_indices_stay_out_of_checkpoints():
    assert DotInteraction(3).state_dict() == {}


def test_mlp_has_a_relu_behind_each_layer_or_behind_each_but_the_last():
    def kinds(layers):
        return [type(layer).__name__ for layer in layers]

    assert kinds(MLP(3, [4, 2])) == ["Linear", "ReLU", "Linear", "ReLU"]
    assert kinds(MLP(3, [4, 2], last_relu=False)) == ["Linear", "ReLU", "Linear"]


def test_start_values_are_normal_with_the_published_deviations():
    torch.manual_seed(0)
    layer = published_linear(300, 500)
    assert layer.weight.std().item() == pytest.approx((2 / 800) ** 0.5, rel=0.02)
    assert layer.bias.std().item() == pytest.approx((1 / 500) ** 0.5, rel=0.1)
    assert layer.weight.abs().max() > 3.5 * (2 / 800) ** 0.5, (
        "a uniform start would end at 1.7 deviations"
    )


def test_equal_seeds_give_equal_start_values():
    def start(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in MLP(3, [4, 2]).parameters()])

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([], "model.bottom_layers=[]: must be a list"),
        (16, "model.bottom_layers=16: must be a list"),
        ("16", "model.bottom_layers=16: must be a list"),
        ([16, 0], "0 is no width"),
        ([1.5], "1.5 is no width"),
        ([True], "True is no width"),
    ],
)
def test_a_width_that_cannot_be_is_named_with_its_setting(widths, message):
    with pytest.raises(ConfigError) as error:
        MLP(13, widths, setting="model.bottom_layers")
    assert message in str(error.value)
