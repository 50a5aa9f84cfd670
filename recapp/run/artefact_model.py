"""Build the model of a stored model from its settings and files, on the meta device for ranks to
shard, or to be filled on one rank.

Ranks import this file, so it does not import Hydra.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recapp.dataset.raw_rows import RawRows
from recapp.engine.sharded_collection import (
    embedding_collections,
    sharded_collections,
    without_tables,
)
from recapp.errors import ArtefactError, RecappError
from recapp.run.model import build_model
from recapp.run.recipe import Recipe
from recapp.stored.manifest import Manifest
from recapp.stored.snapshot import Artefact
from recapp.stored.training_state import state_must_fit
from recapp.tables.collections import embedding_tables

TOLERANCE = 1e-4
"""The largest allowed difference between an output of the example and the exported one, relative to
the larger of 1 and its size. Other machines add numbers in another order.
"""


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
        raise artefact.damaged(str(error)) from error
    if odd := [*(set(missing) - tables), *unknown]:
        raise artefact.damaged(f"the dense part differs from its settings in {odd[0]}")


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
        found = outputs[name].double().cpu()
        if found.shape != expected.shape:
            raise manifest.damaged(f"its example has {len(found)} rows, and {len(expected)} scores")
        apart = (found - expected).abs() / expected.abs().clamp(min=1)
        if not bool((apart <= TOLERANCE).all()):
            worst = int(apart.nan_to_num(math.inf).argmax())
            raise ArtefactError(
                f"artefact {manifest.folder} scores its example otherwise than it was exported: "
                f"row {worst} has the {name} {float(found[worst]):.6f}, must be "
                f"{float(expected[worst]):.6f}: its files do not belong together; export it again"
            )
