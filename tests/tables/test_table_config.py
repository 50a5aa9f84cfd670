"""What a table may be, and the one-line errors for what it may not be."""

import math

import pytest
import torch

from recapp.engine.shard_model import shard_model
from recapp.errors import ConfigError
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.collections import compute_dtype
from recapp.tables.config import (
    DataType,
    EmbeddingBagConfig,
    IdRule,
    PoolingType,
    check_tables,
)
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.lookups import lookups_of
from recapp.transport.communicator import Comm


def table(name="t", **changes):
    return EmbeddingBagConfig(
        **(
            {"name": name, "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}
            | changes
        )
    )


def test_choices_are_taken_as_text_or_as_members():
    t = table(pooling="mean", data_type=DataType.BF16, id_rule="hash")
    assert (t.pooling, t.data_type, t.id_rule) == (PoolingType.MEAN, DataType.BF16, IdRule.HASH)
    assert t.data_type.dtype == torch.bfloat16 and t.feature_names == ("f",)
    assert {d: d.dtype for d in DataType} == {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "int8": torch.quint8,
        "int4": torch.quint4x2,
    }
    assert {d.bits for d in DataType} == {None, 8, 4}


def test_tables_of_so_few_bits_are_only_read():
    few = [table(data_type="int8")]
    made = EmbeddingBagCollection(few, device=torch.device("meta"))
    assert made.dtype == torch.float32
    message = r"data_type=int8: rows of so few bits are .* only read: train fp32"
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(few)
    plan = ShardingPlan({"t": TableSharding((Shard(0, range(10), range(4)),), "unique")}, 1)
    with pytest.raises(ConfigError, match=r"data_type=int8: rows of so few bits are only"):
        shard_model(made, plan, Comm(alone=True), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "first"}, "tables.t.pooling=first: known: mean, sum"),
        ({"data_type": "fp23"}, "tables.t.data_type=fp23: did you mean fp32"),
        ({"id_rule": "hashed"}, "tables.t.id_rule=hashed: did you mean hash"),
        ({"num_embeddings": 0}, "tables.t.num_embeddings=0: must be a whole number of at least 1"),
        ({"num_embeddings": 1e6}, "tables.t.num_embeddings=1000000.0: must be a whole number"),
        ({"embedding_dim": -4}, "tables.t.embedding_dim=-4: must be a whole number"),
        ({"feature_names": []}, r"tables.t.feature_names=\[\]: name at least one feature"),
        (
            {"feature_names": ["f", "g", "f"]},
            r"tables.t.feature_names=\['f', 'g', 'f'\]: .* each once",
        ),
        ({"feature_names": "f1"}, r"tables.t.feature_names=f1: must be a list of names, \[f1\]"),
        (
            {"num_embeddings": 1, "id_rule": "hash"},
            "tables.t.num_embeddings=1: id_rule=hash needs 2 rows",
        ),
        ({"init_range": -1.0}, r"tables.t.init_range=-1.0: must be a number of at least 0"),
        ({"init_range": math.nan}, "tables.t.init_range=nan: must be a number"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_table_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        table(**changes)


def test_tables_have_names_of_their_own_and_there_is_one_at_least():
    with pytest.raises(ConfigError, match="two tables are called t; names must be unique"):
        check_tables([table(), table("u"), table()])
    with pytest.raises(ConfigError, match="tables is empty"):
        EmbeddingBagCollection([])


def test_outputs_are_named_by_feature_and_by_table_where_several_read_one():
    tables = [table("t", feature_names=["a", "b"]), table("u", feature_names=["b", "c"])]
    assert [x.output for x in lookups_of(tables)] == ["a", "b@t", "b@u", "c"]


def test_a_collection_computes_in_double_precision_where_any_table_is_stored_so():
    assert compute_dtype([table(data_type="fp16"), table(data_type="bf16")]) == torch.float32
    assert compute_dtype([table(data_type="fp16"), table(data_type="fp64")]) == torch.float64
