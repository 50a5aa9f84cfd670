"""Build the model of a recipe, with its tables on the meta device."""

from collections.abc import Sequence

import torch
from torch import nn

from recapp.engine.memory_use import check_room
from recapp.errors import ConfigError
from recapp.recipe.constructors import make
from recapp.recipe.model_tables import check_features
from recapp.recipe.recipe import Recipe
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.lookups import TableLookup


def build_model(recipe: Recipe, *, on_paper: bool = False) -> nn.Module:
    """Return the model, with its tables on the meta device.

    Args:
        recipe: The recipe.
        on_paper: Whether the dense part is on the meta device, too, and tables may read features
            that the data set does not have.

    Raises:
        ConfigError: A table reads a feature that the data set does not have, the dense part is
            larger than this rank's memory, or `model._target_` makes no module.
    """
    tables = recipe.table_configs
    if not on_paper:
        check_features(tables, recipe.schema)
    dense = len(recipe.schema.dense)

    def build() -> nn.Module:
        return _model(recipe, tables, recipe.lookups, dense)

    if on_paper:
        with torch.device("meta"):
            return build()
    check_room(build)
    return build()


def _model(
    recipe: Recipe,
    tables: Sequence[EmbeddingBagConfig],
    lookups: Sequence[TableLookup],
    dense: int,
) -> nn.Module:
    collection = EmbeddingBagCollection(
        tables=tables, device=torch.device("meta"), seed=recipe.seed, lookups=lookups
    )
    model = make(
        recipe.model, "model", embedding_bag_collection=collection, dense_in_features=dense
    )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={recipe.model.target}: must make a torch.nn.Module")
    return model
