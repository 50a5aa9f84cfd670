"""TorchRec's cross networks, with its constructors and its parameter names, so that state dicts
load from TorchRec and into TorchRec. Every layer multiplies its input x with the first input x0:

| network                  | x' =                                                       |
|--------------------------|------------------------------------------------------------|
| `CrossNet`               | x0 * (W x + b) + x                                         |
| `LowRankCrossNet`        | x0 * (W V x + b) + x                                       |
| `VectorCrossNet`         | x0 (w . x) + b + x                                         |
| `LowRankMixtureCrossNet` | sum of G_e(x) x0 * (U_e g(C_e g(V_e x)) + b) + x           |

Sources: arXiv 1708.05123 (vector) and arXiv 2008.13535 (the others). `recapp/models/crosses.py` has
the layers of recapp's own models, which are faster.

Shapes: B batch, N columns, R rank, E experts.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from recapp.errors import ConfigError


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
        """Make a parameter for each layer, drawn as Xavier normal."""
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
