"""The unsharded collection of sequences, and concatenations of bags: what comes out, and what is
refused.
"""

import pytest
import torch

from recapp import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    TableLookup,
)
from recapp.errors import ConfigError, IdError
from recapp.sparse.batch import MISSING


def table(name="t", rows=10, dim=3, features=("a",), **more):
    return EmbeddingConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, **more
    )


def features_of(**bags):
    ids = [i for held in bags.values() for bag in held for i in bag]
    return KeyedJaggedTensor(
        list(bags), torch.tensor(ids), lengths=[len(b) for held in bags.values() for b in held]
    )


def test_every_id_has_its_vector_in_its_order():
    collection = EmbeddingCollection([table(), table("wide", 20, 5, ["a", "b"])])
    found = collection(features_of(a=[[7], [2, 9, 2], []], b=[[15], [], [0]]))
    assert list(found) == ["a@t", "a@wide", "b"]
    assert found["a@t"].lengths().tolist() == [1, 3, 0]
    assert torch.equal(found["a@t"].values(), collection.weight("t")[[7, 2, 9, 2]])
    assert torch.equal(found["a@wide"].values(), collection.weight("wide")[[7, 2, 9, 2]])
    assert torch.equal(found["b"].values(), collection.weight("wide")[[15, 0]])
    assert found["b"].weights_or_none() is None


def test_indices_are_the_rows_that_were_looked_up():
    collection = EmbeddingCollection([table(rows=4, id_rule="hash")], need_indices=True)
    found = collection(features_of(a=[[7], [MISSING, 9]]))["a"]
    assert found.weights().tolist() == [1 + 7 % 3, 0, 1 + 9 % 3]


def test_dropped_ids_leave_their_bags():
    collection = EmbeddingCollection([table(rows=4, id_rule="drop")])
    found = collection(features_of(a=[[7, 1], [9], [3, 2]]))["a"]
    assert found.lengths().tolist() == [1, 0, 2]
    assert torch.equal(found.values(), collection.weight("t")[[1, 3, 2]])


def test_start_values_are_those_of_a_collection_of_bags():
    bags = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=3, feature_names=["a"], pooling="sum"
    )
    start = EmbeddingBagCollection([bags], seed=4).weight("t")
    assert torch.equal(start, EmbeddingCollection([table()], seed=4).weight("t"))


def test_a_pooled_table_is_no_table_of_sequences():
    bags = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=3, feature_names=["a"], pooling="sum"
    )
    with pytest.raises(
        ConfigError, match="table t is an EmbeddingBagConfig, whose bags are pooled"
    ):
        EmbeddingCollection([bags])
    with pytest.raises(ConfigError, match="pooling=none: must be sum or mean; for sequences"):
        EmbeddingBagConfig(
            name="t", num_embeddings=10, embedding_dim=3, feature_names=["a"], pooling="none"
        )


def concat(hotness=2, truncates=False):
    config = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=3, feature_names=["a"], pooling="sum"
    )
    lookup = TableLookup(config, "a", "side by side", PoolingType.CONCAT, hotness, truncates)
    return EmbeddingBagCollection([config], lookups=[lookup])


def test_a_concatenation_fills_short_bags_with_zeros():
    collection = concat()
    found = collection(features_of(a=[[7, 2], [], [3]]))
    rows = collection.weight("t")
    zero = torch.zeros(3)
    expected = [torch.cat([rows[7], rows[2]]), torch.zeros(6), torch.cat([rows[3], zero])]
    assert torch.equal(found["side by side"], torch.stack(expected))


def test_a_bag_that_is_too_long_is_an_error_or_cut():
    ids = features_of(a=[[7, 2, 5], [], [3]])
    with pytest.raises(
        IdError, match=r"lookup side by side: feature a has a bag of 3 ids, .*hotness=2 takes 2"
    ):
        concat()(ids)
    found = concat(truncates=True)(ids)
    shorter = concat(truncates=True)(features_of(a=[[7, 2], [], [3]]))
    assert torch.equal(found.values(), shorter.values())


@pytest.mark.parametrize("hotness", [None, 0, "two"])
def test_a_concatenation_needs_its_hotness(hotness):
    with pytest.raises(ConfigError, match=f"lookup c: hotness={hotness}: a concatenation needs"):
        TableLookup(table(), "a", "c", PoolingType.CONCAT, hotness)


def test_other_lookups_have_no_hotness():
    with pytest.raises(ConfigError, match="lookup c: pooling=sum takes bags of any length"):
        TableLookup(table(), "a", "c", PoolingType.SUM, 2)
