"""Averages of rows on several ranks against torch's averaged model of the unsharded collection, for
every way of cutting tables.
"""

import pytest
import torch
from parity.cases import KINDS, TOLERANCE, Oracle, loss_of, make_case, rows_held
from tiers import one_of
from torch.optim import swa_utils

from recapp.engine.sharded_collection import shard_bags

DECAY = 0.75
OPTIONS = {"rule": "rowwise_adagrad", "pooling": "sum", "weighted": False, "steps": 5}


def compare_averages(comm, kind, mode, row_order, is_moving):
    """Runs on every rank; returns whether an average differs from its rows."""
    case = make_case(5, kind, comm.world, mode=mode, row_order=row_order, **OPTIONS)
    sharded = shard_bags(case.tables, case.plan, comm, case.rule, 5, "torch")
    shared = sharded.shared
    shared.keep_average()
    oracle = Oracle(case, 5)
    move = swa_utils.get_ema_multi_avg_fn(DECAY) if is_moving else None
    averaged = swa_utils.AveragedModel(oracle.model, multi_avg_fn=move)
    for step, batches in enumerate(case.batches):
        values = sharded(batches[comm.rank]).values()
        rows = sum(shared.header.rows_W)
        (loss_of(values, case.head).sum() * comm.world / rows).backward()
        oracle.step(batches)
        share = 1 - DECAY if is_moving else 1 / (step + 1)
        shared.update_average(share if step else 1.0)
        averaged.update_parameters(oracle.model)
    moved = False
    raw = {(b.table, b.rows, b.cols): b.data for b in shared.blocks(True) if b.tensor == "raw"}
    for block in (b for b in shared.blocks(True) if b.tensor == "weight"):
        here = rows_held(block), slice(block.cols.start, block.cols.stop)
        wanted = averaged.module.weight(block.table).detach()[here]
        torch.testing.assert_close(block.data, wanted, **TOLERANCE)
        trained = raw[block.table, block.rows, block.cols]
        torch.testing.assert_close(trained, oracle.tensor(block.table, "weight")[here], **TOLERANCE)
        moved |= not torch.equal(trained, block.data)
    last = case.batches[-1][comm.rank]
    for shown, model in ((True, averaged.module), (False, oracle.model)):
        shared.show_average(shown)
        with torch.no_grad():
            torch.testing.assert_close(sharded(last).values(), model(last).values(), **TOLERANCE)
    return moved


@pytest.mark.parametrize("kind", one_of(3, KINDS))
def test_an_average_of_shards_is_torchs_average_of_whole_tables(ranks, kind):
    number = KINDS.index(kind)
    mode = ("unique", "pooled")[number % 2]
    order = "natural" if number % 3 else "mixed"
    assert any(ranks.run(compare_averages, 2, kind, mode, order, number % 4 < 2))
