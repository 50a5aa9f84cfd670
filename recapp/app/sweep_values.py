"""Check every value of a sweep before its first job: a misspelt number must not end it after hours.

-m seed=1,x          seed=x: must be a whole number
"""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from recapp.app import compose
from recapp.recipe.read import checked, read_settings
from recapp.settings.option_files import Folders, is_group


def check_sweep(
    command: str, first: Sequence[str], overrides: Sequence[str], folders: Folders
) -> None:
    """Check that a job accepts every value of a sweep.

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
    values = [found for text in overrides if (found := _values(parser.parse_override(text), text))]
    first_values = [of_one[0] for of_one in values]
    whole = compose.compose(command, [*first, *first_values], folders)
    _check(command, whole, first_values)
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
            _check(command, config, job)


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


def _check(command: str, composed: DictConfig, overrides: Sequence[str]) -> None:
    config = compose.without_hydra(composed)
    whole = not compose.names_checkpoint(config)
    plain = compose.to_plain(config, whole=whole)
    (read_settings if whole else checked)(plain, command, overrides)
