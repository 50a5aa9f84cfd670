"""The model of a recipe, with its tables on the meta device: of its settings alone, or of a stored
model, for ranks to shard or to be filled on one rank.

Ranks import this file, so it does not import Hydra.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from recapp.dataset.collate import RawRows
from recapp.engine.sharded_collection import (
    embedding_collections,
    sharded_collections,
    without_tables,
)
from recapp.errors import ArtefactError, RecappError
from recapp.models.catalogue import MODELS
from recapp.models.ensemble import Ensemble
from recapp.run.constructors import constructor_of, derived_constructor, make_a
from recapp.run.model_tables import check_collections, check_features
from recapp.run.recipe import Recipe, Train
from recapp.stored.manifest import Manifest
from recapp.stored.plain_parts import state_must_fit
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    UnshardedCollection,
    embedding_tables,
)
from recapp.tables.table_settings import ModelTables, TablesOfDataset


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
            take the collections of the tables, or `model._target_` makes no module.
    """
    derived_constructor(nn.Module, recipe.model, "model")
    tables = recipe.model_tables
    if not on_paper:
        check_features(tables, recipe.schema)
    check_collections(recipe.model, tables.collections)
    dense = len(recipe.schema.numbers)
    output = recipe.built_task.outputs[0].name if isinstance(recipe, Train) else "logit"

    def build() -> nn.Module:
        members = []
        for number, member_tables in enumerate(recipe.members):
            if number:  # the caller has set the seed of the first
                torch.manual_seed(recipe.seed + number)
            members.append(_model(recipe, member_tables, dense, recipe.seed + number))
        return Ensemble(members, output) if len(members) > 1 else members[0]

    if on_paper:
        with torch.device("meta"):
            return build()
    return build()


def _model(recipe: Recipe, tables: ModelTables, dense: int, seed: int) -> nn.Module:
    """Return a model. Collections that read the same table share its rows."""
    weighted = None if recipe.schema.id_weights else False  # None: by the weights of the batch
    bags = partial(EmbeddingBagCollection, is_weighted=weighted)
    collections: dict[str, UnshardedCollection] = {}
    first: dict[str, UnshardedCollection] = {}
    for name, collection_tables in tables.collections.items():
        kind = bags if collection_tables.pools else EmbeddingCollection
        collection = kind(
            collection_tables.tables,
            device=torch.device("meta"),
            seed=seed,
            lookups=collection_tables.lookups,
        )
        collections[name] = collection
        for table in collection_tables.tables:
            collection.share(table.name, first.setdefault(table.name, collection))
    return make_a(nn.Module, recipe.model, "model", **collections, dense_in_features=dense)


def check_model(recipe: Recipe) -> None:
    """Make the model on paper. Check only its arguments and collections if its constructor may not
    run there: a user's own, or one whose widths follow from ids that are counted later.

    Raises:
        ConfigError: The model cannot be made.
    """
    tables = recipe.tables
    is_open = (
        isinstance(tables, TablesOfDataset) and tables.dim_rule is not None and recipe.counts_ids
    )
    if recipe.model.target in MODELS and not is_open:
        build_model(recipe, on_paper=True)
        return
    derived_constructor(nn.Module, recipe.model, "model")
    collections = recipe.model_tables.collections
    check_collections(recipe.model, collections)
    constructor_of(recipe.model, "model", [*collections, "dense_in_features"])


# The largest allowed difference between an output of the example and the exported one, relative to
# the larger of 1 and its size. Other machines add numbers in another order.
TOLERANCE = 1e-4


def meta_model(manifest: Manifest, recipe: Recipe) -> nn.Module:
    """Return the model of a stored model, with tables on the meta device and in the stored data
    types.

    Raises:
        ArtefactError: The settings and the files describe different tables.
    """
    model = build_model(recipe)
    manifest.check_tables(embedding_tables(model))
    if manifest.data_types:
        for collection in dict.fromkeys(c for _, c in embedding_collections(model)):
            collection.store_as(manifest.data_types)
    return model


def load_dense(artefact: Artefact, model: nn.Module) -> None:
    """Fill the dense part of a model. Its tables are sharded or still on the meta device.

    Raises:
        ArtefactError: The dense part does not fit the model.
    """
    parameters = model.named_parameters(remove_duplicate=False)  # collections may share a table
    tables = {name for name, p in parameters if p.device.type == "meta"}
    state = artefact.dense()
    try:
        with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
            missing, unknown = model.load_state_dict(state, strict=False)
    except RecappError as error:
        raise artefact.manifest.damaged(str(error)) from error
    if odd := [*(set(missing) - tables), *unknown]:
        raise artefact.manifest.damaged(f"the dense part differs from its settings in {odd[0]}")


def model_to_shard(artefact: Artefact, recipe: Recipe) -> nn.Module:
    """Return the model with a filled dense part, and with tables on the meta device for ranks to
    shard.

    Raises:
        ArtefactError: The settings and the files do not fit together.
    """
    model = meta_model(artefact.manifest, recipe)
    load_dense(artefact, model)
    return model


def raw_rows_of(recipe: Recipe) -> RawRows:
    """Return a reader of raw rows that reads them as the run read its data set."""
    return RawRows(recipe.schema, recipe.dataset.dense_transform)


def check_outputs(manifest: Manifest, outputs: Mapping[str, Tensor]) -> None:
    """Compare the outputs of the example with the stored ones, if any.

    Args:
        manifest: The manifest.
        outputs: The outputs of the task by name, each [N].

    Raises:
        ArtefactError: The outputs differ by more than `TOLERANCE`.
    """
    stored = manifest.example_outputs(list(outputs))
    for name, values in {} if stored is None else stored.items():
        expected = torch.tensor(values, dtype=torch.float64)
        actual = outputs[name].double().cpu()
        if actual.shape != expected.shape:
            raise manifest.damaged(
                f"its example has {len(actual)} rows, and {len(expected)} scores"
            )
        apart = (actual - expected).abs() / expected.abs().clamp(min=1)
        if not bool((apart <= TOLERANCE).all()):
            worst = int(apart.nan_to_num(math.inf).argmax())
            raise ArtefactError(
                f"artefact {manifest.folder} scores its example otherwise than it was exported: "
                f"row {worst} has the {name} {float(actual[worst]):.6f}, must be "
                f"{float(expected[worst]):.6f}: its files do not belong together; export it again"
            )
