"""TorchRec's cross networks, its DLRM and its DeepFM, with its constructors and parameter names, so
that state dicts load from TorchRec and into TorchRec.

    logits_B1 = DLRM(collection, 13, [512, 128], [512, 1])(dense_features, sparse_features)
    loss, (loss, logits, labels) = DLRMTrain(dlrm)(batch)

    DeepFM(dense_module)([a_BND, b_BMC])          any module over all columns side by side
    FactorizationMachine()([a_BND, b_BMC])        the sum over all pairs of columns, [B, 1]

`DLRM_DCN` and `DLRM_Projection` are DLRMs with another interaction. Every layer of a cross network
multiplies its input x with the first input x0:

| network                  | x' =                                                       |
|--------------------------|------------------------------------------------------------|
| `CrossNet`               | x0 * (W x + b) + x                                         |
| `LowRankCrossNet`        | x0 * (W V x + b) + x                                       |
| `VectorCrossNet`         | x0 (w . x) + b + x                                         |
| `LowRankMixtureCrossNet` | sum of G_e(x) x0 * (U_e g(C_e g(V_e x)) + b) + x           |

Sources: arXiv 1708.05123 (vector) and arXiv 2008.13535 (the others).

recapp's own models (`recapp/models`), which `python -m recapp.train` trains, take a `Batch`, allow
tables of different widths and copy less; `model=deepfm` is the published model, with weights of ids
and one product for each pair of vectors.

Shapes: B batch, N columns, R rank, E experts, I dense features, D columns of a vector, F features.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear

from recapp.errors import ConfigError
from recapp.models.fm import fm_term
from recapp.models.layers import DotInteraction, check_widths
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import BagCollection


class _CrossNetwork(nn.Module):
    """The base of cross networks: layers that get x0 and the output of the layer before.

    Args:
        in_features: The columns of the input, N.
        num_layers: The number of layers.
        sizes: Other sizes by name; each must be at least 1.
    """

    def __init__(self, in_features: int, num_layers: int, **sizes: int) -> None:
        super().__init__()
        for name, size in {"in_features": in_features, "num_layers": num_layers, **sizes}.items():
            if size < (0 if name == "num_layers" else 1):
                raise ConfigError(f"{type(self).__name__}: {name}={size}: must be at least 1")
        self._num_layers = num_layers

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer, [B, N], for an input [B, N]."""
        crossed_BN = input
        for layer in range(self._num_layers):
            crossed_BN = self._cross(layer, input, crossed_BN)
        return crossed_BN

    @abstractmethod
    def _cross(self, layer: int, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        """Return the output of a layer, [B, N], from x0 and its input x."""

    def _weights(self, *shape: int) -> nn.ParameterList:
        return nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(shape)))
            for _ in range(self._num_layers)
        )

    def _biases(self, *shape: int) -> nn.ParameterList:
        return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(self._num_layers))


class CrossNet(_CrossNetwork):
    """Cross layers with a full matrix: x' = x0 * (W x + b) + x.

    Args:
        in_features: The columns of the input, N.
        num_layers: The number of layers.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__(in_features, num_layers)
        self.kernels = self._weights(in_features, in_features)
        self.bias = self._biases(in_features, 1)

    def _cross(self, layer: int, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        mapped_BN = linear(x_BN, self.kernels[layer], self.bias[layer].squeeze(1))
        return first_BN * mapped_BN + x_BN


class LowRankCrossNet(_CrossNetwork):
    """Cross layers with a product of two narrow matrices: x' = x0 * (W V x + b) + x.

    Args:
        in_features: The columns of the input, N.
        num_layers: The number of layers.
        low_rank: The columns of V x, R.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__(in_features, num_layers, low_rank=low_rank)
        self.W_kernels = self._weights(in_features, low_rank)
        self.V_kernels = self._weights(low_rank, in_features)
        self.bias = self._biases(in_features)

    def _cross(self, layer: int, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        low_BR = linear(x_BN, self.V_kernels[layer])
        return first_BN * linear(low_BR, self.W_kernels[layer], self.bias[layer]) + x_BN


class VectorCrossNet(_CrossNetwork):
    """Cross layers with a vector: x' = x0 (w . x) + b + x.

    Args:
        in_features: The columns of the input, N.
        num_layers: The number of layers.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__(in_features, num_layers)
        self.kernels = self._weights(in_features, 1)
        self.bias = self._biases(in_features, 1)

    def _cross(self, layer: int, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        crossed_BN: Tensor = first_BN * (x_BN @ self.kernels[layer]) + self.bias[layer].squeeze(1)
        return crossed_BN + x_BN


class LowRankMixtureCrossNet(_CrossNetwork):
    """Cross layers with experts: x' = sum of G_e(x) x0 * (U_e g(C_e g(V_e x)) + b) + x. G is the
    softmax of one linear layer for each expert; a single expert has no gate.

    Args:
        in_features: The columns of the input, N.
        num_layers: The number of layers.
        num_experts: The number of experts, E.
        low_rank: The columns of V x, R.
        activation: The activation g.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__(in_features, num_layers, num_experts=num_experts, low_rank=low_rank)
        self.U_kernels = self._weights(num_experts, in_features, low_rank)
        self.V_kernels = self._weights(num_experts, low_rank, in_features)
        self.bias = self._biases(in_features, 1)
        self.gates = (
            nn.ModuleList(nn.Linear(in_features, 1, bias=False) for _ in range(num_experts))
            if num_experts > 1
            else None
        )
        self._activation = activation
        self.C_kernels = self._weights(num_experts, low_rank, low_rank)

    def _cross(self, layer: int, first_BN: Tensor, x_BN: Tensor) -> Tensor:
        low_EBR = self._activation(x_BN @ self.V_kernels[layer].mT)
        inner_EBR = self._activation(low_EBR @ self.C_kernels[layer].mT)
        mapped_EBN = inner_EBR @ self.U_kernels[layer].mT + self.bias[layer].squeeze(1)
        mixed_BN: Tensor = mapped_EBN[0]
        if self.gates is not None:
            share_BE = torch.cat([gate(x_BN) for gate in self.gates], 1).softmax(1)
            mixed_BN = (mapped_EBN * share_BE.T[:, :, None]).sum(0)
        return first_BN * mixed_BN + x_BN


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
        functions = {"relu": torch.relu, "sigmoid": torch.sigmoid}
        if isinstance(activation, str) and activation not in functions:
            raise ConfigError(f"MLP: activation={activation}: name relu or sigmoid, or a function")
        function = functions[activation] if isinstance(activation, str) else activation
        widths = [in_size, *check_widths("layer_sizes", layer_sizes)]
        layers = [Perceptron(*sizes, bias, function, device) for sizes in pairwise(widths)]
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the last layer's activations, [B, layer_sizes[-1]]."""
        output: Tensor = self._mlp(input)
        return output


def _one_dim(model: str, collection: BagCollection) -> int:
    dims = {t.name: t.embedding_dim for t in collection.tables()}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"{model} needs tables of one embedding_dim, and these have {dims}: use recapp.DLRM, "
            "which takes several"
        )
    return next(iter(dims.values()))


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
        self.D = _one_dim("TorchRec's DLRM", embedding_bag_collection)
        self.sparse_feature_names = [x.output for x in embedding_bag_collection.lookups]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors, [B, F, D], in the order of `sparse_feature_names`."""
        pooled = self.embedding_bag_collection(features).values()
        return pooled.reshape(-1, len(self.sparse_feature_names), self.D)


class _Layers(nn.Module):
    model: nn.Module

    def forward(self, features: Tensor) -> Tensor:
        """Return the output of the layers, [B, columns of the last]."""
        output: Tensor = self.model(features)
        return output


class DenseArch(_Layers):
    """The bottom MLP: dense features [B, I] to vectors [B, D].

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


class InteractionDCNArch(nn.Module):
    """Crosses the dense vector and the vectors of the tables, side by side.

    Args:
        num_sparse_features: The number of vectors F of the tables.
        crossnet: A cross network over F * D + D columns.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Return the crossed columns, [B, F * D + D].

        Args:
            dense_features: The output of the bottom MLP, [B, D].
            sparse_features: The pooled vectors, [B, F, D].
        """
        crossed: Tensor = self.crossnet(side_by_side(dense_features, sparse_features))
        return crossed


class InteractionProjectionArch(nn.Module):
    """Concatenates the dense vector and the products of two projections of all vectors.

    Args:
        num_sparse_features: The number of vectors F of the tables.
        interaction_branch1: A module from F * D + D columns to F1 * D.
        interaction_branch2: A module from F * D + D columns to D * F2.
    """

    def __init__(
        self,
        num_sparse_features: int,
        interaction_branch1: nn.Module,
        interaction_branch2: nn.Module,
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Return [B, D + F1 * F2].

        Args:
            dense_features: The output of the bottom MLP, [B, D].
            sparse_features: The pooled vectors, [B, F, D].
        """
        columns = side_by_side(dense_features, sparse_features)
        samples, dim = dense_features.shape
        first = self.interaction_branch1(columns).reshape(samples, -1, dim)
        second = self.interaction_branch2(columns).reshape(samples, dim, -1)
        return torch.cat([dense_features, torch.bmm(first, second).flatten(1)], 1)


def side_by_side(dense_features: Tensor, sparse_features: Tensor) -> Tensor:
    """Return a dense vector [B, D] and vectors [B, F, D] as [B, D + F * D]."""
    return torch.cat([dense_features, sparse_features.flatten(1)], 1)


class OverArch(_Layers):
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
        interaction = InteractionArch(count)
        self.inter_arch: InteractionArch | InteractionDCNArch | InteractionProjectionArch
        self.inter_arch = interaction
        inputs = D + interaction.interaction.pairs
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


class DLRM_DCN(DLRM):
    """A DLRM whose interaction is a cross network of low rank, as in MLPerf's DLRM-DCNv2.

    Args:
        embedding_bag_collection: See `DLRM`.
        dense_in_features: See `DLRM`.
        dense_arch_layer_sizes: See `DLRM`.
        over_arch_layer_sizes: See `DLRM`.
        dcn_num_layers: The number of cross layers.
        dcn_low_rank_dim: The rank of a cross layer.
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
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        count = self.inter_arch.F
        columns = (count + 1) * self.sparse_arch.D
        crosses = LowRankCrossNet(columns, dcn_num_layers, dcn_low_rank_dim).to(dense_device)
        self.inter_arch = InteractionDCNArch(count, crosses)
        self.over_arch = OverArch(columns, over_arch_layer_sizes, dense_device)


class DLRM_Projection(DLRM):
    """A DLRM whose interaction multiplies two projections of all vectors.

    Args:
        embedding_bag_collection: See `DLRM`.
        dense_in_features: See `DLRM`.
        dense_arch_layer_sizes: See `DLRM`.
        over_arch_layer_sizes: See `DLRM`.
        interaction_branch1_layer_sizes: The columns of the layers of the first projection; the last
            is a multiple of D.
        interaction_branch2_layer_sizes: Those of the second projection.
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
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        dim = self.sparse_arch.D
        count = self.inter_arch.F
        branches = []
        for number, sizes in enumerate(
            (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes), 1
        ):
            if not sizes or sizes[-1] % dim:
                raise ConfigError(
                    f"interaction_branch{number}_layer_sizes={list(sizes)}: the last must be a "
                    f"multiple of the tables' embedding_dim, {dim}"
                )
            branches.append(DenseArch((count + 1) * dim, sizes, dense_device))
        self.inter_arch = InteractionProjectionArch(count, *branches)
        products = interaction_branch1_layer_sizes[-1] * interaction_branch2_layer_sizes[-1]
        self.over_arch = OverArch(dim + products // dim**2, over_arch_layer_sizes, dense_device)


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


def _columns(embeddings: Sequence[Tensor]) -> Tensor:
    return torch.cat([vectors.flatten(1) for vectors in embeddings], 1)


class DeepFM(nn.Module):
    """The deep term of DeepFM: a module over all embeddings side by side.

    Args:
        dense_module: A module from [B, columns] to its output.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the output of the module for embeddings [B, ...] of any widths."""
        output: Tensor = self.dense_module(_columns(embeddings))
        return output


class FactorizationMachine(nn.Module):
    """The sum of the products of all pairs of columns, as in TorchRec. A published factorisation
    machine adds products of vectors.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the sums, [B, 1], for embeddings [B, ...] of any widths."""
        return fm_term(_columns(embeddings).unsqueeze(2)).unsqueeze(1)


class DeepFMSparseArch(nn.Module):
    """The tables: ids to pooled vectors.

    Args:
        embedding_bag_collection: The tables.
    """

    def __init__(self, embedding_bag_collection: BagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors by feature."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DeepFMDenseArch(_Layers):
    """Two linear layers with ReLU: dense features [B, I] to vectors [B, D].

    Args:
        in_features: The number of dense features I.
        hidden_layer_size: The width of the first layer.
        embedding_dim: The width of the second layer, D.
    """

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )


class FMInteractionArch(nn.Module):
    """Concatenates the dense vector, a deep term and the factorisation machine.

    Args:
        fm_in_features: The columns of the dense vector and of all pooled vectors.
        sparse_feature_names: The features of the pooled vectors.
        deep_fm_dimension: The width of the deep term.
    """

    def __init__(
        self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int
    ) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU())
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """Return [B, D + deep_fm_dimension + 1]; without features, the dense vectors.

        Args:
            dense_features: The output of `DeepFMDenseArch`, [B, D].
            sparse_features: The pooled vectors.
        """
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], 1)


class DeepFMOverArch(_Layers):
    """A linear layer and a sigmoid: the probability of a click, [B, 1].

    Args:
        in_features: The columns of the input.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())


class SimpleDeepFMNN(nn.Module):
    """Probabilities of clicks from dense features and ids, by the terms of DeepFM.

    Args:
        num_dense_features: The number of dense features I.
        embedding_bag_collection: The tables, all of width D.
        hidden_layer_size: The width of the hidden layer over the dense features.
        deep_fm_dimension: The width of the deep term.

    Raises:
        ConfigError: The widths of the tables differ.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: BagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        dim = _one_dim("SimpleDeepFMNN", embedding_bag_collection)
        names = [x.output for x in embedding_bag_collection.lookups]
        self.sparse_arch = DeepFMSparseArch(embedding_bag_collection)
        self.dense_arch = DeepFMDenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch(dim * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = DeepFMOverArch(dim + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return probabilities, [B, 1].

        Args:
            dense_features: The dense features, [B, I].
            sparse_features: The ids, with stride B.
        """
        vectors_BD = self.dense_arch(dense_features)
        interactions = self.inter_arch(vectors_BD, self.sparse_arch(sparse_features))
        probabilities_B1: Tensor = self.over_arch(interactions)
        return probabilities_B1
