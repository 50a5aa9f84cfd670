"""Every value of a sweep is looked at before its first job: a sweep of hours is not to end at a
misspelt number.

    -m seed=1,x          seed=x: must be a whole number
"""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf

from recapp.app import compose
from recapp.app.checked_settings import checked
from recapp.settings.option_files import Folders, is_group


def check_sweep(
    command: str, first: Sequence[str], overrides: Sequence[str], folders: Folders
) -> None:
    """Refuse a value that no job could have, whatever the others have.

    Each swept setting takes its values in turn, under the first values of the others. Values that a
    sweeper draws (intervals, distributions) are looked at by the job that gets them; glob(...)
    finds nothing but options that are there.

    Args:
        command: Whose settings they are.
        first: What comes before the command line.
        overrides: The command line's.
        folders: Where options are looked for beside recapp's own.

    Raises:
        ConfigError: A value that is not allowed.
        HydraException: A setting or an option that is not there.
    """
    parser = OverridesParser.create()
    values = [found for text in overrides if (found := _values(parser.parse_override(text), text))]
    said = [of_one[0] for of_one in values]
    whole = compose.compose(command, [*first, *said], folders)
    _check(command, whole, said)
    for number, of_one in enumerate(values):
        for value in of_one[1:]:
            job = [*said[:number], value, *said[number + 1 :]]
            parsed = parser.parse_override(value)
            if is_group(parsed.key_or_group, folders):
                config = compose.compose(command, [*first, *job], folders)
            else:  # composing takes a fifth of a second, and there may be hundreds of seeds
                config = whole.copy()
                OmegaConf.set_struct(config, False)
                OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=False)
            _check(command, config, job)


def _values(override: Override, text: str) -> list[str]:
    """What an override says in one job after the other, as far as that is known before the
    first.
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
    checked(compose.to_plain(config, whole=whole), command, overrides)
