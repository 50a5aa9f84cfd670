"""Sizes at the edge: tables of one row or column, more ranks than rows, batches without samples,
one process without a group.
"""

import sys

import pytest
import torch
from engine.engine_cases import (
    KINDS,
    RULES,
    batch_of,
    make_plan,
    make_tables,
    same_bits,
    sharded,
    whole_tensors,
)
from parity.cases import Case, Oracle, loss_of
from tiers import one_of

from recapp.engine.sharded_collection import shard_bags
from recapp.errors import PlanError
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

TINY = {"rows": (1, 3, 2), "dims": (1, 2, 1), "data_type": "fp64"}


def compare(comm, tables, kind, rule, rows_W, mode="unique"):
    collection = sharded(comm, tables, kind, rule, mode=mode, column_width=1)
    head = torch.linspace(-1, 1, collection.width, dtype=torch.float64)
    oracle = Oracle(Case(tables, None, [], head, RULES[rule]), seed=1)
    for step in range(3):
        batches = [batch_of(tables, rows_W[r], 10 * step + r) for r in range(comm.world)]
        values = collection(batches[comm.rank]).values()
        assert values.shape == (rows_W[comm.rank], collection.width)
        (loss_of(values, head).sum() * comm.world / max(1, sum(rows_W))).backward()
        torch.testing.assert_close(
            values.detach(), oracle.step(batches)[comm.rank], rtol=1e-9, atol=1e-9
        )
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "kind",
    [k if k in ("row_wise", "random") else pytest.param(k, marks=pytest.mark.full) for k in KINDS],
)
def test_tables_of_fewer_rows_than_ranks_and_of_one_column_train(ranks, kind):
    for rule in RULES:
        ranks.run(compare, 4, make_tables(**TINY), kind, rule, [5, 5, 5, 5])


@pytest.mark.parametrize("kind", one_of(2, ["row_wise", "column_wise", "data_parallel", "random"]))
@pytest.mark.parametrize("rows_W", [[4, 0], [0, 4], [0, 0], [1, 0]])
def test_ranks_without_samples_take_part(ranks, kind, rows_W):
    for mode in ("unique", "pooled"):
        ranks.run(compare, 2, make_tables(data_type="fp64"), kind, "rowwise_adagrad", rows_W, mode)


def nobody_has_samples(comm):
    tables = make_tables()
    collection = sharded(comm, tables, "mixed", "sgd")
    before = whole_tensors(comm, collection)
    collection(batch_of(tables, 0, 0)).values().sum().backward()
    after = whole_tensors(comm, collection)
    return all(same_bits(before[k], after[k]) for k in before)


def test_a_step_without_any_sample_changes_nothing(ranks):
    assert ranks.run(nobody_has_samples, 2) == [True, True]


def replicated_strips(comm):
    """A plan that no named type covers: a table replicated in strips, beside one whose strips lie
    on two ranks.
    """
    tables = make_tables(data_type="fp64")[:2]
    cut = TableSharding(
        tuple(Shard(k, range(131), cols) for k in range(2) for cols in (range(7), range(7, 16))),
        "replicated",
    )
    dealt = TableSharding((Shard(1, range(40), range(2)), Shard(0, range(40), range(2, 5))))
    collection = shard_bags(
        tables, ShardingPlan({"t0": cut, "t1": dealt}, 2), comm, RULES["rowwise_adagrad"], 1
    )
    head = torch.linspace(-1, 1, collection.width, dtype=torch.float64)
    oracle = Oracle(Case(tables, None, [], head, RULES["rowwise_adagrad"]), seed=1)
    for step in range(3):
        batches = [batch_of(tables, 5, 10 * step + r) for r in range(2)]
        loss_of(collection(batches[comm.rank]).values(), head).mean().backward()
        oracle.step(batches)
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)


def test_replicas_in_strips_agree_on_their_statistics_at_home(ranks):
    ranks.run(replicated_strips, 2)


def shared_names(comm):
    tables = make_tables()
    out = sharded(comm, tables, "mixed")(batch_of(tables, 3, 0))
    return list(out.keys()), list(out.length_per_key())


def test_a_feature_that_several_tables_read_is_named_with_its_table(ranks):
    assert (
        ranks.run(shared_names, 2)
        == [(["a", "shared@t0", "b", "shared@t1", "c"], [16, 16, 5, 5, 12])] * 2
    )


def one_table_of_two_features(comm):
    """Two features of one table that hold the same rows: one update with both gradients."""
    tables = [
        EmbeddingBagConfig(
            name="t",
            num_embeddings=4,
            embedding_dim=3,
            feature_names=["f", "g"],
            data_type="fp64",
            init_range=0.0,
        )
    ]
    collection = sharded(comm, tables, "row_wise", "adagrad")
    collection(
        KeyedJaggedTensor(["f", "g"], [0, 1, 1, 2], None, [1, 1, 1, 1])
    ).values().sum().backward()
    state = whole_tensors(comm, collection)["t", "sum"]
    return state[:, 0].tolist()


def test_a_row_that_two_features_hit_is_updated_once_with_the_sum(ranks):
    assert ranks.run(one_table_of_two_features, 2) == [[1.0, 4.0, 1.0, 0.0]] * 2


def trained(comm, tables, rule):
    collection = shard_bags(tables, make_plan("random", tables, 1), comm, RULES[rule], 1, "torch")
    head = torch.linspace(-1, 1, collection.width)
    for step in range(3):
        loss_of(collection(batch_of(tables, 6, step)).values(), head).mean().backward()
    return {f"{t}.{n}": data.numpy() for (t, n), data in whole_tensors(comm, collection).items()}


@pytest.mark.parametrize("rule", RULES)
def test_one_process_without_a_group_trains_as_a_group_of_one(ranks, rule):
    here = trained(Comm(), make_tables(), rule)
    (there,) = ranks.run(trained, 1, make_tables(), rule)
    assert here.keys() == there.keys()
    assert all(here[name].tobytes() == there[name].tobytes() for name in here)


@pytest.mark.parametrize(("planned", "world"), [(1, 2), (4, 2), (2, 4)])
def test_a_plan_for_another_number_of_ranks_is_refused(ranks, planned, world):
    for text in ranks.run(wrong_world, world, planned):
        assert text == (
            f"plan row_wise is for {planned} ranks, but there are {world}: set "
            f"trainer.devices={planned} or make the plan "
            f"for {world}"
        )


def wrong_world(comm, planned):
    tables = make_tables()
    with pytest.raises(PlanError) as error:
        shard_bags(tables, make_plan("row_wise", tables, planned), comm, RULES["sgd"])
    return str(error.value)


@pytest.mark.full
def test_without_numba_the_reference_runs_and_says_so_once(monkeypatch, capsys):
    sharded(Comm(), make_tables())
    assert "plain torch" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "numba", None)
    assert sharded(Comm(), make_tables()).shared.state.backend.name == "torch"
    assert capsys.readouterr().err == (
        "numba is not installed (pip install numba): lookup and update run in plain torch, "
        "several times slower\n"
    )
    assert (
        sharded(Comm(), make_tables(), backend="torch").shared.state.backend.name == "torch"
        and capsys.readouterr().err == ""
    )
