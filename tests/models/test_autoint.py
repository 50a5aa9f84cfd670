"""AutoInt against the equations of arXiv 1810.11921, and against forms that differ from it."""

import pytest
import torch
from formulas import fields_of, linear, relu, tower
from transcription import check_model, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.attention import AutoInt

FEATURES = ("a", "b")
HEADS = 2
WIDTH = 6


def attended(
    p, layer, fields, scale=1.0, residual=True, over_queries=False, projected=lambda values: values
):
    """Return the fields after a layer, equations 5 to 8."""
    size = WIDTH // HEADS
    query, key, value = (
        [projected(linear(p, f"layers.{layer}.{name}", e_BD, bias=False)) for e_BD in fields]
        for name in ("query", "key", "value")
    )
    made = []
    for m, e_BD in enumerate(fields):
        heads = []
        for h in range(HEADS):
            columns = slice(h * size, (h + 1) * size)

            def score(i, k, columns=columns):
                return torch.exp((query[i][:, columns] * key[k][:, columns]).sum(1) * scale)

            mixed_BE = 0
            for k in range(len(fields)):
                total_B = sum(
                    score(n, k) if over_queries else score(m, n) for n in range(len(fields))
                )
                mixed_BE = mixed_BE + (score(m, k) / total_B)[:, None] * value[k][:, columns]
            heads.append(mixed_BE)
        made_BW = torch.cat(heads, 1)
        if residual:
            made_BW = made_BW + linear(p, f"layers.{layer}.residual", e_BD, bias=False)
        made.append(relu(made_BW))
    return made


def autoint(p, batch, layers=2, deep=False, **form):
    fields = fields_of(p, batch, FEATURES)
    mixed = fields
    for layer in range(layers):
        mixed = attended(p, layer, mixed, **form)
    logits_B1 = linear(p, "score", torch.cat(mixed, 1))
    if deep:
        logits_B1 = logits_B1 + tower(p, "deep", torch.cat(fields, 1))
    return logits_B1[:, 0]


def model(**settings):
    tables = tables_of(dict.fromkeys(FEATURES, 4))
    return AutoInt(tables, 2, **({"attention_layers": 2, "width": WIDTH} | settings))


def test_attention_over_fields_is_the_papers():
    faults = {
        "scores divided by the root of a head's columns": {"scale": (WIDTH // HEADS) ** -0.5},
        "no residual": {"residual": False},
        "softmax over the fields that ask": {"over_queries": True},
        "a ReLU behind query, key and value": {"projected": relu},
    }
    check_model(
        model(),
        autoint,
        {what: lambda p, x, form=form: autoint(p, x, **form) for what, form in faults.items()},
        [samples_of(FEATURES, dense=2)],
    )


def test_the_deep_layers_of_autoint_plus_read_the_fields_before_attention():
    check_model(
        model(deep_layers=[3]),
        lambda p, x: autoint(p, x, deep=True),
        {"no deep layers": autoint},
        [samples_of(FEATURES, dense=2)],
    )


def test_the_published_defaults():
    made = AutoInt(tables_of(dict.fromkeys(FEATURES, 16)), 3)
    assert [(x.query.in_features, x.query.out_features, x.heads) for x in made.layers] == [
        (16, 64, 2),
        (64, 64, 2),
        (64, 64, 2),
    ]
    assert made.score.in_features == 5 * 64 and made.deep is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heads": 4}, r"model.heads=4: must divide model.width=6: 1, 2, 3, 6 do"),
        ({"attention_layers": 0}, "model.attention_layers=0: must be a whole number of at least 1"),
        ({"width": 2.5}, r"model.width=2.5: must be a whole number"),
        ({"deep_layers": [0]}, "model.deep_layers=.*0 is no width"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)


def test_tables_of_several_dims_are_refused():
    with pytest.raises(ConfigError, match="the interaction of AutoInt takes vectors of one dim"):
        AutoInt(tables_of({"a": 4, "b": 2}), 2)
