"""Dynamic tables in Lightning's runs: resumed under another plan, their rows logged."""

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from runs import SIZES, compose, fit

from recapp.sparse.missing_ids import MISSING
from recapp.trainer.callbacks import LogDynamicRows
from recapp.transport.communicator import Comm

GROWS = ("tables=dynamic", "tables.init_range=0.05")
LIMITED = (*GROWS, "tables.dynamic.max_rows=128", "tables.dynamic.seen=2")


def trained(logs, folder, tables, *more, steps=6, plan="mixed", ckpt_path=None, callbacks=()):
    folder.mkdir()
    config = compose(logs, *tables, f"trainer.max_steps={steps}", f"+plan={plan}", *more)
    seen, trainer, _ = fit(config, folder, *callbacks, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    return seen, shared


def test_ids_of_the_logs_are_keys_and_a_missing_one_has_a_row_of_its_own(logs, tmp_path):
    _, shared = trained(logs, tmp_path / "dynamic", GROWS)
    assert all(group.dynamic for group in shared.state.layout.groups)
    keys = rows_by_key(Comm(), shared)["C1", "keys"][:, 0]
    assert int(keys[0]) == MISSING and int(keys[1]) >= 0 and int(keys[-1]) < SIZES[0]


@pytest.mark.parametrize("tables", [pytest.param(GROWS, marks=pytest.mark.full), LIMITED])
def test_a_run_goes_on_under_another_plan_and_looking_ahead_changes_no_bit(logs, tmp_path, tables):
    _, whole = trained(logs, tmp_path / "whole", tables)
    _, other = trained(logs, tmp_path / "not_ahead", tables, "engine.look_ahead=0")
    trained(logs, tmp_path / "half", tables, steps=3, plan="row_wise")
    stopped = tmp_path / "half" / "checkpoints" / "last.ckpt"
    _, rest = trained(logs, tmp_path / "rest", tables, plan="column_wise", ckpt_path=stopped)
    wanted, *found = (rows_by_key(Comm(), shared) for shared in (whole, other, rest))
    for rows in found:
        assert rows.keys() == wanted.keys()
        assert all(torch.equal(rows[name], wanted[name]) for name in wanted)


def test_rows_and_keys_are_logged_by_table_and_printed_at_the_end(logs, tmp_path, capsys):
    _, shared = trained(
        logs,
        tmp_path / "run",
        LIMITED,
        "logger=csv",
        "trainer.log_every_n_steps=2",
        "trainer.val_check_interval=2",
        "trainer.limit_val_batches=1",
        callbacks=[LogDynamicRows()],
    )
    printed = capsys.readouterr().out
    assert "Dynamic tables" in printed and "evicted" in printed
    header, *rows = (tmp_path / "run" / "csv" / "metrics.csv").read_text().splitlines()
    every = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert {row["step"] for row in every if row["rows/C1"]} >= {"2", "4", "6"}
    last = every[-1]
    changes = shared.changes()["C1"]
    assert float(last["rows/C1"]) == sum(shared.rows_of_stretches()["C1"]["rows"])
    assert float(last["new_keys/C1"]) == changes.new > changes.admitted > 0
    assert float(last["evicted/C1"]) == changes.evicted


@pytest.mark.full
def test_another_way_to_count_keys_is_said(logs, tmp_path, capsys):
    often = (*GROWS, "tables.dynamic.seen=3")
    trained(logs, tmp_path / "exact", often, steps=2)
    last = tmp_path / "exact" / "checkpoints" / "last.ckpt"
    trained(logs, tmp_path / "again", often, steps=3, ckpt_path=last)
    assert "counted anew" not in capsys.readouterr().err
    sketch = "tables.dynamic.counter=sketch"
    trained(logs, tmp_path / "sketch", often, sketch, steps=3, ckpt_path=last)
    assert "the checkpoint counted keys by another dynamic.counter" in capsys.readouterr().err
