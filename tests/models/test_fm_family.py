"""The models of the family of factorisation machines against their papers' formulas."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transcription import check_model, pooled, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.catalogue import MODELS
from recapp.models.fm import FFM, FM, ONN, DeepFM, FwFM, LogisticRegression, WideAndDeep, XDeepFM

CONF = Path(__file__).parents[2] / "conf/model"
FEATURES = ("a", "b", "c")
NUMBERS = 2
FIELDS = NUMBERS + len(FEATURES)
CLASSES = {
    "fm": FM,
    "fwfm": FwFM,
    "ffm": FFM,
    "onn": ONN,
    "wide_and_deep": WideAndDeep,
    "deepfm": DeepFM,
    "xdeepfm": XDeepFM,
}
TOWER = {"layers": [6, 4], "activation": "relu", "batch_norm": False, "dropout": 0}


def tables(dim):
    return tables_of(dict.fromkeys(FEATURES, dim))


def batch():
    return samples_of(FEATURES, NUMBERS)


def dot(left_BD, right_BD):
    return sum(left_BD[:, d] * right_BD[:, d] for d in range(left_BD.shape[1]))


# The formulas, each for the model whose parts have these names.


def bias(p):
    return 10 * p["linear.bias"]


def weighted_numbers(p, x):
    return sum(10 * p["linear.weight_I"][i] * x.dense_BI[:, i] for i in range(NUMBERS))


def weighted_ids(p, x):
    return sum(pooled(p, x, name, "linear.wide")[:, 0] for name in FEATURES)


def linear(p, x):
    return bias(p) + weighted_numbers(p, x) + weighted_ids(p, x)


def vectors(p, x, where="vectors"):
    """Return the vector of each field, times its value."""
    numbers = [
        torch.stack([x.dense_BI[b, i] * p[f"{where}.number_vectors_ID"][i] for b in range(x.rows)])
        for i in range(NUMBERS)
    ]
    return numbers + [pooled(p, x, name, f"{where}.embedding_bag_collection") for name in FEATURES]


def pair_dots(p, x):
    v = vectors(p, x)
    return {(i, j): dot(v[i], v[j]) for i, j in combinations(range(FIELDS), 2)}


def perceptron(p, name, inputs_BK):
    """Return the output of linear layers with a ReLU between them."""
    places = sorted({int(n.split(".")[1]) for n in p if n.startswith(f"{name}.")})
    for place in places:
        weight = p[f"{name}.{place}.weight"]
        bias = p[f"{name}.{place}.bias"]
        inputs_BK = torch.stack(
            [(inputs_BK * row).sum(1) + b for row, b in zip(weight, bias, strict=True)], 1
        )
        if place != places[-1]:
            inputs_BK = inputs_BK.relu()
    return inputs_BK[:, 0]


NO_BIAS = "the bias is left out"
NO_LINEAR = "the linear part is left out"


def without_linear_parts(whole):
    return {
        NO_BIAS: lambda p, x: whole(p, x) - bias(p),
        NO_LINEAR: lambda p, x: whole(p, x) - linear(p, x),
        "the numbers have no weights": lambda p, x: whole(p, x) - weighted_numbers(p, x),
    }


def test_logistic_regression_is_linear_in_numbers_and_ids():
    def named(p):
        return {f"linear.{name}": value for name, value in p.items()}

    faults = {
        NO_BIAS: lambda p, x: linear(named(p), x) - 10 * p["bias"],
        "ids have no weights": lambda p, x: linear(named(p), x) - weighted_ids(named(p), x),
    }
    model = LogisticRegression(tables(1), NUMBERS)
    check_model(model, lambda p, x: linear(named(p), x), faults, [batch()])


def test_fm_is_rendles_and_divides_by_the_fields_if_asked():
    def fm(p, x):
        return linear(p, x) + sum(pair_dots(p, x).values())

    def normalised(p, x):
        return linear(p, x) + sum(pair_dots(p, x).values()) / FIELDS

    faults = without_linear_parts(fm) | {
        "pairs are counted twice": lambda p, x: fm(p, x) + sum(pair_dots(p, x).values()),
        "squares are not taken off": lambda p, x: (
            fm(p, x) + sum(dot(v, v) for v in vectors(p, x)) / 2
        ),
        "numbers do not interact": lambda p, x: (
            linear(p, x) + sum(d for (i, _), d in pair_dots(p, x).items() if i >= NUMBERS)
        ),
    }
    plain = FM(tables(3), tables(1), NUMBERS, normalise=False)
    check_model(plain, fm, faults, [batch()])
    check_model(FM(tables(3), tables(1), NUMBERS), normalised, {"not": fm}, [batch()])


def test_fwfm_weights_the_pairs_of_fields():
    def fwfm(p, x, place=lambda i, j: j * (j - 1) // 2 + i):
        r = p["pairs.weight_P"]
        return linear(p, x) + sum(r[place(i, j)] * d for (i, j), d in pair_dots(p, x).items())

    faults = without_linear_parts(fwfm) | {
        "pairs have no weights": lambda p, x: linear(p, x) + sum(pair_dots(p, x).values()),
        "weights of other pairs": lambda p, x: fwfm(
            p, x, lambda i, j: i * FIELDS - i * (i + 1) // 2 + j - i - 1
        ),
    }
    check_model(FwFM(tables(3), tables(1), NUMBERS), fwfm, faults, [batch()])


def field_aware(p, x, dim):
    """Return the vector of field i for field j under (i, j)."""
    rows = vectors(p, x, "vectors.side_by_side")
    return {
        (i, j): rows[i][:, j * dim : (j + 1) * dim] for i in range(FIELDS) for j in range(FIELDS)
    }


def test_ffm_takes_the_vectors_for_each_other():
    def ffm(p, x, pair=lambda v, i, j: dot(v[i, j], v[j, i])):
        v = field_aware(p, x, 2)
        pairs = sum(pair(v, i, j) for i, j in combinations(range(FIELDS), 2))
        return linear(p, x) + pairs / FIELDS

    faults = without_linear_parts(ffm) | {
        "samples are not normalised": lambda p, x: (
            linear(p, x) + FIELDS * (ffm(p, x) - linear(p, x))
        ),
        "vectors for the field itself": lambda p, x: ffm(
            p, x, lambda v, i, j: dot(v[i, i], v[j, j])
        ),
        "both vectors for the second field": lambda p, x: ffm(
            p, x, lambda v, i, j: dot(v[i, j], v[j, j])
        ),
        "pairs are counted twice": lambda p, x: 2 * ffm(p, x) - linear(p, x),
    }
    check_model(FFM(tables(2 * FIELDS), tables(1), NUMBERS), ffm, faults, [batch()])


def test_onn_copies_one_vector_and_multiplies_the_others():
    def onn(p, x, copied=lambda v, i: v[i, i], pair=lambda v, i, j: dot(v[i, j], v[j, i])):
        v = field_aware(p, x, 2)
        copies = [copied(v, i) for i in range(FIELDS)]
        products = [pair(v, i, j)[:, None] for j in range(FIELDS) for i in range(j)]
        return perceptron(p, "deep", torch.cat([*copies, *products], 1))

    faults = {
        "the copied vector is that of a product": lambda p, x: onn(
            p, x, copied=lambda v, i: v[i, (i + 1) % FIELDS]
        ),
        "products of the copied vectors": lambda p, x: onn(
            p, x, pair=lambda v, i, j: dot(v[i, i], v[j, j])
        ),
    }
    model = ONN(tables(2 * FIELDS), NUMBERS, **TOWER)
    check_model(model, onn, faults, [batch()])


def test_wide_and_deep_adds_both_parts():
    def inputs(p, x):
        looked_up = [pooled(p, x, n, "vectors.embedding_bag_collection") for n in FEATURES]
        return torch.cat([x.dense_BI, *looked_up], 1)

    def wide_and_deep(p, x):
        return linear(p, x) + perceptron(p, "deep", inputs(p, x))

    faults = without_linear_parts(wide_and_deep) | {
        "numbers only in the wide part": lambda p, x: (
            linear(p, x)
            + perceptron(p, "deep", torch.cat([0 * x.dense_BI, inputs(p, x)[:, NUMBERS:]], 1))
        ),
    }
    model = WideAndDeep(tables(3), tables(1), NUMBERS, numbers="concat", **TOWER)
    check_model(model, wide_and_deep, faults, [batch()])


def test_deepfm_adds_an_fm_and_an_mlp_of_the_same_vectors():
    def deep(p, x):
        return perceptron(p, "deep", torch.cat(vectors(p, x), 1))

    def deepfm(p, x):
        return linear(p, x) + sum(pair_dots(p, x).values()) + deep(p, x)

    faults = without_linear_parts(deepfm) | {
        "pairs are counted twice": lambda p, x: deepfm(p, x) + sum(pair_dots(p, x).values()),
        "the FM has no products": lambda p, x: linear(p, x) + deep(p, x),
        "the MLP gets numbers without vectors": lambda p, x: (
            deepfm(p, x)
            - deep(p, x)
            + perceptron(p, "deep", torch.cat([_unscaled(p, x), *vectors(p, x)[NUMBERS:]], 1))
        ),
    }
    model = DeepFM(tables(3), tables(1), NUMBERS, **TOWER, normalise=False)
    check_model(model, deepfm, faults, [batch()])
    normalised = DeepFM(tables(3), tables(1), NUMBERS, **TOWER, normalise=True)
    check_model(
        normalised,
        lambda p, x: linear(p, x) + sum(pair_dots(p, x).values()) / FIELDS + deep(p, x),
        {"not": deepfm},
        [batch()],
    )


def _unscaled(p, x):
    return p["vectors.number_vectors_ID"].flatten().expand(x.rows, -1)


def test_xdeepfm_adds_a_cin_whose_layers_are_all_connected():
    def xdeepfm(p, x, connected=(True, True)):
        v = torch.stack(vectors(p, x), 1)
        return (
            linear(p, x)
            + cin_logit(p, v, connected)
            + perceptron(p, "deep", torch.cat(vectors(p, x), 1))
        )

    def cin_logit(p, v, connected):
        first = last = v
        sums = []
        for k, counts in enumerate(connected):
            weight_HGF = p[f"cin.layers.{k}.weight_HGF"]
            last = torch.stack(
                [
                    sum(
                        weight_GF[i, j] * last[:, i] * first[:, j]
                        for i in range(last.shape[1])
                        for j in range(FIELDS)
                    )
                    for weight_GF in weight_HGF
                ],
                1,
            )
            sums.append(last.sum(2) * counts)
        return (torch.cat(sums, 1) * p["cin_out.weight"][0]).sum(1)

    faults = without_linear_parts(xdeepfm) | {
        "only the last layer is connected": lambda p, x: xdeepfm(p, x, (False, True)),
    }
    model = XDeepFM(tables(3), tables(1), NUMBERS, cin_layers=[4, 3], **TOWER)
    check_model(model, xdeepfm, faults, [batch()])


@pytest.mark.parametrize(("model", "given"), [(FFM, {"wide": tables(1)}), (ONN, TOWER)])
def test_columns_that_are_no_multiple_of_the_fields_are_refused(model, given):
    with pytest.raises(ConfigError) as error:
        model(tables(16), dense_in_features=NUMBERS, **given)
    assert str(error.value) == (
        "tables.dim=16: a row of this model has a vector for each of the 5 fields (numbers and "
        "lookups), so tables.dim must be a multiple of 5, e.g. 20 for vectors of 4 columns"
    )


def made(name, dims, rows=7, dense=NUMBERS, **more):
    """Return a model of the settings of conf/model/NAME.yaml with tables of these dims."""
    settings = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")) | more
    needs = MODELS[settings.pop("_target_")].needs
    by_name = {
        "embedding_bag_collection": tables_of(dims, rows=rows),
        "wide": tables_of(dict.fromkeys(dims, 1), rows=rows),
    }
    collections = {each: by_name[each] for each in needs}
    return CLASSES[name](**collections, dense_in_features=dense, **settings)


SEVERAL_DIMS = dict(zip(FEATURES, [8, 4, 8], strict=True))


@pytest.mark.parametrize("name", ["fm", "fwfm", "ffm", "onn", "deepfm", "xdeepfm"])
def test_vectors_of_several_dims_are_refused(name):
    with pytest.raises(ConfigError, match="tables of one embedding_dim"):
        made(name, SEVERAL_DIMS)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("onn", {"layers": [0]}, r"model.layers=\[0\]: 0 is no width"),
        ("wide_and_deep", {"dropout": 2}, r"model.dropout=2: must be"),
        ("deepfm", {"batch_norm": "yes"}, r"model.batch_norm=yes: must be true or false"),
        ("fm", {"normalise": 2}, r"model.normalise=2: must be true or false"),
        ("ffm", {"normalise": 2}, r"model.normalise=2: must be true or false"),
        ("xdeepfm", {"cin_layers": 8}, r"model.cin_layers=8: must be a list"),
        ("wide_and_deep", {"numbers": "vector"}, r"model.numbers=vector: .*did you mean vectors"),
    ],
)
def test_wrong_settings_are_refused(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        made(name, dict.fromkeys(FEATURES, 2 * FIELDS), **settings)


def test_numbers_with_vectors_need_one_dim_in_wide_and_deep():
    made("wide_and_deep", SEVERAL_DIMS)
    with pytest.raises(ConfigError, match="tables of one embedding_dim"):
        made("wide_and_deep", SEVERAL_DIMS, numbers="vectors")


def test_logistic_regression_names_the_numbers_it_was_made_for():
    with pytest.raises(ConfigError, match="the model was made for 1 dense features"):
        LogisticRegression(tables(1), 1)(samples_of(FEATURES, 2))


CRITEO = [f"C{i}" for i in range(1, 27)]


@pytest.mark.parametrize("name", CLASSES)
def test_a_fresh_criteo_model_has_small_logits_for_large_numbers(name):
    torch.manual_seed(0)
    dims = dict.fromkeys(CRITEO, 156 if name in ("ffm", "onn") else 16)
    model = made(name, dims, rows=100, dense=13).double()
    samples = samples_of(CRITEO, 13, samples=64, rows=100)
    samples.dense_BI.fill_(15.0)
    with torch.no_grad():
        logits_B = model(samples)
    assert logits_B.abs().max() < 5
