"""The bases of modules around a collection of tables (feature processors, managed collisions) and
of their sharders.

Programs pass the sharders to `DistributedModelParallel`, in which any sharder shards every
collection of a model.

TorchRec's feature processors: modules that compute the sample weights of bags, and train them.

    ids of a bag        [17 4 25]
    position_weight     [1.0 0.8 0.5 0.4 ...]       a parameter of max_feature_length numbers
    weights of the bag  [1.0 0.8 0.5]

Processors are dense modules: each rank runs them on its own batch before the ranks exchange ids,
and the engine returns the gradients of the weights to that rank (`recapp/engine/lookup.py`). So
they work with every plan, row-wise too, and DDP averages their gradients like those of layers.

TorchRec's collections with managed collisions: any ids within a fixed number of rows.

    ids of all ranks -> slot ids, on every rank (`managed_collisions.py`) -> an ordinary collection

Every rank holds the slots of all rows and counts the ids of all ranks, which it gathers in each
step of training. So a program gives ids the same slots on any number of ranks, sharded or not, and
the result is TorchRec's: ids without a slot share the last row. Sharding replaces the ordinary
collection under every plan.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.compat.torchrec.managed_collisions import ManagedCollisionCollection
from recapp.engine.sharded_collection import ShardedCollection
from recapp.errors import ConfigError, DataError, suggest
from recapp.optim.rules import RowRule
from recapp.parallel import CollectionSharder
from recapp.sharding.sharding_plan import TableSharding
from recapp.sparse.bags import first_ones, on_host
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    ModuleByName,
    UnshardedCollection,
)
from recapp.tables.config import EmbeddingConfig, sequence_table
from recapp.tables.initial import begun_rows


class CollectionWrapper(nn.Module):
    """A module that holds a collection. Sharding the module replaces the collection by its sharded
    twin (`WrappedSharder`).
    """

    holds: ClassVar[str]
    """The name of the attribute that holds the collection, as in TorchRec."""

    @property
    def collection(self) -> Any:
        """Return the collection inside, sharded or not."""
        return getattr(self, self.holds)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self.collection.tables())

    def over(self, collection: nn.Module) -> Self:
        """Return a shallow copy of this module around another collection, as the sharded one."""
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        setattr(twin, self.holds, collection)
        return twin


class WrappedSharder(CollectionSharder):
    """A sharder of modules that wrap a collection.

    Args:
        ebc_sharder: A sharder with the optimiser and the type of sent vectors; None takes the
            next arguments.
        mc_sharder: Ignored, because managed collisions are sharded with the tables.
        fused_params: The optimiser, as `CollectionSharder` takes it.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).

    Raises:
        ConfigError: A sharder is given together with an optimiser or a type.
    """

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: CollectionSharder | None = None,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        if ebc_sharder is not None:
            if fused_params is not None or self.payload is not None:
                raise ConfigError(
                    f"{type(self).__name__}: a sharder is given together with fused_params or "
                    "qcomm_codecs_registry: give these to the sharder instead"
                )
            self.rule = ebc_sharder.rule
            self.payload = ebc_sharder.payload

    @override
    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        return super().shardable_parameters(module.collection)

    @override
    def shard(
        self,
        module: Any,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        if not isinstance(module, self.module_type):
            raise ConfigError(
                f"{type(self).__name__}.shard: the module is a {type(module).__name__}; use the "
                "sharder of its kind"
            )
        twin = super().shard(module.collection, params, env, device, module_fqn)
        return module.over(twin)


class FeatureProcessor(nn.Module, ABC):
    """Computes the weights of one feature: a module whose `forward` takes its bags."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the bags of a feature with weights."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Computes the weights of several features: a module whose `forward` takes all bags."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the bags of all features with weights."""


class PositionWeightedModule(FeatureProcessor):
    """Weighs an id by its position in its bag, with trained weights that start as ones.

    Args:
        max_feature_length: The largest number of ids in a bag.
        device: The device of the weights; the meta device allocates none yet.

    Raises:
        ConfigError: The length is no whole number of at least 1.
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = _weights("max_feature_length", max_feature_length, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        nn.init.ones_(self.position_weight)

    @override
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        position_L = _positions(features.offsets(), None)
        _check_longest(features.lengths(), len(self.position_weight), "the feature")
        return JaggedTensor.unchecked(
            first_ones(len(position_L), features.values()),
            self.position_weight[position_L],
            features.lengths(),
            features.offsets(),
        )


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Weighs the ids of several features by their positions in their bags; ids of other features
    have the weight 1.

    Args:
        max_feature_lengths: The largest number of ids in a bag, by feature.
        device: The device of the weights; the meta device allocates none yet.

    Raises:
        ConfigError: A length is no whole number of at least 1.
    """

    def __init__(
        self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = nn.ParameterDict(
            {
                key: _weights(f"max_feature_lengths[{key}]", length, device)
                for key, length in max_feature_lengths.items()
            }
        )
        self.reset_parameters()

    @property
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """Return the weights by feature."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = features.keys()
        if not keys:
            return features
        per_key = features.length_per_key()
        position_L = _positions(features.offsets(), sum(per_key))
        parts = []
        for key, position_N in zip(keys, torch.split(position_L, per_key), strict=True):
            if key not in self.position_weights:
                parts.append(torch.ones(position_N.shape[0], device=position_N.device))
                continue
            weight = self.position_weights[key]
            _check_longest(features[key].lengths(), len(weight), f"feature {key}")
            parts.append(weight[position_N])
        return features.with_weights(torch.cat(parts))


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """Runs the processor of each feature that has one; ids of other features have the weight 1.

    Args:
        feature_processors: The processors by feature.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weighted_bags = {}
        for key, bags in features.to_dict().items():
            if key not in self._feature_processors:
                ones = torch.ones(len(bags.values()), device=bags.values().device)
                weighted_bags[key] = JaggedTensor.unchecked(bags.values(), ones, bags.lengths())
                continue
            processor = self._feature_processors[key]
            weighted_bags[key] = processor(bags)
            if weighted_bags[key].weights_or_none() is None:
                raise ConfigError(
                    f"feature_processors[{key}]: {type(processor).__name__} returned a "
                    "JaggedTensor without weights: give it weights, one for each value"
                )
        return KeyedJaggedTensor.from_jt_dict(weighted_bags)


class FeatureProcessedEmbeddingBagCollection(CollectionWrapper):
    """A collection of bags whose sample weights come from processors.

    Args:
        embedding_bag_collection: The collection; `is_weighted=True`.
        feature_processors: A processor for each feature of the collection, by name; or one module
            that takes all bags.

    Raises:
        ConfigError: The collection ignores weights, or a feature or a processor lacks its partner.
    """

    holds = "_embedding_bag_collection"

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        self._embedding_bag_collection = embedding_bag_collection
        if embedding_bag_collection.is_weighted() is False:
            raise ConfigError(
                "embedding_bag_collection ignores sample weights, and processors make nothing "
                "else: build it with is_weighted=True"
            )
        self._feature_names = list(
            dict.fromkeys(x.feature for x in embedding_bag_collection.lookups)
        )
        self._feature_processors: nn.ModuleDict | FeatureProcessorsCollection
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
            return
        _check_same(feature_processors, self._feature_names)
        self._feature_processors = ModuleByName(dict(feature_processors))

    def split(self) -> tuple[FeatureProcessorsCollection, nn.Module]:
        """Return the processors as one module, and the collection."""
        processors = self._feature_processors
        if not isinstance(processors, FeatureProcessorsCollection):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def is_weighted(self) -> bool | None:
        """Return whether the collection takes sample weights."""
        takes_weights: bool | None = self.collection.is_weighted()
        return takes_weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Weigh and pool every bag.

        Args:
            features: Raw ids of at least the tables' features; the processors replace their
                weights.

        Raises:
            ConfigError: A processor returns no weights.
            DataError: A bag is longer than its processor allows.
        """
        processors, bags = self.split()
        pooled: KeyedTensor = bags(processors(features))
        return pooled


class FeatureProcessedEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of collections with feature processors, for every sharding type; TorchRec has no
    row-wise types for them.

    Args:
        ebc_sharder: The argument of `WrappedSharder`.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = FeatureProcessedEmbeddingBagCollection

    def __init__(
        self, ebc_sharder: CollectionSharder | None = None, qcomm_codecs_registry: Any = None
    ) -> None:
        super().__init__(ebc_sharder, qcomm_codecs_registry=qcomm_codecs_registry)


def _weights(argument: str, length: int, device: torch.device | str | None) -> nn.Parameter:
    if type(length) is not int or length < 1:
        raise ConfigError(f"{argument}={length}: must be a whole number of at least 1")
    return nn.Parameter(torch.empty(length, device=device))


def _positions(offsets_N1: Tensor, values: int | None) -> Tensor:
    """Return the position of each value in its bag.

    Args:
        offsets_N1: The offsets of N bags.
        values: The number of values; None computes it from the offsets.
    """
    first_L = torch.repeat_interleave(offsets_N1[:-1], offsets_N1.diff(), output_size=values)
    return torch.arange(first_L.shape[0], device=first_L.device) - first_L


def _check_longest(lengths_B: Tensor, most: int, what: str) -> None:
    """Check that no bag has more ids than there are weights. On an accelerator torch checks this
    itself, when it indexes the weights.

    Raises:
        DataError: A bag is longer.
    """
    if on_host(lengths_B) and len(lengths_B) and int(lengths_B.max()) > most:
        raise DataError(
            f"{what} has a bag of {int(lengths_B.max())} ids, and its PositionWeightedModule "
            f"max_feature_length={most}: raise max_feature_length, or cut the bags"
        )


def _check_same(processors: Mapping[str, Any], features: list[str]) -> None:
    for key in features:
        if key not in processors:
            raise ConfigError(
                f"feature_processors has no processor for feature {key}: give one for each "
                "feature of the collection, or a PositionWeightedModuleCollection, which does "
                "not change other features"
            )
    for key, processor in processors.items():
        if key not in features:
            raise ConfigError(
                f"feature_processors has {key}, which is no feature of the collection: "
                f"{suggest(key, features)}"
            )
        if not isinstance(processor, nn.Module):
            raise ConfigError(
                f"feature_processors[{key}] is a {type(processor).__name__}: give a module such as "
                "PositionWeightedModule(max_feature_length=10)"
            )


class BaseManagedCollisionEmbeddingCollection(CollectionWrapper):
    """A collection whose tables take any ids and have a fixed number of rows.

    Args:
        embedding_module: The collection, with one row for each slot.
        managed_collision_collection: The managed collisions of the tables of the collection.
        return_remapped_features: Whether `forward` also returns the slot ids.
        allow_in_place_embed_weight_update: Ignored. When a slot goes to another id, its row is set
            to start values before the lookup, outside of autograd.

    Raises:
        ConfigError: The collection has another class, or its tables differ from those of the
            managed collisions.
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
        tables = embedding_module.tables()
        mc_tables = managed_collision_collection.embedding_configs()
        if self.kind is EmbeddingCollection:  # it accepts tables of bags and ignores their pooling
            mc_tables = [sequence_table(t) for t in mc_tables]
        if tables != mc_tables:
            raise ConfigError(
                f"{who}: the collection has the tables {', '.join(t.name for t in tables)}, which "
                "are not the embedding_configs of the ManagedCollisionCollection: give both the "
                "same list"
            )
        embedding_module.own_ids = True
        self._embedding_module: Any = embedding_module  # or its sharded twin
        self._managed_collision_collection = managed_collision_collection
        self._returns_slots = return_remapped_features

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. When the sharded twin replaces the collection, all ranks go on with the
        slots of rank 0.
        """
        if isinstance(value, ShardedCollection):
            self._managed_collision_collection = self._managed_collision_collection.on_ranks(
                value.shared.comm
            )
        super().__setattr__(name, value)

    def forward(
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Look up the vectors of ids. In a frozen table no slot goes to another id.

        Args:
            features: Ids of at least the tables' features.

        Returns:
            The output of the collection, and the slot ids or None.

        Raises:
            ConfigError: The tables have no rows: they are on the meta device and not sharded.
        """
        sharded = isinstance(self._embedding_module, ShardedCollection)
        for t in self.tables() if not sharded else ():
            if self._embedding_module.weight(t.name).is_meta:
                raise ConfigError(
                    f"table {t.name} is on the meta device: only a sharded collection makes its "
                    "rows, also on one process: wrap the model in DistributedModelParallel, or "
                    'build its collection with device="cpu"'
                )
        of_tables = getattr(self._embedding_module, self._embedding_module.tables_of)
        frozen = [t.name for t in self.tables() if not of_tables[t.name].weight.requires_grad]
        comm = self._embedding_module.shared.comm if sharded else None
        slots = self._managed_collision_collection(features, frozen, comm)
        evicted = self._managed_collision_collection.evict()
        for t in self._managed_collision_collection.embedding_configs():
            gone = evicted[t.name]
            if gone is not None and len(gone):
                self._begin_anew(t, gone)
        return self._embedding_module(slots), slots if self._returns_slots else None

    @torch.no_grad()
    def _begin_anew(self, table: EmbeddingConfig, slots: Tensor) -> None:
        module = self._embedding_module
        if isinstance(module, ShardedCollection):
            module.shared.begin_rows(table.name, slots)
            return
        weight = module.weight(table.name)
        rows = range(len(weight))
        columns = range(table.embedding_dim)
        at_M, values = begun_rows(slots, table, module.seed, rows, columns, None, weight.dtype)
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
    """A sharder of bags with managed collisions, by the arguments of `WrappedSharder`."""

    module_type = ManagedCollisionEmbeddingBagCollection


class ManagedCollisionEmbeddingCollectionSharder(WrappedSharder):
    """A sharder of sequences with managed collisions.

    Args:
        ec_sharder: The `ebc_sharder` of `WrappedSharder`; the other arguments are the same.
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
        super().__init__(ec_sharder, mc_sharder, fused_params, qcomm_codecs_registry)


class ManagedCollisionCollectionSharder(CollectionSharder):
    """An argument `mc_sharder`, which has no effect: managed collisions are sharded with their
    tables, by the sharders above.

    Args:
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = ManagedCollisionCollection

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    @override
    def shard(self, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(
            "ManagedCollisionCollectionSharder.shard: managed collisions are sharded with their "
            "tables only: shard the ManagedCollisionEmbeddingBagCollection with its own sharder"
        )
