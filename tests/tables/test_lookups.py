"""Tables and lookups are two records: several lookups may read one table."""

import pytest
import torch

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, collections_in, embedding_tables
from recapp.tables.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    lookups_of,
)


def table(name="t", dim=2, features=("a", "b"), **more):
    return EmbeddingBagConfig(
        name=name, num_embeddings=5, embedding_dim=dim, feature_names=features, **more
    )


def test_tables_declare_a_lookup_for_each_of_their_features():
    tables = [table(features=["a", "b"], pooling="mean"), table("u", 3, ["b", "c"])]
    found = [(x.table.name, x.feature, x.output, x.pooling, x.dim) for x in lookups_of(tables)]
    assert found == [
        ("t", "a", "a", "mean", 2),
        ("t", "b", "b@t", "mean", 2),
        ("u", "b", "b@u", "sum", 3),
        ("u", "c", "c", "sum", 3),
    ]


def test_one_table_serves_a_sum_and_a_mean_of_one_feature_in_the_order_of_the_lookups():
    t = table()
    collection = EmbeddingBagCollection(
        [t],
        lookups=[
            TableLookup(t, "b", "b", PoolingType.SUM),
            TableLookup(t, "a", "a_mean", PoolingType.MEAN),
            TableLookup(t, "a", "a_sum", PoolingType.SUM),
        ],
    )
    rows = torch.arange(10.0).view(5, 2)
    collection.weight("t").data.copy_(rows)
    found = collection(KeyedJaggedTensor(["a", "b"], [1, 3, 4], lengths=[2, 1]))
    assert found.keys() == ["b", "a_mean", "a_sum"]
    assert found["a_sum"].tolist() == [(rows[1] + rows[3]).tolist()]
    assert found["a_mean"].tolist() == [((rows[1] + rows[3]) / 2).tolist()]
    assert found["b"].tolist() == [rows[4].tolist()]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([("t", "a", "x"), ("t", "b", "x")], "two lookups are called x"),
        ([("t", "a", "a")], "no lookup reads table t by feature b: give it a lookup"),
        (
            [("t", "a", "a"), ("t", "b", "b"), ("t", "c", "c")],
            "is not in the table's feature_names: a, b",
        ),
        (
            [("other", "a", "a")],
            "table other, which the collection does not have: its tables are t",
        ),
    ],
)
def test_lookups_that_do_not_fit_the_tables_are_refused_by_name(changes, says):
    t = table()
    lookups = [
        TableLookup(t if name == "t" else table(name), feature, output, PoolingType.SUM)
        for name, feature, output in changes
    ]
    with pytest.raises(ConfigError, match=says):
        EmbeddingBagCollection([t], lookups=lookups)


def test_a_models_collections_are_found_by_walking_it_once_each():
    first = EmbeddingBagCollection([table("x")])
    second = EmbeddingBagCollection([table("y")])
    model = torch.nn.ModuleDict({"one": first, "again": first, "two": second})
    assert [path for path, _ in collections_in(model)] == ["one", "two"]
    assert [t.name for t in embedding_tables(model)] == ["x", "y"]


def test_a_pooling_may_be_said_as_text_and_what_is_none_is_refused():
    t = table()
    mean, concat = (
        TableLookup(t, "a", "x", "mean"),
        TableLookup(t, "a", "y", "concat", hotness=2),
    )
    assert (mean.pooling, concat.pooling) == (PoolingType.MEAN, PoolingType.CONCAT)
    assert concat.columns == 2 * mean.columns
    with pytest.raises(ConfigError, match="lookup x: pooling=meen: did you mean mean"):
        TableLookup(t, "a", "x", "meen")
    with pytest.raises(ConfigError, match="table=t: give the table itself"):
        TableLookup("t", "a", "x", "mean")


def test_bags_that_nobody_pools_are_refused():
    size = {"name": "t", "num_embeddings": 4, "embedding_dim": 2, "feature_names": ["a"]}
    with pytest.raises(ConfigError, match="lookup a of table t does not pool its bags"):
        EmbeddingBagCollection([EmbeddingConfig(**size)])
    bags = EmbeddingBagConfig(**size)
    with pytest.raises(ConfigError, match="lookup x of table t does not pool its bags"):
        EmbeddingBagCollection([bags], lookups=[TableLookup(bags, "a", "x", PoolingType.NONE)])
