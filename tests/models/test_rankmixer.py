"""RankMixer against the equations of arXiv 2507.15551, and against forms that differ from it."""

import math

import pytest
import torch
from formulas import fields_of, layer_norm, linear
from transcription import check_model, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.scaling import RankMixer

FEATURES = ("a", "b")
TOKENS = 2
WIDTH = 4
PIECE = WIDTH // TOKENS


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def of_each(p, name, group, input_BK):
    weight_KW = p[f"{name}.weight_GKW"][group]
    columns = [(input_BK * weight_KW[:, w]).sum(1) for w in range(weight_KW.shape[1])]
    return torch.stack(columns, 1) + p[f"{name}.bias_GW"][group]


def mixed(tokens):
    """Return tokens of which number h has piece h of all tokens."""
    return [
        torch.cat([token_BD[:, h * PIECE : (h + 1) * PIECE] for token_BD in tokens], 1)
        for h in range(TOKENS)
    ]


def ffn(p, name, token, input_BD, experts, route=torch.relu, own=True):
    made_BD = 0
    weights_BE = None
    if experts > 1:
        weights_BE = route(of_each(p, f"{name}.router", token, input_BD))
    for e in range(experts):
        group = (token if own else 0) * experts + e
        hidden_BF = gelu(of_each(p, f"{name}.up", group, input_BD))
        each_BD = of_each(p, f"{name}.down", group, hidden_BF)
        made_BD = made_BD + (each_BD if weights_BE is None else each_BD * weights_BE[:, [e]])
    return made_BD, weights_BE


def rankmixer(p, batch, experts=1, mix=mixed, norm_first=False, last=False, **form):
    flat_BK = torch.cat(fields_of(p, batch, FEATURES), 1)
    piece = math.ceil(flat_BK.shape[1] / TOKENS)
    missing = piece * TOKENS - flat_BK.shape[1]
    flat_BK = torch.cat([flat_BK, flat_BK.new_zeros(len(flat_BK), missing)], 1)
    tokens = [
        of_each(p, "tokenise", t, flat_BK[:, t * piece : (t + 1) * piece]) for t in range(TOKENS)
    ]
    routed_B = 0
    for b in range(2):
        name = f"blocks.{b}"
        first, second = (
            (p[f"{name}.{which}_norm.weight"], p[f"{name}.{which}_norm.bias"])
            for which in ("first", "second")
        )
        if norm_first:
            both = zip(mix([layer_norm(t, *first) for t in tokens]), tokens, strict=True)
            middle = [m + t for m, t in both]
        else:
            middle = [layer_norm(m + t, *first) for m, t in zip(mix(tokens), tokens, strict=True)]
        tokens = []
        for t in range(TOKENS):
            made_BD, weights_BE = ffn(p, f"{name}.ffn", t, middle[t], experts, **form)
            tokens.append(layer_norm(made_BD + middle[t], *second))
            if weights_BE is not None:
                routed_B = routed_B + weights_BE.sum(1)
    output_BD = tokens[-1] if last else sum(tokens) / TOKENS
    logits_B = linear(p, "score", output_BD)[:, 0]
    return {"logit": logits_B, "routed": routed_B} if experts > 1 else logits_B


def model(**settings):
    sizes = {"tokens": TOKENS, "width": WIDTH, "blocks": 2, "expansion": 2}
    return RankMixer(tables_of(dict.fromkeys(FEATURES, 3)), 3, **(sizes | settings))


def forms(changes, **more):
    return {
        what: lambda p, x, change=change: rankmixer(p, x, **more, **change)
        for what, change in changes.items()
    }


def test_mixing_and_ffns_are_the_papers():
    faults = {
        "tokens are not mixed": {"mix": lambda tokens: tokens},
        "tokens change places": {"mix": lambda tokens: tokens[::-1]},
        "one FFN for all tokens": {"own": False},
        "normalisation before the mixing": {"norm_first": True},
        "the last token instead of the mean": {"last": True},
    }
    check_model(model(), rankmixer, forms(faults), [samples_of(FEATURES, dense=3)])


def test_experts_are_weighed_by_a_relu():
    faults = {
        "softmax over experts": {"route": lambda scores_BE: scores_BE.softmax(1)},
        "no activation of the router": {"route": lambda scores_BE: scores_BE},
    }
    check_model(
        model(experts=4),
        lambda p, x: rankmixer(p, x, experts=4),
        forms(faults, experts=4),
        [samples_of(FEATURES, dense=3)],
    )


def test_the_weights_of_experts_are_an_extra_loss():
    made = model(experts=4, sparsity=0.5).double()
    batch = samples_of(FEATURES, dense=3)
    outputs = made(batch)
    found = made.extra_losses(outputs, batch, None)
    assert list(found) == ["routing"]
    torch.testing.assert_close(found["routing"], 0.5 * outputs["routed"].mean())
    found["routing"].backward()
    assert made.blocks[0].ffn.router.weight_GKW.grad.abs().sum() > 0
    plain = model().double()
    assert plain.extra_losses(plain(batch), batch, None) == {}


def test_numbers_may_enter_as_they_are():
    made = model(numbers="concat").double()
    assert (made.fields.columns, made.piece, made.padding) == (3 + 6, 5, 1)
    assert made(samples_of(FEATURES, dense=3)).shape == (6,)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokens": 3}, "model.tokens=3: must divide model.width=4: 1, 2, 4 do"),
        ({"experts": 0}, "model.experts=0: must be a whole number of at least 1"),
        ({"sparsity": -1}, "model.sparsity=-1: must be a number of at least 0"),
        ({"numbers": "vector"}, "model.numbers=vector: did you mean vectors"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)
