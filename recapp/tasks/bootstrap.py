"""The Poisson bootstrap: the spread of metrics over samples of the rows, in one pass.

A bootstrap draws N of N rows with replacement; a row is then drawn Poisson(1) times, nearly. So
each row gets R such numbers as weights, and each metric becomes R values. Sums need no other row,
so batches and ranks do not matter, and memory is bounded (Hanley and MacGibbon 2006, "Creating
non-parametric bootstrap samples using Poisson frequencies"; Chamandy et al. 2012, "Estimating
Uncertainty for Massive Data Streams").

The numbers of a row follow from its place in the data set. Thus they are the same for another model
(also one of other columns), number of ranks and batch size, and the difference of two models on the
same samples of rows is known by subtraction.

Shapes: B samples of a batch on this rank, R replicates.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from recapp.errors import ConfigError
from recapp.tasks.added import Detail, Sample


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as a signed one."""
    return number - 2**64 if number >= 2**63 else number


STEP = _signed(0x9E3779B97F4A7C15)  # constants of SplitMix64 (Steele, Lea and Flood 2014)
FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
BITS = 31  # of a uniform number
LIMITS = [  # P(Poisson(1) <= n), in units of 2^-31
    round(2**BITS * math.exp(-1) * sum(1 / math.factorial(k) for k in range(n + 1)))
    for n in range(12)
]


def _mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of int64 numbers."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    """Return int64 numbers shifted to the right, filled with zeros."""
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)


def poisson_weights(row_numbers_B: Tensor, replicates: int) -> Tensor:
    """Return numbers with the distribution Poisson(1), fp64 [B, R], which follow from the number of
    a row.
    """
    keys_B = _mixed(row_numbers_B * STEP)
    numbers_R = torch.arange(1, replicates + 1, device=keys_B.device) * STEP
    uniform_BR = _shifted(_mixed(keys_B[:, None] + numbers_R), 64 - BITS)
    limits = torch.tensor(LIMITS, device=keys_B.device)
    return torch.bucketize(uniform_BR, limits, right=True).double()


class Bootstrap(Detail):
    """The values of metrics over samples of the rows.

    Args:
        metrics: Metrics by name, each made with `replicates`.
        replicates: The number of samples of the rows, R.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    full_state_update = False
    weights: Tensor
    rows: Tensor

    def __init__(self, metrics: Mapping[str, Metric], replicates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metrics: Any = torch.nn.ModuleDict(metrics)
        self.replicates = replicates
        zeros = torch.zeros(replicates, dtype=torch.float64)
        self.add_state("weights", zeros, dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(1, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, sample: Sample) -> None:
        """Add a batch.

        Args:
            sample: The samples.

        Raises:
            ConfigError: The batch has no numbers of its rows.
        """
        row_numbers_B = sample.batch.row_numbers_B
        if row_numbers_B is None:
            raise ConfigError(
                f"metrics.bootstrap={self.replicates}: draws rows by number, and the batches "
                "have none: read them with ClickData(number_rows=True)"
            )
        bits_B = sample.label_B.float().view(torch.int32).long()
        self.rows += _mixed(_mixed(row_numbers_B * STEP) ^ bits_B).sum()
        weight_BR = poisson_weights(row_numbers_B, self.replicates)
        self.weights += weight_BR.sum(0)
        if sample.weight_B is not None:
            weight_BR = weight_BR * sample.weight_B.double()[:, None]
        for metric in self.metrics.values():
            metric.update(sample.output_B, sample.label_B, weights_B=weight_BR)

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        for metric in self.metrics.values():
            metric.reset()

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the number of drawn rows of each sample, [R], and the sum of a hash of the number
        and the label of each row, int64 [1].
        """
        return self.weights, self.rows

    def record(self) -> dict[str, Any]:
        """Return the values of each metric, the numbers of drawn rows, and the sum of hashes of the
        rows: two models that were measured on the same rows agree in both.
        """
        drawn, rows = self.compute()
        values = {name: metric.compute().tolist() for name, metric in self.metrics.items()}
        return {"drawn": drawn.tolist(), "rows": int(rows), "metrics": values}
