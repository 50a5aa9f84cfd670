"""Build the model of a recipe, or its ensemble of models, with their tables on the meta device."""

import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.models.ensemble import Ensemble
from recapp.run.constructors import make
from recapp.run.model_tables import check_collections, check_features
from recapp.run.recipe import Recipe, Train
from recapp.settings.records import Constructor
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.named_collections import ModelTables
from recapp.tables.unsharded_collection import UnshardedCollection
from recapp.trainer.memory_use import check_room


def build_model(recipe: Recipe, *, on_paper: bool = False) -> nn.Module:
    """Return the model, with its tables on the meta device.

    The models of an ensemble have the start values of runs of their own: those of the seeds `seed`,
    `seed + 1` and so on.

    Args:
        recipe: The recipe.
        on_paper: Whether the dense part is on the meta device, too, and tables may read features
            that the data set does not have.

    Raises:
        ConfigError: A table reads a feature that the data set does not have, the model does not
            take the collections of the tables, the dense part is larger than this rank's memory, or
            `model._target_` makes no module.
    """
    tables = recipe.model_tables
    if not on_paper:
        check_features(tables.tables, recipe.schema)
    check_collections(recipe.model, tables.collections)
    dense = len(recipe.schema.numbers)

    def build() -> nn.Module:
        members = []
        for number, own in enumerate(recipe.members):
            if number:  # the caller has set the seed of the first
                torch.manual_seed(recipe.seed + number)
            members.append(_model(recipe.model, own, dense, recipe.seed + number))
        return Ensemble(members, _output_of(recipe)) if len(members) > 1 else members[0]

    if on_paper:
        with torch.device("meta"):
            return build()
    check_room(build)
    return build()


def _output_of(recipe: Recipe) -> str:
    """Return the name of the task's first output; `logit` for a recipe without a task."""
    return recipe.built_task.outputs[0].name if isinstance(recipe, Train) else "logit"


def _model(settings: Constructor, tables: ModelTables, dense: int, seed: int) -> nn.Module:
    given = {**settings.arguments, **_collections(tables, seed), "dense_in_features": dense}
    model = make(Constructor(settings.target, given), "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={settings.target}: must make a torch.nn.Module")
    return model


def _collections(tables: ModelTables, seed: int) -> dict[str, UnshardedCollection]:
    """Return the collections by name. Those that read the same table share its rows."""
    made: dict[str, UnshardedCollection] = {}
    first: dict[str, UnshardedCollection] = {}
    for name, own in tables.collections.items():
        kind = EmbeddingBagCollection if own.pools else EmbeddingCollection
        made[name] = kind(own.tables, device=torch.device("meta"), seed=seed, lookups=own.lookups)
        for table in own.tables:
            made[name].share(table.name, first.setdefault(table.name, made[name]))
    return made
