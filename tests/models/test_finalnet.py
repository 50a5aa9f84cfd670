"""FinalNet against the formulas of its paper and the authors' code, its losses, and forms that
differ from it.
"""

import pytest
import torch
from formulas import fields_of, linear, relu
from transcription import check_model, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.gated import FieldGate, FinalNet
from recapp.models.layers import FastDropout

FEATURES = ("a", "b")


def factorised(p, name, input_BK, residual, kept=lambda first, second: second):
    both_BW = linear(p, f"{name}.both", input_BK)
    half = both_BW.shape[1] // 2
    second, first = both_BW[:, :half], both_BW[:, half:]
    linear_BW = kept(first, second)
    product = first * second
    return torch.cat([linear_BW, product], 1) if residual == "concat" else linear_BW + product


def normalised(p, name, input_BW):
    mean_W = input_BW.sum(0) / len(input_BW)
    variance_W = ((input_BW - mean_W) ** 2).sum(0) / len(input_BW)
    scaled_BW = (input_BW - mean_W) / torch.sqrt(variance_W + 1e-5)
    return scaled_BW * p[f"{name}.weight"] + p[f"{name}.bias"]


def block(p, name, input_BK, layers=2, residual="concat", normal=normalised, **form):
    for layer in range(layers):
        input_BK = factorised(p, f"{name}.{3 * layer}", input_BK, residual, **form)
        input_BK = relu(normal(p, f"{name}.{3 * layer + 1}", input_BK))
    return linear(p, f"{name}.{3 * layers}", input_BK)[:, 0]


def gated(p, fields):
    """Return the fields, and the fields times gates; the gate of a column reads that column."""
    made = []
    for m, e_BD in enumerate(fields):
        gate_BD = sum(p["gate.gate.weight"][m, k] * fields[k] for k in range(len(fields)))
        made.append(e_BD * (gate_BD + p["gate.gate.bias"][m]))
    return [*fields, *made]


def without_bias(p, fields):
    return gated({**p, "gate.gate.bias": 0 * p["gate.gate.bias"]}, fields)


def finalnet(p, batch, gate=None, mean=True, **form):
    fields = fields_of(p, batch, FEATURES)
    flat_BK = torch.cat(fields, 1)
    first_B = block(p, "first", torch.cat(gate(p, fields), 1) if gate else flat_BK, **form)
    second_B = block(p, "second", flat_BK, **form)
    both_B = first_B + second_B
    return {"logit": both_B / 2 if mean else both_B, "first": first_B, "second": second_B}


def model(**settings):
    tables = tables_of(dict.fromkeys(FEATURES, 3))
    return FinalNet(
        tables,
        2,
        **({"first_layers": [6, 4], "second_layers": [4, 6], "first_dropout": 0.0} | settings),
    )


@pytest.mark.parametrize("residual", ["concat", "sum"])
def test_two_blocks_are_the_papers(residual):
    faults = {
        "the sum of both blocks": {"mean": False},
        "no normalisation over the batch": {"normal": lambda p, name, input_BW: input_BW},
        "products alone": {"kept": lambda first, second: 0 * second},
        "h1 is kept": {"kept": lambda first, second: first},
    }
    check_model(
        model(residual=residual),
        lambda p, x: finalnet(p, x, residual=residual),
        {
            what: lambda p, x, form=form: finalnet(p, x, residual=residual, **form)
            for what, form in faults.items()
        },
        [samples_of(FEATURES, dense=2)],
    )


def test_gates_feed_the_first_block_beside_the_fields():
    faults = {
        "no gates": lambda p, fields: fields + fields,
        "gates have no bias": without_bias,
        "gated fields stand first": lambda p, fields: gated(p, fields)[::-1],
    }
    check_model(
        model(gate=True),
        lambda p, x: finalnet(p, x, gate=gated),
        {what: lambda p, x, gate=gate: finalnet(p, x, gate=gate) for what, gate in faults.items()},
        [samples_of(FEATURES, dense=2)],
    )


def test_gates_start_at_one():
    gate = FieldGate(3)
    assert gate.gate.weight.abs().sum() == 0
    fields_BFD = torch.randn(2, 3, 4)
    assert torch.equal(gate(fields_BFD), torch.cat([fields_BFD, fields_BFD], 1))


def entropy(logit_B, target_B):
    p_B = 1 / (1 + torch.exp(-logit_B))
    each_B = -(target_B * torch.log(p_B) + (1 - target_B) * torch.log(1 - p_B))
    return each_B.sum() / len(logit_B)


def gradients(made, batch, extra):
    made.zero_grad()
    outputs = made(batch)
    total = entropy(outputs["logit"], batch.labels_B.double())
    for loss in extra(outputs).values():
        total = total + loss
    total.backward()
    return torch.cat([p.grad.flatten() for p in made.parameters()])


def test_each_block_learns_the_mean_whose_gradient_stays_out():
    torch.manual_seed(1)
    made = model().double()
    batch = samples_of(FEATURES, dense=2)

    def paper(outputs, detach=True):
        mean_B = 1 / (1 + torch.exp(-outputs["logit"]))
        mean_B = mean_B.detach() if detach else mean_B
        return {name: entropy(outputs[name], mean_B) for name in ("first", "second")}

    found = made.extra_losses(made(batch), batch, loss=None)
    assert list(found) == ["first_block", "second_block"]
    for own, expected in zip(found.values(), paper(made(batch)).values(), strict=True):
        torch.testing.assert_close(own, expected)
    own = gradients(made, batch, lambda outputs: made.extra_losses(outputs, batch, None))
    torch.testing.assert_close(own, gradients(made, batch, paper))
    never_added = gradients(made, batch, lambda outputs: {})
    not_detached = gradients(made, batch, lambda outputs: paper(outputs, detach=False))
    for fault in (never_added, not_detached):
        assert (own - fault).abs().max() > 1e-3 * own.abs().max()


def test_sample_weights_multiply_the_losses_of_blocks():
    made = model().double()
    batch = samples_of(FEATURES, dense=2)
    outputs = made(batch)
    plain = made.extra_losses(outputs, batch, None)
    batch.weights["label"] = torch.full((batch.rows,), 2.0, dtype=torch.float64)
    for name, loss in made.extra_losses(outputs, batch, None).items():
        torch.testing.assert_close(loss, 2 * plain[name])


def test_one_block_has_no_further_loss():
    made = model(second_layers=[])
    outputs = {"logit": torch.zeros(2)}
    assert made.extra_losses(outputs, None, None) == {}
    assert list(made.double()(samples_of(FEATURES, dense=2))) == ["logit"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"first_layers": [6, 3]}, r"model.first_layers=\[6, 3\]: 3 is odd, and model.residual="),
        ({"residual": "none"}, "model.residual=none: "),
        ({"first_layers": []}, r"model.first_layers=\[\]: must be a list"),
        ({"activation": "rleu"}, "model.activation=rleu: did you mean relu"),
        ({"first_dropout": 1}, "model.first_dropout=1: must be at least 0 and less than 1"),
        ({"second_dropout": -1}, "model.second_dropout=-1: must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)


def shares(block):
    return [each.p for each in block if isinstance(each, FastDropout)]


def test_each_block_has_its_own_dropout_behind_each_layer():
    made = model(first_dropout=0.1, second_dropout=0.4)
    assert (shares(made.first), shares(made.second)) == ([0.1, 0.1], [0.4, 0.4])
    assert [type(each).__name__ for each in made.first[:4]] == [
        *("FactorisedLayer", "BatchNorm", "ReLU", "FastDropout")
    ]


def test_odd_widths_are_right_for_a_sum():
    assert model(first_layers=[3], residual="sum").first[0].both.out_features == 6
