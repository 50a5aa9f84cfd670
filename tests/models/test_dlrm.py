"""DLRM: a forward pass worked out by hand, shapes refused with the setting's name, the printed
layers.
"""

import pytest
import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.models.layer_table import layer_table
from recapp.models.published_dlrm import DLRM
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig, PoolingType, TableLookup, lookups_of


def table(name, dim, *features, rows=5, **more):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, **more
    )


def collection(*tables):
    return EmbeddingBagCollection(list(tables))


def bags(**bags_of):
    lengths = [len(bag) for key in bags_of for bag in bags_of[key]]
    return KeyedJaggedTensor(
        list(bags_of),
        torch.tensor(
            [i for key in bags_of for bag in bags_of[key] for i in bag], dtype=torch.int64
        ),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def batch(dense_BI, **bags_of):
    """Return samples without a click."""
    return Batch(dense_BI, bags(**bags_of), torch.zeros(len(dense_BI)))


def put(layer, weight, bias=None):
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))


def by_hand():
    """Return a model of given weights.

    It has a bottom [2] of two numbers, a table of two columns, one of three with a projection, and
    a top of one layer.
    """
    tables = collection(table("two", 2, "a", rows=2), table("three", 3, "b", rows=2))
    model = DLRM(tables, 2, [2], [1])
    put(model.bottom[0], [[1.0, 0.0], [1.0, -1.0]], [0.5, 0.0])
    put(tables.embedding_bags["two"], [[1.0, 2.0], [0.0, 3.0]])
    put(tables.embedding_bags["three"], [[1.0, 0.0, 2.0], [4.0, 4.0, 4.0]])
    put(model.projections["three"], [[1.0, 1.0, 1.0], [0.0, 0.0, -1.0]])
    put(model.top[0], [[1.0, 10.0, 100.0, 1000.0, 10000.0]], [0.25])
    return model


def test_a_forward_pass_equals_the_one_written_out_by_hand():
    # bottom: (1 + .5, relu(1 - 3)) = (1.5, 0);  a: rows 0 and 1 = (1, 5);  b: row 0 (1, 0, 2) ->
    # (3, -2) f12 = 1.5 * 1 + 0 * 5 = 1.5;  f13 = 1.5 * 3 + 0 * -2 = 4.5;  f23 = 1 * 3 + 5 * -2 = -7
    logits = by_hand()(batch(torch.tensor([[1.0, 3.0]]), a=[[0, 1]], b=[[0]]))
    assert logits.tolist() == [1.5 + 10 * 0 + 100 * 1.5 + 1000 * 4.5 + 10000 * -7 + 0.25]


def without_dense(**more):
    """Return a model of no dense numbers: tables of two and three columns, interaction of two."""
    tables = collection(
        table("two", 2, "a", "c", rows=2, **more), table("three", 3, "b", rows=2, **more)
    )
    model = DLRM(tables, 0, [9, 2], [1])
    put(tables.embedding_bags["two"], [[1.0, 2.0], [0.0, 3.0]])
    put(tables.embedding_bags["three"], [[1.0, 0.0, 2.0], [4.0, 4.0, 4.0]])
    put(model.projections["three"], [[1.0, 1.0, 1.0], [0.0, 0.0, -1.0]])
    put(model.top[0], [[1.0, 10.0, 100.0]], [0.25])
    return model


@pytest.mark.parametrize("more", [{}, {"data_type": "fp64"}])
def test_without_dense_numbers_only_the_embeddings_interact(more):
    # a: (1, 5);  c: (0, 3);  b: (1, 0, 2) -> (3, -2);   ac = 15, ab = 3 - 10 = -7, cb = -6
    model = without_dense(**more)
    logits = model(batch(torch.empty(1, 0), a=[[0, 1]], c=[[1]], b=[[0]]))
    assert logits.tolist() == [15 + 10 * -7 + 100 * -6 + 0.25]
    assert model.bottom is None and not any(
        name.startswith("bottom") for name, _ in model.named_parameters()
    )
    logits.sum().backward()
    assert model.projections["three"].weight.grad.abs().sum() > 0


def test_each_vector_of_a_concatenation_interacts_by_itself():
    wide = table("wide", 3, "a")
    concat = TableLookup(wide, "a", "side by side", PoolingType.CONCAT, hotness=2)
    own = table("own", 2, "b")
    held = EmbeddingBagCollection([wide, own], lookups=[concat, *lookups_of([own])])
    model = DLRM(held, 1, [2], [1])
    assert model.interaction.vectors == 4  # of the bottom, two of `wide`, one of `own`
    samples = batch(torch.ones(2, 1), a=[[1, 2], [3]], b=[[0], []])
    wide_BHD = held(samples.sparse)["side by side"].view(2, 2, 3)
    projected_BHD = model.projections["wide"](wide_BHD)
    vectors = [
        model.bottom(samples.dense_BI)[:, None],
        projected_BHD,
        held(samples.sparse)["b"][:, None],
    ]
    expected = model.top(model.interaction(torch.cat(vectors, 1)))[:, 0]
    torch.testing.assert_close(model(samples), expected)


def test_without_dense_numbers_and_projections_the_embeddings_are_taken_as_they_are():
    model = DLRM(collection(table("x", 4, "a"), table("y", 4, "b")), 0, [8, 4], [3, 1])
    assert (model.interaction.vectors, model.top[0].in_features, model.flops_per_sample) == (
        2,
        1,
        4.0 * 4 * 4,
    )
    assert model(batch(torch.empty(2, 0), a=[[1], []], b=[[0], [1, 2]])).shape == (2,)


def test_the_layers_of_a_model_without_dense_numbers_have_no_bottom():
    rows = [(r["layer"], r["output"], r["parameters"]) for r in layer_table(without_dense(), 0)[0]]
    assert rows == [
        ("embedding_bag_collection", "B x 7", 2 * 2 + 2 * 3),
        ("projections.three", "B x 2", 6),
        ("interaction", "B x 3", 0),
        ("top.0", "B x 1", 4),
        ("all", "B", 10 + 6 + 4),
    ]


def test_an_empty_batch_gives_no_logits_and_zero_gradients():
    model = by_hand()
    logits = model(batch(torch.empty(0, 2), a=[], b=[]))
    logits.sum().backward()
    assert logits.shape == (0,)
    assert all(p.grad.abs().sum() == 0 for p in model.bottom.parameters())


def test_only_tables_of_another_dim_are_projected_once_per_table():
    model = DLRM(collection(table("wide", 8, "a", "b"), table("same", 4, "c", "a")), 3, [6, 4], [1])
    assert [
        (name, m.in_features, m.out_features, m.bias) for name, m in model.projections.items()
    ] == [("wide", 8, 4, None)]
    assert model(batch(torch.zeros(2, 3), a=[[1], []], b=[[0], [1, 2]], c=[[], []])).shape == (2,)


def test_features_keep_their_position_whether_or_not_any_is_projected():
    torch.manual_seed(0)
    identity = DLRM(collection(table("x", 4, "a"), table("y", 4, "b")), 3, [4], [1])
    samples = batch(torch.randn(2, 3), a=[[1], [2]], b=[[0], [1, 2]])
    expected = identity(samples)
    identity.projections["y"] = nn.Linear(4, 4, bias=False)
    put(identity.projections["y"], torch.eye(4).tolist())
    assert torch.equal(identity(samples), expected)


def test_double_precision_is_kept_and_fp64_tables_serve_a_float_model():
    tables = (table("x", 4, "a", data_type="fp64"),)
    assert (
        DLRM(collection(*tables), 3, [4], [1])(batch(torch.zeros(1, 3), a=[[1]])).dtype
        == torch.float32
    )
    assert (
        DLRM(collection(*tables), 3, [4], [1])
        .double()(batch(torch.zeros(1, 3).double(), a=[[1]]))
        .dtype
        == torch.float64
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bottom_layers": []}, "model.bottom_layers=[]"),
        (
            {"top_layers": [8, 2]},
            "model.top_layers=[8, 2]: the last layer is the logit and must be 1, e.g. [256,128,1]",
        ),
        ({"top_layers": []}, "model.top_layers=[]"),
        ({"top_layers": [0, 1]}, "model.top_layers=[0, 1]: 0 is no width"),
        (
            {"dense_in_features": 0, "bottom_layers": [4, 0]},
            "model.bottom_layers=[4, 0]: 0 is no width",
        ),
        (
            {"dense_in_features": 0},
            (
                "dataset.dense=[] with one sparse feature: a DLRM has nothing to interact; name a "
                "second one, or a number"
            ),
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_at_construction(settings, message):
    with pytest.raises(ConfigError) as error:
        DLRM(
            collection(table("x", 4, "a")),
            **{"dense_in_features": 3, "bottom_layers": [4], "top_layers": [1], **settings},
        )
    assert message in str(error.value)


def test_a_batch_of_other_dense_features_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"made for 2 dense features and got a batch of shape \[1, 3\]"
    ):
        by_hand()(batch(torch.zeros(1, 3), a=[[0]], b=[[0]]))


def test_a_fresh_criteo_model_has_small_logits_for_large_dense_values():
    torch.manual_seed(0)
    names = [f"C{i}" for i in range(1, 27)]
    model = DLRM(
        collection(*(table(n, 16, n, rows=100) for n in names)), 13, [256, 64, 16], [256, 128, 1]
    )
    with torch.no_grad():
        logits = model(batch(torch.full((4, 13), 15.0), **{n: [[1], [2], [3], [4]] for n in names}))
    assert logits.abs().max() < 5


def test_the_layers_are_listed_as_they_run_with_b_left_open():
    tables = [table("wide", 8, "a", "b", rows=1000), table("same", 4, "c")]
    model = DLRM(EmbeddingBagCollection(tables, device=torch.device("meta")), 3, [6, 4], [5, 1])
    rows = [(r["layer"], r["kind"], r["output"], r["parameters"]) for r in layer_table(model, 3)[0]]
    assert rows == [
        ("embedding_bag_collection", "EmbeddingBagCollection", "B x 20", 1000 * 8 + 5 * 4),
        ("bottom.0", "Linear", "B x 6", 3 * 6 + 6),
        ("bottom.2", "Linear", "B x 4", 6 * 4 + 4),
        ("projections.wide", "Linear", "B x 4", 8 * 4),
        ("projections.wide", "Linear", "B x 4", 8 * 4),
        ("interaction", "DotInteraction", "B x 10", 0),
        ("top.0", "Linear", "B x 5", (4 + 6) * 5 + 5),
        ("top.2", "Linear", "B x 1", 6),
        ("all", "DLRM", "B", 8020 + 24 + 28 + 32 + 55 + 6),
    ]


def test_the_cost_of_a_sample_is_listed_by_layer_and_for_the_whole_model():
    tables = [table("wide", 8, "a", "b", rows=1000), table("same", 4, "c")]
    model = DLRM(EmbeddingBagCollection(tables, device=torch.device("meta")), 3, [6, 4], [5, 1])
    costs = [(r["layer"], r["flops"]) for r in layer_table(model, 3)[0]]
    assert costs == [
        ("embedding_bag_collection", 0),
        ("bottom.0", 2 * 3 * 6),
        ("bottom.2", 2 * 6 * 4),
        ("projections.wide", 2 * 8 * 4),
        ("projections.wide", 2 * 8 * 4),
        ("interaction", 2 * 4 * 4 * 4),
        ("top.0", 2 * 10 * 5),
        ("top.2", 2 * 5),
        ("all", 36 + 48 + 128 + 128 + 100 + 10),
    ]


def test_listing_the_layers_leaves_the_model_as_it_was():
    model = DLRM(collection(table("x", 4, "a")), 3, [4], [1])
    model.top.eval()
    before = dict(model.embedding_bag_collection.__dict__)
    random = torch.get_rng_state()
    layer_table(model, 3)
    assert (model.training, model.top.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.embedding_bag_collection.__dict__.keys() == before.keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(batch(torch.zeros(1, 3), a=[[1]])).shape == (1,)


def test_columns_may_have_names_that_torch_refuses_for_modules():
    names = ["items", "type", "user.id", "values"]
    model = DLRM(
        collection(
            *(table(name, dim, name) for name, dim in zip(names, (2, 3, 3, 2), strict=True))
        ),
        2,
        [2],
        [1],
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert {
        "embedding_bag_collection.embedding_bags.items.weight",
        "projections.type.weight",
        "projections.user/id.weight",
    } <= state.keys()
    samples = batch(torch.zeros(2, 2), **{name: [[0, 1], [4]] for name in names})
    logits_B = model(samples)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert not torch.equal(model(samples), logits_B)
    model.load_state_dict(state)
    assert torch.equal(model(samples), logits_B)


def test_wide_weights_are_added_to_the_logit():
    tables = (collection(table("two", 2, "a", rows=2), table("other", 2, "b", rows=2)),)
    wide = collection(table("wide_a", 1, "a", rows=2), table("wide_b", 1, "b", rows=2))
    torch.manual_seed(1)
    alone = DLRM(*tables, 2, [2], [1])
    torch.manual_seed(1)
    beside = DLRM(*tables, 2, [2], [1], wide=wide)
    samples = batch(torch.ones(2, 2), a=[[0], [1]], b=[[1], []])
    expected_B = alone(samples) + wide(samples.sparse).values().sum(1)
    assert torch.equal(beside(samples), expected_B)
