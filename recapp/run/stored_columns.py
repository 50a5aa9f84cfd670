"""The facts on columns that a stored model has and its settings have not: which features had bags
of ids, and the fitted values of derived columns.

recipe, ckpt_path -> recipe whose schema reads and computes the columns as training did
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from recapp.run.recipe import Recipe, Train
from recapp.stored.checkpoint_manifest import META, CheckpointManifest
from recapp.stored.derived_values import DERIVED_FILE
from recapp.stored.stored_model import StoredModel, open_stored

T = TypeVar("T", bound=Train)
R = TypeVar("R", bound=Recipe)


def with_stored_columns(recipe: T) -> T:
    """Return the recipe of a run with the columns of its stored model, if it loads one. Every rank
    calls it.

    Raises:
        CheckpointError: The model has no such values, or they are damaged.
        ArtefactError: The same for an artefact.
    """
    if recipe.ckpt_path is None:
        return recipe
    with open_stored(recipe.ckpt_path, wanted=partial(files_of_values, recipe=recipe)) as stored:
        return with_columns_of(recipe, stored)


def with_columns_of(recipe: R, stored: StoredModel) -> R:
    """Return a recipe with the columns of an open stored model."""
    recipe = replace(recipe, stored_ids=stored.manifest.info.get("ids"))
    if not recipe.schema.derived:
        return recipe
    return recipe.sized(None, stored.derived_values(recipe.schema.derived))


def files_of_values(manifest: Any, recipe: Recipe) -> Iterable[str]:
    """Select the files that hold the fitted values of a recipe's derived columns, if it has any."""
    if not recipe.schema.derived:
        return []
    return [META] if isinstance(manifest, CheckpointManifest) else [DERIVED_FILE]
