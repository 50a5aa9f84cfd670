"""TorchRec's quantised collections: read-only collections of one process, with the stored rows in
their state dict.

    collection.qconfig = QuantConfig(activation=..., weight=...)
    EmbeddingBagCollection.from_float(collection)          # or torch's quantize_dynamic

They are the engine's collections on a single rank (`recapp/inference/one_rank.py`).
`recapp/compat/quantised_models.py` quantises all collections of a model.

The state dict has each table under its usual name: as uint8 [R, K] with a record of K bytes for
each row (values, scale and bias: `recapp/kernels/quantised.py`), or as floats [R, D]. It loads into
a model that was quantised in the same way.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recapp.compat.quantised_rows import check_output_dtype, read_only_model
from recapp.engine.read_only_store import ReadOnlyStore, values_of
from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig

C = TypeVar("C", bound=nn.Module)


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
    """The common part of both quantised collections.

    Args:
        held: All tables of the model, if this process holds them whole. None if they are sharded
            over ranks; the state dict then leaves the tables out.
        output_dtype: The type of the vectors.
    """

    def __init__(self, held: HeldTables | None, output_dtype: torch.dtype) -> None:
        self.held = held
        self.vector_dtype = output_dtype

    def output_dtype(self) -> torch.dtype:
        """Return the type of the vectors."""
        return self.vector_dtype


class EmbeddingBagCollection(ShardedEmbeddingBagCollection, QuantisedCollection):
    """A quantised collection of bags; `from_float` makes it.

    Args:
        shared: The tables of all collections of the model, as in the sharded collection.
        member: The number of the collection.
        held: The tables of the model, as in `QuantisedCollection`.
        output_dtype: The type of the vectors.
    """

    def __init__(
        self,
        shared: ShardedTables,
        member: int,
        held: HeldTables | None,
        output_dtype: torch.dtype,
    ) -> None:
        ShardedEmbeddingBagCollection.__init__(self, shared, member)
        QuantisedCollection.__init__(self, held, output_dtype)
        keep_rows_in_state(self)

    @classmethod
    def from_float(
        cls, module: nn.Module, use_precomputed_fake_quant: bool = False
    ) -> "EmbeddingBagCollection":
        """Return the quantised twin of a collection of bags with a `qconfig`.

        Args:
            module: The collection.
            use_precomputed_fake_quant: Must be False, because this function rounds the rows itself.

        Raises:
            ConfigError: The module is no such collection or has no `qconfig`, or a type is unknown.
        """
        return _from_float(cls, module, use_precomputed_fake_quant)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag into a vector of the output type."""
        found = super().forward(features)
        if self.vector_dtype == found.values().dtype:
            return found
        values = found.values().to(self.vector_dtype)
        return KeyedTensor(found.keys(), found.length_per_key(), values)


class EmbeddingCollection(ShardedEmbeddingCollection, QuantisedCollection):
    """A quantised collection of sequences; `from_float` makes it.

    Args:
        shared: The tables of all collections of the model, as in the sharded collection.
        member: The number of the collection.
        need_indices: Whether outputs carry the rows of ids.
        held: The tables of the model, as in `QuantisedCollection`.
        output_dtype: The type of the vectors.
    """

    def __init__(
        self,
        shared: ShardedTables,
        member: int,
        need_indices: bool,
        held: HeldTables | None,
        output_dtype: torch.dtype,
    ) -> None:
        ShardedEmbeddingCollection.__init__(self, shared, member, need_indices)
        QuantisedCollection.__init__(self, held, output_dtype)
        keep_rows_in_state(self)

    @classmethod
    def from_float(
        cls, module: nn.Module, use_precomputed_fake_quant: bool = False
    ) -> "EmbeddingCollection":
        """Return the quantised twin of a collection of sequences with a `qconfig`. Arguments and
        errors are those of `EmbeddingBagCollection.from_float`.
        """
        return _from_float(cls, module, use_precomputed_fake_quant)

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


def _from_float(kind: type[C], module: nn.Module, precomputed: bool) -> C:
    if precomputed:
        raise ConfigError("from_float: use_precomputed_fake_quant=True: rows are rounded here")
    qconfig: Any = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ConfigError(
            f"from_float: the {type(module).__name__} has no qconfig: set collection.qconfig to a "
            "QuantConfig, or call quantize_embeddings(model, dtype)"
        )
    tables: Any = getattr(module, "tables", list)
    names = [t.name for t in tables()]
    output_dtype = qconfig.activation().dtype
    check_output_dtype(output_dtype)
    of_tables = getattr(qconfig, "per_table_weight_dtype", None) or {}
    here = {name: of_tables[name] for name in names if name in of_tables}
    made, held = read_only_model(module, qconfig.weight().dtype, False, here)
    twin = as_quantised(made, held, output_dtype) if isinstance(made, ShardedCollection) else made
    if not isinstance(twin, kind):
        raise ConfigError(
            f"from_float: a {type(module).__name__} is no module that quant.{kind.__name__} "
            "stands for"
        )
    return twin


def as_quantised(
    collection: ShardedCollection, held: HeldTables | None, output_dtype: torch.dtype
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return a quantised collection of the same tables.

    Args:
        collection: A sharded collection that is read-only.
        held: The tables of the model, as in `QuantisedCollection`.
        output_dtype: The type of the vectors.
    """
    if isinstance(collection, ShardedEmbeddingCollection):
        need = collection.need_indices()
        return EmbeddingCollection(collection.shared, collection.member, need, held, output_dtype)
    return EmbeddingBagCollection(collection.shared, collection.member, held, output_dtype)


def keep_rows_in_state(collection: EmbeddingBagCollection | EmbeddingCollection) -> None:
    """Make the state dict of a quantised collection save and load the stored rows."""
    collection.tables_in_state = False
    if collection.held is not None:
        collection.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
        collection.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


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
    collection: nn.Module,
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
    for name, table, held in _of_state(collection, prefix):
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
        _refill(collection)


def _refill(collection: Any) -> None:
    """Copy the rows of the held tables into the stores."""
    for store in collection.shared.stores:
        assert isinstance(store, ReadOnlyStore)
        again: Any = collection.held.make_store(store.group)
        values_of(store.held).copy_(values_of(again.held))
