"""DLRM-DCNv2, the recommendation benchmark of MLPerf Training 3.0 and later
(github.com/mlcommons/training, `recommendation_v2/torchrec_dlrm`).

    dense_BI - bottom MLP -+
                           +- x0 - L layers  x' = x0 * (U V x + b) + x - top MLP - logits_B
    ids - tables ----------+

A DLRM (arXiv 1906.00091) whose dot products are replaced by the low-rank cross network of DCN-V2
(arXiv 2008.13535).

Shapes: B batch, I dense features, D bottom output, K columns of the bottom output and all vectors.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from recapp.models.crosses import Crosses, LowRankCross
from recapp.models.fields import numbers_of
from recapp.models.layers import MLP, published_linear
from recapp.models.model_checks import check_settings, check_widths
from recapp.sparse.batch import Batch
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import BagCollection


class DLRM_DCN(nn.Module):
    """Click logits from dense features and pooled embeddings, with low-rank crosses.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features I of a sample. With 0 there is no bottom
            MLP, and only the embeddings are crossed.
        bottom_layers: The widths of the bottom MLP, whose layers all have a ReLU.
        cross_layers: The number of cross layers.
        rank: The columns of V x.
        top_layers: The widths of the top MLP, with a ReLU after each layer but the last, which is
            the logit and has width 1.

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        bottom_layers: Sequence[int],
        top_layers: Sequence[int] = (1024, 1024, 512, 256, 1),
        cross_layers: int = 3,
        rank: int = 512,
    ) -> None:
        super().__init__()
        check_settings(top_layers=top_layers, cross_layers=cross_layers, rank=rank)
        check_widths("model.bottom_layers", bottom_layers)
        mlp = partial(MLP, make_linear=published_linear)
        self.bottom = None
        columns = sum(x.columns for x in embedding_bag_collection.lookups)
        if dense_in_features:
            self.bottom = mlp(dense_in_features, bottom_layers, setting="model.bottom_layers")
            columns += bottom_layers[-1]
            # The bottom MLP's output goes into this room, which saves a copy of the vectors.
            embedding_bag_collection.leave_room(bottom_layers[-1])
        self.embedding_bag_collection = embedding_bag_collection
        self.crosses = Crosses(LowRankCross(columns, rank) for _ in range(cross_layers))
        self.top = mlp(columns, top_layers, last_relu=False, setting="model.top_layers")
        self.dense_in_features = dense_in_features

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B].

        Args:
            batch: Samples with `dense_in_features` dense features.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, self.dense_in_features)
        # Tables come first, so that backward reaches them last, and DDP reduces all dense gradients
        # during the exchange and update of rows.
        pooled: KeyedTensor = self.embedding_bag_collection(batch.sparse)
        if self.bottom is None:
            first_BK = pooled.values().to(next(self.top.parameters()).dtype)
        else:
            first_BK = pooled.prepend(self.bottom(dense_BI))
        logits_B1: Tensor = self.top(self.crosses(first_BK))
        return logits_B1[:, 0]
