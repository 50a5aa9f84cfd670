"""Describe a model of recapp as TorchRec's DLRM, for `torchrec_worker.py`: the shapes of layers and
tables, and the rows that each batch looks up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recapp.models.published_dlrm import DLRM
from recapp.sparse.batch import Batch
from recapp.tables.config import PoolingType
from recapp.tables.embedding_bag import EmbeddingBagCollection


def no_twin(model: nn.Module | None) -> str:
    """Return why no DLRM of TorchRec does the same work as a model; empty where one does.

    Args:
        model: The model with its unsharded collection, or None.
    """
    if not isinstance(model, DLRM):
        return "it is no DLRM of static tables"
    collection = model.embedding_bag_collection
    if not isinstance(collection, EmbeddingBagCollection) or model.bottom is None:
        return "it has no bags or no numbers"
    lookups = collection.lookups
    if any(x.pooling is not PoolingType.SUM for x in lookups) or len(model.projections):
        return "its bags are not all summed, or its tables have several widths"
    if len({x.feature for x in lookups}) < len(lookups) or collection.is_weighted():
        return "a feature reads several tables, or ids have weights"
    return ""


def torchrec_spec(model: nn.Module, quantize: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the spec from which a process of TorchRec builds the twin of a model.

    Args:
        model: The model with its unsharded collection; `no_twin` gives no reason against it.
        quantize: The way to store tables.
        files: The file of each list of batches.
    """
    assert isinstance(model, DLRM) and model.bottom is not None
    collection = model.embedding_bag_collection
    assert isinstance(collection, EmbeddingBagCollection)
    read = {
        t.name: [x.feature for x in collection.lookups if x.table.name == t.name]
        for t in collection.tables()
    }
    return {
        "kind": "inference",
        "quantize": quantize,
        "tables": [
            (t.name, t.num_embeddings, t.embedding_dim, read[t.name]) for t in collection.tables()
        ],
        "features": [x.feature for x in collection.lookups],
        "model": {
            "dense": model.dense_in_features,
            "bottom": _widths(model.bottom),
            "top": _widths(model.top),
        },
        "batches": {name: str(path) for name, path in files.items()},
    }


def write_batches(model: nn.Module, batches: Sequence[Batch], path: Path) -> None:
    """Write the numbers and the rows of batches to a file.

    Args:
        model: The model of `torchrec_spec`.
        batches: The batches, all of one size.
        path: The file.
    """
    assert isinstance(model, DLRM)
    collection = model.embedding_bag_collection
    assert isinstance(collection, EmbeddingBagCollection)
    found = [collection.id_rules(batch.sparse) for batch in batches]
    np.savez(
        path,
        ids=torch.cat([rows.rows_L.long() for rows in found]).numpy(),
        ids_of_batch=np.array([len(rows.rows_L) for rows in found]),
        lengths=torch.stack([rows.lengths_FB.reshape(-1).int() for rows in found]).numpy(),
        dense=torch.stack([batch.dense_BI for batch in batches]).numpy(),
    )


def _widths(layers: nn.Module) -> list[int]:
    return [m.out_features for m in layers.modules() if isinstance(m, nn.Linear)]
