"""Settings that options of `conf/` stand for, composed apart from a command line.

plan, [+plan=mixed]         -> the settings of `recapp.plan +plan=mixed`
train, {"plan": "mixed"}    -> the settings of `recapp.train +plan=mixed`
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.app.compose import (
    choices,
    compose,
    overrides_that_choose,
    to_plain,
    with_absolute_paths,
    without_hydra,
)


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
