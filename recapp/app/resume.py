"""Resume from a checkpoint: find the steps left to train, and apply changed optimiser settings."""

from typing import Any

from lightning.pytorch import Trainer

from recapp.console import short_path
from recapp.processes.rank_environment import rank_info
from recapp.recipe.recipe import Train
from recapp.settings.records import to_plain
from recapp.stored.checkpoint import read_manifest, read_meta
from recapp.trainer.changed_optimizer import ChangedOptimizer
from recapp.trainer.keep_last import best_known
from recapp.trainer.missed_validation import validate_first


def limit_reached(recipe: Train) -> str | None:
    """Return the limit that the checkpoint has reached, such as `trainer.max_steps=20`; None if
    steps are left to train.
    """
    if not recipe.ckpt_path:
        return None
    manifest = read_manifest(recipe.ckpt_path)
    epochs, steps = recipe.trainer.length
    if 0 <= steps <= manifest.step:
        return f"trainer.max_steps={steps}"
    return f"trainer.max_epochs={epochs}" if 0 <= epochs <= manifest.position["epoch"] else None


def end_without_training(recipe: Train) -> dict[str, Any] | None:
    """Return the content of `metrics.json` if nothing is left to train, and print that.

    Return None if steps are left, or the validation of a last step that a signal has cut off.

    Args:
        recipe: The recipe of the run.
    """
    limit = limit_reached(recipe)
    if limit is None or _lacks_validation(recipe):
        return None
    return _metrics_of_checkpoint(recipe, limit)


def catch_up(trainer: Trainer, recipe: Train) -> None:
    """Make a trainer validate the checkpoint's step first, if a signal has cut off its validation.

    Args:
        trainer: The trainer, before `fit`.
        recipe: The recipe of the run.
    """
    if recipe.ckpt_path and _lacks_validation(recipe):
        validate_first(trainer, over=limit_reached(recipe) is not None)


def _lacks_validation(recipe: Train) -> bool:
    """Return whether a signal saved the checkpoint before its validation, and validation is on."""
    assert recipe.ckpt_path is not None
    return not read_manifest(recipe.ckpt_path).metrics and recipe.without_validation is None


def _metrics_of_checkpoint(recipe: Train, limit: str) -> dict[str, Any]:
    """Print that nothing is left to train, and return the content of `metrics.json`: the metrics of
    the best checkpoint.

    Ranks other than 0 print nothing and return an empty dict.

    Args:
        recipe: The recipe of the run.
        limit: The result of `limit_reached`.
    """
    here = rank_info()
    path = recipe.ckpt_path
    assert path is not None
    if here and here.rank:
        return {}
    manifest = read_manifest(path)
    steps = manifest.step
    position = manifest.position
    print(
        f"nothing is left to train: {short_path(path)} has {steps} steps behind it "
        f"({position['epoch']} epochs and {position['batches']} "
        f"batches) and {limit}; raise that to go on"
    )
    best = best_known(path, read_meta(path)) or path
    of_best = read_manifest(best)
    return of_best.metrics | {
        "samples_per_second": None,
        "train_seconds": None,
        "step_ms": None,
        "steps": steps,
        "ranks": here.world if here else 1,
        "plan": manifest.plan.name,
        "checkpoint": str(best),
        "checkpoint_step": of_best.step,
        "seed": recipe.seed,
        "status": "ok",
    }


def changed_optimizer(recipe: Train) -> list[ChangedOptimizer]:
    """Return a list of the callback that applies changed optimiser settings to a resumed run; empty
    if no run is resumed.
    """
    if not recipe.ckpt_path:
        return []
    return [
        ChangedOptimizer(
            read_manifest(recipe.ckpt_path).config.get("optimizer"), to_plain(recipe.optimizer)
        )
    ]
