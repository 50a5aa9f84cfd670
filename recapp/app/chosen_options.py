"""Settings that options of `conf/` stand for, composed apart from a command line.

plan, mixed                 -> the settings in conf/plan/mixed.yaml
train, {"plan": "mixed"}    -> the settings of `recapp.train +plan=mixed`
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from recapp.app.compose import (
    choices,
    compose,
    overrides_that_choose,
    to_plain,
    with_absolute_paths,
    without_hydra,
)
from recapp.settings.option_files import Folders, option_file


def option_settings(group: str, option: str, folders: Folders = ()) -> dict[str, Any]:
    """Return the settings of one option, plain and resolved.

    Args:
        group: The group of the option.
        option: The name of an option that exists.
        folders: Directories in which options are looked for beside recapp's own.
    """
    whole = OmegaConf.create({group: OmegaConf.load(str(option_file(group, option, folders)))})
    plain: Any = OmegaConf.to_container(whole, resolve=True)
    found: dict[str, Any] = plain[group]
    return found


def command_settings(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command under some overrides as plain values, with paths as they are
    written.
    """
    return to_plain(without_hydra(compose(command, overrides)))


def default_settings(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a training run whose command line chooses some options and sets
    nothing else, as the run writes them.
    """
    config = compose("train", overrides_that_choose(chosen, "train"))
    settings = to_plain(without_hydra(config), whole=False)
    return with_absolute_paths(settings) | {"choices": choices(config.hydra)}
