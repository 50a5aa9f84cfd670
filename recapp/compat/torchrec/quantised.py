"""TorchRec's quantised collections: read-only collections of one process, with the stored rows in
their state dict.

    collection.qconfig = QuantConfig(activation=..., weight=...)
    EmbeddingBagCollection.from_float(collection)          # or torch's quantize_dynamic

They are the engine's collections on a single rank (`recapp/inference/placed_model.py`).
`recapp/compat/torchrec/quantised.py` quantises all collections of a model.

The state dict has each table under its usual name: as uint8 [R, K] with a record of K bytes for
each row (values, scale and bias: `recapp/kernels/quantised.py`), or as floats [R, D]. It loads into
a model that was quantised in the same way.

TorchRec's functions and classes that make a model for serving from a trained one:
`quantize_embeddings`, then `shard_quant_model`, and the classes around such a model in a server.

    model = quantize_embeddings(model, dtype=torch.qint8)          # one process
    model, plan = shard_quant_model(model, world_size=2)           # every rank, its part

Both models are read-only. `python -m recapp.export` makes the same from a checkpoint, table by
table, without a process that holds the whole model. `PredictFactory` and `PredictModule` are for
programs with their own server; recapp's own servers need neither (`python -m recapp.serve`).
"""

import copy
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.compat.torchrec.wrapped_collections import twin_of
from recapp.engine.gathered_state import gathered_state_dict
from recapp.engine.read_only_store import values_of
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    embedding_collections,
    shard_model,
    sharded_collections,
)
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.inference.placed_model import one_rank
from recapp.inference.storage import stored
from recapp.parallel import DistributedModelParallel, own_device, process_group_of, tables_group
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.options import Constraints
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import collections_in, embedding_lookups, embedding_tables
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import positions_of
from recapp.tables.initial import start_hash
from recapp.tables.unsharded_collection import EmbeddingBagCollection as FloatBags
from recapp.tables.unsharded_collection import EmbeddingCollection as FloatSequences
from recapp.tables.unsharded_collection import UnshardedCollection
from recapp.transport.choose_transport import make_comm

C = TypeVar("C", bound="QuantisedCollection")


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
    def from_float(cls: type[C], module: nn.Module, use_precomputed_fake_quant: bool = False) -> C:
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
        output_dtype = qconfig.activation().dtype
        check_output_dtype(output_dtype)
        of_tables = getattr(qconfig, "per_table_weight_dtype", None) or {}
        here = {name: of_tables[name] for name in names if name in of_tables}
        made, held = read_only_model(module, qconfig.weight().dtype, False, here)
        twin: Any = made
        if isinstance(made, ShardedCollection):
            twin = as_quantised(made, held, output_dtype)
        if not isinstance(twin, cls):
            raise ConfigError(
                f"from_float: a {type(module).__name__} has no quantised form quant.{cls.__name__}"
            )
        return twin


class EmbeddingBagCollection(ShardedEmbeddingBagCollection, QuantisedCollection):
    """A quantised collection of bags."""

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found = super().forward(features)
        if self.vector_dtype == found.values().dtype:
            return found
        values = found.values().to(self.vector_dtype)
        return KeyedTensor(found.keys(), found.length_per_key(), values)


class EmbeddingCollection(ShardedEmbeddingCollection, QuantisedCollection):
    """A quantised collection of sequences."""

    @override
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = super().forward(features)
        return {
            name: jagged
            if jagged.values().dtype == self.vector_dtype
            else JaggedTensor(
                jagged.values().to(self.vector_dtype), jagged.weights_or_none(), jagged.lengths()
            )
            for name, jagged in found.items()
        }


def as_quantised(
    collection: ShardedCollection, held: HeldTables | None, output_dtype: torch.dtype
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return a quantised collection of the same tables, whose state dict saves and loads the stored
    rows if this process holds the tables whole.

    Args:
        collection: A sharded collection that is read-only.
        held: The tables of the model, as in `QuantisedCollection`.
        output_dtype: The type of the vectors.
    """
    made = (
        EmbeddingCollection(collection.shared, collection.member, collection.need_indices())
        if isinstance(collection, ShardedEmbeddingCollection)
        else EmbeddingBagCollection(collection.shared, collection.member)
    )
    made.held = held
    made.vector_dtype = output_dtype
    made.tables_in_state = False
    if held is not None:
        made.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
        made.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]
    return made


def _stored(table: HeldTable) -> Tensor:
    return values_of(table.rows)[table.first_row : table.first_row + table.count]


def _of_state(collection: Any, prefix: str) -> list[tuple[str, EmbeddingConfig, HeldTable]]:
    return [
        (prefix + collection.weight_name(t.name), t, collection.held.tables[t.name])
        for t in collection.tables()
    ]


def _save(collection: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the stored rows of each table into a state dict, and the positions of dynamic keys."""
    for name, table, held in _of_state(collection, prefix):
        state[name] = _stored(held)
        if table.dynamic is not None:
            state[f"{name.removesuffix('weight')}keys"] = held.positions


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
    """Copy the stored rows of a state dict into the held tables, and remove them from it."""
    loaded = []
    for name, table, held in _of_state(holder, prefix):
        if table.dynamic is not None:
            errors.append(f"table {table.name} ({name}): quantised rows of any keys do not load")
            continue
        value = state.pop(name, None)
        own = _stored(held)
        if value is None:
            missing.append(name)
        elif value.shape != own.shape or value.dtype != own.dtype:
            errors.append(
                f"table {table.name} ({name}): {value.dtype} {list(value.shape)} where rows are "
                f"stored as {own.dtype} {list(own.shape)}: quantise alike"
            )
        else:
            with torch.no_grad():
                own.copy_(value)
            loaded.append(table.name)
    if loaded:
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


def check_output_dtype(output_dtype: torch.dtype) -> None:
    """Check that a type is allowed for vectors.

    Raises:
        ConfigError: The type is not allowed.
    """
    if output_dtype not in OUTPUTS:
        raise ConfigError(
            f"output_dtype={output_dtype}: must be one of {', '.join(map(str, OUTPUTS))}"
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
        tables = {t.name: t for t in collection.tables()}
        seed = seeds.get(next(iter(tables)), 0)
        twin = made[id(collection)] = twin_of(collection, tables, torch.device("meta"), seed)
        twin.dtype = collection.dtype  # even if all its tables have a narrower type by now
        for name in tables:
            own = getattr(twin, twin.tables_of)[name]
            own.weight = weights.setdefault((name, id(collection.holder_of(name))), own.weight)
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
                    "quantize_embeddings: the tables are on several ranks: save a checkpoint "
                    "and run python -m recapp.export, which makes a quantised model"
                )
            state = gathered_state_dict(held)
            for t in held.tables():
                name = held.weight_name(t.name)
                keys = state.get(f"{name.removesuffix('weight')}keys")
                made[t.name] = (state[name], keys, held.shared.seeds[t.name])
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
    _check_classes(additional_qconfig_spec_keys or (), additional_mapping or {})
    check_output_dtype(output_dtype)
    module = module.module if isinstance(module, DistributedModelParallel) else module
    made, held = read_only_model(module, dtype, inplace, per_table_weight_dtype or {})
    return _quantised(made, held, defaultdict(lambda: output_dtype))


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
    for path, twin in (quantization_mapping or {}).items():
        if DEFAULT_QUANT_MAPPING.get(path) is not twin:
            raise ConfigError(
                f"quantization_mapping: {path} to {twin.__name__}: must be entries of "
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
    found = [c for c in sharded_collections(model) if isinstance(c, QuantisedCollection)]
    tables = {name: t for c in found if c.held for name, t in c.held.tables.items()}
    if not tables:
        raise ConfigError("shard_quant_model: make the model by quantize_embeddings first")
    held = HeldTables(tables)
    twins = meta_twins(found, {})
    made = copy.deepcopy(model, dict(twins))
    made = twins.get(id(model), made)
    types = {id(twins[id(c)]): c.output_dtype() for c in found}
    paths = {path: types[id(c)] for path, c in embedding_collections(made)}
    for collection in dict.fromkeys(c for _, c in embedding_collections(made)):
        collection.store_as({name: t.data_type for name, t in tables.items()})
    plan = sharding_plan
    if plan is None:
        memory = None if memory_size is None else [memory_size] * comm.world
        topology = Topology(comm.world, compute_device=device.type, memory_bytes=memory)
        plan = serving_plan(embedding_tables(made), topology, embedding_lookups(made), constraints)
    made = shard_model(made, plan, comm, None, trains=False, make_store=held.make_store)
    made = _quantised(made, None, paths)
    return made.to(device).eval().requires_grad_(False), plan


def _quantised(
    module: nn.Module, held: HeldTables | None, output_dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """Replace the sharded collections of a model by quantised ones of the same tables, in place.

    Args:
        module: The model, or a collection.
        held: The tables of the model if this process holds them whole, else None.
        output_dtypes: The type of each collection's vectors, by its path.
    """
    twins: dict[int, nn.Module] = {}
    found = []
    for path, part in module.named_modules():
        if isinstance(part, ShardedCollection):
            found.append(part)
            twins[id(part)] = as_quantised(part, held, output_dtypes[path])
    return with_twins(module, found, twins)


def _check_classes(
    keys: Sequence[type[nn.Module]], mapping: Mapping[type[nn.Module], type[nn.Module]]
) -> None:
    """Check that the classes of a program are collections of recapp with the right twins.

    Raises:
        ConfigError: A class is no such collection, or the program names another twin for it.
    """
    for kind in (*keys, *mapping):
        if kind not in TWINS:
            known = ", ".join(known.__name__ for known in TWINS)
            raise ConfigError(
                f"quantize_embeddings: {kind.__name__} is no collection: name one of {known}, "
                "which are also quantised within other modules"
            )
        if mapping.get(kind, TWINS[kind]) is not TWINS[kind]:
            raise ConfigError(
                f"quantize_embeddings: additional_mapping of {kind.__name__} to "
                f"{mapping[kind].__name__}: its quantised form must be "
                f"quant.{TWINS[kind].__name__}"
            )


@dataclass
class BatchingMetadata:
    """Describes the batching of one input of requests.

    Args:
        type: The kind of the input, such as "dense" or "sparse".
        device: "cpu" or "cuda".
        pinned: The suffixes of the tensors in page-locked memory; "" for all.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Describes the call of a method of the model.

    Args:
        need_preproc: Whether the input needs preprocessing.
    """

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a model for inference, and describes its requests and answers."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights, sharded if there are several ranks."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return the batching of requests, by the name of the input."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the model's output, by which a server splits it into answers."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need no weights. The name is TorchRec's."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need its weights."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata()` as JSON."""
        return _json(self.batching_metadata())

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return the descriptions of the model's methods, by name."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata()` as JSON."""
        return _json(self.qualname_metadata())

    def model_inputs_data(self) -> dict[str, Any]:
        """Return the data from which a benchmark makes inputs."""
        return {}


class PredictModule(nn.Module, ABC):
    """Wraps a model for calls with a dict of tensors; a subclass implements `predict_forward`.

    Args:
        module: The model; the constructor puts it into evaluation mode.
        device: The device of the inputs; None takes the current GPU, or the CPU if there is none.
    """

    def __init__(self, module: nn.Module, device: str | torch.device | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """Return the model."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs."""
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Call the model with a batch, and return its output as a dict of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the output for a batch, in inference mode."""
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, without a prefix in its names."""
        return self._module.state_dict(*args, **kwargs)


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps({name: asdict(value) for name, value in metadata.items()})
