"""Batch norm that also trains on a batch of one row.

Ranks may get one row of the last batch of an epoch. Its variance is zero, and `nn.BatchNorm1d`
refuses to train on it.

Shapes: B batch, C channels.
"""

from torch import Tensor, nn
from torch.nn import functional


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d`, [B, C] or [B, C, columns], which normalises a single value of each channel
    by the running mean and variance, and leaves these as they are.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised channels."""
        if not self.training or input.numel() != input.shape[1]:
            return super().forward(input)
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
