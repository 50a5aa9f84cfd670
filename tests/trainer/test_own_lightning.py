"""Lightning as its users know it: the strategy plans by itself, a script and a notebook have
several ranks, and what was trained is loaded by Lightning's own words.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from jobs import environment
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import StrategyRegistry
from own_lightning import BATCHES, ITEMS, SEEN, Clicks, Watched, fitted, loader
from torch import nn

import recapp
from recapp import (
    ClickData,
    ClickTask,
    DataSettings,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingShardingPlanner,
    EmbeddingShardingStrategy,
    ParameterConstraints,
    Topology,
    load_model,
    sgd,
    write_plan,
)
from recapp.errors import CheckpointError, ConfigError, PlanError
from recapp.stored.manifest import sealed
from recapp.tasks.task import Output
from recapp.trainer.known_to_lightning import make_known
from recapp.trainer.lightnings_parts import AverageWeights
from recapp.trainer.module import TaskModule
from recapp.trainer.sharded_checkpoint import plain_part_of, whole_checkpoint
from recapp.trainer.trainer_settings import AverageSettings

IDS = BATCHES[3][0]
ROW_WISE = {"*": ParameterConstraints(sharding_types=["row_wise"])}
HERE = Path(__file__)


@pytest.fixture(autouse=True)
def one_thread():
    """More threads than cores make these small runs slower."""
    torch.set_num_threads(1)


def types(trainer):
    return {name: s.sharding_type for name, s in trainer.strategy.plan.tables.items()}


def test_the_strategy_plans_by_itself_and_names_the_usual_rule(tmp_path):
    trainer = fitted(tmp_path)
    assert trainer.global_step == 20 and trainer.strategy.rule.name == "rowwise_adagrad"
    assert types(trainer) == {"items": "table_wise", "seen": "table_wise"}


class Scheduler(GradientAccumulationScheduler):
    """A class of one's own is the same."""


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (GradientAccumulationScheduler({0: 1, 1: 2}), "a step takes as many batches in the whole"),
        (Scheduler({0: 2}), "a step takes as many batches in the whole run"),
        (EMAWeightAveraging(), "it averages parameters, and tables are none"),
        (StochasticWeightAveraging(0.1), "it averages parameters, and tables are none: .*Average"),
    ],
)
def test_callbacks_that_would_train_tables_wrongly_are_refused(tmp_path, callback, reason):
    with pytest.raises(ConfigError, match=rf"^Trainer\(callbacks=.*cannot be used: {reason}"):
        fitted(tmp_path, callbacks=[callback])


def test_a_plan_counts_the_average_of_the_rows(tmp_path):
    def planned(memory_bytes, **settings):
        average = [AverageWeights(AverageSettings(**settings))] if settings else []
        return fitted(tmp_path, callbacks=average, memory_bytes=memory_bytes).strategy.problem

    memory = 2 * (400 * 9 * 4 + 300 * 5 * 4) - 4_000  # rows and row-wise Adagrad's number, twice
    assert planned(memory).average_every is None
    assert planned(2 * memory, kind="ema", every=5).average_every == 5
    with pytest.raises(PlanError):
        planned(memory, kind="ema")
    average = AverageWeights(AverageSettings(kind="ema", every=5))
    later = fitted(tmp_path, kind=Watched, callbacks=[average], validated=True)
    assert later.strategy.problem.average_every == 5
    trainer = later.strategy.lightning_module.trainer
    assert trainer.validate(Watched(), loader(), ckpt_path=tmp_path / "end.ckpt", verbose=False)


class Grows(torch.optim.lr_scheduler.LRScheduler):
    """Keeps more than it begins with."""

    peak = None

    def get_lr(self):
        if self.last_epoch > 5:
            self.peak = [*(self.peak or []), self.last_epoch]
        return [rate / (1 + len(self.peak or [])) for rate in self.base_lrs]


class Scheduled(Clicks):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": Grows(optimizer), "interval": "step"}]


def test_a_schedule_of_ones_own_goes_on_with_all_that_it_keeps(tmp_path):
    trainer = fitted(tmp_path, kind=Scheduled)
    again = Trainer(
        strategy=EmbeddingShardingStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Scheduled()
    again.fit(module, loader(), ckpt_path=tmp_path / "end.ckpt")
    assert module.lr_schedulers().peak == list(range(6, 41)) and trainer.global_step == 20


def test_a_planner_is_taken_with_its_constraints_and_its_rule(tmp_path):
    trainer = fitted(tmp_path, planner=EmbeddingShardingPlanner(constraints=ROW_WISE, rule=sgd()))
    assert types(trainer) == {"items": "row_wise", "seen": "row_wise"}
    assert trainer.strategy.rule.name == "sgd"


def test_a_plan_and_its_file_are_taken_as_they_are(tmp_path):
    plan = fitted(tmp_path, planner=EmbeddingShardingPlanner(constraints=ROW_WISE)).strategy.plan
    write_plan(plan, tmp_path / "plan.yaml")
    for source in (plan, tmp_path / "plan.yaml", str(tmp_path / "plan.yaml")):
        assert fitted(tmp_path / "again", planner=source).strategy.plan.tables == plan.tables


def test_a_function_gets_what_the_ranks_found(tmp_path):
    found = []

    def plan(problem):
        found.append(problem)
        return EmbeddingShardingPlanner().plan_problem(problem)

    fitted(tmp_path, planner=plan, rule=sgd())
    (problem,) = found
    assert [x.output for x in problem.lookups] == ["item", "seen"]
    assert problem.rule.name == "sgd" and problem.dense.flops > 0


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        (3, ConfigError, "planner=3: must be an EmbeddingShardingPlanner, a ShardingPlan"),
        (lambda problem: "mixed", ConfigError, "the function returned a str"),
        ("nowhere.yaml", PlanError, "nowhere.yaml"),
        (
            EmbeddingShardingPlanner(topology=Topology(2)),
            PlanError,
            "its plan is for 2 ranks, and the run has 1",
        ),
        (
            EmbeddingShardingPlanner(
                constraints={
                    "items": ParameterConstraints(["data_parallel"], as_parameter=True),
                }
            ),
            PlanError,
            "table items is to be a parameter (as_parameter), which DistributedModelParallel alone",
        ),
    ],
)
def test_what_gives_no_plan_is_refused_in_one_line(source, kind, says, tmp_path):
    with pytest.raises(kind) as error:
        fitted(tmp_path, planner=source)
    assert says in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_planner_keeps_the_statistics_and_lookups_of_the_run():
    problem = fitted_problem()
    planner = EmbeddingShardingPlanner(batch_size=77)
    seen = []
    planner.topology_for = lambda found: seen.append(found) or found.topology
    planner.plan_problem(problem)
    assert seen[0].statistics == problem.statistics and seen[0].lookups == problem.lookups
    assert seen[0].batch_per_rank == 77 and seen[0].dense == problem.dense


def fitted_problem():
    from recapp.planner.problem import Dense, PlanningProblem
    from recapp.tables.statistics import default_statistics

    known = {"items": default_statistics(ITEMS)}
    return PlanningProblem([ITEMS, SEEN], Topology(1), statistics=known, dense=Dense(3.0, 4.0, 5.0))


def plain_trainer():
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def test_without_the_strategy_one_line_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"table items is on the meta device .* Trainer\(strat"):
        plain_trainer().fit(Clicks(), loader())


def test_a_table_of_another_layer_on_the_meta_device_is_torchs_own_error():
    with pytest.raises(NotImplementedError, match="meta tensor"):
        nn.Sequential(nn.Linear(2, 2, device="meta")).to("cpu")
    held = EmbeddingBagCollection([ITEMS], device=torch.device("meta"))
    assert held.to("meta").half().weight("items").dtype == torch.float16


def logits_of(trainer, ids):
    module = trainer.lightning_module.eval()
    with torch.no_grad():
        return module(ids)


def test_load_from_checkpoint_makes_an_ordinary_module_of_whole_tables(tmp_path):
    trainer = fitted(tmp_path, planner=EmbeddingShardingPlanner(constraints=ROW_WISE))
    expected = logits_of(trainer, IDS)
    again = Clicks.load_from_checkpoint(tmp_path / "end.ckpt")
    assert isinstance(again.bags, EmbeddingBagCollection) and again.hparams.width == 3
    torch.testing.assert_close(again(IDS).detach(), expected)
    again(IDS).sum().backward()  # it trains as any module does
    assert again.bags.weight("items").grad is not None


def test_a_public_name_makes_recapp_known_to_a_lightning_that_is_there(monkeypatch):
    registry = type(StrategyRegistry)()
    monkeypatch.setattr(lightning.pytorch.strategies, "StrategyRegistry", registry)
    for reads in (saving, torch_io):
        monkeypatch.setattr(reads, "pl_load", print)
    with monkeypatch.context() as half_imported:
        half_imported.delattr(lightning.pytorch, "Trainer")
        make_known()
        assert not registry
    vars(recapp).pop("sgd")
    assert recapp.sgd is sgd
    assert type(registry.get("recapp")) is EmbeddingShardingStrategy
    assert saving.pl_load is not print and torch_io.pl_load is not print


class Shared(Clicks):
    def configure_model(self):
        super().configure_model()
        self.towers = torch.nn.ModuleList([self.bags, self.bags])


def test_load_from_checkpoint_fills_a_collection_that_two_parts_share(tmp_path):
    expected = logits_of(fitted(tmp_path, kind=Shared), IDS)
    again = Shared.load_from_checkpoint(tmp_path / "end.ckpt")
    assert again.towers[0] is again.bags
    torch.testing.assert_close(again(IDS).detach(), expected)


class WithSchema(lightning.LightningDataModule):
    """Data of one's own, with an attribute of a name that recapp's data have, too."""

    schema = {"user": "int"}  # noqa: RUF012


def test_data_of_ones_own_may_have_another_schema(tmp_path):
    state = {"epoch": 1}
    assert plain_part_of(SimpleNamespace(datamodule=WithSchema()), state, tmp_path) == state


def test_load_from_checkpoint_says_what_it_cannot_load(tmp_path):
    fitted(tmp_path)
    manifest = tmp_path / "end.ckpt/manifest.json"
    manifest.write_text(manifest.read_text().replace('"weights"', '"weighty"', 1))
    with pytest.raises(CheckpointError) as error:
        Clicks.load_from_checkpoint(tmp_path / "end.ckpt")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(FileNotFoundError):  # everything else is Lightning's own
        Clicks.load_from_checkpoint(tmp_path / "nothing.ckpt")


def rewritten(checkpoint, **entries):
    """Replace entries of a checkpoint's manifest, and its checksum."""
    path = checkpoint / "manifest.json"
    kept = json.loads(path.read_text()) | entries
    kept.pop("checksum")
    path.write_text(sealed(json.dumps(kept)[:-1]))


@pytest.mark.parametrize("weights", [5, {"a": ["items"]}, {"a": 5}, {"a": "../../etc"}, ["items"]])
def test_a_checkpoint_that_names_other_tables_is_damaged(tmp_path, weights):
    fitted(tmp_path)
    rewritten(tmp_path / "end.ckpt", weights=weights)
    with pytest.raises(CheckpointError, match="is damaged: weights is") as error:
        whole_checkpoint(tmp_path / "end.ckpt")
    assert len(str(error.value).splitlines()) == 1


def test_load_model_takes_a_module_of_ones_own(tmp_path):
    expected = logits_of(fitted(tmp_path), IDS)
    model = load_model(tmp_path / "end.ckpt", module=Clicks())
    assert torch.equal(model(IDS), expected)
    torch.testing.assert_close(model.scores(IDS), torch.sigmoid(expected))
    with pytest.raises(ConfigError, match="does not know its columns"):
        model.predict({"item": [1]})


def test_load_model_scores_a_module_of_ones_own_by_its_task(tmp_path):
    expected = logits_of(fitted(tmp_path), IDS)
    module = Clicks()
    module.task = ClickTask()
    module.task.outputs = (Output("price", column="price", activation="identity"),)
    model = load_model(tmp_path / "end.ckpt", module=module)
    assert model.task is module.task and torch.equal(model.scores(IDS), expected)
    module.task = "binary"  # a word of the user's own
    assert torch.equal(load_model(tmp_path / "end.ckpt", module=module)(IDS), expected)


def test_load_model_reads_rows_by_the_data_that_it_is_given(tmp_path):
    fitted(tmp_path)
    data = ClickData(DataSettings(path=str(tmp_path)), schema())
    model = load_model(tmp_path / "end.ckpt", module=OfRows(), data=data)
    rows = {"item": [[1, 2], [3]], "seen": [[4], [5, 6]]}
    assert model.predict(rows).shape == (2,)


def schema():
    from recapp.dataset.schema import Schema

    return Schema(label=None, dense=(), sparse=("item", "seen"))


class OfRows(Clicks):
    """The same weights, reading whole batches."""

    def forward(self, batch):
        return super().forward(batch.sparse)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"data": object()}, "pass module, or leave data out"),
        ({}, "so give model and data by hand"),
    ],
)
def test_what_load_model_lacks_is_named(more, says, tmp_path):
    fitted(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=says):
        load_model(tmp_path / "end.ckpt", **more)


def test_a_trainer_leaves_no_open_files(tmp_path):
    fitted(tmp_path)  # leaves torch's default process group, which later trainers take
    before = os.listdir("/proc/self/fd")
    trainer = fitted(tmp_path, kind=Watched, validated=True)
    trainer.validate(trainer.lightning_module, loader(), verbose=False)
    DistributedModelParallel(Clicks.load_from_checkpoint(tmp_path / "end.ckpt"))
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.full
@pytest.mark.parametrize("how", ["script", "notebook"])
def test_a_script_and_a_notebook_start_their_own_ranks(how, tmp_path):
    ran = subprocess.run(
        [sys.executable, str(HERE.parent / "own_lightning.py"), str(tmp_path), how],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert how == "script" or "recapp.run_ranks(function, ranks=2)" in ran.stderr
    model = load_model(tmp_path / "end.ckpt", module=Clicks())
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == pytest.approx(model(IDS).tolist(), abs=1e-6)
    assert model.info["step"] == 10  # of 20 batches on two ranks


def test_lightnings_table_counts_sharded_tables(tmp_path):
    trainer = fitted(tmp_path)
    (summary,) = [c for c in trainer.callbacks if type(c).__name__.endswith("ModelSummary")]
    counts = []
    summary.summarize = lambda data, *numbers, **_: counts.extend([dict(data), *numbers[:2]])
    state = list(trainer.lightning_module.state_dict())
    summary.on_fit_start(trainer, trainer.lightning_module)
    columns, total, trainable = counts
    layers = dict(zip(columns["Name"], columns["Params"], strict=True))
    assert (layers["bags"], layers["sequences"]) == ("3.2 K", "1.2 K")
    assert total == trainable == 400 * 8 + 300 * 4 + 12 * 3 + 3 + 3 + 1
    assert list(trainer.lightning_module.state_dict()) == state


def test_ranks_that_would_keep_the_trained_tables_are_refused():
    with pytest.raises(ConfigError, match="start_method=fork: the ranks would take the trained"):
        EmbeddingShardingStrategy(start_method="fork")


def test_a_test_is_measured_by_the_validation_of_a_module_of_ones_own():
    class Own(TaskModule):
        def validation_step(self, batch, batch_idx):
            self.seen = batch_idx

    module = object.__new__(Own)
    module.test_step(None, 3)
    assert module.seen == 3
