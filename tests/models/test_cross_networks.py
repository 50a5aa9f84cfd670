"""Cross networks as whole models: against transcriptions of their papers and known faults, their
losses, a hidden model, settings that are refused.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from transcription import check_model, pooled, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.dcn import DCN, EDCN, GDCN, DCNv2
from recapp.models.fcn import FCN, QNNAlpha, logit_of_mean
from recapp.models.layers import FieldVectors
from recapp.models.published_dlrm import DLRM_DCN
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor

DIM = 4
SPARSE = ["a", "b"]
DENSE = 2
TABLES = "fields.embedding_bag_collection"
COLUMNS = DENSE + len(SPARSE) * DIM


def tables(dim=DIM):
    return tables_of(dict.fromkeys(SPARSE, dim))


def samples(**more):
    return samples_of(SPARSE, dense=DENSE, **more)


def concatenated(p, batch, where=TABLES):
    """Return x0 of numbers and pooled vectors side by side."""
    return torch.cat([batch.dense_BI, *(pooled(p, batch, name, where) for name in SPARSE)], 1)


def vectors(p, batch):
    """Return the vectors of all fields, each [B, D]: numbers times their vectors, then tables."""
    scaled = [
        number_B[:, None] * vector_D
        for number_B, vector_D in zip(
            batch.dense_BI.unbind(1), p["fields.number_vectors_ID"], strict=True
        )
    ]
    return [*scaled, *(pooled(p, batch, name, TABLES) for name in SPARSE)]


def under(p, start):
    """Return the parameters below a module, by their names there."""
    return {name.removeprefix(start): v for name, v in p.items() if name.startswith(start)}


def tower(p, x_BK, last_relu=True):
    weights = [name for name in p if name.endswith("weight")]
    for number, name in enumerate(weights, 1):
        x_BK = x_BK @ p[name].T + p[name.replace("weight", "bias")]
        if last_relu or number < len(weights):
            x_BK = x_BK.clamp(min=0)
    return x_BK


def joined(p, *parts_BK):
    return torch.cat(parts_BK, 1) @ p["logit.weight"][0] + p["logit.bias"]


def parallel(p, first_BK, crossed_BK):
    return joined(under(p, "logit."), crossed_BK, tower(under(p, "logit.tower."), first_BK))


def stacked(p, first_BK, crossed_BK):
    return joined(under(p, "logit."), tower(under(p, "logit.tower."), crossed_BK))


def dcn(p, batch, join=parallel, layers=3):
    first_BK = concatenated(p, batch)
    x_BK = first_BK
    for layer in range(layers):
        w_K = p["logit.crosses.weight"][layer]
        x_BK = first_BK * (x_BK @ w_K)[:, None] + p["logit.crosses.bias"][layer] + x_BK
    return join(p, first_BK, x_BK)


def test_dcn_is_a_cross_network_beside_a_tower():
    model = DCN(tables(), DENSE, cross_layers=3, layers=[5, COLUMNS], batch_norm=False)
    faults = {
        "the tower is behind the cross network": lambda p, b: joined_alone(p, dcn_stacked(p, b)),
        "a layer too few": partial(dcn, layers=2),
    }
    check_model(model, dcn, faults, [samples()])


def dcn_stacked(p, batch):
    return dcn(p, batch, join=lambda p, _, crossed_BK: tower(under(p, "logit.tower."), crossed_BK))


def joined_alone(p, x_BK):
    return x_BK @ p["logit.logit.weight"][0, : x_BK.shape[1]] + p["logit.logit.bias"]


def dcnv2(p, batch, kind, join):
    first_BK = concatenated(p, batch)
    x_BK = first_BK
    for layer in range(2):
        own = under(p, f"logit.crosses.{layer}.")
        if kind == "full":
            y_BK = x_BK @ own["map.weight"].T + own["map.bias"]
        elif kind == "low_rank":
            y_BK = x_BK @ own["down.weight"].T @ own["up.weight"].T + own["up.bias"]
        else:
            y_BK = own["up.bias"]
            shares_BE = (x_BK @ own["gate.weight"].T).softmax(1)
            for e, share_B in enumerate(shares_BE.unbind(1)):
                of_expert = slice(3 * e, 3 * e + 3)
                low_BR = torch.tanh(x_BK @ own["down.weight"][of_expert].T)
                low_BR = torch.tanh(low_BR @ own["inner"][e].T)
                y_BK = y_BK + share_B[:, None] * (low_BR @ own["up.weight"][:, of_expert].T)
        x_BK = first_BK * y_BK + x_BK
    return join(p, first_BK, x_BK)


JOINS = {"parallel": parallel, "stacked": stacked}


@pytest.mark.parametrize("structure", JOINS)
@pytest.mark.parametrize("cross", ["full", "low_rank", "mixture"])
def test_dcnv2_crosses_beside_or_below_a_tower(cross, structure):
    model = DCNv2(tables(), DENSE, cross, 2, 3, 2, structure, [COLUMNS])
    paper = partial(dcnv2, kind=cross, join=JOINS[structure])

    def without_tower(p, batch):
        return dcnv2(p, batch, cross, lambda p, _, crossed_BK: joined_alone(p, crossed_BK))

    check_model(model, paper, {"no tower": without_tower}, [samples()])


@pytest.mark.parametrize("structure", JOINS)
@pytest.mark.parametrize("make", [DCNv2, GDCN])
def test_without_a_tower_the_cross_network_makes_the_logit(make, structure):
    model = make(tables(), DENSE, structure=structure, layers=[])
    assert not any("tower" in name for name, _ in model.named_parameters())
    model.double()
    assert model(samples()).shape == (6,)
    assert DCN(tables(), DENSE, layers=[]).double()(samples()).shape == (6,)


def test_gdcn_gates_the_crosses_of_field_vectors():
    def paper(p, batch, gate=torch.sigmoid):
        first_BK = torch.cat(vectors(p, batch), 1)
        x_BK = first_BK
        for layer in range(2):
            own = under(p, f"logit.crosses.{layer}.")
            crossed_BK = first_BK * (x_BK @ own["map.weight"].T + own["map.bias"])
            x_BK = crossed_BK * gate(x_BK @ own["gate.weight"].T) + x_BK
        return parallel(p, first_BK, x_BK)

    model = GDCN(tables(), DENSE, cross_layers=2, layers=[5])
    check_model(model, paper, {"no gate": partial(paper, gate=torch.ones_like)}, [samples()])


def normalised(x_BK, p):
    centred_BK = x_BK - x_BK.mean(0)
    return centred_BK / (centred_BK.square().mean(0) + 1e-5).sqrt() * p["weight"] + p["bias"]


def edcn(p, batch, bridge, temperature=2.0, own_attention=True, first=True):
    shared_BK = torch.cat(vectors(p, batch), 1)
    inputs = []
    for layer in range(2):
        regulation = under(p, f"regulations.{layer}.")
        inputs = []
        for side in range(2):
            share_F = (regulation["weight"][side] / temperature).softmax(0)
            parts = shared_BK.split(DIM, 1)
            x_BK = torch.cat([g * part for g, part in zip(share_F, parts, strict=True)], 1)
            norm = under(regulation, f"norms.{side}.")
            inputs.append(normalised(x_BK, norm) if norm else x_BK)
        cross_BK, deep_BK = inputs
        if layer == 0 or not first:
            first_BK = cross_BK
        own = under(p, f"crosses.{layer}.")
        dot_B1 = cross_BK @ own["weight"].T
        cross_BK = first_BK * dot_B1 + own["bias"] + cross_BK
        deep_BK = tower(under(p, f"tower.{layer}."), deep_BK)
        own = under(p, f"bridges.{layer}.")
        shared_BK = bridged(own, bridge, cross_BK, deep_BK, own_attention)
    return joined(p, cross_BK, deep_BK, shared_BK)


def bridged(p, bridge, cross_BK, deep_BK, own_attention):
    if bridge == "hadamard_product":
        return cross_BK * deep_BK
    if bridge == "pointwise_addition":
        return cross_BK + deep_BK
    if bridge == "concatenation":
        return tower(under(p, "map."), torch.cat([cross_BK, deep_BK], 1))
    total = 0
    for side, x_BK in enumerate((cross_BK, deep_BK)):
        own = under(p, f"attention.{side if own_attention else 0}.")
        h_BK = (x_BK @ own["0.weight"].T + own["0.bias"]).clamp(min=0)
        total = total + (h_BK @ own["2.weight"].T).softmax(1) * x_BK
    return total


BRIDGES = ["hadamard_product", "pointwise_addition", "concatenation", "attention_pooling"]


@pytest.mark.parametrize("bridge", BRIDGES)
def test_edcn_bridges_and_regulates_after_each_layer(bridge):
    # a batch norm behind a sum takes the gradient of biases, and the test would say nothing
    batch_norm = bridge == "hadamard_product"
    model = EDCN(tables(), DENSE, 2, bridge, temperature=2.0, batch_norm=batch_norm)
    faults = {
        "no temperature": partial(edcn, bridge=bridge, temperature=1.0),
        "each layer crosses with its own input": partial(edcn, bridge=bridge, first=False),
    }
    if bridge == "attention_pooling":
        faults["one attention for both"] = partial(edcn, bridge=bridge, own_attention=False)
    check_model(model, partial(edcn, bridge=bridge), faults, [samples()])


def test_dlrm_dcn_crosses_the_bottom_output_with_all_vectors():
    def paper(p, batch, residual=True):
        bottom_BD = tower(under(p, "bottom."), batch.dense_BI)
        where = "embedding_bag_collection"
        first_BK = torch.cat([bottom_BD, *(pooled(p, batch, name, where) for name in SPARSE)], 1)
        x_BK = first_BK
        for layer in range(2):
            own = under(p, f"crosses.{layer}.")
            y_BK = x_BK @ own["down.weight"].T @ own["up.weight"].T + own["up.bias"]
            x_BK = first_BK * y_BK + (x_BK if residual else 0)
        return tower(under(p, "top."), x_BK, last_relu=False)[:, 0]

    model = DLRM_DCN(tables(), DENSE, [5, 3], [6, 1], cross_layers=2, rank=2)
    check_model(model, paper, {"x is not added": partial(paper, residual=False)}, [samples()])
    alone = DLRM_DCN(tables(), 0, [5, 3], [6, 1], cross_layers=2, rank=2).double()
    assert alone(samples_of(SPARSE)).shape == (6,)
    with pytest.raises(ConfigError, match=r"made for 0 dense features and got a batch of shape"):
        alone(samples())


def fcn(p, batch, heads, mean=True, halves=True, swapped=False):
    of_fields = vectors(p, batch)
    width = DIM // heads
    logits = {}
    for name, layers in {"exponential": 2, "linear": 3}.items():
        of_heads = []
        for head in range(heads):
            own = [v_BD[:, head * width : (head + 1) * width] for v_BD in of_fields]
            first_BK = torch.cat(own, 1)
            if halves:
                low = [v_BD[:, : width // 2] for v_BD in own]
                high = [v_BD[:, width // 2 :] for v_BD in own]
                first_BK = torch.cat([*low, *high], 1)
            x_BK = first_BK
            for layer in range(layers):
                of_layer = under(p, f"crosses.{name}.{layer}.")
                factor_BK = x_BK if (name == "exponential") != swapped else first_BK
                x_BK = masked(of_layer, factor_BK, x_BK)
            of_head = under(p, f"logits.{name}.")
            of_heads.append(x_BK @ of_head["weight"][0] + of_head["bias"])
        logits[name] = sum(of_heads) / heads
    whole = logits["exponential"] + logits["linear"]
    return {"logit": whole / 2 if mean else whole, **logits}


def masked(p, factor_BK, x_BK):
    h_BL = x_BK @ p["map.weight"].T
    centred_BL = h_BL - h_BL.mean(1, keepdim=True)
    spread_B1 = (centred_BL.square().mean(1, keepdim=True) + 1e-5).sqrt()
    norm_BL = centred_BL / spread_B1 * p["layer_norm.weight"] + p["layer_norm.bias"]
    mask_BK = torch.cat([h_BL, h_BL * norm_BL.clamp(min=0)], 1)
    return factor_BK * (mask_BK + p["bias"]) + x_BK


def made_fcn(heads=1, dropout=0.0):
    return FCN(tables(), DENSE, 2, 3, dropout, dropout, heads)


@pytest.mark.parametrize("heads", [1, 2])
def test_fcn_is_the_mean_of_an_exponential_and_a_linear_network(heads):
    paper = partial(fcn, heads=heads)
    faults = {
        "the sum of the logits": partial(paper, mean=False),
        "fields are not cut into halves": partial(paper, halves=False),
        "the networks are exchanged": partial(paper, swapped=True),
    }
    # parameters of .5 would let the exponential network reach 1e9
    check_model(made_fcn(heads), paper, faults, [samples()], spread=0.2)


def bce(logits_B, labels_B):
    """The cross entropy, without weights."""
    return cross_entropy(logits_B, labels_B.to(logits_B.dtype))


def gradient(model, batch, extra):
    """Return the gradients of the loss with `extra(outputs, loss)` added, as one vector."""
    outputs = model(batch)
    loss_of = partial(bce, labels_B=batch.labels_B)
    total = loss_of(outputs["logit"]) + extra(outputs, loss_of)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


def test_tri_bce_weights_the_loss_of_each_network_by_its_excess_and_is_not_detached():
    torch.manual_seed(3)
    model = made_fcn().double()
    batch = samples(samples=40)
    batch.labels_B.bernoulli_(0.5)

    def own(outputs, loss):
        extra = model.extra_losses(outputs, batch, loss)
        assert set(extra) == {"exponential_loss", "linear_loss"}
        return sum(extra.values())

    def paper(outputs, loss, detach=False):
        whole = loss(outputs["logit"])
        total = 0
        for name in ("exponential", "linear"):
            part = loss(outputs[name])
            weight = torch.clamp(part - whole, min=0)
            total = total + (weight.detach() if detach else weight) * part
        return total

    torch.testing.assert_close(gradient(model, batch, own), gradient(model, batch, paper))
    faults = {
        "weights are detached": partial(paper, detach=True),
        "the extra loss never runs": lambda outputs, loss: 0,
        "weights of 1": lambda outputs, loss: loss(outputs["exponential"]),
    }
    right = gradient(model, batch, own)
    for what, fault in faults.items():
        assert (gradient(model, batch, fault) - right).abs().max() > 1e-3, what


def qnn(p, batch, logits_only=True):
    x_BK = torch.cat(vectors(p, batch), 1)
    for layer in range(2):
        own = under(p, f"layers.{layer}.")
        rows_BN = (x_BK @ own["map.weight"].T + own["map.bias"]).clamp(min=0)
        x_BK = sum(x_BK * row_BK for row_BK in rows_BN.chunk(3, 1)) + x_BK
    logits_B = x_BK @ p["logit.weight"][0] + p["logit.bias"]
    return {"logit": logits_B, "first": logits_B, "second": logits_B}


def test_qnn_alpha_is_quadratic_layers_and_a_linear_one():
    def one_layer(p, batch):
        return qnn({**p, "layers.1.map.weight": p["layers.1.map.weight"] * 0}, batch)

    model = QNNAlpha(tables(), DENSE, quadratic_layers=2, rows=3, dropout=0.0)
    check_model(model, qnn, {"a layer without weights": one_layer}, [samples()], spread=0.3)


def test_the_probability_of_two_passes_is_the_mean_of_their_probabilities():
    first_B = torch.tensor([0.0, 2.0, -50.0, 300.0, -4.0], dtype=torch.float64)
    second_B = torch.tensor([0.0, -1.0, 40.0, 310.0, -3.0], dtype=torch.float64)
    mean_B = (first_B.sigmoid() + second_B.sigmoid()) / 2
    found_B = logit_of_mean(first_B, second_B)
    torch.testing.assert_close(found_B.sigmoid(), mean_B)
    assert found_B[3] > 300, "the logit of a probability near 1 must not overflow"
    assert (((first_B + second_B) / 2).sigmoid() - mean_B).abs().max() > 0.1, (
        "the mean of logits would be another probability"
    )


def test_the_self_ensemble_loss_takes_the_mean_as_a_constant():
    torch.manual_seed(3)
    batch = samples(samples=40)
    batch.labels_B.bernoulli_(0.5)
    model = QNNAlpha(tables(), DENSE, 2, 3, dropout=0.3).double()

    def of(extra):
        torch.manual_seed(5)  # the same dropouts
        return gradient(model, batch, extra)

    def own(outputs, loss):
        assert not torch.equal(outputs["first"], outputs["second"]), "two passes"
        return sum(model.extra_losses(outputs, batch, loss).values())

    def paper(outputs, loss, detach=True):
        passes = [outputs["first"].sigmoid(), outputs["second"].sigmoid()]
        mean_B = (passes[0] + passes[1]) / 2
        target_B = mean_B.detach() if detach else mean_B
        return sum(
            -(target_B * p_B.log() + (1 - target_B) * (1 - p_B).log()).mean() for p_B in passes
        )

    right = of(own)
    torch.testing.assert_close(right, of(paper))
    faults = {
        "the mean is not a constant": partial(paper, detach=False),
        "the extra loss never runs": lambda outputs, loss: 0,
        "the passes are compared with the labels": lambda outputs, loss: (
            loss(outputs["first"]) + loss(outputs["second"])
        ),
    }
    for what, fault in faults.items():
        assert (of(fault) - right).abs().max() > 1e-3, what


def test_the_self_ensemble_loss_uses_the_weights_of_samples():
    batch = samples(samples=4)
    weights_B = torch.tensor([0.0, 1.0, 2.0, 0.5])
    batch.weights["label"] = weights_B
    model = QNNAlpha(tables(), DENSE, 1, 2).double()
    outputs = model(batch)
    extra = model.extra_losses(outputs, batch, bce)["first_pass_loss"]
    mean_B = outputs["logit"].sigmoid()
    each_B = cross_entropy(outputs["first"], mean_B, reduction="none")
    torch.testing.assert_close(extra, (each_B * weights_B).sum() / 4)


@pytest.mark.parametrize("make", [made_fcn, lambda **more: QNNAlpha(tables(), DENSE, **more)])
def test_evaluation_has_the_logits_alone(make):
    model = make(dropout=0.2).double()
    assert set(model(samples())) > {"logit"}
    model.eval()
    assert model(samples()).shape == (6,)
    assert model(samples(samples=1)).shape == (1,)


def test_without_dropout_qnn_alpha_computes_one_pass_and_its_loss_changes_no_gradient():
    model = QNNAlpha(tables(), DENSE, 1, 2, dropout=0.0).double()
    batch = samples()
    outputs = model(batch)
    assert outputs["first"] is outputs["second"]
    torch.testing.assert_close(outputs["logit"], outputs["first"])
    extra = sum(model.extra_losses(outputs, batch, bce).values())
    gradients = torch.autograd.grad(extra, [model.logit.weight])
    assert gradients[0].abs().max() < 1e-12


def test_further_passes_and_heads_are_counted_as_operations():
    two = QNNAlpha(tables(), DENSE, 1, 2)
    columns = (DENSE + 2) * DIM
    weights = columns * 2 * columns + 2 * columns + columns + 1
    assert two.flops_per_sample == 6.0 * weights
    assert QNNAlpha(tables(), DENSE, 1, 2, dropout=0.0).flops_per_sample == 0
    heads = made_fcn(heads=2)
    of_crosses = sum(p.numel() for p in heads.crosses.parameters())
    assert heads.flops_per_sample == 6.0 * of_crosses
    assert made_fcn().flops_per_sample == 0


IDS = 4
"""Ids of each of three fields in the hidden model, half of them with the sign -1."""
CLICKS = 0.9
"""The rate of clicks where the product of the three signs is 1; elsewhere it is the rest of 1."""
BEST = CLICKS**2 + CLICKS * (1 - CLICKS)
"""The AUC of the hidden rates themselves: right pairs, and half of the equal ones."""


def hidden():
    """Return all samples of three fields, and the hidden rate of each: a product of signs."""
    ids_NF = torch.cartesian_prod(*[torch.arange(IDS)] * 3)
    rate_N = torch.where((ids_NF % 2).sum(1) % 2 == 0, CLICKS, 1 - CLICKS)
    names = ["a", "b", "c"]
    lengths = torch.ones(ids_NF.numel(), dtype=torch.int64)
    sparse = KeyedJaggedTensor(names, ids_NF.T.flatten(), lengths=lengths)
    batch = Batch(torch.empty(len(ids_NF), 0, dtype=torch.float64), sparse, rate_N)
    return tables_of(dict.fromkeys(names, 4), rows=IDS), batch


def auc(logits_N, rate_N):
    """Return the expected AUC of clicks with these rates."""
    logits_N = logits_N.round(decimals=4)  # sums of other orders are equal
    right_NN = (logits_N[:, None] > logits_N).double()
    right_NN = right_NN + (logits_N[:, None] == logits_N).double() / 2
    weight_NN = rate_N[:, None].double() * (1 - rate_N.double())
    return float((right_NN * weight_NN).sum() / weight_NN.sum())


def learnt(model, batch, steps=150):
    """Train with Adam on all samples at once, and return the AUC."""
    model.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for table in model.fields.embedding_bag_collection.parameters():
            table.normal_(0, 0.5)
    adam = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(steps):
        adam.zero_grad()
        cross_entropy(model.eval()(batch), batch.labels_B.double()).backward()
        adam.step()
    return auc(model(batch).detach(), batch.labels_B)


class LinearInIds(torch.nn.Module):
    """Logistic regression of ids: the logit is linear in the vectors."""

    def __init__(self, tables):
        super().__init__()
        self.fields = FieldVectors(tables, 0)
        self.logit = torch.nn.Linear(self.fields.columns, 1)

    def forward(self, batch):
        return self.logit(self.fields.flat(batch))[:, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda tables: DCNv2(tables, 0, cross_layers=2, layers=[]),
        lambda tables: DCNv2(tables, 0, "low_rank", 2, rank=6, layers=[]),
        lambda tables: GDCN(tables, 0, cross_layers=2, layers=[]),
        lambda tables: FCN(tables, 0, 2, 2),
        lambda tables: QNNAlpha(tables, 0, 2, 2),
    ],
    ids=["full", "low_rank", "gated", "fcn", "qnn_alpha"],
)
def test_a_hidden_product_of_three_fields_is_found(make):
    torch.manual_seed(0)
    found = learnt(make(hidden()[0]), hidden()[1])
    assert found > BEST - 0.001, f"{found} of {BEST}"


def test_a_hidden_product_of_three_fields_is_not_found_by_models_of_lower_order():
    tables, batch = hidden()
    torch.manual_seed(0)
    assert learnt(LinearInIds(tables), batch) < 0.55
    assert learnt(DCNv2(hidden()[0], 0, cross_layers=1, layers=[]), batch) < 0.6


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (DCN, {"cross_layers": 0}, "model.cross_layers=0: must be a whole number of at "),
        (DCN, {"layers": [8, 0]}, "model.layers=[8, 0]: 0 is no width"),
        (DCN, {"dropout": 1.0}, "model.dropout=1.0: must be at least 0 and less than 1"),
        (DCN, {"numbers": "vector"}, "model.numbers=vector: did you mean vectors?"),
        (DCNv2, {"cross": "low-rank"}, "model.cross=low-rank: did you mean low_rank?"),
        (DCNv2, {"rank": 1.5}, "model.rank=1.5: must be a whole number"),
        (DCNv2, {"experts": True}, "model.experts=True: must be a whole number"),
        (DCNv2, {"structure": "both"}, "model.structure=both: known: parallel, stacked"),
        (GDCN, {"layers": 400}, "model.layers=400: must be a list"),
        (GDCN, {"batch_norm": "no"}, "model.batch_norm=no: must be true or false"),
        (EDCN, {"bridge": "sum"}, "model.bridge=sum: known: attention_pooling"),
        (EDCN, {"temperature": 0}, "model.temperature=0: must be a number above 0"),
        (DLRM_DCN, {"top_layers": [8, 2]}, "model.top_layers=[8, 2]: the last layer"),
        (DLRM_DCN, {"bottom_layers": []}, "model.bottom_layers=[]: must be a list"),
        (FCN, {"heads": 0}, "model.heads=0: must be a whole number"),
        (
            FCN,
            {"heads": 4},
            "model.heads=4: FCN cuts each vector into 2 halves for each head, so tables.dim=4 must "
            "be a multiple of 8",
        ),
        (FCN, {"linear_dropout": -0.1}, "model.linear_dropout=-0.1: must be at least 0"),
        (QNNAlpha, {"rows": 0}, "model.rows=0: must be a whole number"),
        (QNNAlpha, {"heads": 3}, "model.heads=3: must divide tables.dim=4: 1, 2, 4 do"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(model, settings, message):
    bottom = {"bottom_layers": [4]} if model is DLRM_DCN else {}
    with pytest.raises(ConfigError) as error:
        model(tables(), DENSE, **{**bottom, **settings})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (EDCN, {}),
        (FCN, {}),
        (QNNAlpha, {}),
        (GDCN, {"numbers": "vectors"}),
    ],
)
def test_tables_of_several_dims_are_refused_where_fields_need_one(model, settings):
    with pytest.raises(ConfigError, match=r"takes vectors of one dim, and these have 4, 8"):
        model(tables_of({"a": 4, "b": 8}), DENSE, **settings)


def test_cross_networks_of_columns_take_tables_of_any_dims():
    mixed = tables_of({"a": 3, "b": 5})
    for make in (DCN, DCNv2, partial(GDCN, numbers="concat"), partial(DLRM_DCN, bottom_layers=[4])):
        model = make(mixed, DENSE).double()
        assert model(samples()).shape == (6,)
