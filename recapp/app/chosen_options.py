"""Compose the settings of options of `conf/` apart from a command line.

mixed                       -> the settings of `recapp.plan +plan=mixed`, its group `plan`
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
from recapp.planner.planner_settings import PlanSettings
from recapp.recipe.read import checked, read_settings
from recapp.recipe.recipe import Train
from recapp.settings.records import record


def plan_settings(option: str) -> PlanSettings:
    """Return the settings of an option of the group `plan`. In a job, `--config-dir` adds options.

    Args:
        option: The name of an option that exists.
    """
    overrides = [f"+plan={option}"]
    plain = to_plain(without_hydra(compose("plan", overrides)))
    return record(PlanSettings, checked(plain, "plan", overrides)["plan"], "plan")


def recipe_under(overrides: Sequence[str]) -> Train:
    """Return the recipe of `recapp.train` under some overrides, with absolute paths."""
    plain = with_absolute_paths(to_plain(without_hydra(compose("train", overrides))))
    recipe: Train = read_settings(plain, "train", overrides)
    return recipe


def default_settings(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a training run writes if its command line only chooses options."""
    config = compose("train", overrides_that_choose(chosen, "train"))
    settings = to_plain(without_hydra(config), whole=False)
    return with_absolute_paths(settings) | {"choices": choices(config.hydra)}
