"""An ensemble: its members train as runs alone would, and the mean of their outputs is measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from jobs import validation
from runs import compose, fit
from tiers import one_of
from torch import nn

from recapp.errors import CheckpointError
from recapp.inference.probe import storage_by_hand
from recapp.models.ensemble import Ensemble
from recapp.optim.named_rules import pick
from recapp.planner.planner_settings import Machines, PlanRule, PlanSettings
from recapp.planner.problem import PlanningProblem, topology_of
from recapp.run.plan_of_run import build_plan
from recapp.run.run_checks import check_tables
from recapp.run.training import build_callbacks
from recapp.stored.stored_model import load_table, read_manifest
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.table_settings import member_name, of_all_members

MEMBERS = 3
SEED = 5
STEPS = "trainer.max_steps=4"
WIDE = "tables.wide=true"
HASH = "tables.id_rule=hash"


@pytest.fixture(scope="module")
def trained(logs, tmp_path_factory):
    """An ensemble on one rank: its folder and module."""
    folder = tmp_path_factory.mktemp("ensemble")
    wanted = (f"seed={SEED}", f"ensemble={MEMBERS}", STEPS, WIDE)
    _, _, module = fit(compose(logs, *wanted), folder)
    return folder, module


@pytest.mark.parametrize("number", one_of(3, range(MEMBERS)))
def test_a_member_trains_as_a_run_alone_does(number, trained, logs, tmp_path):
    folder, ensemble = trained
    wanted = (f"seed={SEED + number}", f"dataset.seed={SEED}", STEPS, WIDE)
    _, _, alone = fit(compose(logs, *wanted), tmp_path)
    mine, other = (f / "checkpoints/last.ckpt" for f in (folder, tmp_path))
    for table in read_manifest(other).shapes:
        found = load_table(mine, member_name(table, number))
        assert torch.equal(found, load_table(other, table))
    member = dict(ensemble.model.members[number].named_parameters())
    for name, value in alone.model.named_parameters():
        assert torch.equal(value, member[name])


def test_the_tables_of_members_differ(trained):
    last = trained[0] / "checkpoints/last.ckpt"
    first, second = (load_table(last, member_name("C1", number)) for number in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.full
def test_rules_of_tables_and_names_of_a_plan_hold_for_all_members(logs):
    wanted = compose(logs, "ensemble=2", "optimizer.sparse.tables={C1: {lr: 0.5}, C2*: {lr: 1}}")
    assert {name: rule.lr for name, rule in wanted.rules.items()} == {
        "*": 0.05,
        "C1": 0.5,
        "C1__2": 0.5,
        "C2*": 1,
    }


def test_every_setting_by_table_holds_for_all_members():
    first = [EmbeddingBagConfig(100, 4, name, feature_names=[name]) for name in ("C1", "C2", "I1")]
    later = [replace(t, name=member_name(t.name, 1), member_of=t.name) for t in first]
    tables = first + later
    given = {"C?": "a", "*1": "b", "I1": "c", "C2__2": "d"}
    made = of_all_members(given, tables)
    assert {t.name: pick(made, t.name) for t in later} == {"C1__2": "b", "C2__2": "d", "I1__2": "c"}
    assert of_all_members({"C*": "a", "*": "b"}, tables) == {"C*": "a", "*": "b"}
    stored = storage_by_hand(tables, {"C?": "int8"})
    assert list(stored) == ["C1", "C2", "C1__2", "C2__2"]
    problem = PlanningProblem(tables, topology_of(Machines(ranks=2), 2, "cpu"))
    rules = (PlanRule("row_wise", tables=["C?"]), PlanRule("table_wise"))
    by_hand = build_plan(SimpleNamespace(plan=PlanSettings(rules=rules)), problem)
    assert {n for n, s in by_hand.tables.items() if s.sharding_type == "row_wise"} == set(stored)


def test_tables_of_all_members_begin_anew(logs, tmp_path):
    wanted = compose(logs, "ensemble=2", "optimizer.restart_tables=[C1,'C?']", "callbacks=none")
    made = build_callbacks(wanted, tmp_path, logging=False)[0]
    assert {"C1__2", "C9__2"} <= set(made.tables) and "C10__2" not in made.tables


def test_a_stored_ensemble_keeps_its_number_of_members(trained, logs):
    last = trained[0] / "checkpoints/last.ckpt"
    wanted = compose(logs, "ensemble=2", f"ckpt_path={last}")
    with pytest.raises(CheckpointError, match="ensemble=2: the checkpoint has an ensemble of 3"):
        check_tables(wanted, read_manifest(last))


@pytest.mark.full
def test_an_ensemble_is_the_same_under_every_plan_and_measured_as_it_was_saved(jobs, tmp_path):
    found = []
    for plan in ("row_wise", "table_wise"):
        wanted = ("dataset=sample", f"dataset.path={tmp_path}/clicks", "dataset.generate.rows=2000")
        more = ("ensemble=2", f"+plan={plan}", STEPS, "dataset.table_rows=[60,40,20]")
        found.append(jobs.train(tmp_path / plan, *wanted, *more, "tables=from_dataset", HASH))
    first, second = found
    assert validation(first) == validation(second)
    measured = jobs.evaluate(tmp_path / "eval", f"ckpt_path={first['checkpoint']}")
    assert validation(measured) == validation(first)


class Member(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, batch):
        return self.factor * batch


class TwoOutputs(Member):
    def forward(self, batch):
        return {"click": self.factor * batch, "order": batch, "kept": None}

    def extra_losses(self, outputs, batch, loss):
        return {"branch": loss(outputs["order"])}


def test_outputs_are_averaged_and_losses_added():
    batch_B = torch.tensor([1.0, 2.0])
    one = Ensemble([Member(1.0), Member(3.0)], "price")
    outputs = one(batch_B)
    assert torch.equal(outputs["price"], 2 * batch_B)
    assert one.task_loss(outputs, batch_B, torch.sum) == 3.0 + 9.0
    assert one.extra_losses(outputs, batch_B, torch.sum) == {}
    several = Ensemble([TwoOutputs(1.0), TwoOutputs(2.0)])
    outputs = several(batch_B)
    assert set(outputs) == {"click", "order", "members"}
    assert torch.equal(outputs["click"], 1.5 * batch_B)
    assert several.extra_losses(outputs, batch_B, torch.sum) == {"branch": 6.0}


class OwnLoss(Member):
    """A member that trains with a loss of its own, and returns the order of its samples, too."""

    def forward(self, batch_B):
        return {"logit": super().forward(batch_B), "order": batch_B.argsort()}

    def task_loss(self, outputs, batch, loss):
        return 100 * loss(outputs["logit"])


def test_members_keep_their_own_loss_and_tensors_that_are_no_outputs():
    batch_B = torch.tensor([1.0, 2.0])
    one = Ensemble([OwnLoss(1.0), OwnLoss(3.0)])
    outputs = one(batch_B)
    assert set(outputs) == {"logit", "members"}
    assert one.task_loss(outputs, batch_B, torch.sum) == 300.0 + 900.0
