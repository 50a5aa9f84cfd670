"""FinalMLP against the equations of arXiv 2304.00902, and against forms that differ from it."""

import pytest
import torch
from formulas import fields_of, relu, tower
from transcription import check_model, pooled, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.gated import FinalMLP

FEATURES = ("a", "b")
HEADS = 2


def gate(p, name, context_BC, factor=2):
    scores_BK = tower(p, f"{name}_gate.score", context_BC)
    return factor / (1 + torch.exp(-scores_BK))


def context(p, batch, name, shared=False):
    """Return what a gate reads: numbers times own vectors, own tables, or a learnt vector."""
    path = f"{name}_context"
    if f"{path}.constant_1D" in p:
        return p[f"{path}.constant_1D"].expand(batch.rows, -1)
    vectors = p.get(f"{path}.number_vectors_ID", ())
    parts = [batch.dense_BI[:, [i]] * vector_D for i, vector_D in enumerate(vectors)]
    own = f"{path}.tables.embedding_bags."
    for key in p:
        if key.startswith(own):
            feature = key.removeprefix(own).removesuffix(".weight")
            collection = "fields.embedding_bag_collection" if shared else f"{path}.tables"
            parts.append(pooled(p, batch, feature, collection))
    return torch.cat(parts, 1)


def finalmlp(p, batch, factor=2, shared=False, heads=HEADS, products=True):
    flat_BK = torch.cat(fields_of(p, batch, FEATURES), 1)
    x_BX, y_BY = (
        tower(
            p,
            name,
            flat_BK * gate(p, name, context(p, batch, name, shared), factor),
            relu,
            last=True,
        )
        for name in ("first", "second")
    )
    both_BK = torch.cat([x_BX, y_BY], 1)
    logits_B = (both_BK * p["fusion.linear.weight"][0]).sum(1) + p["fusion.linear.bias"][0]
    weight_HXY = p["fusion.weight_HXY"]
    for h in range(heads if products else 0):
        for i in range(weight_HXY.shape[1]):
            for j in range(weight_HXY.shape[2]):
                x_B = x_BX[:, h * weight_HXY.shape[1] + i]
                y_B = y_BY[:, h * weight_HXY.shape[2] + j]
                logits_B = logits_B + x_B * weight_HXY[h, i, j] * y_B
    return logits_B


def model(**settings):
    sizes = {"first_layers": [5, 4], "second_layers": [6], "heads": HEADS, "gate_layers": [3]}
    sizes |= {"first_dropout": 0.0, "second_dropout": 0.0}
    sizes |= {"first_batch_norm": False, "second_batch_norm": False}
    return FinalMLP(tables_of(dict.fromkeys(FEATURES, 3)), 2, **(sizes | settings))


def form(**changes):
    return lambda p, x: finalmlp(p, x, **changes)


def test_gates_and_fusion_are_the_papers():
    faults = {
        "gates without the factor 2": form(factor=1),
        "the gate reads the table of the fields": form(shared=True),
        "one head is forgotten": form(heads=1),
        "no products": form(products=False),
    }
    made = model(second_context=tables_of({"a": 3}))
    check_model(made, finalmlp, faults, [samples_of(FEATURES, dense=2)])


def test_a_gate_without_context_reads_a_learnt_vector():
    check_model(
        model(first_numbers=False, gate_layers=[8]),
        finalmlp,
        {"gates without the factor 2": form(factor=1)},
        [samples_of(FEATURES, dense=2)],
    )


def test_numbers_and_tables_are_one_context():
    made = model(first_context=tables_of({"b": 5}), second_numbers=True)
    check_model(made, finalmlp, {}, [samples_of(FEATURES, dense=2)])
    assert (made.first_context.columns, made.second_context.columns) == (2 * 3 + 5, 2 * 3)


def test_gates_start_near_one():
    torch.manual_seed(0)
    made = FinalMLP(tables_of(dict.fromkeys(FEATURES, 3)), 2)
    batch = samples_of(FEATURES, dense=2)
    batch.dense_BI = batch.dense_BI.float()
    factors_BK = made.first_gate(made.first_context(batch))
    assert (factors_BK - 1).abs().max() < 0.5


def kinds(mlp):
    return [type(each).__name__ for each in mlp]


def test_each_mlp_has_its_own_dropout_and_batch_norm():
    made = model(first_dropout=0.2, second_batch_norm=True)
    assert kinds(made.first) == 2 * ["Linear", "ReLU", "FastDropout"] and made.first[2].p == 0.2
    assert kinds(made.second) == ["Linear", "BatchNorm", "ReLU"]
    other = model(first_batch_norm=True, second_dropout=0.3)
    assert kinds(other.first) == 2 * ["Linear", "BatchNorm", "ReLU"]
    assert kinds(other.second) == ["Linear", "ReLU", "FastDropout"] and other.second[2].p == 0.3


def test_a_gate_of_a_learnt_vector_costs_nothing_per_sample():
    made = model()
    once = sum(p.numel() for p in made.second_gate.parameters())
    assert made.flops_per_sample == -6 * once
    assert model(second_numbers=True).flops_per_sample == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heads": 4}, r"model.heads=4: must divide model.second_layers\[-1\]=6: 1, 2, 3, 6 do"),
        ({"first_layers": [4, 5]}, r"model.heads=2: must divide model.first_layers\[-1\]=5: 1, 5"),
        ({"second_layers": []}, r"model.second_layers=\[\]: must be a list"),
        ({"gate_layers": [-1]}, "-1 is no width"),
        ({"first_dropout": 1}, "model.first_dropout=1: must be at least 0 and less than 1"),
        ({"second_dropout": -1}, "model.second_dropout=-1: must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)
