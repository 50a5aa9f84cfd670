"""Makes a read-only model whose tables are stored in fewer bits, in one process: the common part of
TorchRec's `quantize_embeddings` and of `from_float` of its quantised collections.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recapp.engine.gathered_state import gathered_state_dict
from recapp.engine.shard_model import embedding_collections
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.inference.one_rank import one_rank
from recapp.inference.storage import stored
from recapp.tables.collections import collections_in
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import positions_of
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.initial import start_hash
from recapp.tables.unsharded_collection import UnshardedCollection

DATA_TYPES = {
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.int8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
    torch.float32: DataType.FP32,
}
"""The data type of stored rows for each torch type that TorchRec accepts."""
OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)


def check_output_dtype(output_dtype: torch.dtype) -> None:
    """Check that a type is allowed for vectors.

    Raises:
        ConfigError: The type is not allowed.
    """
    if output_dtype not in OUTPUTS:
        raise ConfigError(
            f"output_dtype={output_dtype}: vectors are {', '.join(map(str, OUTPUTS))}"
        )


def read_only_model(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    per_table_weight_dtype: Mapping[str, torch.dtype],
) -> tuple[nn.Module, HeldTables]:
    """Return a model with read-only collections of the engine on one rank, and its tables.

    Args:
        module: A model with collections that hold their rows, or such a collection.
        dtype: The type of the stored rows.
        inplace: Whether to replace the collections of the model itself instead of those of a copy.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.

    Raises:
        ConfigError: A type or a table is unknown, tables are on the meta device, or several ranks
            hold them.
    """
    found = [held for _, held in collections_in(module)]
    tables = {t.name: t for held in found for t in held.tables()}
    chosen = _chosen(tables, dtype, per_table_weight_dtype)
    rows = _rows_of(module, found)
    held_tables = HeldTables(
        {name: _held(tables[name], chosen[name], *rows[name]) for name in tables}
    )
    twins = meta_twins(found, {name: seed for name, (_, _, seed) in rows.items()})
    made = module if inplace else copy.deepcopy(module, dict(twins))
    made = with_twins(made, found, twins) if inplace else made
    for collection in dict.fromkeys(c for _, c in embedding_collections(made)):
        collection.store_as(chosen)
    device = next((p.device for p in made.parameters() if p.device.type != "meta"), None)
    return one_rank(made, device or torch.device("cpu"), held_tables.make_store), held_tables


def meta_twins(
    collections: Sequence[Any], seeds: Mapping[str, int]
) -> dict[int, UnshardedCollection]:
    """Return an unsharded copy of each collection with its tables on the meta device, by the `id`
    of the collection.

    Args:
        collections: The collections, sharded or not. Copies share a table if the originals do.
        seeds: The seed of each table's start values; a missing seed is 0.
    """
    made: dict[int, UnshardedCollection] = {}
    weights: dict[tuple[str, int], Any] = {}
    for collection in collections:
        twin = made[id(collection)] = _meta_twin(collection, seeds)
        twin.dtype = collection.dtype  # even if all its tables have a narrower type by now
        for t in collection.tables():
            own = getattr(twin, twin.tables_of)[t.name]
            own.weight = weights.setdefault((t.name, id(collection.holder_of(t.name))), own.weight)
    return made


def _meta_twin(
    collection: UnshardedCollection | ShardedCollection, seeds: Mapping[str, int]
) -> UnshardedCollection:
    meta = torch.device("meta")
    tables = collection.tables()
    seed = seeds.get(tables[0].name, 0)
    if isinstance(collection, EmbeddingCollection | ShardedEmbeddingCollection):
        return EmbeddingCollection(tables, meta, collection.need_indices(), seed)
    assert isinstance(collection, EmbeddingBagCollection | ShardedEmbeddingBagCollection)
    weighted = collection.is_weighted()
    made = EmbeddingBagCollection(tables, weighted, meta, seed, lookups=collection.lookups)
    made.leave_room(collection.room)
    return made


def _chosen(
    tables: Mapping[str, EmbeddingConfig],
    dtype: torch.dtype,
    of_tables: Mapping[str, torch.dtype],
) -> dict[str, DataType]:
    for name, wanted in (("dtype", dtype), *of_tables.items()):
        if wanted not in DATA_TYPES:
            known = ", ".join(map(str, DATA_TYPES))
            raise ConfigError(f"quantize_embeddings: {name}={wanted}: must be one of {known}")
    unknown = [name for name in of_tables if name not in tables]
    if unknown:
        raise ConfigError(
            f"per_table_weight_dtype: {unknown[0]}: the model has the tables {', '.join(tables)}"
        )
    return {name: DATA_TYPES[of_tables.get(name, dtype)] for name in tables}


def _rows_of(
    module: nn.Module, found: Sequence[Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None, int]]:
    """Return the rows of each table, its keys if it is dynamic, and the seed of start values."""
    made: dict[str, tuple[torch.Tensor, torch.Tensor | None, int]] = {}
    state: dict[str, Any] = {}
    for held in found:
        if isinstance(held, ShardedCollection):
            if held.shared.comm.world > 1:
                raise ConfigError(
                    "quantize_embeddings: several ranks hold the tables: save a checkpoint, and "
                    "python -m recapp.export makes a quantised model of it"
                )
            state = gathered_state_dict(held)
            for t in held.tables():
                name = held.weight_name(t.name)
                keys = state.get(f"{name.removesuffix('weight')}keys")
                made[t.name] = (state[name], keys, held.shared.seed_of(t.name))
            continue
        for t in held.tables():
            weight = held.weight(t.name).detach()
            if weight.device.type == "meta" or t.dynamic is not None:
                raise ConfigError(
                    f"quantize_embeddings: table {t.name} has no rows yet: train it first, or load "
                    "a checkpoint"
                )
            made[t.name] = (weight, None, held.seed)
    return made


def _held(
    table: EmbeddingConfig,
    data_type: DataType,
    rows: torch.Tensor,
    keys: torch.Tensor | None,
    seed: int,
) -> HeldTable:
    positions = None
    if keys is not None:
        positions, order = positions_of(keys[:, 0]).sort()
        rows = rows[order]
    made = stored(rows, data_type)
    return HeldTable(
        data_type,
        table.embedding_dim,
        made,
        0,
        len(rows),
        positions,
        start_hash(table, seed),
        table.start_range,
    )


def with_twins(
    module: nn.Module, found: Sequence[nn.Module], twins: Mapping[int, nn.Module]
) -> nn.Module:
    """Replace collections of a model in place, and return the model.

    Args:
        module: The model, or a collection.
        found: The collections to replace.
        twins: The replacement of each collection, by the `id` of the collection.
    """
    wanted = {id(held) for held in found}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        if id(part) in wanted:
            if not path:
                return twins[id(part)]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, twins[id(part)])
    return module
