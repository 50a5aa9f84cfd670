"""TorchRec's sharder of collections with feature processors, for programs that pass it to
`DistributedModelParallel`: any sharder shards every collection of a model.
"""

from typing import Any

from recapp.compat.feature_processors import FeatureProcessedEmbeddingBagCollection
from recapp.compat.wrapped_sharders import WrappedSharder
from recapp.engine.sharder import CollectionSharder


class FeatureProcessedEmbeddingBagCollectionSharder(WrappedSharder):
    """A sharder of collections with feature processors, by every sharding type; TorchRec has no
    row-wise types for them.

    Args:
        ebc_sharder: As of `WrappedSharder`.
        qcomm_codecs_registry: As of `WrappedSharder`.
    """

    wraps = FeatureProcessedEmbeddingBagCollection

    def __init__(
        self, ebc_sharder: CollectionSharder | None = None, qcomm_codecs_registry: Any = None
    ) -> None:
        super().__init__(ebc_sharder, None, qcomm_codecs_registry)
