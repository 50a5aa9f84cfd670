"""The recipe of a stored model: its settings, checked for trust, with the ids and the sizes of
tables that it was trained with.

    manifest -> recipe_of_stored                     -> recipe      Python
    manifest -> stored_settings -> compose_over (Hydra) -> match_stored -> recipe      commands
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recapp.errors import CheckpointError, ConfigError
from recapp.run.recipe import Recipe, Train, read_settings
from recapp.settings.records import override_names
from recapp.stored.trust import judged, marked
from recapp.tables.table_settings import TablesOfDataset

if TYPE_CHECKING:
    from recapp.stored.manifest import Manifest

R = TypeVar("R", bound=Recipe)
# settings that only the command line may set, never a stored model
OF_THE_INVOCATION = ("format", "trust", "resume_data", "checkpoints", "hydra")
# The commands that make no loggers. So the loggers of a stored model need no trust there.
READING = ("eval", "predict", "export")
# The commands that measure none of the metrics of a stored model's group `metrics`.
SCORING = ("predict", "export")


def recipe_of_stored(manifest: "Manifest", trust: Sequence[str] = ()) -> Train:
    """Return the recipe that a stored model was trained with, checked for trust, without the group
    `metrics`.

    Raises:
        ConfigError: `trust` is not a list of packages.
        CheckpointError: The settings are damaged, or name a constructor that may not be called.
        ArtefactError: The settings are damaged.
    """
    plain = judged(stored_settings(manifest.config, "predict"), trust)
    more = {"trust": list(trust), "metrics": {}}
    recipe: Train = read_settings(plain | more, "eval")
    return match_stored(recipe, manifest)


def stored_settings(settings: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the settings that a command takes from a stored model, with a mark on each `_target_`
    (`recapp/stored/trust.py`).

    Raises:
        CheckpointError: The settings are not plain.
    """
    left_out = (*OF_THE_INVOCATION, *(["metrics"] if command in SCORING else []))
    settings_of_command = {name: value for name, value in settings.items() if name not in left_out}
    return marked(settings_of_command | ({"logger": {}} if command in READING else {}))


def as_scored(recipe: R, overrides: Sequence[str]) -> R:
    """Return a recipe with which every way to score gives the same bits on any number of ranks,
    unless the command line changes it.

    Three settings of training change the last bits of scores, so only the command line sets them:
    owners' sums of bags depend on the number of ranks, payloads of 16 bits round vectors, and only
    a trainer computes in narrower floats.
    """
    named = set(override_names(overrides))
    if not named & {"planner", "planner.mode"}:
        recipe = replace(recipe, planner=replace(recipe.planner, mode="unique"))
    if not named & {"trainer", "trainer.precision"}:
        recipe = replace(recipe, trainer=replace(recipe.trainer, precision="32-true"))
    if not named & {"engine", "engine.payload"}:
        recipe = replace(recipe, engine=replace(recipe.engine, payload="full"))
    plan = recipe.plan
    if plan is not None and plan.mode is not None and not named & {"plan", "plan.mode"}:
        recipe = replace(recipe, plan=replace(plan, mode="unique"))
    return recipe


def match_stored(recipe: R, manifest: "Manifest") -> R:
    """Return a recipe with which a stored model reads the same ids into tables of the same sizes.

    Tables that the ids of the data set would size keep the stored sizes.

    Args:
        recipe: The recipe of a run that loads the model.
        manifest: The manifest of the checkpoint or artefact.

    Raises:
        CheckpointError: Text ids would be read differently than in training.
        ArtefactError: The same.
    """
    from recapp.dataset.schema import LISTS

    features = recipe.schema.features
    stored = manifest.info.get("ids")
    if stored is not None:
        try:
            recipe.schema.check_id_encoding(stored, str(manifest.folder), manifest.kind.name)
        except CheckpointError as error:
            raise manifest.kind.error(str(error)) from None
        for_cpp = manifest.info.get("features")  # of an artefact
        if isinstance(for_cpp, Mapping) and for_cpp.get(LISTS) != stored.get(LISTS):
            raise manifest.wrong(f"features.{LISTS}")
    rows = {name: shape.rows for name, shape in manifest.shapes.items() if shape.rows}
    dataset = recipe.dataset
    sized = bool(dataset.table_rows or dataset.cardinality or dataset.generate)
    known = all(name in rows for name in features)
    if sized or not known or not isinstance(recipe.tables, TablesOfDataset):
        return recipe
    return recipe.sized([rows[name] for name in features])


def check_generated(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Check that a checkpoint's generated data exist, unless the command line names their
    directory.

    They are not generated again, since a checkpoint must not decide where a command writes.

    Args:
        recipe: The recipe of a run that loads the checkpoint.
        overrides: The command line.

    Raises:
        ConfigError: The data do not exist.
    """
    dataset = recipe.dataset
    named = {"dataset", "dataset.path", "experiment"}.intersection(override_names(overrides))
    if not dataset.generate or named:
        return
    path = Path(str(dataset.scaled.path))  # one directory, where data are generated
    if not path.is_dir() or not any(path.iterdir()):
        raise ConfigError(
            f"dataset.path={path}: the generated data of the checkpoint are not there, and nothing "
            "is written at a place that only a checkpoint names: say dataset.path=... to have them "
            "generated"
        )
