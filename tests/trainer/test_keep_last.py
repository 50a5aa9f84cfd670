"""Going on from a checkpoint: which one is the best counts over all runs, wherever their
directories are; weights stay finite.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import compose, fit

from recapp.errors import CheckpointError
from recapp.run import training
from recapp.run.model import build_model
from recapp.run.training import build_strategy
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.manifest import CheckpointManifest, to_json
from recapp.stored.plain_parts import write_meta
from recapp.stored.stored_model import read_manifest, read_meta, verify
from recapp.trainer.keep_checkpoints import KeepLast, step_of_best
from recapp.transport.communicator import Comm


class Score(Callback):
    """Validations score what the test says, in turn."""

    def __init__(self, scores):
        self.scores = list(scores)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("score", torch.tensor(self.scores.pop(0)))


def train(logs, folder, *scores, ckpt=None, epochs=1, more=()):
    """A run with these scores; the trainer, and the checkpoint that its summary would name."""
    own = f"+callbacks.score={{_target_: {__name__}.Score, scores: {list(scores)}}}"
    config = compose(
        logs, "callbacks.checkpoint.monitor=score", f"trainer.max_epochs={epochs}", own, *more
    )
    _, trainer, _ = fit(config, folder, ckpt_path=ckpt and str(ckpt))
    (last,) = [c for c in trainer.checkpoint_callbacks if isinstance(c, KeepLast)]
    return trainer, Path(last.best_or_last(trainer))


@pytest.fixture
def first(logs, tmp_path):
    """A run of one epoch, its best and its last checkpoint."""
    _, best = train(logs, tmp_path / "first", 0.7)
    return best, tmp_path / "first/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def saved(logs, tmp_path_factory):
    """The checkpoint of such a run, that no test changes."""
    return train(logs, tmp_path_factory.mktemp("saved"), 0.7)[1]


@pytest.mark.full
@pytest.mark.parametrize("base", ["elsewhere", "first"])
def test_the_earlier_best_stays_the_best_where_it_is(logs, tmp_path, first, base, capfd):
    best, last = first
    trainer, named = train(logs, tmp_path / base, 0.6, ckpt=last, epochs=2)
    assert named == best and named.is_absolute() and read_manifest(named).step == 18
    assert step_of_best(trainer) == 18
    assert float(trainer.checkpoint_callbacks[0].best_model_score) == pytest.approx(0.7)
    assert read_manifest(tmp_path / base / "checkpoints/last.ckpt").step == 36
    again, named = train(
        logs, tmp_path / "third", 0.65, ckpt=tmp_path / base / "checkpoints/last.ckpt", epochs=3
    )
    assert named == best and again.global_step == 54
    assert "from here on counts" not in capfd.readouterr().err


def test_a_best_of_another_metric_is_not_the_best_and_is_said(logs, tmp_path, saved, capfd):
    other = ["callbacks.checkpoint.monitor=val_auc"]
    _, named = train(logs, tmp_path / "second", 0.6, ckpt=saved, epochs=2, more=other)
    assert named == tmp_path / "second/checkpoints/step_000036.ckpt"
    assert "chooses the best checkpoint as ModelCheckpoint{'monitor': 'score'" in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize(("base", "kept"), [("elsewhere", True), ("first", False)])
def test_a_better_one_takes_over_and_another_directorys_is_not_deleted(
    logs, tmp_path, first, base, kept
):
    best, last = first
    _, named = train(logs, tmp_path / base, 0.8, ckpt=last, epochs=2)
    assert (
        named == tmp_path / base / "checkpoints/step_000036.ckpt"
        and read_manifest(named).step == 36
    )
    assert best.exists() == kept


@pytest.mark.full
def test_a_run_that_was_moved_takes_its_best_along(logs, tmp_path, first):
    best, _ = first
    shutil.move(tmp_path / "first", tmp_path / "moved")
    _, named = train(
        logs, tmp_path / "second", 0.6, ckpt=tmp_path / "moved/checkpoints/last.ckpt", epochs=2
    )
    assert named == tmp_path / "moved/checkpoints" / best.name


@pytest.mark.full
def test_an_earlier_best_that_is_gone_is_said_once_and_training_goes_on(
    logs, tmp_path, first, capfd
):
    best, last = first
    # last.ckpt has a directory of its own from here on
    _, named = train(logs, tmp_path / "first", 0.6, ckpt=last, epochs=2)
    shutil.rmtree(best)
    capfd.readouterr()
    _, named = train(logs, tmp_path / "second", 0.5, ckpt=last, epochs=3)
    assert capfd.readouterr().err.count(f"the earlier run's best checkpoint {best} is gone") == 1
    assert named == tmp_path / "second/checkpoints/step_000054.ckpt"


def names_in(folder):
    """The names in a directory of checkpoints."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.full
def test_a_copied_run_knows_its_best_from_that_of_another_run_in_its_old_place(
    logs, tmp_path, first, capfd
):
    best, last = first
    shutil.copytree(tmp_path / "first", tmp_path / "copy", symlinks=True)
    (best.parent / "notes.txt").touch()
    shutil.copytree(best, best.parent / "mine.ckpt")
    capfd.readouterr()
    train(logs, tmp_path / "first", 0.9, more=["seed=2"])
    # the second run in a directory replaces the first, and leaves what the user put there
    assert names_in(best.parent) == ["last.ckpt", "mine.ckpt", "notes.txt", "step_000018.ckpt"]
    assert (
        "checkpoints of an earlier run are deleted: last.ckpt, step_0000" in capfd.readouterr().err
    )
    copied = tmp_path / "copy/checkpoints"
    run = read_manifest(copied / best.name).run
    assert read_manifest(best).run not in ("", run) and read_manifest(last).run != run

    _, named = train(logs, tmp_path / "on", 0.6, ckpt=copied / "last.ckpt", epochs=2)
    assert named == copied / best.name and read_manifest(named).run == run
    assert read_manifest(tmp_path / "on" / "checkpoints/last.ckpt").run == run
    shutil.rmtree(copied / best.name)
    shutil.copytree(best, copied / best.name)  # of the other run, where "on" names its own
    capfd.readouterr()
    _, named = train(
        logs, tmp_path / "far", 0.5, ckpt=tmp_path / "on/checkpoints/last.ckpt", epochs=3
    )
    assert "best checkpoint" in capfd.readouterr().err and named.parent.parent == tmp_path / "far"


def test_a_run_that_goes_on_from_an_earlier_step_replaces_what_came_after_it(logs, tmp_path):
    folder = tmp_path / "run/checkpoints"
    more = ["callbacks.checkpoint.save_top_k=-1"]
    train(logs, tmp_path / "run", 0.7, 0.8, 0.6, epochs=3, more=more)
    start = folder / "step_000036.ckpt"
    train(
        logs, tmp_path / "run", 0.5, ckpt=start, epochs=3, more=[*more, "optimizer.dense.lr=.002"]
    )
    assert names_in(folder) == ["last.ckpt", *(f"step_0000{n}.ckpt" for n in (18, 36, 54))]
    assert read_manifest(folder / "step_000054.ckpt").config["optimizer"]["dense"]["lr"] == 0.002


@pytest.mark.full
def test_no_warning_is_given_about_another_directory(logs, tmp_path, saved, recwarn):
    train(logs, tmp_path / "second", 0.6, ckpt=saved, epochs=2)
    assert not [w for w in recwarn if "dirpath has changed" in str(w.message)]


# ---- weights that are not finite


class Spoil(Callback):
    """After some steps a weight of the dense part or of a table is not finite."""

    def __init__(self, dense):
        self.dense = dense

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 36:
            with torch.no_grad():
                block = next(
                    b
                    for c in trainer.strategy.sharded_tables()
                    for b in c.blocks()
                    if b.tensor == "weight"
                )
                (next(pl_module.parameters()) if self.dense else block.data)[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("dense", "said"),
    [
        (True, r"^model\.\w+.*: weights that are not finite"),
        (False, r"^table C\d+, rows 0-\d+: weights that are not finite"),
    ],
)
def test_weights_that_are_not_finite_end_the_run_and_leave_its_checkpoints(
    logs, tmp_path, dense, said
):
    config = compose(logs, "trainer.max_epochs=2")
    with pytest.raises(CheckpointError, match=said):
        fit(config, tmp_path, Spoil(dense))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "last.ckpt",
        "step_000018.ckpt",
    ]
    assert read_manifest(tmp_path / "checkpoints/last.ckpt").step == 18


@pytest.mark.parametrize("dense", [True, pytest.param(False, marks=pytest.mark.full)])
def test_evaluating_weights_that_are_not_finite_fails_and_names_them(
    logs, tmp_path, saved, dense, monkeypatch
):
    best = saved
    config = compose(logs)
    # as an earlier version saved
    monkeypatch.setattr("recapp.stored.block_files.is_finite", lambda values: True)
    strategy = build_strategy(config, training=False)
    tester = training.build_trainer(config, strategy, [], [])
    module = training.build_module(config, partial(build_model, config))
    tester.validate(
        module, datamodule=training.build_data(config), ckpt_path=str(best), verbose=False
    )
    meta = read_meta(best)
    blocks = [b for c in strategy.sharded_tables() for b in c.blocks()]
    name, _ = next(iter(module.named_parameters()))
    with torch.no_grad():
        (meta["state_dict"][name] if dense else blocks[3].data)[0, 0] = float("inf")
    write_checkpoint(
        tmp_path / "bad.ckpt", blocks, comm=Comm(), meta=meta, manifest=read_manifest(best).info
    )
    said = name if dense else f"table {blocks[3].table}, rows 0-{blocks[3].shape[0]}"
    with pytest.raises(CheckpointError, match="weights that are not finite") as raised:
        training.build_trainer(config, build_strategy(config, training=False), [], []).validate(
            training.build_module(config, partial(build_model, config)),
            datamodule=training.build_data(config),
            ckpt_path=str(tmp_path / "bad.ckpt"),
            verbose=False,
        )
    assert str(raised.value).startswith(f"{said} of checkpoint {tmp_path}/bad.ckpt has weights")


# ---- a plain part that is another model's, or none


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict": {"x": 1}},
        {"optimizer_states": [{"dense": {}}]},
        {"pytorch-lightning_version": "x"},
    ],
)
def test_a_plain_part_that_is_no_state_of_training_is_one_error(logs, tmp_path, saved, change):
    best = saved
    manifest = read_manifest(saved)
    shutil.copytree(best, tmp_path / "forged.ckpt")
    entry = write_meta(tmp_path / "forged.ckpt", "meta.pt", read_meta(best) | change)
    files = manifest.files | {"meta.pt": entry}
    (tmp_path / "forged.ckpt/manifest.json").write_text(
        to_json(CheckpointManifest(best, manifest.info, files, manifest.blocks))
    )
    with pytest.raises(CheckpointError) as raised:
        train(logs, tmp_path / "second", 0.6, ckpt=tmp_path / "forged.ckpt", epochs=2)
    assert len(str(raised.value).splitlines()) == 1


def test_a_checkpoint_that_a_callback_saves_under_the_name_of_the_last_one_is_not_lost(
    logs, tmp_path
):
    folder = tmp_path / "run/checkpoints"
    same = ModelCheckpoint(
        dirpath=folder,
        filename="last",
        monitor="val_auc",
        mode="max",
        save_on_train_epoch_end=False,
    )
    fit(compose(logs, "callbacks=none"), tmp_path / "run", same)
    assert verify(folder / "last.ckpt") > 0 and read_manifest(folder / "last.ckpt").step == 18
