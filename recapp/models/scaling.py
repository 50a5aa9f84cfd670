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

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.layers import (
    MLP,
    FieldVectors,
    Numbers,
    check_divides,
    check_hidden,
    check_same_dim,
    check_settings,
    xavier,
    xavier_linear,
)
from recapp.sparse.keyed_jagged_tensor import Batch
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
        vectors_out: The number of vectors that leave, M.
        rank: The columns of Y, k.
        layers: The widths of the hidden layers of the MLP.
    """

    def __init__(
        self, vectors: int, dim: int, vectors_out: int, rank: int, layers: Sequence[int]
    ) -> None:
        super().__init__()
        self.projection = xavier_linear(vectors, rank, bias=False)
        self.norm = nn.LayerNorm(vectors * rank)
        self.mlp = MLP(
            vectors * rank, [*layers, vectors_out * dim], last_relu=False, setting="layers"
        )
        self.vectors_out = vectors_out

    def forward(self, vectors_BND: Tensor) -> Tensor:
        """Return the vectors of the products, [B, M, D]."""
        samples, _, dim = vectors_BND.shape
        projected_BkD = mixed(self.projection.weight, vectors_BND)  # the transpose of X^T Y
        products_BNk = vectors_BND @ projected_BkD.mT
        return self.mlp(self.norm(products_BNk.flatten(1))).view(samples, self.vectors_out, dim)


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
        vectors_out = factorised + compressed
        self.residual = VectorMix(vectors, vectors_out) if vectors_out != vectors else None
        self.norm = nn.LayerNorm(dim)
        # linear maps of vectors run once for each column, and the vectors are multiplied with their
        # projections
        maps = vectors * (rank + compressed + (vectors_out if vectors_out != vectors else 0))
        self.flops_per_sample = 6.0 * ((dim - 1) * maps + dim * vectors * rank)

    def forward(self, vectors_BND: Tensor) -> Tensor:
        """Return the vectors after the layer, [B, M, D]."""
        vectors_BMD = torch.cat([self.factorisation(vectors_BND), self.compression(vectors_BND)], 1)
        residual_BMD = vectors_BND if self.residual is None else self.residual(vectors_BND)
        normal_BMD: Tensor = self.norm(vectors_BMD + residual_BMD)
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
        vectors_out = factorised + compressed
        entering = [self.fields.count + (self.bottom is not None), *[vectors_out] * (stack - 1)]
        self.stack = nn.Sequential(
            *(
                WukongLayer(vectors, dim, factorised, compressed, rank, block_layers)
                for vectors in entering
            )
        )
        self.top = MLP(
            vectors_out * dim,
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
        return self.top(self.stack(vectors_BND).flatten(1)).squeeze(1)


class LinearOfEach(nn.Module):
    """A linear map of its own for each of G groups: [G, B, K] -> [G, B, W].

    Args:
        groups: The number of groups, G.
        columns: The columns of the input, K.
        width: The columns of the output, W.
    """

    def __init__(self, groups: int, columns: int, width: int) -> None:
        super().__init__()
        self.weight_GKW = nn.Parameter(torch.empty(groups, columns, width))
        self.bias_GW = nn.Parameter(torch.zeros(groups, width))
        xavier(self.weight_GKW, columns, width)

    def forward(self, input_GBK: Tensor) -> Tensor:
        """Return the maps, [G, B, W]."""
        return torch.baddbmm(self.bias_GW[:, None], input_GBK, self.weight_GKW)


class TokenMixing(nn.Module):
    """Multi-head token mixing: [T, B, D] -> [T, B, D], without a parameter.

    Token h of the result has piece h of token 1, piece h of token 2, and so on.
    """

    def forward(self, tokens_TBD: Tensor) -> Tensor:
        """Return the mixed tokens, [T, B, D]."""
        tokens, samples, dim = tokens_TBD.shape
        pieces_TBHP = tokens_TBD.view(tokens, samples, tokens, dim // tokens)
        return pieces_TBHP.permute(2, 1, 0, 3).reshape(tokens, samples, dim)


class PerTokenFFN(nn.Module):
    """An FFN of its own for each token, or several that a router weighs: [T, B, D] -> [T, B, D].

    Args:
        tokens: The number of tokens, T.
        dim: The columns of a token, D.
        expansion: The width of the hidden layer, divided by D.
        experts: The number of FFNs of a token, E; with 1 there is no router.
    """

    def __init__(self, tokens: int, dim: int, expansion: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = LinearOfEach(tokens * experts, dim, expansion * dim)
        self.down = LinearOfEach(tokens * experts, expansion * dim, dim)
        self.router = LinearOfEach(tokens, dim, experts) if experts > 1 else None

    def forward(self, tokens_TBD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens, [T, B, D], and the weights of their experts, [T, B, E]; None without a
        router.
        """
        if self.router is None:
            return self.down(functional.gelu(self.up(tokens_TBD))), None
        tokens, samples, dim = tokens_TBD.shape
        weights_TBE = torch.relu(self.router(tokens_TBD))
        each_GBD = tokens_TBD.repeat_interleave(self.experts, 0)
        expert_GBD: Tensor = self.down(functional.gelu(self.up(each_GBD)))
        expert_TEBD = expert_GBD.view(tokens, self.experts, samples, dim)
        return (expert_TEBD * weights_TBE.transpose(1, 2)[..., None]).sum(1), weights_TBE


class MixerBlock(nn.Module):
    """A block: token mixing and FFNs, each with a residual and a normalisation behind it.

    Args:
        tokens: The number of tokens, T.
        dim: The columns of a token, D.
        expansion: The width of the hidden layer of an FFN, divided by D.
        experts: The number of FFNs of a token.
    """

    def __init__(self, tokens: int, dim: int, expansion: int, experts: int) -> None:
        super().__init__()
        self.mixing = TokenMixing()
        self.first_norm = nn.LayerNorm(dim)
        self.ffn = PerTokenFFN(tokens, dim, expansion, experts)
        self.second_norm = nn.LayerNorm(dim)

    def forward(self, tokens_TBD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens, [T, B, D], and the weights of their experts, [T, B, E], or None."""
        mixed_TBD = self.first_norm(self.mixing(tokens_TBD) + tokens_TBD)
        output_TBD, weights_TBE = self.ffn(mixed_TBD)
        return self.second_norm(output_TBD + mixed_TBD), weights_TBE


class RankMixer(nn.Module):
    """Click logits from tokens that mix without parameters.

    "RankMixer: Scaling Up Ranking Models in Industrial Recommenders", arXiv 2507.15551.

        fields -- side by side -- T pieces -- a linear map each -- X_0, T tokens of D columns

        S = LN(mix(X) + X)         mix has no parameters: token h of the result is piece h of each
        X = LN(FFN_t(S_t) + S_t)   each token t has an FFN of its own: D -> k D -> D, with GELU

        logits_B = linear(mean of the T tokens)

    Mixing cuts each token into as many pieces as there are tokens, so T must divide D. With
    `experts` above 1 each token has several FFNs, and a router with a ReLU weighs them: sum_j
    ReLU(r_tj) FFN_tj. The sum of these weights is an extra loss, which makes most of them zero. All
    experts are computed here, so routing changes the function and not the cost. The paper trains
    with two routers and serves with one. This model has one.

    Shapes: B batch, T tokens, D columns of a token, K columns of all fields, P columns of a piece,
    E experts.

    Args:
        embedding_bag_collection: The tables.
        dense_in_features: The number of dense features.
        tokens: The number of tokens, T.
        width: The columns of a token, D, a multiple of the number of tokens.
        blocks: The number of blocks.
        expansion: The width of the hidden layer of an FFN, divided by D.
        experts: The number of FFNs of a token; 1 makes no router.
        sparsity: The factor of the extra loss of routers, the mean over samples of the sum of all
            weights.
        numbers: The form in which numbers enter: "vectors" (x_i v_i) or "concat" (as they are).
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed, such as a width that the tokens do not divide.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        tokens: int = 8,
        width: int = 128,
        blocks: int = 2,
        expansion: int = 2,
        experts: int = 1,
        sparsity: float = 0.001,
        numbers: Numbers = "vectors",
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            width=width, blocks=blocks, expansion=expansion, experts=experts, sparsity=sparsity
        )
        check_divides("model.tokens", tokens, "model.width", width)
        self.fields = FieldVectors(
            embedding_bag_collection,
            dense_in_features,
            numbers=numbers,
            model="RankMixer",
            dropout=field_dropout,
        )
        self.piece = ceil(self.fields.columns / tokens)
        self.padding = self.piece * tokens - self.fields.columns
        self.tokens = tokens
        self.sparsity = sparsity
        self.tokenise = LinearOfEach(tokens, self.piece, width)
        self.blocks = nn.ModuleList(
            MixerBlock(tokens, width, expansion, experts) for _ in range(blocks)
        )
        self.score = xavier_linear(width, 1)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Compute logits, [B]; with routers also the sum of the weights of all experts, [B]."""
        flat_BK = functional.pad(self.fields.flat(batch), (0, self.padding))
        pieces_TBP = flat_BK.view(flat_BK.shape[0], self.tokens, self.piece).transpose(0, 1)
        tokens_TBD = self.tokenise(pieces_TBP)
        routed = []
        for block in self.blocks:
            tokens_TBD, weights_TBE = block(tokens_TBD)
            if weights_TBE is not None:
                routed.append(weights_TBE.sum((0, 2)))
        logits_B = self.score(tokens_TBD.mean(0)).squeeze(1)
        return {"logit": logits_B, "routed": sum(routed, 0 * logits_B)} if routed else logits_B

    def extra_losses(
        self,
        outputs: Tensor | Mapping[str, Tensor],
        batch: Batch,
        loss: Callable[..., Tensor],
    ) -> dict[str, Tensor]:
        """Return the loss that keeps few experts active; none without routers.

        Args:
            outputs: The result of `forward`.
            batch: The batch.
            loss: Not used: this loss knows no label.
        """
        if isinstance(outputs, Tensor):
            return {}
        return {"routing": self.sparsity * outputs["routed"].sum() / max(batch.rows, 1)}
