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
from recapp.sparse.missing_ids import MISSING


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


def test_a_collection_says_what_it_looks_up():
    collection = EmbeddingCollection([table(), table("u", features=["a", "b"])], need_indices=True)
    assert collection.need_indices() and not EmbeddingCollection([table()]).need_indices()
    assert collection.embedding_dim() == 3
    assert collection.embedding_names_by_table() == [["a@t"], ["a@u", "b"]]
    assert collection.device == torch.device("cpu")
    assert EmbeddingCollection([table()], device="meta").device == torch.device("meta")
    with pytest.raises(ConfigError, match=r"embedding_dim\(\): tables are 3, 5 columns wide"):
        EmbeddingCollection([table(), table("wide", dim=5)]).embedding_dim()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_sequences_are_whole_tables_unless_sparse_ones_are_asked_for(sparse):
    collection = EmbeddingCollection([table()], sparse=sparse)
    collection(features_of(a=[[7], [2, 2]]))["a"].values().sum().backward()
    gradient = collection.weight("t").grad
    assert gradient.is_sparse == sparse == collection.embeddings["t"].sparse
    expected = torch.zeros(10, 3).index_add(0, torch.tensor([7, 2, 2]), torch.ones(3, 3))
    assert torch.equal(gradient.to_dense() if sparse else gradient, expected)


def test_start_values_are_those_of_a_collection_of_bags():
    bags = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=3, feature_names=["a"], pooling="sum"
    )
    start = EmbeddingBagCollection([bags], seed=4).weight("t")
    assert torch.equal(start, EmbeddingCollection([table()], seed=4).weight("t"))


def test_the_pooling_of_a_table_of_bags_has_no_meaning_for_sequences():
    bags = EmbeddingBagConfig(
        name="t",
        num_embeddings=10,
        embedding_dim=3,
        feature_names=["a"],
        pooling="mean",
        data_type="fp64",
        min_key=2,
    )
    collection = EmbeddingCollection([bags])
    assert collection.embedding_configs() == [table(data_type="fp64", min_key=2)]
    vectors = collection(features_of(a=[[5, 4], []]))["a"].values()
    assert torch.equal(vectors, collection.weight("t")[[3, 2]])


def test_bags_that_are_no_bags_are_refused():
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
        IdError,
        match=r"lookup side by side: feature a has a bag of 3 ids, .*takes at most hotness=2",
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
