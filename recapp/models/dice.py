"""Dice, the activation of DIN (arXiv 1706.06978, section 5.3).

    f(s) = p s + (1 - p) a s,  p = sigmoid((s - mean) / sqrt(variance + 1e-8))

It is a PReLU with a learnt slope a whose bend is smooth, and lies at the mean of the data instead
of at 0. Training takes mean and variance of each column from the rows of the batch, and keeps
running ones for evaluation.

Shapes: N rows, U columns.
"""

import torch
from torch import Tensor, nn

ADDED = 1e-8
"""The number added to a variance, as published."""
MOMENTUM = 0.1
"""The weight of a batch in the running statistics, that of torch's batch normalisation."""


class Dice(nn.Module):
    """The activation Dice: [N, U] -> [N, U]. Slopes start at 0, as in the authors' code.

    A batch without rows leaves the running statistics as they are; a single row has the variance 0.

    Args:
        columns: The columns of the input, U.
    """

    mean_U: Tensor
    variance_U: Tensor
    running_statistics = ("mean_U", "variance_U")
    """The buffers that ranks average (`recapp/trainer/step_of_ranks.py`)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.slope_U = nn.Parameter(torch.zeros(columns))
        self.register_buffer("mean_U", torch.zeros(columns))
        self.register_buffer("variance_U", torch.ones(columns))

    def forward(self, input_NU: Tensor) -> Tensor:
        """Return the activated columns, [N, U]."""
        share_NU = torch.sigmoid(self._normal(input_NU))
        return input_NU * torch.addcmul(self.slope_U, share_NU, 1 - self.slope_U)

    def _normal(self, input_NU: Tensor) -> Tensor:
        """Return the columns minus their means, divided by their deviations."""
        if not self.training or not input_NU.shape[0]:
            return (input_NU - self.mean_U) * (self.variance_U + ADDED).rsqrt()
        # autocast computes in 16 bits, which is too few for a variance
        wide_NU = input_NU.to(self.mean_U.dtype)
        # torch's batch norm computes x * scale + shift, which loses digits where a mean is large
        # beside the deviation; a constant taken off before changes neither result nor gradient
        with torch.no_grad():
            centre_U = wide_NU.mean(0)
        normal_NU: Tensor
        # without running statistics, as torch's batch norm would keep the unbiased variance
        normal_NU, rest_U, scale_U = torch.native_batch_norm(
            wide_NU - centre_U, None, None, None, None, True, 0.0, ADDED
        )
        with torch.no_grad():
            variance_U = (scale_U**-2 - ADDED).clamp_(min=0)
            self.mean_U.lerp_(centre_U + rest_U, MOMENTUM)
            self.variance_U.lerp_(variance_U, MOMENTUM)
        return normal_NU

    def extra_repr(self) -> str:
        """Return the number of columns as text."""
        return str(self.slope_U.shape[0])
