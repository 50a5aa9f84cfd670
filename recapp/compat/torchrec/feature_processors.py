"""TorchRec's feature processors: modules that compute the sample weights of bags, and train them.

    ids of a bag        [17 4 25]
    position_weight     [1.0 0.8 0.5 0.4 ...]       a parameter of max_feature_length numbers
    weights of the bag  [1.0 0.8 0.5]

Processors are dense modules: each rank runs them on its own batch before the ranks exchange ids,
and the engine returns the gradients of the weights to that rank (`recapp/engine/lookup.py`). So
they work with every plan, row-wise too, and DDP averages their gradients like those of layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recapp.compat.torchrec.collection_wrapper import CollectionWrapper, WrappedSharder
from recapp.errors import ConfigError, DataError, suggest
from recapp.parallel import CollectionSharder
from recapp.sparse.bags import first_ones, on_host
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.module_by_name import ModuleByName


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

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same bags, weighted.

        Raises:
            DataError: A bag has more ids than there are weights.
        """
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

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same bags, weighted.

        Raises:
            DataError: A bag has more ids than its feature has weights.
        """
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

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the bags with the weights that the processors compute.

        Raises:
            ConfigError: A processor returns bags without weights.
        """
        made = {}
        for key, bags in features.to_dict().items():
            if key not in self._feature_processors:
                ones = torch.ones(len(bags.values()), device=bags.values().device)
                made[key] = JaggedTensor.unchecked(bags.values(), ones, bags.lengths())
                continue
            processor = self._feature_processors[key]
            made[key] = processor(bags)
            if made[key].weights_or_none() is None:
                raise ConfigError(
                    f"feature_processors[{key}]: {type(processor).__name__} returned a "
                    "JaggedTensor without weights: give it weights, one for each value"
                )
        return KeyedJaggedTensor.from_jt_dict(made)


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
        found: bool | None = self.collection.is_weighted()
        return found

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
        ebc_sharder: The `sharder` of `WrappedSharder`.
        qcomm_codecs_registry: The type of sent vectors (`CollectionSharder`).
    """

    module_type = FeatureProcessedEmbeddingBagCollection

    def __init__(
        self, ebc_sharder: CollectionSharder | None = None, qcomm_codecs_registry: Any = None
    ) -> None:
        super().__init__(ebc_sharder, None, qcomm_codecs_registry)


def _weights(argument: str, length: int, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter for the weights of a feature.

    Raises:
        ConfigError: The length is no whole number of at least 1.
    """
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
    """Check that every feature has a processor and every processor a feature.

    Raises:
        ConfigError: One of them lacks its partner, or a processor is no module.
    """
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
