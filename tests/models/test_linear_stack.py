"""Linear layers as one function: the bits of torch's own layers, and the cases that torch keeps."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recapp.models import linear_stack
from recapp.models.layers import MLP

K = 5


def tower(**settings):
    torch.manual_seed(3)
    return MLP(K, settings.pop("layers", [7, 4, 1]), last_relu=False, **settings)


def gradients(layers, x_BK, call):
    """The output and all gradients of a call, and the gradient that went in."""
    x_BK = x_BK.clone().requires_grad_()
    layers.zero_grad()
    y_BO = call(x_BK)
    torch.manual_seed(4)
    grad_BO = torch.randn_like(y_BO)
    before_BO = grad_BO.clone()
    y_BO.backward(grad_BO)
    assert torch.equal(grad_BO, before_BO), "a function must leave the gradient that it gets"
    return [y_BO.detach(), x_BK.grad, *(p.grad for p in layers.parameters() if p.requires_grad)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def functions_of(y_BO):
    """The names of the functions of a graph."""
    found, todo = [], [y_BO.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.append(node.name())
            todo += [parent for parent, _ in node.next_functions]
    return found


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", [0, linear_stack.LARGE])
@pytest.mark.parametrize(
    "settings",
    [{}, {"layers": [3]}, {"batch_norm": True}, {"activation": "tanh"}, {"activation": "prelu"}],
    ids=str,
)
def test_towers_train_to_the_bits_of_torchs_layers(rows, dtype, large, settings, monkeypatch):
    if rows < 2 and "batch_norm" in settings:
        rows = 2
    monkeypatch.setattr(linear_stack, "LARGE", large)
    monkeypatch.setattr(linear_stack, "WIDE", 0)
    own = tower(**settings).to(dtype)
    torchs = nn.Sequential(*own)
    x_BK = torch.randn(rows, K, dtype=dtype)
    assert same(gradients(own, x_BK, own), gradients(own, x_BK, torchs))


def test_towers_of_a_real_size_train_to_the_bits_of_torchs_layers():
    """Some results have gaps between their rows, others are too small or too narrow."""
    torch.manual_seed(3)
    own = MLP(367, [429, 64, 1], last_relu=False)
    x_BK = torch.randn(1024, 367)
    assert not linear_stack.Linear(367, 429)(x_BK).is_contiguous()
    assert same(gradients(own, x_BK, own), gradients(own, x_BK, nn.Sequential(*own)))


def test_a_tower_is_one_function_and_layers_in_between_divide_it():
    x_BK = torch.randn(6, K)
    assert functions_of(tower()(x_BK)).count("_StackBackward") == 1
    divided = functions_of(tower(dropout=0.5)(x_BK))
    assert divided.count("_StackBackward") == 3 and "AddmmBackward0" not in divided


def test_a_relu_follows_the_last_layer_and_biases_may_be_missing():
    own = MLP(K, [4, 3], make_linear=lambda i, o: nn.Linear(i, o, bias=o == 3))
    x_BK = torch.randn(6, K)
    found = gradients(own, x_BK, own)
    assert same(found, gradients(own, x_BK, nn.Sequential(*own)))
    assert found[0].min() == 0 < found[0].max()


def test_frozen_layers_get_no_gradient():
    own = tower()
    own[0].weight.requires_grad_(False)
    own[4].bias.requires_grad_(False)
    x_BK = torch.randn(6, K)
    assert same(gradients(own, x_BK, own), gradients(own, x_BK, nn.Sequential(*own)))
    own(x_BK).sum().backward()
    assert own[0].weight.grad is None and own[4].bias.grad is None


def test_torchs_layers_run_where_something_listens_records_or_changes_dtypes():
    own = tower()
    x_BK = torch.randn(6, K)
    calls = []
    hook = own[2].register_forward_hook(lambda *_: calls.append(1))
    assert functions_of(own(x_BK)).count("_StackBackward") == 2 and calls == [1]
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        low = own(x_BK)
    assert low.dtype == torch.bfloat16 and "_StackBackward" not in functions_of(low)
    assert "_StackBackward" not in functions_of(own.eval()(x_BK))


@pytest.mark.parametrize("large", [0, linear_stack.LARGE])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_the_bits_of_torchs(bias, large, monkeypatch):
    monkeypatch.setattr(linear_stack, "LARGE", large)
    monkeypatch.setattr(linear_stack, "WIDE", 0)
    own = linear_stack.Linear(K, 3, bias)
    torchs = nn.Linear(K, 3, bias)
    torchs.load_state_dict(own.state_dict())
    x_BK = torch.randn(6, K)
    found = gradients(own, x_BK, own)
    assert same(found, gradients(torchs, x_BK, torchs))
    assert own(x_BK).is_contiguous() == (large > 0) and own.weight.grad.is_contiguous()
    assert own.eval()(x_BK).is_contiguous()
    own.train()(x_BK).add_(1).sum().backward()


def test_logits_may_be_changed_in_place():
    logits_B1 = tower()(torch.randn(2, K))
    logits_B1.add_(1).sum().backward()


def test_inputs_of_more_dimensions_take_torchs_way():
    assert tower()(torch.randn(2, 3, K)).shape == (2, 3, 1)


def second_derivatives(layers, call):
    """The gradients of a loss of logits and of their own gradients, as in a gradient penalty."""
    x_BK = torch.linspace(-1, 1, 6 * K, dtype=torch.float64).reshape(6, K).requires_grad_()
    layers.zero_grad()
    logits_BO = call(x_BK)
    slope_BK, *slopes = torch.autograd.grad(
        logits_BO.sum(), [x_BK, *layers.parameters()], create_graph=True
    )
    penalty = sum(slope.square().sum() for slope in (slope_BK, *slopes))
    (logits_BO.square().sum() + penalty).backward()
    return [x_BK.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("large", [0, linear_stack.LARGE])
@pytest.mark.parametrize("last_relu", [True, False])
def test_second_derivatives_of_a_mixed_loss_are_those_of_torchs_layers(
    last_relu, large, monkeypatch
):
    monkeypatch.setattr(linear_stack, "LARGE", large)
    monkeypatch.setattr(linear_stack, "WIDE", 0)
    torch.manual_seed(3)
    own = MLP(K, [7, 4, 3], last_relu=last_relu).double()
    torchs = nn.Sequential(*own)
    found = second_derivatives(own, own)
    torch.testing.assert_close(found, second_derivatives(own, torchs))
    assert all(gradient.any() for gradient in found)


def test_second_derivatives_are_those_of_finite_differences():
    own = tower().double()
    names = [name for name, _ in own.named_parameters()]
    x_BK = torch.randn(3, K, dtype=torch.float64, requires_grad=True)

    def logits(x_BK, *parameters):
        return torch.func.functional_call(own, dict(zip(names, parameters, strict=True)), x_BK)

    assert torch.autograd.gradgradcheck(logits, (x_BK, *own.parameters()))
    assert functions_of(logits(x_BK, *own.parameters())).count("_StackBackward") == 1


def test_transforms_of_functions_take_torchs_way():
    own = tower()
    x_BK = torch.randn(6, K)
    parameters = dict(own.named_parameters())

    def total(parameters, x_BK):
        return torch.func.functional_call(own, parameters, x_BK).sum()

    own(x_BK).sum().backward()
    found = torch.func.grad(total)(parameters, x_BK)
    torch.testing.assert_close(found, {name: p.grad for name, p in parameters.items()})
    of_rows = torch.func.vmap(torch.func.grad(total), (None, 0))(parameters, x_BK[:, None])
    torch.testing.assert_close({n: rows.sum(0) for n, rows in of_rows.items()}, found)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x_BK, x_BK)
        assert torch.autograd.forward_ad.unpack_dual(own(dual)).tangent.any()


def test_activations_may_be_computed_again_in_backward():
    own = tower()
    x_BK = torch.randn(6, K)
    again = partial(checkpoint, own, use_reentrant=False)
    assert same(gradients(own, x_BK, again), gradients(own, x_BK, own))


@pytest.mark.parametrize("large", [0, linear_stack.LARGE])
def test_several_gradients_at_once_are_those_of_one_after_another(large, monkeypatch):
    monkeypatch.setattr(linear_stack, "LARGE", large)
    monkeypatch.setattr(linear_stack, "WIDE", 0)
    own = tower(layers=[7, 3])
    x_BK = torch.randn(6, K, requires_grad=True)
    wanted = [x_BK, *own.parameters()]
    y_BO = own(x_BK)
    several_NBO = torch.randn(2, *y_BO.shape)
    one = partial(torch.autograd.grad, y_BO, wanted, retain_graph=True)
    expected = [torch.stack(g) for g in zip(*map(one, several_NBO), strict=True)]
    assert "_StackBackward" in functions_of(y_BO)
    torch.testing.assert_close([*one(several_NBO, is_grads_batched=True)], expected)
    torch.testing.assert_close([*torch.func.vmap(one)(several_NBO)], expected)
    jacobian = partial(torch.autograd.functional.jacobian, own, x_BK.detach())
    torch.testing.assert_close(jacobian(vectorize=True), jacobian())


def test_narrow_results_have_no_gaps():
    logits_B1 = linear_stack.Linear(2, 1)(torch.randn(linear_stack.LARGE, 2))
    assert logits_B1.is_contiguous()
    wide = linear_stack.Linear(2, linear_stack.WIDE + 1)
    assert not wide(torch.randn(linear_stack.LARGE // linear_stack.WIDE, 2)).is_contiguous()
