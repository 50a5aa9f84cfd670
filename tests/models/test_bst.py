"""BST against the formulas of arXiv 1905.06874, histories of any length, and export."""

import pytest
import torch
from formulas import layer_norm, linear, tower
from histories import at_most, bags_of, behaviours, exported, histories_of, sequences_of
from transcription import check_model, pooled

from recapp.errors import ConfigError
from recapp.models.attention import BST

NUMBERS = 2
MOST = 3
HEADS = 2
DIM = 3
WIDTH = 2 * DIM


def leaky(values, slope=0.01):
    return torch.where(values > 0, values, slope * values)


def attended(p, name, steps, scale):
    """Return the attention of the steps of one sample, in heads."""
    size = WIDTH // HEADS
    query, key, value = (
        [linear(p, f"{name}.{part}", step_W, bias=False) for step_W in steps]
        for part in ("query", "key", "value")
    )
    made = []
    for q_W in query:
        heads = []
        for h in range(HEADS):
            columns = slice(h * size, (h + 1) * size)
            powers = [torch.exp((q_W[columns] * k[columns]).sum() * scale) for k in key]
            mixed = sum(w * v[columns] for w, v in zip(powers, value, strict=True))
            heads.append(mixed / sum(powers))
        made.append(linear(p, f"{name}.output", torch.cat(heads), bias=False))
    return made


def layer(p, name, steps, scale=(WIDTH // HEADS) ** -0.5, residual=True):
    """Return the steps of one sample after a layer, equations 2 to 7."""
    made = []
    first, second = (
        (p[f"{name}.{which}_norm.weight"], p[f"{name}.{which}_norm.bias"])
        for which in ("first", "second")
    )
    for step_W, attended_W in zip(steps, attended(p, name, steps, scale), strict=True):
        middle_W = layer_norm(attended_W + step_W * residual, *first)
        hidden_F = leaky(linear(p, f"{name}.hidden", middle_W))
        made.append(layer_norm(middle_W + linear(p, f"{name}.back", hidden_F), *second))
    return made


def bst(
    p,
    batch,
    latest=True,
    places=lambda n: range(n + 1),
    padding=False,
    candidate=True,
    names=("history",),
    **form,
):
    """Return logits: candidate and history, latest first, pass through the layers."""
    bags = "fields.embedding_bag_collection"
    vectors = {name: pooled(p, batch, name, bags) for name in ("item", "user")}
    rows = []
    for b, behaviour_TD in enumerate(behaviours(p, batch, names)):
        seen = behaviour_TD[-MOST:] if latest else behaviour_TD[:MOST]
        item_D = torch.cat([vectors[x][b] for x in ("item", "user")[: len(names)]])
        items = [item_D * candidate, *reversed(seen)]
        count = len(items)
        if padding:  # zeros that are attended to
            items += [torch.zeros_like(item_D)] * (MOST + 1 - count)
        position = [p["position_TP"][t] for t in places(len(items) - 1)]
        steps = [torch.cat(both) for both in zip(items, position, strict=True)]
        for index in range(2):
            steps = layer(p, f"layers.{index}", steps, **form)
        missing = [torch.zeros_like(steps[0])] * (MOST + 1 - count)
        rows.append(torch.cat([*steps[:count], *missing]))
    flat_BK = torch.cat([batch.dense_BI, *vectors.values(), torch.stack(rows)], 1)
    return tower(p, "top", flat_BK, leaky)[:, 0]


def model(names=("history",), **settings):
    sizes = {"max_length": MOST, "heads": HEADS, "transformer_layers": 2, "feed_forward": 5}
    sizes |= {"layers": [6], "dropout": 0.0, "position_dim": WIDTH - DIM * len(names) or None}
    history = dict(zip(names, ("item", "user"), strict=False))
    tables = (bags_of(["item", "user"], DIM), sequences_of(names, DIM))
    return BST(*tables, NUMBERS, **({"history": history} | sizes | settings))


def form(**change):
    return lambda p, x: bst(p, x, **change)


def test_layers_and_positions_are_the_papers():
    faults = {
        "the first behaviours of a long history": form(latest=False),
        "positions from the oldest on": form(places=lambda n: [0, *range(n, 0, -1)]),
        "padding is attended to": form(padding=True),
        "the candidate is left out": form(candidate=False),
        "scores without their factor": form(scale=1.0),
        "no residual": form(residual=False),
    }
    check_model(model(), bst, faults, [histories_of(["history"], NUMBERS)])


def test_empty_histories_leave_the_candidate_alone():
    made = model().double()
    batch = histories_of(["history"], NUMBERS, lengths=[0, 0])
    logits_B = made(batch)
    logits_B.sum().backward()
    assert logits_B.isfinite().all()
    assert all(p.grad.isfinite().all() for p in made.parameters() if p.grad is not None)
    expected_B = bst(dict(made.named_parameters()), batch)
    torch.testing.assert_close(logits_B, expected_B)


def test_values_behind_the_last_behaviour_and_more_steps_change_nothing():
    made = model().double()
    batch = histories_of(["history"], NUMBERS)
    expected_B = made(batch)
    found = made.embedding_collection(batch.sparse)
    for amount in (1, 5):
        made.embedding_collection.forward = lambda _, n=amount: at_most(found, n)
        torch.testing.assert_close(made(batch), expected_B)


def test_the_program_takes_any_batch_size_and_number_of_behaviours():
    made = model(("history", "users"), position_dim=2).double().eval()
    for batch, scored in exported(made, ["history", "users"], NUMBERS):
        torch.testing.assert_close(scored, made(batch))


def test_the_published_defaults():
    made = BST(bags_of(["item"], 8), sequences_of(["history"], 8), 0, {"history": "item"})
    assert [m.out_features for m in made.top if hasattr(m, "out_features")] == [1024, 512, 256, 1]
    assert (len(made.layers), made.layers[0].heads, made.layers[0].hidden.out_features) == (
        1,
        8,
        4 * 16,
    )
    assert made.layers[0].dropout.p == 0.2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heads": 4}, r"model.heads=4: must divide the 3 columns of an item \+ model.position_d"),
        ({"max_length": 0}, "model.max_length=0: must be a whole number of at least 1"),
        ({"position_dim": 0}, "model.position_dim=0: must be a whole number of at least 1"),
        ({"history": {"history": "itme"}}, "itme is no column that pools its ids"),
        ({"dropout": 2}, "model.dropout=2"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)
