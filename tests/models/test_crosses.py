"""Cross layers against transcriptions of their papers' formulas, and against known faults."""

from functools import partial

import pytest
import torch
from transcription import check_model, random_vectors

from recapp.models.dcn import (
    Crosses,
    FullCross,
    GatedCross,
    LowRankCross,
    MixtureCross,
    VectorCross,
    VectorCrosses,
)
from recapp.models.fcn import MaskedCross, MaskedCrosses, QuadraticCross

COLUMNS = 6
SAMPLES = 5


def rows(layer):
    """Make a function of samples of one of a sample: layer(p, x0_K, x_K)."""

    def of_all(p, first_BK, x_BK):
        return torch.stack(
            [layer(p, first_K, x_K) for first_K, x_K in zip(first_BK, x_BK, strict=True)]
        )

    return of_all


def network(layer, layers):
    """Make a function of x0: layer(p, x0_K, x_K) with the parameters of each layer in turn."""

    def of_all(p, first_BK):
        x_BK = first_BK
        for number in range(layers):
            start = f"{number}."
            own = {n.removeprefix(start): v for n, v in p.items() if n.startswith(start)}
            x_BK = rows(layer)(own, first_BK, x_BK)
        return x_BK

    return of_all


def pair():
    return [random_vectors(SAMPLES, COLUMNS, seed=5), random_vectors(SAMPLES, COLUMNS)]


def dcn(p, x0, x, times=1):
    crossed = torch.outer(x0, x) @ p["weight"].reshape(-1)
    return times * crossed + p["bias"] + x


def test_a_vector_cross_is_that_of_dcn():
    def v2(p, x0, x):
        return x0 * (p["weight"][0] * x + p["bias"]) + x

    def crossed_with_itself(p, x0, x):
        return dcn(p, x, x)

    def no_residual(p, x0, x):
        return dcn(p, x0, x) - x

    def bias_inside(p, x0, x):
        return x0 * ((p["weight"][0] * x).sum() + p["bias"]) + x

    faults = {
        "columns are multiplied one by one, as in DCN-V2": rows(v2),
        "x is crossed with itself instead of x0": rows(crossed_with_itself),
        "x is not added": rows(no_residual),
        "the bias is multiplied by x0": rows(bias_inside),
    }
    check_model(VectorCross(COLUMNS), rows(dcn), faults, pair())


def layers_of(p, first_BK, layer=dcn, **more):
    """Return DCN's network, one layer after the other."""
    x_BK = first_BK
    for weight, bias in zip(p["weight"], p["bias"], strict=True):
        x_BK = rows(partial(layer, **more))({"weight": weight, "bias": bias}, first_BK, x_BK)
    return x_BK


def test_all_layers_of_dcn_in_one_product_are_the_layers_one_by_one():
    def gdcn_readme(p, x0, x):
        """The formula printed for GDCN, whose product is of x0 with itself after one layer."""
        return dcn(p, x0, x0) - x0 + x

    def no_bias_below(p, first_BK):
        scale_B = 1
        for weight in p["weight"]:
            scale_B = scale_B * (1 + first_BK @ weight)
        return scale_B[:, None] * first_BK + p["bias"].sum(0)

    faults = {
        "the product does not see the layer below": partial(layers_of, layer=gdcn_readme),
        "the product does not see the biases below": no_bias_below,
        "products count twice": partial(layers_of, times=2),
    }
    check_model(VectorCrosses(COLUMNS, 4), layers_of, faults, [random_vectors(SAMPLES, COLUMNS)])


def full(p, x0, x):
    return x0 * (p["map.weight"] @ x + p["map.bias"]) + x


def test_a_full_cross_is_that_of_dcnv2():
    def activated(p, x0, x):
        return x0 * (p["map.weight"] @ x + p["map.bias"]).relu() + x

    def bias_outside(p, x0, x):
        return x0 * (p["map.weight"] @ x) + p["map.bias"] + x

    def transposed(p, x0, x):
        return x0 * (x @ p["map.weight"] + p["map.bias"]) + x

    def from_first(p, x0, x):
        return x0 * (p["map.weight"] @ x + p["map.bias"]) + x0

    faults = {
        "an activation behind the map": rows(activated),
        "the bias is not multiplied by x0": rows(bias_outside),
        "the matrix is transposed": rows(transposed),
        "x0 is added instead of x": rows(from_first),
    }
    check_model(FullCross(COLUMNS), rows(full), faults, pair())


def test_a_network_gives_x0_and_the_layer_below_to_each_layer():
    def exponential(p, x0, x):
        return full(p, x, x)

    crosses = Crosses(FullCross(COLUMNS) for _ in range(3))
    faults = {"each layer multiplies its own input": network(exponential, 3)}
    check_model(crosses, network(full, 3), faults, [random_vectors(SAMPLES, COLUMNS)])


def low_rank(p, x0, x, between=lambda low: low):
    u, v = p["up.weight"], p["down.weight"]
    return x0 * (u @ between(v @ x) + p["up.bias"]) + x


def test_a_low_rank_cross_has_no_activation_between_its_matrices():
    faults = {
        f"{name} between the matrices": rows(partial(low_rank, between=function))
        for name, function in {"tanh": torch.tanh, "ReLU": torch.relu}.items()
    }
    check_model(LowRankCross(COLUMNS, 2), rows(low_rank), faults, pair())


RANK = 2
EXPERTS = 3


def softmax(gates_E):
    return gates_E.exp() / gates_E.exp().sum()


def mixture(p, x0, x, share=softmax, inner=torch.tanh, core=True, gate=None, bias=1):
    gates_E = (p["gate.weight"] if gate is None else gate) @ x
    total = 0
    for e, weight in enumerate(share(gates_E)):
        v = p["down.weight"][e * RANK : (e + 1) * RANK]
        u = p["up.weight"][:, e * RANK : (e + 1) * RANK]
        low = inner(v @ x)
        if core:
            low = inner(p["inner"][e] @ low)
        total = total + weight * (x0 * (u @ low + bias * p["up.bias"]))
    return total + x


def test_a_mixture_of_experts_has_a_softmax_over_experts_and_tanh_in_the_low_rank():
    def of_one(gates_E):
        return torch.ones_like(gates_E) + 0 * gates_E

    faults = {
        "gates without softmax": rows(partial(mixture, share=lambda gates_E: gates_E)),
        "gates of sigmoids": rows(partial(mixture, share=torch.sigmoid)),
        "softmax over one expert, as on a wrong axis": rows(partial(mixture, share=of_one)),
        "no tanh": rows(partial(mixture, inner=lambda low: low)),
        "no inner matrix": rows(partial(mixture, core=False)),
        "no bias": rows(partial(mixture, bias=0)),
        "a bias of each expert, with sum and not mean": rows(partial(mixture, bias=EXPERTS)),
    }
    check_model(MixtureCross(COLUMNS, RANK, EXPERTS), rows(mixture), faults, pair())


def test_each_layer_of_experts_has_its_own_gates():
    def shared(p, first_BK):
        def layer(own, x0, x):
            return mixture(own, x0, x, gate=p["0.gate.weight"])

        return network(layer, 2)(p, first_BK)

    crosses = Crosses(MixtureCross(COLUMNS, RANK, EXPERTS) for _ in range(2))
    faults = {"one gate for all layers": shared}
    check_model(crosses, network(mixture, 2), faults, [random_vectors(SAMPLES, COLUMNS)])


@pytest.mark.parametrize("samples", [0, 1])
def test_crosses_of_one_sample_and_of_none_keep_both_axes(samples):
    x_BK = torch.ones(samples, COLUMNS)
    for layer in (
        VectorCross(COLUMNS),
        FullCross(COLUMNS),
        LowRankCross(COLUMNS, 2),
        MixtureCross(COLUMNS, 2, 3),
        GatedCross(COLUMNS),
    ):
        assert layer(x_BK, x_BK).shape == (samples, COLUMNS)
    assert VectorCrosses(COLUMNS, 2)(x_BK).shape == (samples, COLUMNS)
    assert QuadraticCross(3, 2, 4)(x_BK).shape == (samples, COLUMNS)
    masked = MaskedCross(COLUMNS)
    assert masked(x_BK[:, None], x_BK[:, None]).shape == (samples, 1, COLUMNS)


def gated(p, x0, x):
    crossed = p["map.weight"] @ x + p["map.bias"]
    return x0 * crossed * torch.sigmoid(p["gate.weight"] @ x) + x


def test_a_gated_cross_is_that_of_gdcn():
    def dcn_v1(p, x0, x):
        """The formula that a widely used zoo prints for GDCN."""
        return x0 * (p["map.weight"][0] @ x) + p["map.bias"] + x

    def gate_of_all(p, x0, x):
        crossed = p["map.weight"] @ x + p["map.bias"]
        return (x0 * crossed + x) * torch.sigmoid(p["gate.weight"] @ x)

    def gate_of_first(p, x0, x):
        crossed = p["map.weight"] @ x + p["map.bias"]
        return x0 * crossed * torch.sigmoid(p["gate.weight"] @ x0) + x

    def bias_behind_gate(p, x0, x):
        gate = torch.sigmoid(p["gate.weight"] @ x)
        return x0 * (p["map.weight"] @ x * gate + p["map.bias"]) + x

    def doubled(p, x0, x):
        return 2 * (gated(p, x0, x) - x) + x

    faults = {
        "the formula of DCN": rows(dcn_v1),
        "the formula of DCN-V2, without a gate": rows(full),
        "the gate multiplies x, too": rows(gate_of_all),
        "the gate sees x0": rows(gate_of_first),
        "the bias passes the gate": rows(bias_behind_gate),
        "the gate is twice a sigmoid": rows(doubled),
    }
    check_model(GatedCross(COLUMNS), rows(gated), faults, pair())


def test_biases_start_at_zero_and_weights_with_the_deviation_of_xavier():
    torch.manual_seed(0)
    for layer in (
        VectorCrosses(40, 3),
        FullCross(40),
        LowRankCross(40, 8),
        MixtureCross(40, 8, 2),
        GatedCross(40),
        MaskedCross(40),
        QuadraticCross(10, 4, 3),
    ):
        biases = [v for name, v in layer.named_parameters() if name.endswith("bias")]
        assert biases and not any(bias.abs().sum() for bias in biases), type(layer).__name__
    assert FullCross(300).map.weight.std().item() == pytest.approx((2 / 600) ** 0.5, rel=0.02)
    mixed = MixtureCross(300, 100, 2)
    assert mixed.down.weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert mixed.inner.std().item() == pytest.approx(0.1, rel=0.02)


def test_layers_are_made_on_the_meta_device():
    with torch.device("meta"):
        for layer in (VectorCrosses(6, 3), MixtureCross(6, 2, 2), GatedCross(6), MaskedCross(6)):
            assert all(p.is_meta for p in layer.parameters())


def layer_norm(h, p):
    centred = h - h.mean()
    scaled = centred / (h.var(unbiased=False) + 1e-5).sqrt()
    return scaled * p["layer_norm.weight"] + p["layer_norm.bias"]


def masked(p, factor, x, mask=None):
    h = p["map.weight"] @ x
    other = h * layer_norm(h, p).relu() if mask is None else mask(h, p)
    return factor * (torch.cat([h, other]) + p["bias"]) + x


def by_head(layer):
    def of_all(p, factor_BHK, x_BHK):
        return torch.stack(
            [rows(layer)(p, factor, x) for factor, x in zip(factor_BHK, x_BHK, strict=True)]
        )

    return of_all


def test_a_masked_cross_is_that_of_fcn():
    def bias_before(p, factor, x):
        half = len(x) // 2
        h = p["map.weight"] @ x + p["bias"][:half]
        return factor * torch.cat([h, h * layer_norm(h, p).relu()]) + x

    def swapped(p, factor, x):
        h = p["map.weight"] @ x
        return factor * (torch.cat([h * layer_norm(h, p).relu(), h]) + p["bias"]) + x

    faults = {
        "the bias is added before the mask": by_head(bias_before),
        "the masked half comes first": by_head(swapped),
        "the mask without h": by_head(
            partial(masked, mask=lambda h, p: layer_norm(h, p).relu() + 0 * h)
        ),
        "the mask without layer norm": by_head(partial(masked, mask=lambda h, p: h * h.relu())),
        "the mask is a sigmoid": by_head(
            partial(masked, mask=lambda h, p: h * layer_norm(h, p).sigmoid())
        ),
        "h in both halves": by_head(partial(masked, mask=lambda h, p: h)),
    }
    inputs = [random_vectors(SAMPLES, 2, COLUMNS, seed=5), random_vectors(SAMPLES, 2, COLUMNS)]
    check_model(MaskedCross(COLUMNS, heads=2), by_head(masked), faults, inputs)


def test_a_batch_norm_before_a_mask_has_one_mean_of_each_head():
    layer = MaskedCross(COLUMNS, heads=2, layer_norm=False, batch_norm=True)

    def paper(p, factor_BHK, x_BHK, every_column=False):
        h_BHL = torch.einsum("lk,bhk->bhl", p["map.weight"], x_BHK)
        over = (0,) if every_column else (0, 2)
        mean = h_BHL.mean(over, keepdim=True)
        spread = (h_BHL.var(over, unbiased=False, keepdim=True) + 1e-5).sqrt()
        scale_H1 = p["batch_norm.weight"][:, None]
        shift_H1 = p["batch_norm.bias"][:, None]
        h_BHL = (h_BHL - mean) / spread * scale_H1 + shift_H1
        return factor_BHK * (torch.cat([h_BHL, h_BHL * h_BHL.relu()], 2) + p["bias"]) + x_BHK

    inputs = [random_vectors(SAMPLES, 2, COLUMNS, seed=5), random_vectors(SAMPLES, 2, COLUMNS)]
    faults = {"a mean of each column": partial(paper, every_column=True)}
    check_model(layer, paper, faults, inputs)


@pytest.mark.parametrize("exponential", [True, False])
def test_the_exponential_network_multiplies_its_own_input_and_the_linear_one_x0(exponential):
    def paper(p, first_BHK, own):
        x_BHK = first_BHK
        for number in range(3):
            start = f"{number}."
            of_layer = {n.removeprefix(start): v for n, v in p.items() if n.startswith(start)}
            x_BHK = by_head(masked)(of_layer, x_BHK if own else first_BHK, x_BHK)
        return x_BHK

    check_model(
        MaskedCrosses(lambda: MaskedCross(COLUMNS), 3, exponential),
        partial(paper, own=exponential),
        {"the other network": partial(paper, own=not exponential)},
        [random_vectors(SAMPLES, 1, COLUMNS)],
    )


FIELDS = 3
DIM = 4


def quadratic(
    p,
    x_BK,
    heads=1,
    activation=torch.relu,
    after=lambda x: x,
    residual=True,
    rows=2,
    normal=lambda p, mapped: mapped,
):
    """The Khatri-Rao product column by column."""
    columns = FIELDS * DIM
    mapped = [[row @ x_K for row in p["map.weight"]] for x_K in x_BK]
    mapped = normal(p, torch.stack([torch.stack(each) + p["map.bias"] for each in mapped]))
    samples = []
    for x_K, mapped_M in zip(x_BK, mapped, strict=True):
        order = [
            field * DIM + head * (DIM // heads) + c
            for head in range(heads)
            for field in range(FIELDS)
            for c in range(DIM // heads)
        ]
        out = []
        for k in range(columns):
            total = 0
            for r in range(rows):
                total = total + x_K[order[k]] * activation(mapped_M[r * columns + k])
            out.append(after(total) + (x_K[k] if residual else 0))
        samples.append(torch.stack(out))
    return torch.stack(samples)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_quadratic_cross_is_the_khatri_rao_product_of_qnn_alpha(heads):
    paper = partial(quadratic, heads=heads)
    faults = {
        "a Hadamard product of one row": partial(paper, rows=1),
        "no activation between": partial(paper, activation=lambda h: h),
        "the activation behind the product": partial(
            paper, activation=lambda h: h, after=torch.relu
        ),
        "x is not added": partial(paper, residual=False),
        "another order of columns": partial(quadratic, heads=3 - heads),
    }
    layer = QuadraticCross(FIELDS, DIM, 2, heads)
    check_model(layer, paper, faults, [random_vectors(3, FIELDS * DIM)])


def test_a_batch_norm_of_a_quadratic_cross_stands_before_the_relu_of_each_row():
    def normal(p, mapped_BM):
        spread_M = (p["batch_norm.running_var"] + 1e-5).sqrt()
        normal_BM = (mapped_BM - p["batch_norm.running_mean"]) / spread_M
        return normal_BM * p["batch_norm.weight"] + p["batch_norm.bias"]

    def behind(p, x_BK):
        rectified = partial(quadratic, activation=lambda h: h)
        return rectified(p, x_BK, normal=lambda p, mapped: normal(p, mapped.relu()))

    # Under the statistics of a batch, the bias before the batch norm has no gradient.
    layer = QuadraticCross(FIELDS, DIM, 2, batch_norm=True).eval()
    layer.batch_norm.running_mean.normal_(generator=torch.Generator().manual_seed(2))
    faults = {"no batch norm": quadratic, "a batch norm behind the ReLU": behind}
    check_model(layer, partial(quadratic, normal=normal), faults, [random_vectors(3, FIELDS * DIM)])


def test_dropouts_act_on_rows_and_outputs_in_training_only():
    torch.manual_seed(0)
    layer = QuadraticCross(2, 3, 4, dropout=0.5)
    x_BK = torch.ones(50, 6)
    assert 0.3 < (layer(x_BK) == 0).float().mean() < 0.7
    layer.dropout = torch.nn.Identity()
    assert not torch.equal(layer(x_BK), layer(x_BK))  # the dropout of rows
    assert not (layer(x_BK) == 0).any()
    layer.row_dropout = torch.nn.Identity()
    assert torch.equal(layer(x_BK), layer(x_BK))
    layer = QuadraticCross(2, 3, 4, dropout=0.5).eval()
    assert torch.equal(layer(x_BK), layer(x_BK))


def test_crosses_under_bf16_autocast_have_gradients_of_the_input_dtype():
    for layer in (FullCross(COLUMNS), LowRankCross(COLUMNS, 2), MixtureCross(COLUMNS, 2, 3)):
        x_BK = torch.randn(SAMPLES, COLUMNS, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            close = layer(x_BK, x_BK)
        close.float().sum().backward()
        assert x_BK.grad.dtype == torch.float32 and x_BK.grad.isfinite().all()
        torch.testing.assert_close(close.float(), layer(x_BK, x_BK), rtol=0.05, atol=0.05)
    layer = MaskedCross(COLUMNS)
    x_BHK = torch.randn(SAMPLES, 2, COLUMNS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        close = layer(x_BHK, x_BHK)
    close.float().sum().backward()
    assert x_BHK.grad.dtype == torch.float32
    torch.testing.assert_close(close.float(), layer(x_BHK, x_BHK), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layer", [FullCross, MaskedCross])
@pytest.mark.parametrize("own", [True, False])
def test_second_derivatives_are_those_of_finite_differences(layer, own):
    torch.manual_seed(7)
    cross = layer(4).double()
    names = [name for name, _ in cross.named_parameters()]
    first_BK = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x_BK = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def crossed(first_BK, x_BK, *parameters):
        held = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(cross, held, (x_BK if own else first_BK, x_BK))

    assert torch.autograd.gradgradcheck(crossed, (first_BK, x_BK, *cross.parameters()))


@pytest.mark.parametrize("layer", [FullCross, MaskedCross])
def test_several_gradients_at_once_are_those_of_one_after_another(layer):
    first, x = torch.randn(2, 3, COLUMNS)
    jacobian = partial(torch.autograd.functional.jacobian, layer(COLUMNS), (first, x))
    torch.testing.assert_close(jacobian(vectorize=True), jacobian())
