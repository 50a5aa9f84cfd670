"""TorchRec's quantised collections, and its functions that make a model for serving from a trained
one. Both models are read-only.

    model = quantize_embeddings(model, dtype=torch.qint8)          # one process
    model, plan = shard_quant_model(model, world_size=2)           # every rank, its part

    collection.qconfig = QuantConfig(activation=..., weight=...)   # one collection
    EmbeddingBagCollection.from_float(collection)                  # or torch's quantize_dynamic

The collections are the engine's on a single rank (`recapp/inference/held_tables.py`). The state
dict has each table under its usual name: as uint8 [R, K] with a packed row of K bytes for each row
(values, scale and bias: `recapp/kernels/quantised.py`), or as floats [R, D]. It loads into a model
that was quantised in the same way.

`python -m recapp.export` makes such a model from a checkpoint, table by table, without a process
that holds the whole model, and `python -m recapp.serve` serves it.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.data_parallel import own_device, process_group_of, tables_group
from recapp.engine.read_only_store import values_of
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    embedding_collections,
    shard_model,
    sharded_collections,
)
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables, one_rank, stored
from recapp.parallel import DistributedModelParallel
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.options import Constraints
from recapp.planner.problem import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection as FloatBags
from recapp.tables.collections import EmbeddingCollection as FloatSequences
from recapp.tables.collections import (
    UnshardedCollection,
    collections_in,
    embedding_lookups,
    embedding_tables,
)
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.initial import start_hash
from recapp.tables.positions import positions_of
from recapp.transport.join_ranks import make_comm


class QuantConfig(NamedTuple):
    """The types of a collection's rows and vectors.

    Args:
        activation: A function that returns an observer; its `dtype` is the type of the vectors.
        weight: A function that returns an observer; its `dtype` is the type of the stored rows.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None


class QuantisedCollection:
    """The common part of both quantised collections; `from_float` and `as_quantised` make them."""

    held: HeldTables | None
    """All tables of the model, if this process holds them whole. None if they are sharded over
    ranks; the state dict then leaves the tables out.
    """
    vector_dtype: torch.dtype

    def output_dtype(self) -> torch.dtype:
        """Return the type of the vectors."""
        return self.vector_dtype

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """Return the quantised twin of a collection with a `qconfig`.

        Args:
            module: The collection.
            use_precomputed_fake_quant: Must be False, because this function rounds the rows itself.

        Raises:
            ConfigError: The module is no such collection or has no `qconfig`, or a type is unknown.
        """
        if use_precomputed_fake_quant:
            raise ConfigError(
                "from_float: use_precomputed_fake_quant=True: recapp rounds rows "
                "itself: leave it out"
            )
        qconfig: Any = getattr(module, "qconfig", None)
        if qconfig is None:
            raise ConfigError(
                f"from_float: the {type(module).__name__} has no qconfig: set collection.qconfig to"
                " a QuantConfig, or call quantize_embeddings(model, dtype)"
            )
        tables: Any = getattr(module, "tables", list)
        names = [t.name for t in tables()]
        of_tables = getattr(qconfig, "per_table_weight_dtype", None) or {}
        here = {name: of_tables[name] for name in names if name in of_tables}
        output_dtype = qconfig.activation().dtype
        twin: Any = quantised_model(module, qconfig.weight().dtype, False, here, output_dtype)
        if not isinstance(twin, cls):
            raise ConfigError(
                f"from_float: a {type(module).__name__} has no quantised form quant.{cls.__name__}"
            )
        return twin


class EmbeddingBagCollection(ShardedEmbeddingBagCollection, QuantisedCollection):
    """A quantised collection of bags."""

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = super().forward(features)
        if self.vector_dtype == pooled.values().dtype:
            return pooled
        values = pooled.values().to(self.vector_dtype)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), values)


class EmbeddingCollection(ShardedEmbeddingCollection, QuantisedCollection):
    """A quantised collection of sequences."""

    @override
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return {
            name: jagged
            if jagged.values().dtype == self.vector_dtype
            else JaggedTensor(
                jagged.values().to(self.vector_dtype), jagged.weights_or_none(), jagged.lengths()
            )
            for name, jagged in super().forward(features).items()
        }


def as_quantised(
    collection: ShardedCollection, tables: HeldTables | None, output_dtype: torch.dtype
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return a quantised collection of the same tables, whose state dict saves and loads the stored
    rows if this process holds the tables whole.

    Args:
        collection: A sharded collection that is read-only.
        tables: The tables of the model, as in `QuantisedCollection`.
        output_dtype: The type of the vectors.
    """
    twin = (
        EmbeddingCollection(collection.shared, collection.member, collection.need_indices())
        if isinstance(collection, ShardedEmbeddingCollection)
        else EmbeddingBagCollection(collection.shared, collection.member)
    )
    twin.held = tables
    twin.vector_dtype = output_dtype
    twin.tables_in_state = False
    if tables is not None:
        twin.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
        twin.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]
    return twin


def _stored(table: HeldTable) -> Tensor:
    return values_of(table.rows)[table.first_row : table.first_row + table.count]


def _of_state(collection: Any, prefix: str) -> list[tuple[str, EmbeddingConfig, HeldTable]]:
    return [
        (prefix + collection.weight_name(t.name), t, collection.held.tables[t.name])
        for t in collection.tables()
    ]


def _save(collection: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, table, held_table in _of_state(collection, prefix):
        state[name] = _stored(held_table)
        if table.dynamic is not None:
            state[f"{name.removesuffix('weight')}keys"] = held_table.positions


def _load(
    holder: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    loaded_tables = []
    for name, table, held_table in _of_state(holder, prefix):
        if table.dynamic is not None:
            errors.append(f"table {table.name} ({name}): quantised rows of any keys do not load")
            continue
        value = state.pop(name, None)
        target = _stored(held_table)
        if value is None:
            missing.append(name)
        elif value.shape != target.shape or value.dtype != target.dtype:
            errors.append(
                f"table {table.name} ({name}): {value.dtype} {list(value.shape)} where rows are "
                f"stored as {target.dtype} {list(target.shape)}: quantise alike"
            )
        else:
            with torch.no_grad():
                target.copy_(value)
            loaded_tables.append(table.name)
    if loaded_tables:
        holder.shared.forget_vectors()
        for store in holder.shared.stores:  # read the rows of the held tables again
            again = holder.held.make_store(store.group)
            values_of(store.held).copy_(values_of(again.held))


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


def quantised_model(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    per_table_weight_dtype: Mapping[str, torch.dtype],
    output_dtype: torch.dtype,
) -> nn.Module:
    """Return a model with quantised collections on one rank.

    Args:
        module: A model with collections that hold their rows, or such a collection.
        dtype: The type of the stored rows.
        inplace: Whether to replace the collections of the model itself instead of those of a copy.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.
        output_dtype: The type of the vectors.

    Raises:
        ConfigError: A type or a table is unknown, tables are on the meta device, or several ranks
            hold them.
    """
    if output_dtype not in OUTPUTS:
        raise ConfigError(
            f"output_dtype={output_dtype}: must be one of {', '.join(map(str, OUTPUTS))}"
        )
    collections = [collection for _, collection in collections_in(module)]
    tables = {t.name: t for collection in collections for t in collection.tables()}
    types = _types(tables, dtype, per_table_weight_dtype)
    rows = _rows_of(collections)
    held_tables = HeldTables(
        {name: _held_table(tables[name], types[name], *rows[name]) for name in tables}
    )
    twins = meta_twins(collections, {name: seed for name, (_, _, seed) in rows.items()})
    model = with_twins(module, twins) if inplace else copy.deepcopy(module, dict(twins))
    for collection in dict.fromkeys(c for _, c in embedding_collections(model)):
        collection.store_as(types)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    model = one_rank(model, device or torch.device("cpu"), held_tables.make_store)
    return _over_held(model, held_tables, defaultdict(lambda: output_dtype))


def meta_twins(
    collections: Sequence[Any], seeds: Mapping[str, int]
) -> dict[int, UnshardedCollection]:
    """Return an unsharded copy of each collection with its tables on the meta device, by the `id`
    of the collection.

    Args:
        collections: The collections, sharded or not. Copies share a table if the originals do.
        seeds: The seed of each table's start values; a missing seed is 0.
    """
    twins: dict[int, UnshardedCollection] = {}
    weights: dict[tuple[str, int], Any] = {}
    meta = torch.device("meta")
    for collection in collections:
        tables = collection.tables()
        seed = seeds.get(tables[0].name, 0)
        twin: UnshardedCollection
        if isinstance(collection, FloatSequences | ShardedEmbeddingCollection):
            twin = FloatSequences(tables, meta, collection.need_indices(), seed)
        else:
            weighted = collection.is_weighted()
            twin = FloatBags(tables, weighted, meta, seed, lookups=collection.lookups)
            twin.leave_room(collection.room)
        twins[id(collection)] = twin
        twin.own_ids = (
            collection.shared.members[collection.member].own_ids
            if isinstance(collection, ShardedCollection)
            else collection.own_ids
        )
        twin.dtype = collection.dtype  # even if all its tables have a narrower type by now
        for t in tables:
            module = getattr(twin, twin.tables_of)[t.name]
            module.weight = weights.setdefault(
                (t.name, id(collection.holder_of(t.name))), module.weight
            )
    return twins


def _types(
    tables: Mapping[str, EmbeddingConfig],
    dtype: torch.dtype,
    of_tables: Mapping[str, torch.dtype],
) -> dict[str, DataType]:
    for name, kind in (("dtype", dtype), *of_tables.items()):
        if kind not in DATA_TYPES:
            known = ", ".join(map(str, DATA_TYPES))
            raise ConfigError(f"quantize_embeddings: {name}={kind}: must be one of {known}")
    unknown = [name for name in of_tables if name not in tables]
    if unknown:
        raise ConfigError(
            f"per_table_weight_dtype: {unknown[0]}: the model has the tables {', '.join(tables)}"
        )
    return {name: DATA_TYPES[of_tables.get(name, dtype)] for name in tables}


def _rows_of(collections: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor | None, int]]:
    """Return the rows of each table, its keys if it is dynamic, and the seed of start values."""
    rows: dict[str, tuple[Tensor, Tensor | None, int]] = {}
    for collection in collections:
        if isinstance(collection, ShardedCollection):
            if collection.shared.comm.world > 1:
                raise ConfigError(
                    "quantize_embeddings: the tables are on several ranks: save a checkpoint "
                    "and run python -m recapp.export, which makes a quantised model"
                )
            state = gathered_state_dict(collection)
            for t in collection.tables():
                name = collection.weight_name(t.name)
                keys = state.get(f"{name.removesuffix('weight')}keys")
                rows[t.name] = (state[name], keys, collection.shared.seeds[t.name])
            continue
        for t in collection.tables():
            weight = collection.weight(t.name).detach()
            if weight.device.type == "meta" or t.dynamic is not None:
                raise ConfigError(
                    f"quantize_embeddings: table {t.name} has no rows yet: train it first, or load "
                    "a checkpoint"
                )
            rows[t.name] = (weight, None, collection.seed)
    return rows


def _held_table(
    table: EmbeddingConfig,
    data_type: DataType,
    rows: Tensor,
    keys: Tensor | None,
    seed: int,
) -> HeldTable:
    positions = None
    if keys is not None:
        positions, order = positions_of(keys[:, 0]).sort()
        rows = rows[order]
    return HeldTable(
        data_type,
        table.embedding_dim,
        stored(rows, data_type),
        0,
        len(rows),
        positions,
        start_hash(table, seed),
        table.start_range,
    )


def with_twins(module: nn.Module, twins: Mapping[int, nn.Module]) -> nn.Module:
    """Replace collections of a model in place, and return the model.

    Args:
        module: The model, or a collection.
        twins: The replacement of each collection, by the `id` of the collection.
    """
    for path, part in list(module.named_modules(remove_duplicate=False)):
        if id(part) in twins:
            if not path:
                return twins[id(part)]
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, twins[id(part)])
    return module


DEFAULT_QUANTIZATION_DTYPE = torch.int8
TWINS: dict[type[nn.Module], type[nn.Module]] = {
    FloatBags: EmbeddingBagCollection,
    FloatSequences: EmbeddingCollection,
}
DEFAULT_QUANT_MAPPING = {torch.typename(kind): twin for kind, twin in TWINS.items()}
"""The quantised class of each class of collections, by the path of the latter."""


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool = False,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Return a read-only model whose tables are stored in fewer bits, in one process. All
    collections are quantised, those of sequences too (TorchRec: those of bags alone).

    Args:
        module: A trained model or collection. Its collections are unsharded, or sharded over this
            process alone.
        dtype: The type of the stored rows: torch.qint8, torch.quint4x2, torch.float16 or
            torch.float32.
        inplace: Whether to replace the collections of the model itself instead of those of a copy.
        additional_qconfig_spec_keys: Classes of recapp's collections; all are quantised anyway.
        additional_mapping: The quantised class of each class; it must agree with recapp's.
        output_dtype: The type of the vectors: torch.float32, torch.float16 or torch.bfloat16.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.

    Raises:
        ConfigError: A type, a class or a table is unknown, tables are on the meta device, or
            several ranks hold them.
    """
    classes = {kind: TWINS.get(kind) for kind in additional_qconfig_spec_keys or ()}
    for kind, twin in {**classes, **(additional_mapping or {})}.items():
        if kind not in TWINS or twin is not TWINS[kind]:
            known = ", ".join(f"{known.__name__} as quant.{known.__name__}" for known in TWINS)
            raise ConfigError(
                f"quantize_embeddings: additional_mapping of {kind.__name__}: recapp quantises "
                f"{known}, also within other modules: leave it out"
            )
    module = module.module if isinstance(module, DistributedModelParallel) else module
    return quantised_model(module, dtype, inplace, per_table_weight_dtype or {}, output_dtype)


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    quantization_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Quantise the collections of a model in place, and return the model.

    Args:
        model: A model that `quantize_embeddings` takes.
        quantization_mapping: None, or entries of `DEFAULT_QUANT_MAPPING`.
        per_table_weight_dtype: The type of the stored rows of some tables, by table name.
        fp_weight_dtype: Must equal `quantization_dtype` or its default. To store tables of feature
            processors in another type, name them in `per_table_weight_dtype`.
        quantization_dtype: The type of the stored rows.
        output_dtype: The type of the vectors.

    Raises:
        ConfigError: An argument is wrong, here or in `quantize_embeddings`.
    """
    if (quantization_mapping or {}).items() - DEFAULT_QUANT_MAPPING.items():
        raise ConfigError(
            f"quantization_mapping={quantization_mapping}: must be entries of "
            f"DEFAULT_QUANT_MAPPING, of {', '.join(DEFAULT_QUANT_MAPPING)}"
        )
    if fp_weight_dtype not in (DEFAULT_QUANTIZATION_DTYPE, quantization_dtype):
        raise ConfigError(
            f"fp_weight_dtype={fp_weight_dtype}: tables with feature processors have the type of "
            "quantization_dtype: name their types in per_table_weight_dtype"
        )
    return quantize_embeddings(
        model,
        quantization_dtype,
        inplace=True,
        output_dtype=output_dtype,
        per_table_weight_dtype=per_table_weight_dtype,
    )


def shard_quant_model(
    model: nn.Module,
    world_size: int | None = None,
    compute_device: str = "cpu",
    sharding_device: str = "meta",
    sharders: None = None,
    device_memory_size: int | None = None,
    constraints: Constraints | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
    env: Any = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Shard a quantised model by a plan, and return the sharded model and the plan. Every rank
    calls this. The outputs are those of the quantised model, bit for bit.

    Args:
        model: The result of `quantize_embeddings`, the same on every rank; it is not changed.
        world_size: The number of ranks; None takes that of `env`.
        compute_device: "cpu" or "cuda".
        sharding_device: Ignored, because each row is copied once, to its rank.
        sharders: Must be None, because a read-only model has no optimiser.
        device_memory_size: The bytes of a rank for tables; None takes the free memory.
        constraints: The constraints of the plan, by table name or glob.
        ddr_cap: The same as `device_memory_size`, for CPU ranks.
        sharding_plan: The plan; None lets recapp plan for lookups alone.
        env: The ranks, as for `DistributedModelParallel`.

    Returns:
        The model and the plan. The state dict of this model leaves the tables out; that of the
        quantised model has them.

    Raises:
        ConfigError: The model is not quantised, the number of ranks differs, sharders are given, or
            `ddr_cap` is given for GPU ranks.
        PlanError: The tables do not fit into memory.
    """
    if sharders is not None:
        raise ConfigError(
            "shard_quant_model: sharders would have no effect here, because read-only tables "
            "have no optimiser: leave them out"
        )
    if ddr_cap is not None and compute_device == "cuda":
        raise ConfigError(
            f"shard_quant_model: ddr_cap={ddr_cap}: GPU ranks keep no rows in the host's memory: "
            "give device_memory_size"
        )
    memory_size = ddr_cap if device_memory_size is None else device_memory_size
    ranks = process_group_of(env)
    device = own_device(ranks) if compute_device == "cuda" else torch.device("cpu")
    comm = make_comm(tables_group(ranks), device)
    if world_size not in (None, comm.world):
        raise ConfigError(
            f"shard_quant_model: world_size={world_size}, but there are {comm.world} ranks: "
            f"start {world_size} ranks, or leave world_size out"
        )
    collections = [c for c in sharded_collections(model) if isinstance(c, QuantisedCollection)]
    tables = {name: t for c in collections if c.held for name, t in c.held.tables.items()}
    if not tables:
        raise ConfigError("shard_quant_model: make the model by quantize_embeddings first")
    twins = meta_twins(collections, {})
    twin = copy.deepcopy(model, dict(twins))
    types = {id(twins[id(c)]): c.output_dtype() for c in collections}
    paths = {path: types[id(c)] for path, c in embedding_collections(twin)}
    for collection in dict.fromkeys(c for _, c in embedding_collections(twin)):
        collection.store_as({name: t.data_type for name, t in tables.items()})
    plan = sharding_plan
    if plan is None:
        memory = None if memory_size is None else [memory_size] * comm.world
        topology = Topology(comm.world, compute_device=device.type, memory_bytes=memory)
        plan = serving_plan(embedding_tables(twin), topology, embedding_lookups(twin), constraints)
    make_store = HeldTables(tables).make_store
    twin = shard_model(twin, plan, comm, None, trains=False, make_store=make_store)
    return _over_held(twin, None, paths).to(device).eval().requires_grad_(False), plan


def _over_held(
    module: nn.Module, tables: HeldTables | None, output_dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """Replace the sharded collections of a model by quantised ones of the same tables, in place.

    Args:
        module: The model, or a collection.
        tables: The tables of the model if this process holds them whole, else None.
        output_dtypes: The type of each collection's vectors, by its path.
    """
    twins: dict[int, nn.Module] = {
        id(part): as_quantised(part, tables, output_dtypes[path])
        for path, part in module.named_modules()
        if isinstance(part, ShardedCollection)
    }
    return with_twins(module, twins)
