"""Whatever goes wrong in a validation, the epoch before it is saved; a run goes on from there."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from runs import compose, fit
from trainer.test_snapshots import CatchUp

from recapp.stored.checkpoint import read_manifest, verify
from recapp.stored.checkpoint_manifest import META
from recapp.trainer.ending import EndTogether

EPOCH = 18
"""The steps of an epoch of the logs."""


class Fault(Exception):
    """An error of a user's own code."""


class Fail(Callback):
    """Raises an error in a hook of the validation after a step."""

    def __init__(self, hook, step=EPOCH):
        def fail(trainer, *_):
            if trainer.global_step == step:
                raise Fault

        setattr(self, hook, fail)


@pytest.fixture(scope="module")
def unbroken(logs, tmp_path_factory):
    """The weights and metrics of two epochs that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    _, _, module = fit(compose(logs, "trainer.max_epochs=2"), folder)
    return of_run(folder, module)


def of_run(folder, module):
    """The metrics of the last checkpoint of a run, and its dense weights."""
    metrics = read_manifest(folder / "checkpoints/last.ckpt").metrics
    return metrics, {name: p.tolist() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_end", "on_validation_end"]
)
def test_the_epoch_before_a_failed_validation_is_saved_and_validated_later(
    logs, tmp_path, unbroken, hook
):
    recipe = compose(logs, "trainer.max_epochs=2")
    last = tmp_path / "checkpoints/last.ckpt"
    with pytest.raises(Fault):
        fit(recipe, tmp_path, Fail(hook))
    manifest = read_manifest(last)
    assert (manifest.step, manifest.metrics) == (EPOCH, {})
    assert manifest.position == {"epoch": 1, "batches": 0, "batch_size": 96}
    _, _, module = fit(recipe, tmp_path, CatchUp(over=False), ckpt_path=last)
    assert of_run(tmp_path, module) == unbroken


def test_a_later_validation_leaves_its_epoch_too(logs, tmp_path):
    with pytest.raises(Fault):
        fit(compose(logs, "trainer.max_epochs=2"), tmp_path, Fail("on_validation_end", 2 * EPOCH))
    manifest = read_manifest(tmp_path / "checkpoints/last.ckpt")
    assert (manifest.step, manifest.metrics) == (2 * EPOCH, {})
    # the best so far stays
    assert read_manifest(tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt").metrics


class Names(Checkpoint):
    """The files of the checkpoint that is saved before a validation."""

    def on_validation_start(self, trainer, pl_module):
        (last,) = [c for c in trainer.callbacks if isinstance(c, EndTogether)]
        folder = last.save.__self__.path
        self.files = {p.name: p.stat().st_ino for p in folder.iterdir()}


def test_tables_are_written_once_though_they_are_saved_before_and_after(logs, tmp_path):
    names = Names()
    fit(compose(logs), tmp_path, names)
    best = tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt"
    files = {p.name: p.stat().st_ino for p in best.iterdir()}
    shared = [name for name in files if files[name] == names.files[name]]
    assert shared == ["rank-00000.safetensors"] and META in files
    assert verify(best) > 0 and read_manifest(best).metrics
    assert (tmp_path / "checkpoints/last.ckpt").resolve() == best


class Change(Callback):
    """Changes a row of a table in a validation, as a swap of weights does."""

    def on_validation_end(self, trainer, pl_module):
        blocks = [b for c in trainer.strategy.sharded_tables() for b in c.blocks()]
        with torch.no_grad():
            blocks[0].data[0, 0] += 1


def test_tables_that_a_validation_changes_are_written_as_they_are(logs, tmp_path):
    names = Names()
    fit(compose(logs), tmp_path, Change(), names)
    best = tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt"
    file = best / "rank-00000.safetensors"
    assert file.stat().st_ino != names.files[file.name] and verify(best) > 0
