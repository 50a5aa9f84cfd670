"""TorchRec's DLRM: the same model as `recapp.DLRM`, with TorchRec's modules, parameter names and
order of pairs, so that state dicts load from TorchRec and into TorchRec.

    logits_B1 = DLRM(collection, 13, [512, 128], [512, 1])(dense_features, sparse_features)
    loss, (loss, logits, labels) = DLRMTrain(dlrm)(batch)

`recapp.DLRM` takes a `Batch`, allows tables of different widths and copies less;
`python -m recapp.train` trains that class.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.models.layers import DotInteraction
from recapp.models.widths import check_widths
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import BagCollection

Activation = Callable[[Tensor], Tensor]


class Perceptron(nn.Module):
    """A linear layer and an activation.

    Args:
        in_size: The columns of the input.
        out_size: The columns of the output.
        bias: Whether the linear layer has a bias.
        activation: The function after the linear layer.
        device: The device of the parameters.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias, device=device)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return the activations, [..., out_size]."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """A stack of perceptrons.

    Args:
        in_size: The columns of the input.
        layer_sizes: The columns of each layer's output, first to last.
        bias: Whether the linear layers have biases.
        activation: The function after each linear layer, or "relu" or "sigmoid".
        device: The device of the parameters.

    Raises:
        ConfigError: The activation is unknown, or a width is no whole number of at least 1.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | Activation = torch.relu,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        named = {"relu": torch.relu, "sigmoid": torch.sigmoid}
        if isinstance(activation, str) and activation not in named:
            raise ConfigError(f"MLP: activation={activation}: name relu or sigmoid, or a function")
        function = named[activation] if isinstance(activation, str) else activation
        widths = [in_size, *check_widths("layer_sizes", layer_sizes)]
        layers = [Perceptron(*sizes, bias, function, device) for sizes in pairwise(widths)]
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the last layer's activations, [B, layer_sizes[-1]]."""
        output: Tensor = self._mlp(input)
        return output


class SparseArch(nn.Module):
    """The tables: ids to vectors, [B, F, D].

    Args:
        embedding_bag_collection: The tables, all of width D.

    Raises:
        ConfigError: The widths differ.
    """

    def __init__(self, embedding_bag_collection: BagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        dims = {t.name: t.embedding_dim for t in embedding_bag_collection.tables()}
        if len(set(dims.values())) > 1:
            raise ConfigError(
                f"TorchRec's DLRM needs tables of one embedding_dim, and these have {dims}: use "
                "recapp.DLRM, which takes several"
            )
        self.D = next(iter(dims.values()))
        self.sparse_feature_names = [x.output for x in embedding_bag_collection.lookups]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors, [B, F, D], in the order of `sparse_feature_names`."""
        pooled = self.embedding_bag_collection(features).values()
        return pooled.reshape(-1, len(self.sparse_feature_names), self.D)


class DenseArch(nn.Module):
    """The bottom MLP: dense features to a vector, [B, D].

    Args:
        in_features: The number of dense features I.
        layer_sizes: The columns of each layer; the last is D.
        device: The device of the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """Return the vectors, [B, D]."""
        vectors: Tensor = self.model(features)
        return vectors


class InteractionArch(nn.Module):
    """Concatenates the dense vector and the dot products of all pairs, [B, D + F + F (F - 1) / 2].

    Pairs are in the order of the upper triangle, row by row, as in TorchRec; the published model
    takes the lower triangle.

    Args:
        num_sparse_features: The number of vectors F of the tables.
    """

    order_P: Tensor

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction = DotInteraction(self.F + 1)
        low_P, high_P = torch.triu_indices(self.F + 1, self.F + 1, 1, device="cpu")
        order_P = high_P * (high_P - 1) // 2 + low_P  # the place of the pair in the lower triangle
        self.register_buffer("order_P", order_P, persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Return the dense vector and the dot products, concatenated.

        Args:
            dense_features: The output of the bottom MLP, [B, D].
            sparse_features: The pooled vectors, [B, F, D].
        """
        vectors_BFD = torch.cat([dense_features[:, None], sparse_features], 1)
        dots_BP = self.interaction(vectors_BFD).index_select(1, self.order_P)
        return torch.cat([dense_features, dots_BP], 1)


class OverArch(nn.Module):
    """The top MLP: the concatenation to logits, [B, 1].

    Args:
        in_features: The columns of the input.
        layer_sizes: The columns of each layer, at least two; a ReLU follows each but the last.
        device: The device of the parameters.

    Raises:
        ConfigError: There are fewer than two layers.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ConfigError(
                f"over_arch_layer_sizes={list(layer_sizes)}: name two layers or more, e.g. [64, 1]"
            )
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, [B, layer_sizes[-1]]."""
        logits: Tensor = self.model(features)
        return logits


class DLRM(nn.Module):
    """Click logits from dense features and ids.

    Args:
        embedding_bag_collection: The tables, all of width D.
        dense_in_features: The number of dense features I of a sample.
        dense_arch_layer_sizes: The columns of the bottom MLP's layers; the last is D.
        over_arch_layer_sizes: The columns of the top MLP's layers; the last is 1.
        dense_device: The device of the dense parameters.

    Raises:
        ConfigError: The widths do not fit each other.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        D = self.sparse_arch.D
        if list(dense_arch_layer_sizes)[-1:] != [D]:
            raise ConfigError(
                f"dense_arch_layer_sizes={list(dense_arch_layer_sizes)}: the last must be the "
                f"tables' embedding_dim, {D}"
            )
        count = len(self.sparse_arch.sparse_feature_names)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch = InteractionArch(count)
        inputs = D + self.inter_arch.interaction.pairs
        self.over_arch = OverArch(inputs, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits, [B, 1].

        Args:
            dense_features: The dense features, [B, I].
            sparse_features: The ids, with stride B.
        """
        pooled_BFD = self.sparse_arch(sparse_features)
        bottom_BD = self.dense_arch(dense_features)
        logits: Tensor = self.over_arch(self.inter_arch(bottom_BD, pooled_BFD))
        return logits


class DLRMTrain(nn.Module):
    """A DLRM and its loss, for a train pipeline.

    Args:
        dlrm_module: The model.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean binary cross-entropy, and (loss, logits, labels) without gradients.

        Args:
            batch: A batch with `dense_features`, `sparse_features` and `labels`.
        """
        logits_B = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits_B, batch.labels.float())
        return loss, (loss.detach(), logits_B.detach(), batch.labels.detach())
