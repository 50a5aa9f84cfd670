"""What a table may be, and the one-line errors for what it may not be."""

import math
from dataclasses import replace

import pytest
import torch

from recapp.engine.sharded_collection import shard_model
from recapp.errors import ConfigError
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.collections import EmbeddingBagCollection, compute_dtype
from recapp.tables.config import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    IdRule,
    PoolingType,
    check_tables,
    lookups_of,
)
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
    message = r"data_type=int8: rows of 8 or 4 bits are read-only .*: train fp32"
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(few)
    plan = ShardingPlan({"t": TableSharding((Shard(0, range(10), range(4)),), "unique")}, 1)
    with pytest.raises(
        ConfigError, match=r"data_type=int8: rows of 8 or 4 bits are read-only: train"
    ):
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
        (
            {"feature_names": ["f", "g", "f"]},
            r"tables.t.feature_names=\['f', 'g', 'f'\]: .* each once",
        ),
        ({"feature_names": "f1"}, r"tables.t.feature_names=f1: must be a list of names, \[f1\]"),
        (
            {"num_embeddings": 1, "id_rule": "hash"},
            "tables.t.num_embeddings=1: must be at least 2 with id_rule=hash",
        ),
        ({"init_range": -1.0}, r"tables.t.init_range=-1.0: must be a number of at least 0"),
        ({"init_range": math.nan}, "tables.t.init_range=nan: must be a number"),
        ({"weight_init_max": math.inf}, "tables.t.weight_init_max=inf: must be a number"),
        ({"weight_init_min": "0"}, "tables.t.weight_init_min=0: must be a number"),
        (
            {"weight_init_min": 0.5, "init_range": 0.1},
            r"tables.t.weight_init_min=0.5 and init_range=0.1 both set .*: give only one",
        ),
        (
            {"weight_init_min": 0.5},
            r"tables.t.weight_init_min=0.5: is above weight_init_max=0.316.*: start values lie",
        ),
        ({"init_fn": 0.1}, "tables.t.init_fn=0.1: must be a function that writes into a tensor"),
        (
            {"num_embeddings": "dynamic", "weight_init_min": 0.0, "weight_init_max": 0.1},
            "tables.t.weight_init_max: the start values of a dynamic table are uniform",
        ),
        (
            {"num_embeddings": "dynamic", "init_fn": torch.nn.init.zeros_},
            "tables.t.init_fn: the start values of a dynamic table are uniform around 0",
        ),
        (
            {"name": ""},
            "a table has no name: give each EmbeddingBagConfig or EmbeddingConfig a name=",
        ),
        (
            {"num_embeddings_post_pruning": 5},
            "tables.t.num_embeddings_post_pruning=5: tables are not pruned here.*: leave it out",
        ),
        ({"input_dim": 5}, "tables.t.input_dim=5: nothing reads it"),
        (
            {"total_num_buckets": 4},
            r"tables.t.total_num_buckets=4: .*num_embeddings=\"dynamic\" here",
        ),
        ({"use_virtual_table": True}, "tables.t.use_virtual_table=True: a table of any ids is num"),
        ({"virtual_table_eviction_policy": "p"}, "tables.t.virtual_table_eviction_policy=p: a tab"),
        (
            {"enable_embedding_update": True},
            "tables.t.enable_embedding_update=True: rows change by training or load_state_dict",
        ),
        ({"stash_weights": True}, "tables.t.stash_weights=True: rows stay in the memory"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_table_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        table(**changes)


def test_arguments_stand_in_torchrecs_order_and_its_defaults_are_taken():
    fill = torch.nn.init.zeros_
    last = (None, fill, True, None, None, False, None, False)
    given = EmbeddingBagConfig(10, 4, "t", DataType.FP16, ["f", "g"], 0.2, -0.1, *last, "mean")
    assert given == table(
        data_type="fp16",
        feature_names=["f", "g"],
        weight_init_max=0.2,
        weight_init_min=-0.1,
        init_fn=fill,
        pooling="mean",
    )
    assert given.num_features() == 2 and given.need_pos and not given.use_virtual_table
    assert EmbeddingConfig(10, 4, "t").feature_names == ("t",)
    assert replace(given, name="u").need_pos


def test_the_range_of_start_values_is_that_of_torchrec_where_none_is_given():
    usual = 10**-0.5
    bounds = [
        (t.get_weight_init_min(), t.get_weight_init_max())
        for t in (table(), table(weight_init_max=0.5), table(init_range=0.25))
    ]
    assert bounds == [(-usual, usual), (-usual, 0.5), (-0.25, 0.25)]


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
