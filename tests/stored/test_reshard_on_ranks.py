"""Save under one plan on n ranks, load under another on m ranks: weights and optimiser state are
those of the unsharded run.
"""

import random
from itertools import product

import pytest
import torch
from parity.cases import (
    KINDS,
    RULES,
    Oracle,
    in_order,
    loss_of,
    make_case,
    rows_held,
    sharding,
)

from recapp.engine.sharded_collection import shard_bags
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.stored_model import load_blocks, load_table, read_manifest, verify
from recapp.tables.positions import ROW_ORDERS

SEED = 11


BAGS = {"mode": "both", "pooling": "sum", "weighted": False}


def trained(comm, kind, rule, row_order, path):
    """Train three steps and save."""
    case = make_case(SEED, kind, comm.world, rule=rule, **BAGS, row_order=row_order)
    model = shard_bags(case.tables, case.plan, comm, case.rule, seed=SEED)
    for batches in case.batches:
        values = model(batches[comm.rank]).values()
        (
            loss_of(values, case.head).sum() * comm.world / max(1, sum(model.shared.header.rows_W))
        ).backward()
    write_checkpoint(
        path,
        list(model.blocks()),
        comm=comm,
        meta={"step": 3},
        manifest={"plan": case.plan.to_dict()},
    )


def loaded(comm, world, kind, other, rule, row_order, path):
    """Load under another plan and compare with the unsharded run on the trained batches."""
    case = make_case(SEED, kind, world, rule=rule, **BAGS)
    oracle = Oracle(case, SEED)
    for batches in case.batches:
        oracle.step(batches)
    rng = random.Random(other)
    plan = ShardingPlan(
        {t.name: sharding(other, t, comm.world, rng, "unique") for t in case.tables}, comm.world
    )
    plan = in_order(plan, row_order)
    model = shard_bags(case.tables, plan, comm, case.rule, seed=SEED + 1)
    load_blocks(path, list(model.blocks()))
    for block in model.blocks():
        whole = oracle.tensor(block.table, block.tensor)
        expected = whole[rows_held(block), block.cols.start : block.cols.stop]
        torch.testing.assert_close(block.data, expected, rtol=1e-9, atol=1e-9)
    return sum(b.data.numel() for b in model.blocks() if b.tensor == "weight")


@pytest.mark.parametrize(
    ("kind", "other", "n", "m", "rule", "orders"),
    [
        ("row_wise", "column_wise", 2, 4, "rowwise_adagrad", ("natural", "natural")),
        ("mixed", "random", 4, 2, "adam", ("mixed", "mixed")),
        ("random", "data_parallel", 4, 1, "adagrad", ("mixed", "natural")),
        ("data_parallel", "grid_shard", 1, 4, "rowwise_adagrad", ("natural", "mixed")),
        ("column_wise", "table_wise", 4, 3, "rowwise_adagrad", ("natural", "natural")),
    ],
)
def test_a_checkpoint_loads_under_any_plan_on_any_number_of_ranks(
    ranks, tmp_path, kind, other, n, m, rule, orders
):
    path = str(tmp_path / "a.ckpt")
    ranks.run(trained, n, kind, rule, orders[0], path)
    held = ranks.run(loaded, m, n, kind, other, rule, orders[1], path)
    assert sum(held) > 0
    assert verify(path) > 0
    manifest = read_manifest(path)
    assert {tensor for _, tensor in manifest.tensors} == {
        "weight",
        *(name for name, _ in RULES[rule].state),
    }
    table = manifest.blocks[0].table
    assert load_table(path, table).shape == manifest.tensors[table, "weight"][0].shape


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_every_plan_reads_what_every_plan_wrote(ranks, tmp_path, kind, other):
    for number, (before, after) in enumerate(product(ROW_ORDERS, ROW_ORDERS)):
        path = str(tmp_path / f"{number}.ckpt")
        ranks.run(trained, 4, kind, "rowwise_adagrad", before, path)
        ranks.run(loaded, 2, 4, kind, other, "rowwise_adagrad", after, path)
