"""Models of several checkpoints are joined into one ensemble; so are those of the last epochs."""

import shutil
import signal
from contextlib import nullcontext

import pytest
import torch
from jobs import validation
from lightning.pytorch import Callback
from runs import compose, fit
from trainer.test_ending import Send

from recapp.errors import CheckpointError, ConfigError
from recapp.processes.stopping import Stopped
from recapp.reporting.summary import report_end
from recapp.run.resume import Resumed
from recapp.run.run_checks import check_resumed, check_training
from recapp.stored.checkpoint import join_checkpoints, name_metrics, write_checkpoint
from recapp.stored.manifest import JOINED
from recapp.stored.plain_parts import dense_state
from recapp.stored.stored_model import load_table, read_manifest, read_meta, verify
from recapp.tables.table_settings import member_name
from recapp.train import with_snapshots
from recapp.trainer.keep_checkpoints import KeepSnapshots, kept_before, validate_first
from recapp.transport.communicator import Comm

SHORT = ("trainer.max_steps=2", "tables.wide=true")
LAST = "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def trained(logs, tmp_path_factory):
    """A model, and an ensemble of two of the same model."""
    folder = tmp_path_factory.mktemp("trained")
    for name, more in (("one", ["seed=1"]), ("two", ["seed=5", "ensemble=2"])):
        (folder / name).mkdir()
        fit(compose(logs, *SHORT, *more), folder / name)
    return folder / "one" / LAST, folder / "two" / LAST


@pytest.fixture(scope="module")
def joined(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("joined") / "joined.ckpt"
    assert join_checkpoints(trained, path) == 3 and read_manifest(path).metrics == {}
    name_metrics(path, {"val_auc": 0.5})
    return path


def test_members_of_a_joined_checkpoint_are_the_models_that_were_joined(trained, joined):
    one, two = trained
    tables = read_manifest(one).shapes
    assert len(read_manifest(joined).shapes) == 3 * len(tables)
    for table in tables:
        found = [load_table(joined, member_name(table, number)) for number in range(3)]
        assert torch.equal(found[0], load_table(one, table))
        assert torch.equal(found[1], load_table(two, table))
        assert torch.equal(found[2], load_table(two, member_name(table, 1)))
    dense = dense_state(read_meta(joined))
    first, others = (dense_state(read_meta(path)) for path in trained)
    for name, value in first.items():
        assert torch.equal(dense[f"members.0.{name}"], value)
        for number in (0, 1):
            same = others[f"members.{number}.{name}"]
            assert torch.equal(dense[f"members.{number + 1}.{name}"], same)
    assert len(dense) == 3 * len(first)


def test_a_joined_checkpoint_is_whole_and_says_what_it_is(joined):
    manifest = read_manifest(joined)
    assert verify(joined) > 0
    assert manifest.config["ensemble"] == 3
    assert manifest.metrics == {"val_auc": 0.5}
    assert JOINED in manifest.info
    assert not [p for p in joined.parent.iterdir() if p != joined]


def test_training_does_not_resume_from_a_joined_checkpoint(joined, logs):
    with pytest.raises(CheckpointError, match=r"joined.ckpt: joins several models .* last.ckpt"):
        recipe = compose(logs, *SHORT, "ensemble=3", f"ckpt_path={joined}")
        check_resumed(recipe, read_manifest(joined))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["model.top_layers=[4,1]"], "cannot be joined with .*: their settings model differ"),
        (["dataset.missing_flags=true"], "they read other columns, or ids in another way"),
    ],
)
def test_other_models_are_not_joined(trained, logs, tmp_path, more, says):
    (tmp_path / "other").mkdir()
    fit(compose(logs, *SHORT, *more), tmp_path / "other")
    with pytest.raises(CheckpointError, match=says):
        join_checkpoints([trained[0], tmp_path / "other" / LAST], tmp_path / "joined.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_dynamic_tables_and_single_models_are_not_joined(trained, logs, tmp_path):
    (tmp_path / "grows").mkdir()
    fit(compose(logs, "trainer.max_steps=2", "tables=dynamic"), tmp_path / "grows")
    with pytest.raises(CheckpointError, match="is dynamic, and checkpoints of dynamic tables"):
        join_checkpoints([tmp_path / "grows" / LAST] * 2, tmp_path / "joined.ckpt")
    with pytest.raises(CheckpointError, match="1 models: an ensemble has 2 to 64"):
        join_checkpoints(trained[:1], tmp_path / "joined.ckpt")


def made(folder, *names, run="own"):
    """Return what `KeepSnapshots` stores about checkpoints, those with a mark do not exist."""
    for name in names:
        if not name.endswith("?"):
            entries = {"run": run, "step": 1} if run else {"step": 1}
            write_checkpoint(folder / name, [], comm=Comm(), meta={}, manifest=entries)
    return {"kept": [str(folder / name.rstrip("?")) for name in names], "count": 3}


def test_a_resumed_run_goes_on_with_the_latest_snapshots_that_exist(tmp_path, capsys):
    run = tmp_path / "run"
    state = made(run, "a?", "b", "c")
    assert kept_before(state, 2, tmp_path, "own") == [run / "b", run / "c"]
    assert kept_before(state, 1, tmp_path, "own") == [run / "c"]
    assert not capsys.readouterr().err
    assert kept_before(state, 3, tmp_path, "own", noted=False) == [run / "b", run / "c"]
    assert not capsys.readouterr().err
    assert kept_before(state, 9, tmp_path, "own") == [run / "b", run / "c"]
    assert "snapshots=9: the run of ckpt_path has deleted a;" in capsys.readouterr().err
    run.rename(tmp_path / "moved")
    assert kept_before(state, 3, tmp_path / "moved", "own")[1] == tmp_path / "moved" / "c"
    assert kept_before(state, 3, tmp_path, "own") == []


@pytest.mark.parametrize(("run", "stored"), [("own", "another"), ("own", ""), ("", ""), ("", "x")])
def test_no_checkpoint_of_another_run_is_taken_for_a_snapshot(tmp_path, run, stored):
    """Neither where the run stood, nor at a place that a hostile checkpoint names. A run of an
    earlier version, without identity, finds what lies beside its checkpoint.
    """
    state = made(tmp_path / "run", "a.ckpt", run=stored)
    assert kept_before(state, 3, tmp_path / "saved", run, noted=False) == []
    beside = kept_before(state, 3, tmp_path / "run", run, noted=False)
    assert [path.name for path in beside] == (["a.ckpt"] if run == stored else [])


@pytest.mark.parametrize("run", ["own", "another", ""])
def test_joined_models_of_another_run_in_the_directory_are_not_reported(logs, tmp_path, run):
    recipe = compose(logs, "snapshots=2", "trainer.max_epochs=2")
    for name, whose in (("last.ckpt", "own"), ("snapshots.ckpt", run)):
        entries = {"run": whose, "step": 36, "metrics": {"val_auc": 0.5}}
        write_checkpoint(tmp_path / name, [], comm=Comm(), meta={}, manifest=entries)
    resumed = Resumed(recipe, f"{tmp_path}/last.ckpt", read_manifest(tmp_path / "last.ckpt"))
    assert (resumed.joined is not None) == (run == "own")


EPOCH = 18
"""The steps of an epoch of the logs."""
EPOCHS = ("snapshots=2", "trainer.check_val_every_n_epoch=2", "callbacks.checkpoint.save_top_k=-1")


def train(logs, folder, *more, ckpt_path=None):
    """Train with snapshots, and return the recipe and the steps of those that are kept."""
    recipe = compose(logs, *EPOCHS, *more)
    keeper = KeepSnapshots(folder / "checkpoints", 2)
    folder.mkdir(exist_ok=True)
    fit(recipe, folder, keeper, ckpt_path=ckpt_path)
    return recipe, [read_manifest(path).step for path in keeper.kept]


@pytest.fixture(scope="module")
def three_epochs(logs, tmp_path_factory):
    """The directory of a run of three epochs that validates once in two, and its recipe."""
    folder = tmp_path_factory.mktemp("epochs")
    recipe, steps = train(logs, folder, "trainer.max_epochs=3")
    assert steps == [2 * EPOCH, 3 * EPOCH]
    return folder / "checkpoints", recipe


def steps_of(recipe, path):
    """Return the steps of the models that are joined for a run that is over."""
    resumed = Resumed(recipe, str(path), read_manifest(path))
    return [read_manifest(kept).step for kept in resumed.snapshots()]


@pytest.mark.full
def test_a_run_that_is_over_joins_no_model_twice(three_epochs):
    folder, recipe = three_epochs
    assert steps_of(recipe, folder / "last.ckpt") == [2 * EPOCH, 3 * EPOCH]


def test_a_run_that_resumes_from_a_snapshot_keeps_it(three_epochs, logs, tmp_path):
    start = three_epochs[0] / f"snapshot_{3 * EPOCH:06d}.ckpt"
    _, steps = train(logs, tmp_path, "trainer.max_epochs=4", ckpt_path=start)
    assert steps == [3 * EPOCH, 4 * EPOCH]


def test_a_run_resumes_from_a_checkpoint_whose_snapshots_are_deleted(three_epochs, logs, tmp_path):
    start = three_epochs[0] / f"step_{2 * EPOCH:06d}.ckpt"
    assert not (three_epochs[0] / f"snapshot_{EPOCH:06d}.ckpt").exists()  # which it names
    _, steps = train(logs, tmp_path, "trainer.max_epochs=3", ckpt_path=start)
    assert steps == [2 * EPOCH, 3 * EPOCH]


class CatchUp(Callback):
    """Validates first, as the command does after a signal."""

    def __init__(self, over):
        self.over = over

    def setup(self, trainer, pl_module, stage):
        validate_first(trainer, over=self.over)


def test_an_epoch_that_a_signal_ends_has_its_snapshot_after_a_resume(logs, tmp_path):
    recipe = compose(logs, "snapshots=2", "trainer.max_epochs=2")
    kept = []
    for name, more in (("stopped", Send(signal.SIGTERM, 2 * EPOCH)), ("on", CatchUp(over=True))):
        (tmp_path / name).mkdir()
        keeper = KeepSnapshots(tmp_path / name / "checkpoints", 2)
        start = tmp_path / "stopped" / LAST if name == "on" else None
        with pytest.raises(Stopped) if name == "stopped" else nullcontext():
            fit(recipe, tmp_path / name, keeper, more, ckpt_path=start)
        kept.append([read_manifest(path).step for path in keeper.kept])
    assert kept == [[EPOCH], [EPOCH, 2 * EPOCH]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("validation", "step"),
    [
        ("trainer.check_val_every_n_epoch=2", EPOCH - 2),
        pytest.param("trainer.limit_val_batches=0", EPOCH - 2, marks=pytest.mark.full),
        pytest.param("trainer.check_val_every_n_epoch=1", EPOCH, marks=pytest.mark.full),
    ],
)
def test_any_epoch_that_a_signal_ends_has_its_snapshot_after_a_resume(
    logs, tmp_path, validation, step
):
    """Also one after which other epochs follow, whether it is validated or not.

    Args:
        step: The step after which a signal comes, so that the run is saved after that of the
            epoch's end: the ranks know of a signal two steps later, or before a validation.
    """
    recipe = compose(logs, "snapshots=3", "trainer.max_epochs=3", validation)
    states = []
    for name, more in (
        ("unbroken", []),
        ("stopped", [Send(signal.SIGTERM, step)]),
        ("on", [CatchUp(over=False)]),
    ):
        (tmp_path / name).mkdir()
        keeper = KeepSnapshots(tmp_path / name / "checkpoints", 3)
        start = tmp_path / "stopped" / LAST if name == "on" else None
        with pytest.raises(Stopped) if name == "stopped" else nullcontext():
            fit(recipe, tmp_path / name, keeper, *more, ckpt_path=start)
        states.append([(read_manifest(path).step, dense_of(path)) for path in keeper.kept])
    unbroken, stopped, on = states
    assert stopped == [] and unbroken == on
    assert [number for number, _ in on] == [EPOCH, 2 * EPOCH, 3 * EPOCH]


def dense_of(path):
    """The dense weights of a checkpoint, as plain numbers."""
    return {name: weight.tolist() for name, weight in dense_state(read_meta(path)).items()}


@pytest.mark.full
def test_a_run_that_ends_inside_an_epoch_keeps_as_many(logs, tmp_path):
    recipe, steps = train(logs, tmp_path / "part", f"trainer.max_steps={2 * EPOCH + 2}")
    last = tmp_path / "part" / LAST
    assert steps == steps_of(recipe, last) == [EPOCH, 2 * EPOCH]
    _, steps = train(logs, tmp_path / "on", f"trainer.max_steps={2 * EPOCH + 4}", ckpt_path=last)
    assert steps == [EPOCH, 2 * EPOCH]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.max_epochs=1"], "training has 1 .*max_epochs=6 or more, or leave snapshots out"),
        (["trainer.max_epochs=5"], "snapshots=6: keeps the models of 6 epochs, and training has 5"),
        (["ensemble=11", "trainer.max_epochs=9"], "snapshots=6 ensemble=11: would join 66 models"),
        (["tables=dynamic", "trainer.max_epochs=6"], "snapshots=6: table C1 is dynamic"),
    ],
)
def test_what_can_make_no_ensemble_is_refused_before_ranks_start(logs, overrides, says):
    with pytest.raises(ConfigError, match=says):
        check_training(compose(logs, "snapshots=6", *overrides))


@pytest.mark.parametrize(("joined", "said"), [(0.7, True), (0.9, False)])
def test_an_epoch_that_is_better_than_the_joined_models_is_named(
    logs, tmp_path, monkeypatch, capsys, joined, said
):
    found = {"val_auc": joined, "checkpoint": "snapshots.ckpt"}
    monkeypatch.setattr("recapp.train.measure_joined", lambda *_: found)
    recipe = compose(logs, "snapshots=3", "trainer.max_epochs=3")
    one = {"val_auc": 0.8, "checkpoint": "step_1.ckpt", "plan": "mixed", "ranks": 1}
    one |= {"checkpoint_step": 1, "steps": 1, "status": "ok"}
    measured = with_snapshots(recipe, [tmp_path / "a", tmp_path / "b"], tmp_path, one)
    report_end(measured, recipe.built_task, tmp_path, "text")
    printed = capsys.readouterr()
    assert ("AUC 0.80000 of step_1.ckpt" in printed.out) == said
    assert "snapshots=3: 2 models are joined, because training ended after 2" in printed.err


@pytest.mark.full
def test_the_mean_of_the_last_epochs_is_measured_and_a_resumed_run_is_the_same(jobs, tmp_path):
    wanted = (
        "dataset=sample",
        f"dataset.path={tmp_path}/clicks",
        "dataset.generate.rows=3000",
        "dataset.table_rows=[60,40,20]",
        "tables=from_dataset",
        "tables.id_rule=hash",
        "optimizer.restart_tables=['*']",
        "snapshots=2",
        "callbacks=none",
    )
    whole = jobs.train(tmp_path / "whole", *wanted, "+plan=mixed", "trainer.max_epochs=4")
    folder = tmp_path / "whole/checkpoints"
    kept = sorted(p.name for p in folder.glob("snapshot_*"))
    assert len(kept) == 2 and whole["checkpoint_step"] == read_manifest(folder / kept[-1]).step
    measured = jobs.evaluate(tmp_path / "eval", f"ckpt_path={whole['checkpoint']}", world=1)
    assert validation(measured) == pytest.approx(validation(whole), rel=1e-6)
    assert read_manifest(whole["checkpoint"]).metrics == validation(whole)

    last = tmp_path / "whole" / LAST
    assert read_manifest(last).metrics != validation(whole)
    part = jobs.train(tmp_path / "part", *wanted, "+plan=mixed", "trainer.max_epochs=3")
    assert validation(part) != validation(whole)
    more = (f"ckpt_path={tmp_path}/part/{LAST}", "trainer.max_epochs=4", "+plan=row_wise")
    resumed = jobs.train(tmp_path / "resumed", *more)
    assert validation(resumed) == validation(whole)

    # the whole run is over: its joined models are there, or are joined now
    over = jobs.train(tmp_path / "over", f"ckpt_path={last}", "trainer.max_epochs=4")
    assert validation(over) == validation(whole) and over["checkpoint"] == whole["checkpoint"]
    shutil.rmtree(folder / "snapshots.ckpt")
    shutil.rmtree(folder / kept[-1])
    (tmp_path / "again/checkpoints/snapshots.ckpt.tmp").mkdir(parents=True)
    more = (f"ckpt_path={last}", "trainer.max_epochs=4")
    again = jobs.train(tmp_path / "again", *more)
    assert validation(again) == validation(whole)
    assert again["checkpoint"] == str(tmp_path / "again/checkpoints/snapshots.ckpt")
    assert [p.name for p in (tmp_path / "again/checkpoints").iterdir()] == ["snapshots.ckpt"]
    assert read_manifest(again["checkpoint"]).run == read_manifest(last).run == again["run"]
