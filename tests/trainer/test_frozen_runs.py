"""Frozen tables and start values from files in whole runs: settings, checkpoints and resumed runs,
and LightningModules of somebody's own.
"""

from itertools import pairwise

import lightning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from trainer.own_lightning import Clicks, fitted
from trainer.runs import STOP, compose, fit, fit_twice

from recapp.errors import ConfigError
from recapp.stored.checkpoint import load_table, read_manifest
from recapp.tables.initial import fill_initial
from recapp.trainer.fill_tables import FillTables

LAST = "checkpoints/last.ckpt"


class Frozen(Clicks):
    def configure_model(self):
        super().configure_model()
        self.bags.requires_grad_(False)


class FreezeLater(lightning.Callback):
    """Freezes the sharded sequences before the tenth of twenty batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 10:
            self.before = whole(pl_module.sequences)
            pl_module.sequences.requires_grad_(False)


def whole(collection):
    return torch.cat([b.data for b in collection.blocks() if b.tensor == "weight"]).clone()


def test_tables_that_a_lightning_module_freezes_stay_before_and_after_sharding(tmp_path):
    later = FreezeLater()
    trainer = fitted(tmp_path, kind=Frozen, callbacks=[later])
    module = trainer.lightning_module
    start = Clicks()
    start.configure_model()
    unsharded = start.bags.__class__(tables=start.bags.tables(), device="cpu")
    assert torch.equal(whole(module.bags), unsharded.weight("items").detach())
    assert torch.equal(whole(module.sequences), later.before)
    assert [group["tables"] for group in trainer.strategy.sparse_groups()] == [["seen"]]
    manifest = read_manifest(tmp_path / "end.ckpt")
    assert manifest.rules == {"items": "frozen", "seen": "rowwise_adagrad"}
    assert ("items", "sum") not in manifest.tensors


def test_settings_freeze_tables_and_a_resumed_run_freezes_others(logs, tmp_path, capsys):
    schedule = ("optimizer.sparse.tables={C7: {rule: sgd}}",)
    _, optimizer, manifest = fit_twice(
        logs,
        tmp_path,
        ("tables.frozen=[C1,C7]", *schedule),
        ("tables.frozen=[C1,C2]", *schedule),
    )
    assert [manifest.rules[name] for name in ("C1", "C7", "C2")] == ["frozen"] * 2 + [
        "rowwise_adagrad"
    ]
    first, then, last = (tmp_path / name / LAST for name in ("first", "then", "last"))
    start = {t.name: t for t in compose(logs).all_tables}
    everything = f"tables.frozen=[{','.join(start)}]"
    _, trainer, _ = fit(
        compose(logs, everything, "trainer.max_steps=8"), tmp_path / "last", ckpt_path=then
    )

    def moves(table):
        """Whether rows moved in the first run, in the second and in the last."""
        rows = torch.empty(start[table].num_embeddings, 16)
        fill_initial(rows, start[table], 1, range(len(rows)), range(16))
        every = [rows, *(load_table(path, table) for path in (first, then, last))]
        return [not torch.equal(*pair) for pair in pairwise(every)]

    assert [moves(table) for table in ("C1", "C2", "C7", "C3")] == [
        [False, False, False],
        [True, False, False],
        [False, True, False],
        [True, True, False],
    ]
    assert [group["name"] for group in trainer.optimizers[0].param_groups] == ["dense"]
    said = capsys.readouterr().err
    assert "table C2 is frozen from here on" in said
    assert "table C7 goes on by sgd, the checkpoint has frozen: weights stay" in said
    assert {group["name"] for group in optimizer.param_groups} == {
        "dense",
        "sparse/rowwise_adagrad",
        "sparse/sgd",
    }
