"""Save under one plan on n ranks, load under another on m ranks: weights and optimiser state are
those of the unsharded run.
"""

import random

import pytest
import torch
from parity.cases import KINDS, RULES, Oracle, loss_of, make_case, sharding

from recapp.checkpoints.directory import (
    load_blocks,
    load_table,
    read_manifest,
    verify,
    write_checkpoint,
)
from recapp.engine.sharded_embedding_bag import shard_bags
from recapp.sharding.sharding_plan import ShardingPlan

SEED = 11


def trained(comm, kind, rule, path):
    """Train three steps and save."""
    case = make_case(SEED, kind, comm.world, rule=rule, mode="both", pooling="sum", weighted=False)
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


def loaded(comm, world, kind, other, rule, path):
    """Load under another plan and compare with the unsharded run on the trained batches."""
    case = make_case(SEED, kind, world, rule=rule, mode="both", pooling="sum", weighted=False)
    oracle = Oracle(case, SEED)
    for batches in case.batches:
        oracle.step(batches)
    rng = random.Random(other)
    plan = ShardingPlan(
        {t.name: sharding(other, t, comm.world, rng, "unique") for t in case.tables}, comm.world
    )
    model = shard_bags(case.tables, plan, comm, case.rule, seed=SEED + 1)
    load_blocks(path, list(model.blocks()))
    for block in model.blocks():
        whole = oracle.tensor(block.table, block.tensor)
        expected = whole[block.rows.start : block.rows.stop, block.cols.start : block.cols.stop]
        torch.testing.assert_close(block.data, expected, rtol=1e-9, atol=1e-9)
    return sum(b.data.numel() for b in model.blocks() if b.tensor == "weight")


@pytest.mark.parametrize(
    ("kind", "other", "n", "m", "rule"),
    [
        ("row_wise", "column_wise", 2, 4, "rowwise_adagrad"),
        ("mixed", "random", 4, 2, "adam"),
        ("random", "data_parallel", 4, 1, "adagrad"),
        ("data_parallel", "grid_shard", 1, 4, "rowwise_adagrad"),
        ("column_wise", "table_wise", 4, 3, "rowwise_adagrad"),
    ],
)
def test_a_checkpoint_loads_under_any_plan_on_any_number_of_ranks(
    ranks, tmp_path, kind, other, n, m, rule
):
    path = str(tmp_path / "a.ckpt")
    ranks.run(trained, n, kind, rule, path)
    held = ranks.run(loaded, m, n, kind, other, rule, path)
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
    ranks.run(trained, 4, kind, "rowwise_adagrad", str(tmp_path / "a.ckpt"))
    ranks.run(loaded, 2, 4, kind, other, "rowwise_adagrad", str(tmp_path / "a.ckpt"))
