"""The recipe of a job: from its command line or, with `ckpt_path`, from a stored model and the
command line.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from recapp.app import compose
from recapp.app.match_trained import match_stored
from recapp.recipe.read import checked, read_settings
from recapp.recipe.recipe import Train
from recapp.settings.option_files import Folders

LENGTH: tuple[Literal["max_epochs"], Literal["max_steps"]] = ("max_epochs", "max_steps")


def recipe_of_job(
    config: DictConfig,
    command: str,
    overrides: tuple[str, ...],
    choices: dict[str, str],
    folders: Folders,
) -> Any:
    """Return the record of a command's settings. Paths are absolute, so that a run's checkpoint
    works from any directory.

    Args:
        config: The settings that Hydra composed.
        command: The name of the command.
        overrides: The command line.
        choices: The option chosen of each group.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: A setting is wrong.
        CheckpointError: The checkpoint does not exist, is damaged, or is of a later version.
        ArtefactError: The same for an artefact.
    """
    whole = not compose.names_checkpoint(config)
    plain = compose.with_absolute_paths(compose.to_plain(config, whole=whole))
    if whole:
        return read_settings(plain | {"choices": choices}, command, overrides)
    checked(plain, command, overrides)
    return stored_recipe(Path(plain["ckpt_path"]), command, overrides, folders)


def stored_recipe(path: Path, command: str, overrides: tuple[str, ...], folders: Folders) -> Any:
    """Return the recipe that a stored model was trained with. The command line replaces only the
    settings that it names.

    Args:
        path: The checkpoint or artefact.
        command: The command, which gives the type of the record.
        overrides: The command line.
        folders: Directories with further options, besides recapp's own.
    """
    if command == "predict":
        from recapp.app.trained_model import scoring_recipe

        return scoring_recipe(
            path,
            lambda stored: compose.recipe_over(stored, command, overrides, folders),
            overrides,
        )
    from recapp.stored.checkpoint import read_manifest

    manifest = read_manifest(path)
    recipe = match_stored(
        compose.recipe_over(manifest.config, command, overrides, folders), manifest
    )
    return with_one_length(recipe, overrides) if command == "train" else recipe


def with_one_length(recipe: Train, overrides: Sequence[str]) -> Train:
    """Return the recipe of a resumed run with one limit of training: if the command line sets one
    of trainer.max_epochs and trainer.max_steps, the checkpoint's other limit is dropped.
    """
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    trainer = recipe.trainer
    for one, other in (LENGTH, LENGTH[::-1]):
        chosen = f"trainer.{one}" in said and f"trainer.{other}" not in said
        if chosen and getattr(trainer, one) is not None:
            trainer = trainer.without(other)
    return replace(recipe, trainer=trainer)
