"""TorchRec's collections with managed collisions: any ids within a fixed number of rows.

    tables          EmbeddingBagConfig(name="t", num_embeddings=N, ...), with numbered rows
    managed         ManagedCollisionCollection({"t": MCHManagedCollisionModule(N, ...)}, tables)

    unsharded       ids -> numbers of rows -> an ordinary collection (`managed_collisions.py`)
    sharded         a dynamic table, max_rows=N, eviction lru or lfu (`recapp/tables/dynamic.py`)
    with numbers    ids of all ranks -> numbers, on every rank -> an ordinary collection, sharded

A dynamic table finds a row by the id itself. It needs no numbers, and an id without a row gets its
start value. With numbers the result is TorchRec's: ids without a number share the last row. Every
rank then holds the numbers of all rows and counts the ids of all ranks, which it gathers in each
step of training. So a program gives ids the same numbers on any number of ranks, sharded or not.
The module holds the ordinary collection, and sharding replaces that under every plan.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from recapp.compat.torchrec.collection_wrapper import CollectionWrapper, WrappedSharder, twin_of
from recapp.compat.torchrec.managed_collisions import ManagedCollisionCollection
from recapp.engine.sharded_collection import ShardedCollection
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule
from recapp.parallel import CollectionSharder
from recapp.sharding.sharding_plan import TableSharding
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig, sequence_table
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.initial import begun_rows
from recapp.tables.unsharded_collection import UnshardedCollection


class BaseManagedCollisionEmbeddingCollection(CollectionWrapper):
    """A collection whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_module: The collection, with one row for each number. Sharding gives its settings
            to the dynamic tables.
        managed_collision_collection: The managed collisions of the tables of the collection.
        return_remapped_features: Whether `forward` also returns the numbers of the ids. Sharded
            tables then use numbers as well; they also do if a module needs numbers
            (`MCHManagedCollisionModule.needs_numbers`).
        allow_in_place_embed_weight_update: Ignored. When a number goes to another id, its row is
            set to start values before the lookup, outside of autograd.

    Raises:
        ConfigError: The collection has another class, or its tables differ from those of the
            managed collisions.

    The start values of sharded dynamic tables depend on the keys, and are the same under every
    plan. Dynamic tables do not take over the rows of the unsharded collection.
    """

    holds = "_embedding_module"
    kind: ClassVar[type[UnshardedCollection]]
    """The class of the wrapped collection."""

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
        given = embedding_module.tables()
        named = managed_collision_collection.embedding_configs()
        if self.kind is EmbeddingCollection:  # it accepts tables of bags and ignores their pooling
            named = [sequence_table(t) for t in named]
        if given != named:
            raise ConfigError(
                f"{who}: the collection has the tables {', '.join(t.name for t in given)}, which "
                "are not the embedding_configs of the ManagedCollisionCollection: give both the "
                "same list"
            )
        self._embedding_module: Any  # one of two classes, or the sharded twin of one
        self._managed_collision_collection = managed_collision_collection
        self._returns_numbers = return_remapped_features
        self._by_numbers = return_remapped_features or managed_collision_collection.needs_numbers
        self._numbered: UnshardedCollection | None = None
        if self._by_numbers:
            embedding_module.own_ids = True
            self._embedding_module = embedding_module
            return
        self._embedding_module = self._over_rows_of(
            embedding_module, managed_collision_collection.dynamic_tables()
        )
        # looks up numbers in the same rows until they are sharded; not a submodule
        object.__setattr__(self, "_numbered", embedding_module)

    def _over_rows_of(self, given: Any, tables: Mapping[str, EmbeddingConfig]) -> Any:
        """Return a collection of dynamic tables with the settings of the given one. It shares the
        rows of the given one until it is sharded, and has its in-backward optimisers.
        """
        device = given.weight(next(iter(tables))).device
        made = twin_of(given, tables, device, given.seed)
        for name in tables:
            weight = given.weight(name)
            if not weight.is_meta:
                getattr(made, made.tables_of)[name].weight = weight
            elif hasattr(weight, "_in_backward_optimizers"):
                own: Any = made.weight(name)
                own._in_backward_optimizers = weight._in_backward_optimizers
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. When the sharded twin replaces the collection, number the ids of all
        ranks from now on, or drop the numbers if the tables become dynamic.

        Raises:
            ConfigError: Ids have numbers already, which dynamic tables cannot take over.
        """
        if isinstance(value, ShardedCollection):
            managed = self._managed_collision_collection
            super().__setattr__(
                "_managed_collision_collection",
                managed.on_ranks(value.shared.comm)
                if self._by_numbers
                else managed.settings_alone(),
            )
            object.__setattr__(self, "_numbered", None)
        super().__setattr__(name, value)

    def forward(
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Look up the vectors of ids. In a frozen table no number goes to another id.

        Args:
            features: Ids of at least the tables' features.

        Returns:
            The output of the collection, and the numbers of the ids or None.

        Raises:
            ConfigError: The tables have no rows: they are on the meta device and not sharded.
        """
        sharded = isinstance(self._embedding_module, ShardedCollection)
        if sharded and not self._by_numbers:
            return self._embedding_module(features), None
        if not sharded:
            self._check_has_rows()
        held = getattr(self._embedding_module, self._embedding_module.tables_of)
        frozen = [t.name for t in self.tables() if not held[t.name].weight.requires_grad]
        numbers = self._managed_collision_collection(features, frozen)
        evicted = self._managed_collision_collection.evict()
        for t in self._managed_collision_collection.embedding_configs():
            gone = evicted[t.name]
            if gone is not None and len(gone):
                self._begin_anew(t, gone)
        if self._numbered is None:
            found = self._embedding_module(numbers)
        else:
            rows: dict[str, Tensor] = dict(self._embedding_module.named_parameters())
            found = functional_call(self._numbered, rows, (numbers,))
        return found, numbers if self._returns_numbers else None

    def _check_has_rows(self) -> None:
        for t in self.tables():
            if self._embedding_module.weight(t.name).is_meta:
                raise ConfigError(
                    f"table {t.name} is on the meta device: only a sharded collection makes its "
                    "rows, also on one process: wrap the model in DistributedModelParallel, or "
                    'build its collection with device="cpu"'
                )

    @torch.no_grad()
    def _begin_anew(self, table: EmbeddingConfig, numbers: Tensor) -> None:
        """Write start values into the rows of a table whose numbers went to other ids."""
        module = self._embedding_module
        if isinstance(module, ShardedCollection):
            module.shared.begin_rows(table.name, numbers)
            return
        weight = module.weight(table.name)
        rows = range(len(weight))
        columns = range(table.embedding_dim)
        at_M, values = begun_rows(numbers, table, module.seed, rows, columns, None, weight.dtype)
        weight[at_M.to(weight.device)] = values.to(weight)


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_bag_collection: The collection.
        others: The arguments of `BaseManagedCollisionEmbeddingCollection` by position:
            managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update.
        named: The same arguments by name.
    """

    kind = EmbeddingBagCollection

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *others: Any, **named: Any
    ) -> None:
        super().__init__(embedding_bag_collection, *others, **named)

    @property
    def _embedding_bag_collection(self) -> Any:
        return self.collection


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_collection: The collection.
        others: The arguments of `BaseManagedCollisionEmbeddingCollection` by position:
            managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update.
        named: The same arguments by name.
    """

    kind = EmbeddingCollection

    def __init__(
        self, embedding_collection: EmbeddingCollection, *others: Any, **named: Any
    ) -> None:
        super().__init__(embedding_collection, *others, **named)

    @property
    def _embedding_collection(self) -> Any:
        return self.collection


class ManagedCollisionEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of bags with managed collisions.

    Args:
        ebc_sharder: The `sharder` of `WrappedSharder`.
        mc_sharder: Ignored, because managed collisions are sharded with the tables.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = ManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: CollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ebc_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionEmbeddingCollectionSharder(WrappedSharder):
    """A sharder of sequences with managed collisions.

    Args:
        ec_sharder: The `sharder` of `WrappedSharder`.
        mc_sharder: Ignored, because managed collisions are sharded with the tables.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = ManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: CollectionSharder | None = None,
        mc_sharder: CollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(ec_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionCollectionSharder(CollectionSharder):
    """A sharder of managed collisions, which recapp shards with their tables only.

    Args:
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = ManagedCollisionCollection

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    def shard(
        self,
        module: Any,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Refuse to shard managed collisions without their tables.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "ManagedCollisionCollectionSharder.shard: managed collisions are sharded with their "
            "tables only: shard the ManagedCollisionEmbeddingBagCollection with its own sharder"
        )
