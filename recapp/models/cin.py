"""The compressed interaction network of xDeepFM, arXiv 1803.05170, section 3.

    X^0_BFD - X^1_BHD - X^2_BHD - ...       X^k_h = sum over i, j of W^k_hij X^(k-1)_i * X^0_j
                 |         |
              sums over D, side by side: every layer is connected with the output

The product * is that of columns, and layers have no activation (the paper found the identity best).

Shapes: B batch, F fields, D columns of a vector, H vectors of a layer, G vectors of the layer
before.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from recapp.models.model_checks import check_widths


class CIN(nn.Module):
    """Sums of the columns of all layers of a compressed interaction network.

    The input is [B, F, D], the output [B, sum of layers].

    Args:
        fields: The number of vectors of the input, F.
        layers: The number of vectors of each layer, H, first to last.
        setting: The name of `layers` in the configuration, for messages.

    Raises:
        ConfigError: A width is no whole number of at least 1.
    """

    def __init__(self, fields: int, layers: Sequence[int], setting: str = "cin_layers") -> None:
        super().__init__()
        widths = [fields, *check_widths(setting, layers)]
        self.layers = nn.ModuleList(
            CINLayer(before, width, fields) for before, width in pairwise(widths)
        )
        self.columns = sum(layers)

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return the sums of the columns of all layers, [B, sum of layers]."""
        # The columns of a vector go the same way by themselves, like samples.
        first_BDF = vectors_BFD.transpose(1, 2).contiguous()
        last_BDH = first_BDF
        sums: list[Tensor] = []
        for layer in self.layers:
            last_BDH = layer(last_BDH, first_BDF)
            sums.append(last_BDH.sum(1))
        return torch.cat(sums, 1)


class CINLayer(nn.Module):
    """One layer: [B, D, G] and [B, D, F] -> [B, D, H].

    Args:
        before: The number of vectors of the layer before, G.
        width: The number of vectors of this layer, H.
        fields: The number of vectors of the input, F.
    """

    def __init__(self, before: int, width: int, fields: int) -> None:
        super().__init__()
        self.weight_HGF = nn.Parameter(torch.empty(width, before, fields))
        if not self.weight_HGF.is_meta:
            nn.init.normal_(self.weight_HGF, 0.0, (2 / (before * fields + width)) ** 0.5)

    def forward(self, last_BDG: Tensor, first_BDF: Tensor) -> Tensor:
        """Return the vectors of this layer, [B, D, H].

        The double sum can be computed in two orders with equally many products. This takes the
        order that needs less memory.
        """
        width, before, fields = self.weight_HGF.shape
        if width < fields:
            mixed_BDK = linear(first_BDF, self.weight_HGF.view(width * before, fields))
            mixed_BDHG = mixed_BDK.view(*mixed_BDK.shape[:2], width, before)
            return (mixed_BDHG * last_BDG[:, :, None]).sum(3)
        outer_BDGF = last_BDG[..., None] * first_BDF[:, :, None]
        return linear(outer_BDGF.flatten(2), self.weight_HGF.view(width, before * fields))

    def extra_repr(self) -> str:
        """Return the numbers of vectors as text."""
        width, before, fields = self.weight_HGF.shape
        return f"{before} x {fields} vectors, {width} out"
