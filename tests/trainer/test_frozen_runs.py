"""Frozen tables and start values from files in whole runs: settings, checkpoints and resumed runs,
and LightningModules of somebody's own.
"""

from itertools import pairwise

import lightning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from trainer.own_lightning import Clicks, fitted
from trainer.runs import SCHEDULE, compose, fit, fit_twice

from recapp.errors import ConfigError
from recapp.optim.named_rules import rules_of, tables_that_restart
from recapp.run import training
from recapp.run.run_checks import check_start_values, check_starts, check_training
from recapp.settings.records import to_plain
from recapp.sharding.layout import Block
from recapp.stored.checkpoint import remove_checkpoint, write_checkpoint
from recapp.stored.stored_model import load_table, read_manifest
from recapp.tables.initial import fill_initial
from recapp.trainer.callbacks import FillTables
from recapp.transport.communicator import Comm

LAST = "checkpoints/last.ckpt"


class Frozen(Clicks):
    def configure_model(self):
        super().configure_model()
        self.bags.requires_grad_(False)


ALL = ["bags", "sequences", "hidden"]
HABITS = [
    (lambda module: None, ALL),
    (lambda module: module.freeze(), []),
    (lambda module: module.unfreeze(), ALL),
    (lambda module: module.requires_grad_(False), []),
    (lambda module: BaseFinetuning.make_trainable(module.bags), ["bags"]),
    (lambda module: module.requires_grad_(), ALL),
    (lambda module: BaseFinetuning.freeze([module.sequences, module.hidden]), ["bags"]),
    (lambda module: BaseFinetuning.make_trainable(module), ALL),
    (lambda module: table(module).requires_grad_(False), ["sequences", "hidden"]),
    (lambda module: module.sequences.requires_grad_(False), ["hidden"]),
]


def table(module):
    return module.bags.embedding_bags["items"].weight


class Habits(lightning.Callback):
    """Freezes parts of a module in several ways, one after the other, each before a batch."""

    def __init__(self):
        self.moved = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx < len(HABITS):
            HABITS[batch_idx][0](pl_module)
        self.before = values_of(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        after = values_of(pl_module)
        self.moved.append([n for n in ALL if not torch.equal(self.before[n], after[n])])


def values_of(module):
    rows = {name: whole(getattr(module, name)) for name in ("bags", "sequences")}
    return rows | {"hidden": module.hidden.weight.detach().clone()}


def whole(collection):
    return torch.cat([b.data for b in collection.blocks() if b.tensor == "weight"]).clone()


def test_modules_freeze_sharded_tables_as_they_freeze_parameters(tmp_path):
    habits = Habits()
    fitted(tmp_path, callbacks=[habits])
    assert habits.moved[: len(HABITS)] == [moved for _, moved in HABITS]


def test_tables_that_a_lightning_module_freezes_before_sharding_stay(tmp_path):
    trainer = fitted(tmp_path, kind=Frozen)
    module = trainer.lightning_module
    start = Clicks()
    start.configure_model()
    unsharded = start.bags.__class__(tables=start.bags.tables(), device="cpu")
    assert torch.equal(whole(module.bags), unsharded.weight("items").detach())
    assert [group["tables"] for group in trainer.strategy.sparse_groups()] == [["seen"]]
    manifest = read_manifest(tmp_path / "end.ckpt")
    assert manifest.rules == {"items": "frozen", "seen": "rowwise_adagrad"}
    assert ("items", "sum") not in manifest.tensors


@pytest.mark.full
def test_settings_freeze_tables_and_a_resumed_run_freezes_others(logs, tmp_path, capsys):
    schedule = ("optimizer.sparse.tables={C7: {rule: sgd}}", *SCHEDULE)
    _, optimizer, manifest, scheduled = fit_twice(
        logs,
        tmp_path,
        ("tables.frozen=[C1,C7]", *schedule),
        ("tables.frozen=[C1,C2]", *schedule),
    )
    assert len(scheduled.base_lrs) == len(optimizer.param_groups) == 3
    assert [manifest.rules[name] for name in ("C1", "C7", "C2")] == ["frozen"] * 2 + [
        "rowwise_adagrad"
    ]
    first, then, last = (tmp_path / name / LAST for name in ("first", "then", "last"))
    start = {t.name: t for t in compose(logs).all_tables}
    everything = f"tables.frozen=[{','.join(start)}]"
    now = compose(logs, everything, "trainer.max_steps=8", *schedule)
    plain = to_plain(now.optimizer)
    changed = training.changed_optimizer(plain, plain)
    _, trainer, _ = fit(now, tmp_path / "last", changed, ckpt_path=then)

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


def test_a_run_starts_from_values_of_files_and_resumes_from_its_checkpoint(logs, tmp_path, capsys):
    """Both members of an ensemble begin with the file, and a frozen table ends with it."""
    path = tmp_path / "c6.ckpt"
    values = torch.linspace(-1, 1, 4 * 16).view(4, 16)
    block = Block("C6", "weight", (4, 16), range(4), range(16), values, True)
    write_checkpoint(path, [block], comm=Comm(), meta={}, manifest={})
    ids = tmp_path / "c7.parquet"
    pq.write_table(pa.table({"id": [3, 5, 3], "vector": [[0.0] * 16] * 3}), ids)
    settings = (f"tables.values={{C6: {path}, C7: {ids}}}", "tables.frozen=[C6]", "ensemble=2")
    recipe = compose(logs, *settings, "trainer.max_steps=2")
    check_start_values(recipe)
    fit(recipe, tmp_path / "first", FillTables(recipe.tables.values))
    first = tmp_path / "first" / LAST
    assert all(torch.equal(load_table(first, name), values) for name in ("C6", "C6__2"))
    said = capsys.readouterr().err
    assert f"table C6 has 4 rows from {path}" in said
    shared = f"table C7 has 2 rows from {ids}; 1 of its 3 vectors are not used, because a later id"
    assert shared in said
    with pytest.raises(ConfigError, match=r"tables\.values: C33: no such table; did you mean C3"):
        check_start_values(compose(logs, "tables.values={C33: x}"))
    others = compose(logs, f"tables.values={{C6: {path}.x}}", f"ckpt_path={first}")
    with pytest.raises(ConfigError, match=r"tables\.values\.C6=.*: is a start value, which has"):
        check_starts(others, read_manifest(first).config)
    remove_checkpoint(path)
    again = compose(logs, *settings, "trainer.max_steps=3", f"ckpt_path={first}")
    check_starts(again, read_manifest(first).config)
    fit(again, tmp_path / "then", ckpt_path=first)
    assert torch.equal(load_table(tmp_path / "then" / LAST, "C6__2"), values)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("tables.frozen=[C33]",), r"tables\.frozen: C33: no such table; did you mean C3"),
        (
            ("tables.frozen=[C3]", "optimizer.restart_tables=[C3]"),
            r"optimizer\.restart_tables: C3: the table is frozen and keeps its rows",
        ),
        (
            ("tables.values={C3: x.parquet}", "optimizer.restart_tables=['*']"),
            r"restart_tables: C3: would lose the values of tables\.values\.C3=x.parquet",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_ranks_start(
    logs, overrides, message
):
    with pytest.raises(ConfigError, match=message) as refused:
        check_training(compose(logs, *overrides))
    assert len(str(refused.value).splitlines()) == 1


def test_restart_tables_by_glob_leaves_frozen_ones(logs):
    recipe = compose(logs, "tables.frozen=[C3]", "optimizer.restart_tables=['*']")
    names = [table.name for table in recipe.all_tables]
    assert "C3" not in tables_that_restart(["*"], rules_of(recipe.rules, names))
