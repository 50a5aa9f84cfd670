"""Wukong against the formulas of arXiv 2403.02545, and against forms that differ from it."""

import pytest
import torch
from formulas import fields_of, layer_norm, relu, tower
from transcription import check_model, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.scaling import Wukong

FEATURES = ("a", "b", "c")
DIM = 3
MADE = 2


def mixed(p, name, vectors):
    """Return linear combinations of vectors."""
    return [sum(w * v_BD for w, v_BD in zip(row_N, vectors, strict=True)) for row_N in p[f"{name}"]]


def factorised(p, name, vectors, triangle=False, norm_products=True, end=lambda values: values):
    """Return reshape(MLP(LN(flat(X X^T Y))))."""
    weight_kN = p[f"{name}.projection.weight"]
    products = []
    for i in range(len(vectors)):
        for row_N in weight_kN:
            total_B = 0
            for j, other_BD in enumerate(vectors):
                if not (triangle and j >= i):
                    total_B = total_B + (vectors[i] * other_BD).sum(1) * row_N[j]
            products.append(total_B if torch.is_tensor(total_B) else 0 * vectors[0][:, 0])
    flat_BK = torch.stack(products, 1)
    if norm_products:
        flat_BK = layer_norm(flat_BK, p[f"{name}.norm.weight"], p[f"{name}.norm.bias"])
    made_BK = end(tower(p, f"{name}.mlp", flat_BK, relu))
    return [made_BK[:, m * DIM : (m + 1) * DIM] for m in range(MADE)]


def wukong(p, batch, dense=2, residual=True, norm=True, order=1, **form):
    vectors = fields_of(p, batch, FEATURES)
    if dense:
        vectors = [tower(p, "bottom", batch.dense_BI, relu), *vectors]
    for layer in range(2):
        name = f"stack.{layer}"
        blocks = [
            *factorised(p, f"{name}.factorisation", vectors, **form),
            *mixed(p, f"{name}.compression.mix.weight", vectors),
        ][::order]
        kept = vectors
        if f"{name}.residual.mix.weight" in p:
            kept = mixed(p, f"{name}.residual.mix.weight", vectors)
        made = [b + k if residual else b for b, k in zip(blocks, kept, strict=True)]
        norms = (p[f"{name}.norm.weight"], p[f"{name}.norm.bias"])
        vectors = [layer_norm(m, *norms) if norm else m for m in made]
    return tower(p, "top", torch.cat(vectors, 1), relu)[:, 0]


def model(dense=2, **settings):
    sizes = {"bottom_layers": [4], "stack": 2, "factorised": MADE, "compressed": 3, "rank": 2}
    sizes |= {"block_layers": [5], "layers": [4]}
    return Wukong(tables_of(dict.fromkeys(FEATURES, DIM)), dense, **(sizes | settings))


FAULTS = {
    "no residual": {"residual": False},
    "no normalisation of a layer's output": {"norm": False},
    "products are not normalised": {"norm_products": False},
    "each product once, as in a DLRM": {"triangle": True},
    "a ReLU behind the block": {"end": relu},
    "compressed vectors first": {"order": -1},
}


def form(change):
    return lambda p, x: wukong(p, x, **change)


def test_layers_are_the_papers():
    faults = {what: form(change) for what, change in FAULTS.items()}
    check_model(model(), wukong, faults, [samples_of(FEATURES, dense=2)])


def test_vectors_that_fit_are_their_own_residual_and_numbers_may_be_missing():
    made = model(dense=0, compressed=1)
    assert made.stack[0].residual is None and made.bottom is None
    check_model(
        made,
        lambda p, x: wukong(p, x, dense=0),
        {"no residual": lambda p, x: wukong(p, x, dense=0, residual=False)},
        [samples_of(FEATURES, dense=0)],
    )


def test_the_residual_is_a_map_where_a_layer_changes_the_number_of_vectors():
    stack = model().stack
    assert [layer.residual is None for layer in stack] == [False, True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stack": 0}, "model.stack=0: must be a whole number of at least 1"),
        ({"rank": True}, "model.rank=True: must be a whole number"),
        ({"block_layers": [1.5]}, "1.5 is no width"),
        ({"dropout": -1}, "model.dropout=-1"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)


def test_tables_of_several_dims_are_refused():
    with pytest.raises(ConfigError, match="the interaction of Wukong takes vectors of one dim"):
        Wukong(tables_of({"a": 4, "b": 2}), 2)
