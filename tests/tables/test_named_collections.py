"""Lookups and tables by the collection that the model gets them in."""

import pytest
import torch
from list_of_tables import listed

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableLookup, check_lookups
from recapp.tables.table_settings import BAGS, SEQUENCES, listed_tables

ITEM = {"name": "item", "num_embeddings": 10, "embedding_dim": 4}
USER = {"name": "user", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["u", "v"]}


def outputs(made):
    return {name: [x.output for x in own.lookups] for name, own in made.collections.items()}


def test_a_table_without_pooling_is_a_sequence():
    made = listed_tables(listed([USER, ITEM | {"pooling": "none", "feature_names": ["i"]}]))
    assert outputs(made) == {BAGS: ["u", "v"], SEQUENCES: ["i"]}
    assert [type(t) for t in made.tables] == [EmbeddingBagConfig, EmbeddingConfig]


def test_outputs_are_named_within_a_collection():
    weight = {"name": "weight", "num_embeddings": 10, "embedding_dim": 1, "feature_names": ["u"]}
    wide = weight | {"collection": "wide"}
    assert outputs(listed_tables(listed([USER, wide]))) == {BAGS: ["u", "v"], "wide": ["u"]}
    assert outputs(listed_tables(listed([USER, weight]))) == {BAGS: ["u@user", "v", "u@weight"]}


def test_two_collections_may_read_one_table_each_by_its_own_features():
    lookups = [
        {"table": "item", "feature": "i"},
        {"table": "item", "feature": "h", "combiner": "none"},
        {"table": "item", "feature": "i", "collection": "other", "combiner": "mean"},
    ]
    made = listed_tables(listed([ITEM], lookups))
    assert outputs(made) == {BAGS: ["i"], SEQUENCES: ["h"], "other": ["i"]}
    assert [t.feature_names for t in made.tables] == [("i", "h")]
    for name, own in made.collections.items():
        check_lookups(own.tables, own.lookups)
        assert own.tables[0].feature_names == (("h",) if name == SEQUENCES else ("i",))


def test_a_feature_that_nothing_reads_stays_and_is_refused_by_the_collection():
    named = ITEM | {"feature_names": ["i", "h", "x"]}
    made = listed_tables(listed([named], [{"table": "item", "feature": "i"}]))
    with pytest.raises(ConfigError, match="no lookup reads table item by feature h"):
        check_lookups(made.collections[BAGS].tables, made.lookups)


def test_a_collection_pools_all_its_lookups_or_none():
    mixed = [
        {"table": "item", "feature": "i"},
        {"table": "item", "feature": "h", "combiner": "none", "collection": BAGS},
    ]
    with pytest.raises(ConfigError, match="collection embedding_bag_collection has a lookup that"):
        listed_tables(listed([ITEM], mixed))


@pytest.mark.parametrize(
    ("name", "combiner", "says"), [(BAGS, "none", "i does not pool"), (SEQUENCES, "sum", "i pools")]
)
def test_a_usual_name_is_refused_for_lookups_of_the_other_kind(name, combiner, says):
    lookups = [{"table": "item", "feature": "i", "combiner": combiner, "collection": name}]
    with pytest.raises(ConfigError, match=f"collection: {name} takes lookups that .*{says}"):
        listed_tables(listed([ITEM], lookups))


def test_a_collection_of_sequences_takes_lookups_in_their_order():
    table = EmbeddingBagConfig(
        name="item", num_embeddings=10, embedding_dim=4, feature_names=["i", "h"]
    )
    read = [TableLookup(table, "h", "watched", "none"), TableLookup(table, "i", "now", "none")]
    found = EmbeddingCollection([table], lookups=read)
    ids = KeyedJaggedTensor(["i", "h"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    made = found(ids)
    assert list(made) == ["watched", "now"]
    rows = found.weight("item")
    assert torch.equal(made["watched"].values(), rows[[2, 3]])
    assert torch.equal(made["now"].values(), rows[[1]])
    pooled = [TableLookup(table, "h", "watched", "sum"), read[1]]
    with pytest.raises(ConfigError, match="lookup watched of table item pools its bags \\(sum\\)"):
        EmbeddingCollection([table], lookups=pooled)
