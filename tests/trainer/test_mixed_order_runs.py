"""Runs whose rows lie in mixed order: the losses of the natural order, and checkpoints of either go
on in the other.
"""

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from runs import SIZES, compose, fit

from recapp.sharding.plan_file import write_plan
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.stored.stored_model import load_table, read_manifest
from recapp.transport.communicator import Comm

DIM = 16
ORDERS = ("natural", "mixed")


def plan_file(folder, order):
    """Two strips of every table on one rank: a table that is not cut stays in its own order."""

    def halves(rows):
        return tuple(
            Shard(0, part, range(DIM)) for part in (range(rows // 2), range(rows // 2, rows))
        )

    tables = {
        f"C{k + 1}": TableSharding(halves(rows), "unique", "custom", order)
        for k, rows in enumerate(SIZES)
    }
    write_plan(ShardingPlan(tables, 1), folder / "plan.yaml")
    return folder / "plan.yaml"


def trained(logs, folder, order, steps=6, ckpt_path=None):
    folder.mkdir()
    path = plan_file(folder, order)
    config = compose(logs, f"trainer.max_steps={steps}", "+plan=file", f"plan.path={path}")
    seen, trainer, _ = fit(config, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    return seen.losses, shared, folder / "checkpoints" / "last.ckpt"


def test_losses_and_stored_tables_are_those_of_the_natural_order(logs, tmp_path):
    (natural, _, first), (mixed, shared, second) = (
        trained(logs, tmp_path / order, order) for order in ORDERS
    )
    assert natural == mixed and len(mixed) == 6
    assert all(order is not None for order in shared.state.layout.orders)
    assert read_manifest(second).plan.tables["C1"].row_order == "mixed"
    for tensor in ("weight", "sum"):
        assert torch.equal(load_table(first, "C1", tensor), load_table(second, "C1", tensor))


@pytest.mark.full
@pytest.mark.parametrize(
    ("order", "other"), [ORDERS, pytest.param(*ORDERS[::-1], marks=pytest.mark.full)]
)
def test_a_run_goes_on_in_the_other_order(logs, tmp_path, order, other):
    whole, wanted, _ = trained(logs, tmp_path / "whole", other)
    _, _, stopped = trained(logs, tmp_path / "half", order, steps=3)
    rest, found, _ = trained(logs, tmp_path / "rest", other, ckpt_path=stopped)
    assert rest == whole[3:]
    found, wanted = (rows_by_key(Comm(), shared) for shared in (found, wanted))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
