"""DIN against the formulas of arXiv 1706.06978, histories of any length, export, and a hidden model
that needs attention.
"""

import pytest
import torch
from formulas import relu, tower
from histories import at_most, bags_of, behaviours, exported, histories_of, sequences_of
from transcription import check_model, pooled

from recapp.errors import ConfigError
from recapp.models.attention import DIN

NUMBERS = 2


def din(
    p,
    batch,
    pair=lambda a, v: [a, v, a - v, a * v],
    normal=lambda weights: weights,
    target="item",
    names=("history",),
    columns=("item", "user"),
):
    """Return logits: each behaviour has a weight, and their weighted sum enters the MLP."""
    bags = "fields.embedding_bag_collection"
    vectors = {name: pooled(p, batch, name, bags) for name in columns}
    interests = []
    for b, behaviour_TW in enumerate(behaviours(p, batch, names)):
        candidate_W = torch.cat([vectors[x][b] for x in (target, "user")[: len(names)]])
        weights = [
            tower(p, "attention.unit", torch.cat(pair(candidate_W, v_W)), relu)[0]
            for v_W in behaviour_TW
        ]
        total_W = torch.zeros_like(candidate_W)
        for weight, v_W in zip(normal(weights), behaviour_TW, strict=True):
            total_W = total_W + weight * v_W
        interests.append(total_W)
    flat_BK = torch.cat([batch.dense_BI, *vectors.values(), torch.stack(interests)], 1)
    return tower(p, "top", flat_BK, relu)[:, 0]


def softmax(weights):
    total = sum(torch.exp(w) for w in weights)
    return [torch.exp(w) / total for w in weights]


def model(names=("history",), **settings):
    sizes = {"attention_layers": [4], "layers": [5], "activation": "relu"}
    history = dict(zip(names, ("item", "user"), strict=False))
    tables = (bags_of(["item", "user"], 3), sequences_of(names, 3))
    return DIN(*tables, NUMBERS, **({"history": history} | sizes | settings))


def form(**change):
    return lambda p, x: din(p, x, **change)


@pytest.mark.parametrize("names", [("history",), ("history", "users")])
def test_the_unit_weighs_behaviours_by_the_candidate(names):
    faults = {
        "weights that add up to 1": {"normal": softmax},
        "the mean": {"normal": lambda weights: [1 / max(len(weights), 1)] * len(weights)},
        "no difference": {"pair": lambda a, v: [a, v, 0 * a, a * v]},
        "the difference turned round": {"pair": lambda a, v: [a, v, v - a, a * v]},
        "another column as the candidate": {"target": "user"},
    }
    check_model(
        model(names),
        form(names=names),
        {what: form(**change, names=names) for what, change in faults.items()},
        [histories_of(names, NUMBERS)],
    )


def test_weights_may_be_made_to_add_up_to_one():
    made = model(softmax=True).double()
    batch = histories_of(["history"], NUMBERS)
    parameters = dict(made.named_parameters())
    # a softmax takes no notice of the last bias, whose gradient is rounding
    read = [p for name, p in parameters.items() if name != "attention.unit.2.bias"]
    own_B = made(batch)
    expected_B = din(parameters, batch, normal=softmax)
    torch.testing.assert_close(own_B, expected_B)
    assert (own_B - din(parameters, batch)).abs().max() > 1e-3
    gradients = (torch.autograd.grad(x[0] + 2 * x[2], read) for x in (own_B, expected_B))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("softmax", [False, True])
def test_empty_histories_give_zeros_and_no_nan(softmax):
    made = model(softmax=softmax, activation="dice").double()
    batch = histories_of(["history"], NUMBERS, lengths=[0, 0, 0, 0, 0, 0])
    logits_B = made(batch)
    logits_B.sum().backward()
    assert logits_B.isfinite().all()
    assert all(p.grad.isfinite().all() for p in made.parameters() if p.grad is not None)
    made.eval()
    one = histories_of(["history"], NUMBERS, lengths=[0])
    assert made(one).isfinite().all()


@pytest.mark.parametrize("softmax", [False, True])
def test_values_behind_the_last_behaviour_change_nothing(softmax):
    made = model(softmax=softmax).double()
    batch = histories_of(["history"], NUMBERS)
    expected_B = made(batch)
    found = made.embedding_collection(batch.sparse)
    for amount in (1, 5):
        made.embedding_collection.forward = lambda _, n=amount: at_most(found, n)
        torch.testing.assert_close(made(batch), expected_B)


@pytest.mark.parametrize("softmax", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_program_takes_any_batch_size_and_number_of_behaviours(softmax):
    made = model(("history", "users"), softmax=softmax, activation="dice").double().eval()
    for batch, scored in exported(made, ["history", "users"], NUMBERS):
        torch.testing.assert_close(scored, made(batch))


def test_the_published_widths():
    made = DIN(bags_of(["item"], 8), sequences_of(["history"], 8), 0, {"history": "item"})
    assert [m.out_features for m in made.attention.unit if hasattr(m, "out_features")] == [36, 1]
    assert [m.out_features for m in made.top if hasattr(m, "out_features")] == [200, 80, 1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"history": {"histroy": "item"}}, "histroy is no sequence; did you mean history"),
        ({"history": {"history": "itme"}}, "itme is no column that pools its ids; did you mean it"),
        ({"history": {}}, "model.history={}: names no sequence: use null"),
        ({"history": None}, "model.history=null: no column that pools its ids reads the table of"),
        ({"activation": "dize"}, "model.activation=dize: did you mean dice"),
        ({"attention_layers": []}, r"model.attention_layers=\[\]: must be a list"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)


def test_vectors_of_two_dims_are_no_pair():
    with pytest.raises(ConfigError, match=r"have 4 and 3 columns: let them share a table"):
        DIN(bags_of(["item"], 3), sequences_of(["history"], 4), 0, {"history": "item"})
