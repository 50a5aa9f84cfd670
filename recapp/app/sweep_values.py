"""The check of every value of a sweep before its first job, so that no sweep of hours ends at a
misspelt number.

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
    """Check that every value of a sweep is one that a job can have.

    Each swept setting takes its values in turn, under the first values of the others. Values that a
    sweeper draws (intervals, distributions) are checked by the job that gets them; glob(...) finds
    nothing but options that exist.

    Args:
        command: The command whose settings they are.
        first: Overrides that come before the command line.
        overrides: The command line's.
        folders: Directories in which options are looked for beside recapp's own.

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
            else:  # composing takes a fifth of a second, and there may be hundreds of seeds
                config = whole.copy()
                OmegaConf.set_struct(config, False)
                OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=False)
            _check(command, config, job)


def _values(override: Override, text: str) -> list[str]:
    """Return what an override sets in one job after the other, as far as that is known before the
    first job.
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
