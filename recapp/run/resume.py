"""Resume from a checkpoint: find the steps left to train, and apply changed optimiser settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from recapp.console import short_path
from recapp.processes.rank_environment import is_first, rank_info
from recapp.run.lightning_trainer import build_callback
from recapp.run.monitors import with_monitor
from recapp.run.recipe import Train
from recapp.run.training import changed_optimizer
from recapp.settings.records import constructor, to_plain
from recapp.stored.checkpoint import read_manifest, read_meta
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_checkpoint
from recapp.stored.run_files import folder_of
from recapp.trainer.changed_callbacks import ChangedCallbacks
from recapp.trainer.changed_optimizer import ChangedOptimizer
from recapp.trainer.keep_last import best_known
from recapp.trainer.keep_snapshots import JOINED_FILE, KeepSnapshots, kept_before
from recapp.trainer.missed_validation import validate_first


@dataclass(frozen=True)
class Resumed:
    """A run that resumes from a checkpoint.

    Args:
        recipe: The recipe of the run.
        path: The checkpoint.
        manifest: Its manifest.
    """

    recipe: Train
    path: str
    manifest: CheckpointManifest

    @property
    def limit(self) -> str | None:
        """The limit that the checkpoint has reached, such as `trainer.max_steps=20`; None if steps
        are left to train.
        """
        epochs, steps = self.recipe.trainer.length
        if 0 <= steps <= self.manifest.step:
            return f"trainer.max_steps={steps}"
        reached = 0 <= epochs <= self.manifest.position["epoch"]
        return f"trainer.max_epochs={epochs}" if reached else None

    @property
    def lacks_validation(self) -> bool:
        """Whether a signal saved the checkpoint before its validation, and validation is on."""
        return not self.manifest.metrics and self.recipe.without_validation is None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train, nor the validation of a last step to make up for."""
        return self.limit is not None and not self.lacks_validation

    @property
    def changed_optimizer(self) -> ChangedOptimizer:
        """The callback that applies changed optimiser settings."""
        before = with_monitor(self.manifest.config)
        return changed_optimizer(before, with_monitor(to_plain(self.recipe)))

    def changed_callbacks(self, folder: Path) -> ChangedCallbacks:
        """Return the callback that applies changed settings of callbacks.

        Args:
            folder: The directory of checkpoints.
        """
        found = self.manifest.config.get("callbacks")
        stored = found if isinstance(found, Mapping) else {}  # a damaged file may hold any value
        changed = []
        for name, now in self.recipe.callbacks.items():
            setting = f"callbacks.{name}"
            others = [stored[other] for other in stored if other not in self.recipe.callbacks]
            entries = [stored[name]] if name in stored else others
            entries = [constructor(each) for each in entries if isinstance(each, Mapping)]
            alike = [each for each in entries if each.target == now.target]
            if to_plain(now.arguments) in [to_plain(each.arguments) for each in alike]:
                continue
            if alike or name in stored:
                # its class is named by this run's settings, which are the user's
                before = build_callback(alike[0], setting, folder) if alike else None
                changed.append((setting, before, build_callback(now, setting, folder)))
        return ChangedCallbacks(changed)

    @property
    def joined(self) -> CheckpointManifest | None:
        """The manifest of the joined models of the last epochs, if they lie measured beside the
        checkpoint of a run that is over.
        """
        beside = folder_of(self.path) / JOINED_FILE
        if self.recipe.snapshots < 2 or not is_checkpoint(beside):
            return None
        manifest = read_manifest(beside)
        same = (manifest.run, manifest.step) == (self.manifest.run, self.manifest.step)
        return manifest if same and manifest.metrics else None

    def snapshots(self) -> list[Path]:
        """Return the checkpoints of the last epochs of a run that is over, if it kept any: its run
        ended before they were joined. This checkpoint is the last of them if it is of the end of an
        epoch and has no snapshot beside it.
        """
        state = read_meta(self.path)["callbacks"].get(KeepSnapshots.__qualname__)
        if state is None:
            return []
        path = Path(self.path).absolute()
        kept = kept_before(
            state, self.recipe.snapshots, folder_of(path), self.manifest.run, noted=is_first()
        )
        steps = [read_manifest(snapshot).step for snapshot in kept]
        if not self.manifest.position["batches"] and self.manifest.step not in steps:
            kept.append(path)
        return kept[-self.recipe.snapshots :]

    def catch_up(self, trainer: Trainer) -> None:
        """Make a trainer validate the checkpoint's step first, if a signal has cut off its
        validation.

        Args:
            trainer: The trainer, before `fit`.
        """
        if self.lacks_validation:
            validate_first(trainer, over=self.limit is not None)

    def metrics(self) -> dict[str, Any]:
        """Print that nothing is left to train, and return the content of `metrics.json`: the
        metrics of the best checkpoint. Ranks other than 0 print nothing and return an empty dict.
        """
        if not is_first():
            return {}
        here = rank_info()
        steps = self.manifest.step
        position = self.manifest.position
        print(
            f"nothing is left to train: {short_path(self.path)} has {steps} steps behind it "
            f"({position['epoch']} epochs and {position['batches']} "
            f"batches) and {self.limit}; raise that to go on"
        )
        best = best_known(self.path, read_meta(self.path), self.manifest.run)
        of_best = self.joined or read_manifest(best or self.path)
        return of_best.metrics | {
            "samples_per_second": None,
            "samples_per_cpu_second": None,
            "train_seconds": None,
            "step_ms": None,
            "steps": steps,
            "ranks": here.world if here else 1,
            "plan": self.manifest.plan.name,
            "checkpoint": str(of_best.folder),
            "checkpoint_step": of_best.step,
            "run": self.manifest.run,
            "seed": self.recipe.seed,
            "status": "ok",
        }


def resumed_run(recipe: Train) -> Resumed | None:
    """Return the run of a recipe if it resumes from a checkpoint, else None."""
    path = recipe.ckpt_path
    return Resumed(recipe, path, read_manifest(path)) if path else None
