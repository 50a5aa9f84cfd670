"""TorchRec's quantised collections: read-only collections of one process, with the stored rows in
their state dict.

    collection.qconfig = QuantConfig(activation=..., weight=...)
    EmbeddingBagCollection.from_float(collection)          # or torch's quantize_dynamic

They are the engine's collections on a single rank (`recapp/inference/placed_model.py`).
`recapp/compat/torchrec/quantised_models.py` quantises all collections of a model.

The state dict has each table under its usual name: as uint8 [R, K] with a record of K bytes for
each row (values, scale and bias: `recapp/kernels/quantised.py`), or as floats [R, D]. It loads into
a model that was quantised in the same way.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recapp.compat.torchrec.collection_wrapper import twin_of
from recapp.engine.gathered_state import gathered_state_dict
from recapp.engine.read_only_store import values_of
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    embedding_collections,
)
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.inference.placed_model import one_rank
from recapp.inference.storage import stored
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import collections_in
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.dynamic import positions_of
from recapp.tables.initial import start_hash
from recapp.tables.unsharded_collection import UnshardedCollection

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

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag into a vector of the output type."""
        found = super().forward(features)
        if self.vector_dtype == found.values().dtype:
            return found
        values = found.values().to(self.vector_dtype)
        return KeyedTensor(found.keys(), found.length_per_key(), values)


class EmbeddingCollection(ShardedEmbeddingCollection, QuantisedCollection):
    """A quantised collection of sequences."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a vector of the output type for every id."""
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
