"""HugeCTR's dense layers: what each computes, by hand, and the shapes that each refuses."""

import math
import re

import pytest
import torch

from recapp import hugectr
from recapp.compat.hugectr.graph import KINDS, layer_made
from recapp.errors import ConfigError

L = hugectr.Layer_t
Start = hugectr.Initializer_t


def built(kind, inputs, tops=("out",), **parameters):
    """The module of a layer, and the shapes that it says it makes."""
    bottoms = [f"in{k}" for k in range(len(inputs))]
    layer = hugectr.DenseLayer(kind, bottoms, list(tops), **parameters).layer
    shapes, make = layer_made(layer, [tuple(x.shape[1:]) for x in inputs])
    torch.manual_seed(3)
    return make(), shapes


def run(kind, *inputs, tops=("out",), **parameters):
    """What a layer makes of its inputs; its shapes are those that it has said."""
    module, shapes = built(kind, inputs, tops, **parameters)
    made = module(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    assert [tuple(x.shape[1:]) for x in made] == shapes
    return made if len(made) > 1 else made[0]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


X = numbers(5, 6)
Y = numbers(6, 5).T.contiguous()
V = numbers(5, 4, 6)

CASES = {
    "Add": lambda: (run(L.Add, X, Y, X), X + Y + X),
    "ElementwiseMultiply": lambda: (run(L.ElementwiseMultiply, X, Y), X * Y),
    "Sub": lambda: (run(L.Sub, X, Y), X - Y),
    "Concat": lambda: (run(L.Concat, V, V[:, :2], axis=1), torch.cat([V, V[:, :2]], 1)),
    "ReLU": lambda: (run(L.ReLU, X), X * (X > 0)),
    "Sigmoid": lambda: (run(L.Sigmoid, X), 1 / (1 + (-X).exp())),
    "ELU": lambda: (run(L.ELU, X, elu_alpha=0.5), torch.where(X > 0, X, 0.5 * (X.exp() - 1))),
    "ReduceSum": lambda: (run(L.ReduceSum, V, axis=1), V.sum(1, keepdim=True)),
    "ReduceMean": lambda: (run(L.ReduceMean, V, axis=2), V.mean(2, keepdim=True)),
    "Reshape": lambda: (run(L.Reshape, V, leading_dim=24), V.reshape(5, 24)),
    "FmOrder2": lambda: (run(L.FmOrder2, X, out_dim=2), pairs(X.view(5, 3, 2))),
}


def pairs(vectors):
    """The sum of the products of all pairs of vectors, for each column."""
    count = vectors.shape[1]
    return sum(vectors[:, i] * vectors[:, j] for i in range(count) for j in range(i))


@pytest.mark.parametrize("kind", CASES)
def test_a_layer_without_parameters_computes_its_formula(kind):
    made, wanted = CASES[kind]()
    torch.testing.assert_close(made, wanted)


def test_an_inner_product_is_linear_on_two_and_three_dimensions():
    for x in (X, V):
        module, shapes = built(L.InnerProduct, [x], num_output=3)
        assert shapes == [(*x.shape[1:-1], 3)]
        torch.testing.assert_close(module(x), x @ module.weight.T + module.bias)


def test_an_interaction_has_the_vector_all_dots_and_a_zero():
    made = run(L.Interaction, X, V)
    every = torch.cat([X[:, None], V], 1)
    dots = [(every[:, i] * every[:, j]).sum(1) for i in range(5) for j in range(i)]
    wanted = torch.cat([X, torch.stack(dots, 1), torch.zeros(5, 1)], 1)
    torch.testing.assert_close(made, wanted)
    wide = [torch.zeros(2, 128), torch.zeros(2, 26, 128)]
    assert built(L.Interaction, wide)[1] == [(480,)]  # as HugeCTR's summary has it


def test_slices_may_overlap_and_a_layer_reads_each_by_its_name():
    first, second = run(L.Slice, X, tops=("a", "b"), ranges=[(0, 4), (2, 6)])
    assert torch.equal(first, X[:, :4]) and torch.equal(second, X[:, 2:])


def test_a_reshape_keeps_samples_by_any_of_its_arguments():
    assert torch.equal(run(L.Reshape, V), V.reshape(5, 24))
    assert torch.equal(run(L.Reshape, V, time_step=3, leading_dim=8), V.reshape(5, 3, 8))
    assert torch.equal(run(L.Reshape, V, shape=[-1, 2, 12]), V.reshape(5, 2, 12))
    chosen = run(L.Reshape, V, selected=True, selected_slots=[3, 0], leading_dim=12)
    assert torch.equal(chosen, V[:, [3, 0]].reshape(5, 12))


def test_cross_layers_are_those_of_both_papers():
    module, _ = built(L.MultiCross, [X], num_layers=2, bias_init_type=Start.Uniform)
    x = X
    for down, bias in zip(module.down, module.bias, strict=True):
        x = X * (x @ down.weight[0])[:, None] + bias + x
    torch.testing.assert_close(module(X), x)
    module, _ = built(L.MultiCross, [X], num_layers=2, projection_dim=3)
    x = X
    for down, up, bias in zip(module.down, module.up, module.bias, strict=True):
        x = X * (x @ down.weight.T @ up.weight.T + bias) + x
    torch.testing.assert_close(module(X), x)


def test_a_weight_multiply_gives_every_number_a_vector():
    module, shapes = built(L.WeightMultiply, [X], weight_dims=[6, 3])
    assert shapes == [(18,)]
    torch.testing.assert_close(module(X), (X[:, :, None] * module.weight).reshape(5, 18))


def test_dropout_drops_its_share_in_training_alone():
    x = torch.ones(100, 100)
    module, _ = built(L.Dropout, [x], dropout_rate=0.25)
    made = module(x)
    assert abs((made == 0).float().mean() - 0.25) < 0.02 and made.max() == 1 / 0.75
    assert torch.equal(module.eval()(x), x)


def test_batch_norm_normalises_and_keeps_what_factor_says():
    module, _ = built(L.BatchNorm, [X], factor=0.5, eps=1e-3)
    var = X.var(0, unbiased=False)
    torch.testing.assert_close(module(X), (X - X.mean(0)) / (var + 1e-3).sqrt())
    torch.testing.assert_close(module.running_mean, 0.5 * X.mean(0))


def test_start_values_are_drawn_as_the_initialiser_says():
    x = torch.zeros(1, 300)

    def drawn(how):
        module, _ = built(
            L.InnerProduct, [x], num_output=100, weight_init_type=how, bias_init_type=how
        )
        return module.weight, module.bias

    assert not drawn(Start.Zero)[0].any() and not drawn(Start.Zero)[1].any()
    uniform, bias = drawn(Start.Uniform)
    assert 0.99 / 400 < uniform.abs().max() <= 1 / 400 and bias.abs().max() <= 1 / 100
    assert abs(drawn(Start.XavierNorm)[0].std() / math.sqrt(2 / 400) - 1) < 0.02
    assert 0.99 < drawn(Start.XavierUniform)[0].abs().max() / math.sqrt(6 / 400) <= 1
    assert abs(drawn(Start.Default)[0].std() / math.sqrt(2 / 400) - 1) < 0.02


def test_every_type_that_is_there_has_a_case_in_this_file():
    own = {"InnerProduct", "Interaction", "Slice", "MultiCross", "WeightMultiply", "Dropout"}
    assert {*CASES, *own, "BatchNorm", "BinaryCrossEntropyLoss"} == set(KINDS)


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "inputs", "parameters", "said"),
    [
        (L.Add, [X, X[:, :3]], {}, ("in0 (None, 6) and in1 (None, 3)", "one shape")),
        (L.Add, [X], {}, ("1 bottom_names (in0)", "2 or more")),
        (L.Sub, [X, X, X], {}, ("3 bottom_names", "takes 2")),
        (L.Concat, [V, X], {}, ("in0 (None, 4, 6) and in1 (None, 6)", "axis=1")),
        (L.Concat, [V, V[:, :, :2]], {}, ("in1 (None, 4, 2)", "axis=1")),
        (L.Concat, [X, X], {"axis": 2}, ("axis=2", "in0 is (None, 6)", "1 to 1")),
        (L.InnerProduct, [X], {"num_output": 0}, ("num_output=0", "at least 1")),
        (L.InnerProduct, [X[:, :0]], {}, ("in0 (None, 0)",)),
        (L.Interaction, [X, X], {}, ("in0 (None, 6) and in1 (None, 6)", "(None, F, D)")),
        (L.Interaction, [X[:, :3], V], {}, ("in0 (None, 3) and in1 (None, 4, 6)", "same D")),
        (L.Slice, [X], {"ranges": [(0, 7)]}, ("in0 (None, 6)", "(0, 7)")),
        (L.Slice, [X], {"ranges": [(0, 3), (3, 6)]}, ("2 ranges and 1 top_names",)),
        (L.Reshape, [V], {"leading_dim": 5}, ("in0 (None, 4, 6)", "24 numbers", "(None, 5)")),
        (L.Reshape, [X], {"selected": True, "selected_slots": [1]}, ("selected_slots=[1]",)),
        (L.ReduceSum, [X], {"axis": 0}, ("axis=0", "1 to 1")),
        (L.FmOrder2, [X], {"out_dim": 4}, ("in0 (None, 6)", "out_dim=4")),
        (L.FmOrder2, [X], {}, ("out_dim=0", "at least 1")),
        (L.MultiCross, [X], {}, ("num_layers=0",)),
        (L.MultiCross, [V], {"num_layers": 1}, ("in0 (None, 4, 6)",)),
        (L.MultiCross, [X], {"num_layers": 1, "projection_dim": -1}, ("projection_dim=-1",)),
        (L.WeightMultiply, [X], {"weight_dims": [5, 2]}, ("(None, 6)", "weight_dims=[5, 2]")),
        (L.BatchNorm, [V], {}, ("in0 (None, 4, 6)",)),
        (L.Dropout, [X], {"dropout_rate": 1}, ("dropout_rate=1", "below 1")),
        (L.InnerProduct, [X], {"num_output": 2**70}, ("num_output=", "64 bits")),
        (L.InnerProduct, [X], {"weight_init_type": "Xavier"}, ("weight_init_type=Xavier", "Zero")),
        (L.InnerProduct, [X], {"bias_init_type": [1]}, ("bias_init_type=[1]", "XavierUniform")),
        (L.BatchNorm, [X], {"eps": "small"}, ("eps=small", "a number")),
        (L.BatchNorm, [X], {"factor": float("nan")}, ("factor=nan", "a number")),
        (L.BatchNorm, [X], {"factor": 1.5}, ("factor=1.5", "at most 1")),
        (L.Reshape, [X], {"shape": [-1, 6], "leading_dim": 6}, ("shape=[-1, 6]", "give only one")),
        (L.ELU, [X], {"elu_alpha": None}, ("elu_alpha=null", "a number")),
        (L.Dropout, [X], {"dropout_rate": "0.5"}, ("dropout_rate=0.5", "a number")),
        (L.Reshape, [X], {"leading_dim": 1.5}, ("leading_dim=1.5", "whole number")),
        (L.Reshape, [X], {"shape": -1}, ("shape=-1", "a list of whole numbers")),
        (L.Reshape, [X], {"selected": "yes"}, ("selected=yes", "true or false")),
        (L.Slice, [X], {"ranges": [3]}, ("ranges=[3]", "a list of whole numbers")),
        (L.WeightMultiply, [X], {"weight_dims": None}, ("weight_dims=null", "[F, D]")),
        (L.MultiCross, [X], {"num_layers": 1, "projection_dim": True}, ("projection_dim=true",)),
        (L.Concat, [X, X], {"axis": True}, ("axis=True",)),
        (L.BinaryCrossEntropyLoss, [X, X[:, :1]], {}, ("(None, 6)", "(None, 1)", "one logit")),
    ],
)
def test_a_layer_refuses_in_one_line_with_its_name_tensors_and_shapes(
    kind, inputs, parameters, said
):
    with pytest.raises(ConfigError) as refused:
        built(kind, inputs, **parameters)
    line = str(refused.value)
    assert line.startswith(f"layer {kind.name} (out): ") and "\n" not in line
    for part in said:
        assert part in line, line


def test_unknown_types_and_parameters_are_one_line_with_close_matches():
    with pytest.raises(ConfigError, match=r"^Layer_t\.Relu: unknown; did you mean ReLU"):
        hugectr.DenseLayer(L.Relu, ["x"], ["y"])
    with pytest.raises(
        ConfigError, match=r"layer GRU \(g\): recapp does not have this layer of HugeCTR; kn"
    ):
        hugectr.DenseLayer(L.GRU, ["x"], ["g"])
    with pytest.raises(ConfigError, match=r"unknown parameter num_outptu; did you mean num_output"):
        hugectr.DenseLayer(L.InnerProduct, ["x"], ["fc"], num_outptu=3)
    with pytest.raises(ConfigError, match="use_regularizer=True: recapp has no regularisers"):
        hugectr.DenseLayer(L.InnerProduct, ["x"], ["fc"], use_regularizer=True)
    for names in ("x", [], [1], None):
        text = re.escape(f"_names={names}: must be a list of names of tensors")
        with pytest.raises(ConfigError, match=f"^DenseLayer: bottom{text}"):
            hugectr.DenseLayer(L.ReLU, names, ["y"])
        with pytest.raises(ConfigError, match=f"^DenseLayer: top{text}"):
            hugectr.DenseLayer(L.ReLU, ["x"], names)
    with pytest.raises(ConfigError, match="layer_type=ReLU: must be a Layer_t"):
        hugectr.DenseLayer("ReLU", ["x"], ["y"])


def test_a_parameter_of_another_type_of_layer_is_noted(capsys):
    hugectr.DenseLayer(L.ReLU, ["x"], ["noted"], num_output=3)
    assert "layer ReLU (noted): num_output has no effect" in capsys.readouterr().err
