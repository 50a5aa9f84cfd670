"""Recipes from composed settings: of a job, of options of `conf/`, and of each job of a sweep.

command line                          -> recipe                              recipe_of_job
command line, ckpt_path of a model    -> its recipe, changed                 stored_recipe
+plan=mixed                           -> the recipe of that command line     recipe_under
-m seed=1,x                           -> seed=x: must be a whole number      check_sweep
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recapp.cli import compose
from recapp.cli.stored_recipe import as_scored, match_stored
from recapp.errors import ConfigError
from recapp.run.commands import checked, read_settings, recipe_of
from recapp.run.recipe import Train
from recapp.settings.check_settings import override_names
from recapp.settings.option_files import Folders, is_group

LENGTH: tuple[Literal["max_epochs"], Literal["max_steps"]] = ("max_epochs", "max_steps")


def recipe_of_job(
    config: DictConfig,
    command: str,
    overrides: Sequence[str],
    choices: Mapping[str, str],
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
    if compose.names_checkpoint(config):
        path = Path.cwd() / Path(str(config.ckpt_path)).expanduser()
        return stored_recipe(path, command, overrides, folders, config)
    plain = compose.with_absolute_paths(compose.to_plain(config))
    return read_settings(plain | {"choices": choices}, command)


def stored_recipe(
    path: Path,
    command: str,
    overrides: Sequence[str],
    folders: Folders,
    composed: DictConfig | None = None,
) -> Any:
    """Return the recipe that a stored model was trained with. The command line replaces only the
    settings that it names.

    Args:
        path: The checkpoint or artefact.
        command: The command, which gives the type of the record.
        overrides: The command line.
        folders: Directories with further options, besides recapp's own.
        composed: What Hydra has composed of the command line; None composes it.
    """
    from recapp.stored.checkpoint import read_manifest
    from recapp.stored.stored_model import read_stored

    manifest = read_stored(path) if command in ("eval", "predict") else read_manifest(path)
    recipe = match_stored(
        compose.recipe_over(manifest.config, command, overrides, folders, composed), manifest
    )
    if command == "train":
        return with_one_length(recipe, overrides)
    # an artefact has no plan of training
    scores = command == "predict" or not manifest.kind.resumes
    return as_scored(recipe, overrides) if scores else recipe


def with_one_length(recipe: Train, overrides: Sequence[str]) -> Train:
    """Return the recipe of a resumed run with one limit of training: if the command line sets one
    of trainer.max_epochs and trainer.max_steps, the checkpoint's other limit is dropped.
    """
    named = override_names(overrides)
    trainer = recipe.trainer
    for one, other in (LENGTH, LENGTH[::-1]):
        sets_only_one = f"trainer.{one}" in named and f"trainer.{other}" not in named
        if sets_only_one and getattr(trainer, one) is not None:
            trainer = trainer.without(other)
    return replace(recipe, trainer=trainer)


def recipe_under(command: str, overrides: Sequence[str]) -> Any:
    """Return the recipe of a command under some overrides. In a job, `--config-dir` adds options.

    Args:
        command: The name of the command.
        overrides: Overrides that name no stored model.

    Raises:
        ConfigError: A setting or an option does not exist, or has a wrong value.
    """
    try:
        config = compose.without_hydra(compose.compose(command, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        known = compose.known_settings(command, overrides)
        raise ConfigError(compose.in_one_line(error, known)) from error
    return recipe_of_job(config, command, overrides, {}, ())


# ---- a sweep


def check_sweep(
    command: str, first: Sequence[str], overrides: Sequence[str], folders: Folders
) -> None:
    """Check that a job accepts every value of a sweep, before the first job: a misspelt number must
    not end the sweep after hours.

    Each swept setting takes its values in turn, with the first values of the other settings. Values
    that a sweeper draws (intervals, distributions) are checked by their job. glob(...) finds only
    options that exist.

    Args:
        command: The command.
        first: Overrides that come before the command line.
        overrides: The overrides of the command line.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: A value is not allowed.
        HydraException: A setting or an option does not exist.
    """
    parser = OverridesParser.create()
    values = [texts for text in overrides if (texts := _values(parser.parse_override(text), text))]
    first_values = [of_one[0] for of_one in values]
    whole = compose.compose(command, [*first, *first_values], folders)
    _check(compose.without_hydra(whole), command)
    for number, of_one in enumerate(values):
        for value in of_one[1:]:
            job = [*first_values[:number], value, *first_values[number + 1 :]]
            parsed = parser.parse_override(value)
            if is_group(parsed.key_or_group, folders):
                config = compose.compose(command, [*first, *job], folders)
            else:  # composing again takes a fifth of a second, too long for hundreds of seeds
                config = whole.copy()
                OmegaConf.set_struct(config, False)
                OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=False)
            _check(compose.without_hydra(config), command)


def _check(config: DictConfig, command: str) -> None:
    """Check the settings of a job of a sweep; those of a stored model are not known yet."""
    whole = not compose.names_checkpoint(config)
    plain = compose.with_absolute_paths(compose.to_plain(config, whole=whole))
    settings = checked(plain, command)
    if whole:
        recipe_of(settings, command)


def _values(override: Override, text: str) -> list[str]:
    """Return the overrides of single jobs that an override of a sweep stands for, if they are known
    before the first job.
    """
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    key = override.get_key_element()
    return [f"{key}={value!s}" for value in override.sweep_string_iterator()]
