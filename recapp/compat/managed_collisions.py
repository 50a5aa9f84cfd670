"""TorchRec's managed collisions (ZCH) on dynamic tables: any ids within a fixed number of rows.

    tables          EmbeddingBagConfig(name="t", num_embeddings=N, ...), with numbered rows
    managed         ManagedCollisionCollection({"t": MCHManagedCollisionModule(N, ...)}, tables)
    made of both    a dynamic table, max_rows=N, eviction lru or lfu (`recapp/tables/dynamic.py`)

TorchRec replaces ids by row numbers before it looks them up, and ids without a number share one
row. Here a row is found by its id itself, so there is nothing to replace: a key without a row
answers its start value. Such a module is no collection but holds one, which is sharded as any other
in a model, under every plan.

Arguments that ask for what happens anyway (a device, an interval, buckets) are taken; those that
would have to change what happens, and do not, are refused.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import RUNS, DynamicRows, Eviction
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.module_by_name import ModuleByName
from recapp.tables.unsharded_collection import UnshardedCollection

LARGEST_INPUT = 2**63 - 1
M = TypeVar("M", bound="BaseManagedCollisionEmbeddingCollection")


class MCHEvictionPolicy:
    """Which rows leave a full table.

    Args:
        threshold_filtering_func: None: which keys get rows is a setting of a dynamic table.

    Raises:
        ConfigError: A function is given.
    """

    eviction: Eviction

    def __init__(self, threshold_filtering_func: Callable[[Tensor], Any] | None = None) -> None:
        if threshold_filtering_func is not None:
            raise ConfigError(
                "threshold_filtering_func: functions of counts are not called here; to give rows "
                "to keys seen in n steps alone, make the table EmbeddingBagConfig(num_embeddings="
                '"dynamic", dynamic={"max_rows": zch_size, "seen": n}) and leave the managed '
                "collisions out"
            )


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Those leave that were used in the fewest steps; TorchRec counts every occurrence. Arguments
    as of `MCHEvictionPolicy`.
    """

    eviction = Eviction.LFU


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Those leave that were not used for the longest time.

    Args:
        decay_exponent: Above 0, where it does not change the order.
        threshold_filtering_func: As of `MCHEvictionPolicy`.

    Raises:
        ConfigError: Another exponent, or a function is given.
    """

    eviction = Eviction.LRU

    def __init__(
        self,
        decay_exponent: float = 1.0,
        threshold_filtering_func: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent > 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be above 0 for LRU_EvictionPolicy, which "
                "else would not evict the rows unused for the longest time"
            )


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Takes the nearest policy that there is, and says so once.

    TorchRec divides a row's count by a power of the steps since its last use. Of rows kept so with
    the default exponent, lru keeps 60 to 85 % and lfu 40 to 75 % (`docs/from_torchrec.md`); with
    the exponent 0 it is lfu.

    Args:
        decay_exponent: At least 0.
        threshold_filtering_func: As of `MCHEvictionPolicy`.

    Raises:
        ConfigError: Another exponent, or a function is given.
    """

    def __init__(
        self,
        decay_exponent: float = 1.0,
        threshold_filtering_func: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent >= 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be at least 0 for "
                "DistanceLFU_EvictionPolicy"
            )
        self.eviction = Eviction.LRU if decay_exponent else Eviction.LFU
        if decay_exponent:
            note_once(
                "DistanceLFU_EvictionPolicy: rows leave by when they were used last, as with "
                "LRU_EvictionPolicy, the nearest policy here; LFU_EvictionPolicy counts uses"
            )


class ManagedCollisionModule(nn.Module):
    """A name for type annotations; the one that there is is `MCHManagedCollisionModule`."""


class MCHManagedCollisionModule(ManagedCollisionModule):
    """How many rows a table of any ids has, and which of them leave.

    A key gets its row in the first step that trains it, and a run of positions that is full gives
    up a sixteenth of its rows (`recapp/engine/admission.py`).

    Args:
        zch_size: Rows, as many as the table's `num_embeddings`.
        device: Not needed: rows lie where their table is sharded to.
        eviction_policy: Which rows leave.
        eviction_interval: Not needed: rows are made and leave when a step needs them.
        input_hash_size: Not needed: any int64 is a key.
        input_hash_func: None: keys are mixed by a function that lets none collide.
        mch_size: None, as TorchRec ignores it.
        mch_hash_func: None, as TorchRec ignores it.
        name: A name.
        output_global_offset: 0: rows have no numbers.
        output_segments: None: rows have no numbers.
        buckets: Not needed: a checkpoint loads under any plan.

    Raises:
        ConfigError: A number is out of range, the policy is none, or an argument that would have to
            have an effect.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str | None,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = LARGEST_INPUT,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        super().__init__()
        if type(zch_size) is not int or zch_size < RUNS:
            raise ConfigError(
                f"zch_size={zch_size}: must be a whole number of at least {RUNS}, because each of "
                f"{RUNS} parts of the keys has its share of the rows: give the table and its "
                f"module {RUNS} rows or more"
            )
        for setting, number in (("eviction_interval", eviction_interval), ("buckets", buckets)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{setting}={number}: must be a whole number of at least 1")
        if not isinstance(eviction_policy, MCHEvictionPolicy):
            raise ConfigError(
                f"eviction_policy is a {type(eviction_policy).__name__}: give LRU_EvictionPolicy(),"
                " LFU_EvictionPolicy() or DistanceLFU_EvictionPolicy() of recapp.modules.mc_modules"
            )
        refused = {
            "input_hash_func": (input_hash_func, "keys of any size are mixed without collisions"),
            "mch_size": (mch_size, "there is no second range of rows, and TorchRec ignores it"),
            "mch_hash_func": (mch_hash_func, "there is no second range, and TorchRec ignores it"),
            "output_global_offset": (output_global_offset or None, "rows have no numbers"),
            "output_segments": (output_segments, "rows have no numbers"),
        }
        for setting, (given, why) in refused.items():
            if given is not None:
                raise ConfigError(f"{setting} would have no effect here: {why}; leave it out")
        self.dynamic = DynamicRows(max_rows=zch_size, eviction=eviction_policy.eviction)
        self.name = name
        self._zch_size = zch_size
        self._input_hash_size = input_hash_size
        self._buckets = buckets

    def output_size(self) -> int:
        """Return the number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the `input_hash_size`; larger ids are keys, too."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the `buckets`."""
        return self._buckets

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Refuse to replace ids.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_no_numbers(type(self).__name__))

    def extra_repr(self) -> str:
        """Return the number of rows and which of them leave."""
        return f"{self._zch_size:,} rows, {self.dynamic.eviction}"


class ManagedCollisionCollection(nn.Module):
    """The managed collisions of the tables of a collection.

    Args:
        managed_collision_modules: Of each table, by its name.
        embedding_configs: The tables, `num_embeddings` as their modules' `zch_size`.
        need_preprocess: Not needed: nothing is preprocessed.

    Raises:
        ConfigError: Tables and modules are not the same, or have other sizes.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, MCHManagedCollisionModule],
        embedding_configs: Sequence[EmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        names = [t.name for t in embedding_configs]
        for name, module in managed_collision_modules.items():
            if name not in names:
                raise ConfigError(
                    f"managed_collision_modules has {name}, which is no table of embedding_configs:"
                    f" {suggest(name, names)}"
                )
            if not isinstance(module, MCHManagedCollisionModule):
                raise ConfigError(
                    f"managed_collision_modules[{name}] is a {type(module).__name__}: give an "
                    "MCHManagedCollisionModule of recapp.modules.mc_modules"
                )
        for t in embedding_configs:
            _check_fits(t, managed_collision_modules.get(t.name))
        self._managed_collision_modules = ModuleByName(dict(managed_collision_modules))
        self._embedding_configs = list(embedding_configs)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables as they were given, in order."""
        return list(self._embedding_configs)

    def dynamic_tables(self) -> dict[str, EmbeddingConfig]:
        """Return the dynamic tables that stand for them, by name.

        Raises:
            ConfigError: A table has an id rule or a smallest key.
        """
        found = {}
        for t in self._embedding_configs:
            module: Any = self._managed_collision_modules[t.name]
            found[t.name] = replace(t, dynamic=module.dynamic)
        return found

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Refuse to replace ids.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_no_numbers(type(self).__name__))


def _check_fits(table: EmbeddingConfig, module: MCHManagedCollisionModule | None) -> None:
    """Check that a module manages a table.

    Raises:
        ConfigError: It does not.
    """
    if module is None:
        raise ConfigError(
            f"table {table.name} is not in managed_collision_modules: give it an "
            f"MCHManagedCollisionModule of zch_size={table.num_embeddings}, or look it up by a "
            "collection of its own"
        )
    if table.dynamic is not None:
        raise ConfigError(
            f"table {table.name} is dynamic and says itself which rows leave: give num_embeddings "
            f"the number {module.output_size()}, or look it up without managed collisions"
        )
    if module.output_size() != table.num_embeddings:
        raise ConfigError(
            f"table {table.name}: its module has zch_size={module.output_size()}, the table "
            f"num_embeddings={table.num_embeddings}: give both the same number"
        )


def _no_numbers(what: str) -> str:
    return (
        f"{what}: ids are not replaced, because rows are found by the ids themselves and have no "
        "numbers: look ids up by a ManagedCollisionEmbeddingBagCollection or "
        "ManagedCollisionEmbeddingCollection"
    )


class BaseManagedCollisionEmbeddingCollection(nn.Module, ABC):
    """A collection whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_module: The collection; it stays as it is, and one with the same settings and
            dynamic tables takes its place.
        managed_collision_collection: Of exactly its tables.
        return_remapped_features: False: rows have no numbers by which ids could be replaced.
        allow_in_place_embed_weight_update: Not needed: rows leave without a trace in any graph.

    Raises:
        ConfigError: The collection is of another kind, the tables are others, or remapped features
            are asked for.

    Start values are those of the keys, the same under every plan; rows that the collection had are
    not taken over.
    """

    kind: ClassVar[type[UnshardedCollection]]
    """What is wrapped."""

    def __init__(
        self,
        embedding_module: Any,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if not isinstance(embedding_module, self.kind):
            raise ConfigError(
                f"{who}: wraps an {self.kind.__name__}, not a {type(embedding_module).__name__}"
            )
        if not isinstance(managed_collision_collection, ManagedCollisionCollection):
            raise ConfigError(
                f"{who}: managed_collision_collection is a "
                f"{type(managed_collision_collection).__name__}: give a ManagedCollisionCollection"
            )
        if return_remapped_features:
            raise ConfigError(
                "return_remapped_features=True: rows are found by the ids themselves and have no "
                "numbers 0..zch_size-1; leave it out, and log the ids, or feed them to other "
                "tables, as they came"
            )
        given = embedding_module.tables()
        if given != managed_collision_collection.embedding_configs():
            raise ConfigError(
                f"{who}: the collection has the tables {', '.join(t.name for t in given)}, which "
                "are not the embedding_configs of the ManagedCollisionCollection: give both the "
                "same list"
            )
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module = self._dynamic(
            embedding_module, managed_collision_collection.dynamic_tables()
        )
        for t in given:
            _take_over_optimizer(
                embedding_module.weight(t.name), self._embedding_module.weight(t.name)
            )

    @abstractmethod
    def _dynamic(self, given: Any, tables: Mapping[str, EmbeddingConfig]) -> UnshardedCollection:
        """Return a collection with the settings of another and other tables."""

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return self._embedding_module.tables()

    @property
    def collection(self) -> nn.Module:
        """Return the collection with dynamic tables, sharded or not."""
        return self._embedding_module

    def over(self: M, embedding_module: nn.Module) -> M:
        """Return the same over another collection: the sharded one."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        made._modules["_embedding_module"] = embedding_module
        return made

    def forward(
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Look ids up.

        Args:
            features: Ids of at least the tables' features.

        Returns:
            What the collection returns, and None.

        Raises:
            ConfigError: The tables are not sharded, so they have no rows yet.
        """
        return self._embedding_module(features), None


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_bag_collection: The collection whose tables take any ids.
        others: As of `BaseManagedCollisionEmbeddingCollection`, by position:
            managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update.
        named: Or by name.
    """

    kind = EmbeddingBagCollection

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *others: Any, **named: Any
    ) -> None:
        super().__init__(embedding_bag_collection, *others, **named)

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module

    def _dynamic(self, given: Any, tables: Mapping[str, EmbeddingConfig]) -> UnshardedCollection:
        made = EmbeddingBagCollection(
            list(tables.values()),
            given.is_weighted(),
            _device_of(given),
            given.seed,
            lookups=[replace(x, table=tables[x.table.name]) for x in given.lookups],
        )
        made.leave_room(given.room)
        return made


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_collection: The collection whose tables take any ids.
        others: As of `BaseManagedCollisionEmbeddingCollection`, by position:
            managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update.
        named: Or by name.
    """

    kind = EmbeddingCollection

    def __init__(
        self, embedding_collection: EmbeddingCollection, *others: Any, **named: Any
    ) -> None:
        super().__init__(embedding_collection, *others, **named)

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module

    def _dynamic(self, given: Any, tables: Mapping[str, EmbeddingConfig]) -> UnshardedCollection:
        return EmbeddingCollection(
            list(tables.values()), _device_of(given), given.need_indices(), given.seed
        )


def _device_of(collection: UnshardedCollection) -> torch.device:
    return collection.weight(collection.tables()[0].name).device


def _take_over_optimizer(given: Tensor, weight: Tensor) -> None:
    """Let a table have the optimiser that was applied in backward before it was wrapped."""
    applied = getattr(given, "_in_backward_optimizers", None)
    if applied is not None:
        weight._in_backward_optimizers = applied  # type: ignore[attr-defined]
