"""Wukong: "Wukong: Towards a Scaling Law for Large-Scale Recommendation", arXiv 2403.02545.

    numbers - MLP - one vector --+
                                 +-- X_0 -- layer 1 -- ... -- layer L -- flat -- MLP -- logits_B
    lookups ---------------------+

    X_(i+1) = LN(FMB(X_i) and LCB(X_i), one under the other, + X_i)

    FMB(X)  a factorisation machine block: the products X X^T, times a learnt matrix Y [n, k], flat,
            normalised, and an MLP that gives m_F vectors
    LCB(X)  a linear compression block: W_L X, which gives m_L vectors

X X^T Y is computed as X (X^T Y), so its cost is linear in the number of vectors. A layer returns
m_F + m_L vectors. If another number of vectors enters, the residual adds a learnt linear map of X_i
in place of X_i. The paper also has a Y that depends on the sample; here Y is a parameter.

Shapes: B batch, N vectors that enter a layer, D columns of a vector, M vectors that leave it, k
columns of Y.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.models.fields import FieldVectors
from recapp.models.layers import MLP, xavier_linear
from recapp.models.model_checks import check_hidden, check_same_dim, check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


def mixed(weight_MN: Tensor, vectors_BND: Tensor) -> Tensor:
    """Return the linear combinations W X of the vectors of each sample, [B, M, D].

    A product for each sample: one product for all would need its vectors and results transposed.
    """
    # not len(), which is a fixed number where torch exports the model
    return torch.bmm(weight_MN.expand(vectors_BND.shape[0], -1, -1), vectors_BND)


class VectorMix(nn.Module):
    """Linear combinations of the vectors of a sample, W_L X: [B, N, D] -> [B, M, D].

    Args:
        vectors: The number of vectors that enter, N.
        mixed: The number of combinations, M.
    """

    def __init__(self, vectors: int, mixed: int) -> None:
        super().__init__()
        self.mix = xavier_linear(vectors, mixed, bias=False)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        """Return the combinations, [B, M, D]."""
        return mixed(self.mix.weight, vectors_BND)


class FactorisationBlock(nn.Module):
    """The factorisation machine block, reshape(MLP(LN(flat(X X^T Y)))): [B, N, D] -> [B, M, D].

    Args:
        vectors: The number of vectors that enter, N.
        dim: The columns of a vector, D.
        made: The number of vectors that leave, M.
        rank: The columns of Y, k.
        layers: The widths of the hidden layers of the MLP.
    """

    def __init__(self, vectors: int, dim: int, made: int, rank: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.projection = xavier_linear(vectors, rank, bias=False)
        self.norm = nn.LayerNorm(vectors * rank)
        self.mlp = MLP(vectors * rank, [*layers, made * dim], last_relu=False, setting="layers")
        self.made = made

    def forward(self, vectors_BND: Tensor) -> Tensor:
        """Return the vectors of the products, [B, M, D]."""
        samples, _, dim = vectors_BND.shape
        projected_BkD = mixed(self.projection.weight, vectors_BND)  # the transpose of X^T Y
        products_BNk = vectors_BND @ projected_BkD.mT
        made_BK: Tensor = self.mlp(self.norm(products_BNk.flatten(1)))
        return made_BK.view(samples, self.made, dim)


class WukongLayer(nn.Module):
    """A layer of the stack: [B, N, D] -> [B, M, D], with M = m_F + m_L.

    Args:
        vectors: The number of vectors that enter, N.
        dim: The columns of a vector, D.
        factorised: The vectors of the factorisation machine block, m_F.
        compressed: The vectors of the linear compression block, m_L.
        rank: The columns of Y, k.
        layers: The widths of the hidden layers of the block's MLP.
    """

    def __init__(
        self,
        vectors: int,
        dim: int,
        factorised: int,
        compressed: int,
        rank: int,
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.factorisation = FactorisationBlock(vectors, dim, factorised, rank, layers)
        self.compression = VectorMix(vectors, compressed)
        self.made = made = factorised + compressed
        self.residual = VectorMix(vectors, made) if made != vectors else None
        self.norm = nn.LayerNorm(dim)
        self.vectors = vectors
        self.dim = dim
        self.rank = rank
        self.compressed = compressed

    def flops_per_sample(self) -> float:
        """Return the operations per sample beyond two for each weight, with backward.

        Linear maps of vectors run once for each column, and the vectors are multiplied with their
        projections.
        """
        made = self.made if self.residual is not None else 0
        maps = self.vectors * (self.rank + self.compressed + made)
        return 6.0 * ((self.dim - 1) * maps + self.dim * self.vectors * self.rank)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        """Return the vectors after the layer, [B, M, D]."""
        made_BMD = torch.cat([self.factorisation(vectors_BND), self.compression(vectors_BND)], 1)
        kept_BMD = vectors_BND if self.residual is None else self.residual(vectors_BND)
        normal_BMD: Tensor = self.norm(made_BMD + kept_BMD)
        return normal_BMD


class Wukong(nn.Module):
    """Click logits from stacked factorisation machines.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        bottom_layers: The hidden widths of the MLP that makes one vector of the numbers.
        stack: The number of layers.
        factorised: The vectors that the factorisation machine block of a layer makes, m_F.
        compressed: The vectors that the linear compression block of a layer makes, m_L.
        rank: The columns of the learnt matrix Y, k.
        block_layers: The hidden widths of the MLP of a factorisation machine block.
        layers: The widths of the MLP behind the stack; the logit follows.
        dropout: The share of the columns of that MLP that dropout sets to zero.
        batch_norm: Whether that MLP normalises its hidden layers over the batch.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        bottom_layers: Sequence[int] = (64,),
        stack: int = 3,
        factorised: int = 16,
        compressed: int = 16,
        rank: int = 8,
        block_layers: Sequence[int] = (128,),
        layers: Sequence[int] = (128,),
        dropout: float = 0.0,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(stack=stack, factorised=factorised, compressed=compressed, rank=rank)
        check_hidden("model.bottom_layers", bottom_layers)
        check_hidden("model.block_layers", block_layers)
        check_hidden("model.layers", layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="concat", dropout=field_dropout
        )
        check_same_dim("Wukong", [x.dim for x in embedding_bag_collection.lookups])
        dim = self.fields.dim
        self.numbers = dense_in_features
        self.bottom = None
        if dense_in_features:
            self.bottom = MLP(
                dense_in_features,
                [*bottom_layers, dim],
                last_relu=False,
                setting="model.bottom_layers",
            )
        made = factorised + compressed
        entering = [self.fields.count + (self.bottom is not None), *[made] * (stack - 1)]
        self.stack = nn.Sequential(
            *(
                WukongLayer(vectors, dim, factorised, compressed, rank, block_layers)
                for vectors in entering
            )
        )
        self.top = MLP(
            made * dim,
            [*layers, 1],
            last_relu=False,
            setting="model.layers",
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        vectors_BND = flat_BK[:, self.numbers :].reshape(-1, self.fields.count, self.fields.dim)
        if self.bottom is not None:
            number_BD = self.bottom(flat_BK[:, : self.numbers])
            vectors_BND = torch.cat([number_BD[:, None].to(vectors_BND.dtype), vectors_BND], 1)
        logits_B1: Tensor = self.top(self.stack(vectors_BND).flatten(1))
        return logits_B1.squeeze(1)
