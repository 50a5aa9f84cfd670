"""RankMixer: "RankMixer: Scaling Up Ranking Models in Industrial Recommenders", arXiv 2507.15551.

    fields -- side by side -- cut into T pieces -- a linear map each -- X_0, T tokens of D columns

    S = LN(mix(X) + X)         mix has no parameters: token h of the result is piece h of all tokens
    X = LN(FFN_t(S_t) + S_t)   each token t has an FFN of its own: D -> k D -> D, with GELU

    logits_B = linear(mean of the T tokens)

Mixing cuts each token into as many pieces as there are tokens, so T must divide D. With `experts`
above 1 each token has several FFNs, and a router with a ReLU weighs them: sum_j ReLU(r_tj) FFN_tj.
The sum of these weights is an extra loss, which makes most of them zero. All experts are computed
here, so routing changes the function and not the cost. The paper trains with two routers and serves
with one. This model has one.

Shapes: B batch, T tokens, D columns of a token, K columns of all fields, P columns of a piece, E
experts.
"""

from collections.abc import Callable, Mapping
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.errors import ConfigError
from recapp.models.fields import FieldVectors, Numbers
from recapp.models.layers import xavier, xavier_linear
from recapp.models.model_checks import check_divides, check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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
        made_GBD: Tensor = self.down(functional.gelu(self.up(each_GBD)))
        made_TEBD = made_GBD.view(tokens, self.experts, samples, dim)
        return (made_TEBD * weights_TBE.transpose(1, 2)[..., None]).sum(1), weights_TBE


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
        made_TBD, weights_TBE = self.ffn(mixed_TBD)
        return self.second_norm(made_TBD + mixed_TBD), weights_TBE


class RankMixer(nn.Module):
    """Click logits from tokens that mix without parameters.

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
        check_settings(width=width, blocks=blocks, expansion=expansion, experts=experts)
        check_divides("model.tokens", tokens, "model.width", width)
        if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or sparsity < 0:
            raise ConfigError(f"model.sparsity={sparsity}: must be a number of at least 0")
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
        logits_B: Tensor = self.score(tokens_TBD.mean(0)).squeeze(1)
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
