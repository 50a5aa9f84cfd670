"""TorchRec's way from a trained model to one that serves: `quantize_embeddings`, then
`shard_quant_model`.

    model = quantize_embeddings(model, dtype=torch.qint8)          # one process
    model, plan = shard_quant_model(model, world_size=2)           # every rank, its part

What both make only answers. `python -m recapp.export` makes the same of a checkpoint, table by
table, and needs no process that holds the model.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recapp.engine.gathered_state import gathered_state_dict
from recapp.engine.model_parallel import DistributedModelParallel
from recapp.engine.shard_model import embedding_collections, shard_model, sharded_collections
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharded_embedding import ShardedEmbeddingCollection
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.engine.sharder import own_device, process_group_of, tables_group
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.inference.one_rank import one_rank
from recapp.inference.storage import stored
from recapp.planner.constraints import Constraints
from recapp.planner.serving import serving_plan
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import collections_in, embedding_lookups, embedding_tables
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import positions_of
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.initial import start_hash
from recapp.tables.unsharded_collection import UnshardedCollection
from recapp.transport.choose_transport import make_comm

DATA_TYPES = {
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
    torch.float32: DataType.FP32,
}
"""How rows are stored that TorchRec calls by these types."""
_HELD = "_held_tables"  # where a quantised model keeps its tables for `shard_quant_model`


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool = False,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Return a model whose tables are stored in fewer bits and only read, on one process.

    Args:
        module: A trained model with collections that hold their rows, or that this process alone
            holds sharded; or such a collection.
        dtype: How rows are stored: torch.qint8, torch.quint4x2, torch.float16 or torch.float32.
        inplace: Whether the collections of the model itself are replaced.
        output_dtype: torch.float32, the type of the vectors.
        per_table_weight_dtype: Of some tables, by name.

    Raises:
        ConfigError: A type or a table is unknown, tables are on the meta device, or several ranks
            hold them.
    """
    if output_dtype not in (torch.float32, torch.float):
        raise ConfigError(f"output_dtype={output_dtype}: vectors are torch.float32 here")
    module = module.module if isinstance(module, DistributedModelParallel) else module
    found = [held for _, held in collections_in(module)]
    tables = {t.name: t for held in found for t in held.tables()}
    chosen = _chosen(tables, dtype, per_table_weight_dtype or {})
    rows = _rows_of(module, found)
    held_tables = HeldTables(
        {name: _held(tables[name], chosen[name], *rows[name]) for name in tables}
    )
    twins = meta_twins(found, {name: seed for name, (_, _, seed) in rows.items()})
    made = module if inplace else copy.deepcopy(module, dict(twins))
    made = _with_twins(made, found, twins) if inplace else made
    for collection in dict.fromkeys(c for _, c in embedding_collections(made)):
        collection.store_as(chosen)
    device = next((p.device for p in made.parameters() if p.device.type != "meta"), None)
    made = one_rank(made, device or torch.device("cpu"), held_tables.make_store)
    setattr(made, _HELD, held_tables)
    return made


def shard_quant_model(
    model: nn.Module,
    world_size: int | None = None,
    compute_device: str = "cpu",
    device_memory_size: int | None = None,
    constraints: Constraints | None = None,
    sharding_plan: ShardingPlan | None = None,
    env: Any = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Return a quantised model whose tables lie where a plan says, and the plan. Every rank calls
    it; answers are those of the quantised model, bit for bit.

    Args:
        model: From `quantize_embeddings`, the same on every rank; it stays as it is.
        world_size: The number of ranks; None takes those of `env`.
        compute_device: "cpu" or "cuda".
        device_memory_size: The bytes of a rank for tables; None takes what is free.
        constraints: What the plan must respect, by table name or glob.
        sharding_plan: Where tables lie; None lets recapp decide, for reading alone.
        env: The ranks, as of `DistributedModelParallel`.

    Raises:
        ConfigError: The model was not quantised, or there are other ranks.
        PlanError: The tables do not fit.
    """
    held: HeldTables | None = getattr(model, _HELD, None)
    if held is None:
        raise ConfigError("shard_quant_model: make the model by quantize_embeddings first")
    ranks = process_group_of(env)
    device = own_device(ranks) if compute_device == "cuda" else torch.device("cpu")
    comm = make_comm(tables_group(ranks), device)
    if world_size not in (None, comm.world):
        raise ConfigError(
            f"shard_quant_model: world_size={world_size}, but there are {comm.world} ranks: start "
            "as many, and leave world_size out"
        )
    found: list[ShardedCollection] = sharded_collections(model)
    twins = meta_twins(found, {})
    made = copy.deepcopy(model, {**twins, id(held): held})
    made = twins.get(id(model), made)
    for collection in dict.fromkeys(c for _, c in embedding_collections(made)):
        collection.store_as({name: t.data_type for name, t in held.tables.items()})
    plan = sharding_plan
    if plan is None:
        memory = None if device_memory_size is None else [device_memory_size] * comm.world
        topology = Topology(comm.world, compute_device=device.type, memory_bytes=memory)
        plan = serving_plan(embedding_tables(made), topology, embedding_lookups(made), constraints)
    made = shard_model(made, plan, comm, None, trains=False, make_store=held.make_store)
    return made.to(device).eval().requires_grad_(False), plan


def meta_twins(
    collections: Sequence[Any], seeds: Mapping[str, int]
) -> dict[int, UnshardedCollection]:
    """Return collections like others, their tables on the meta device, by the others' identity.

    Args:
        collections: The others, sharded or not; those that share a table share it again.
        seeds: The seed of each table's start values; 0 where it is not there.
    """
    made: dict[int, UnshardedCollection] = {}
    weights: dict[tuple[str, int], Any] = {}
    for collection in collections:
        twin = made[id(collection)] = _meta_twin(collection, seeds)
        twin.dtype = collection.dtype  # also where all its tables are stored narrower by now
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
    """Return the rows of each table, the keys of a dynamic one, and the seed of start values."""
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


def _with_twins(
    module: nn.Module, found: Sequence[nn.Module], twins: Mapping[int, nn.Module]
) -> nn.Module:
    """Replace collections of a model, in place."""
    wanted = {id(held) for held in found}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        if id(part) in wanted:
            if not path:
                return twins[id(part)]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, twins[id(part)])
    return module
