"""The Poisson bootstrap: the spread of metrics over samples of the rows, in one pass.

A bootstrap draws N of N rows with replacement; a row is then drawn Poisson(1) times, nearly. So
each row gets R such numbers as weights, and each metric becomes R values. Sums need no other row,
so batches and ranks do not matter, and memory is bounded (Hanley and MacGibbon 2006, "Creating
non-parametric bootstrap samples using Poisson frequencies"; Chamandy et al. 2012, "Estimating
Uncertainty for Massive Data Streams").

The numbers of a row follow from a hash of its label, numbers and ids. Thus they are the same for
another model, number of ranks and batch size, and the difference of two models on the same samples
of rows is known by subtraction. Rows that are equal in everything are drawn together.

Shapes: B samples of a batch on this rank, L ids, R replicates.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from recapp.sparse.batch import Batch
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


def keys_of_rows(batch: Batch) -> Tensor:
    """Return a hash of the label, the numbers and the ids of each row, int64 [B]."""
    rows = batch.rows
    parts = [
        batch.dense_BI.float(),
        *(label_B.float()[:, None] for label_B in batch.labels.values()),
    ]
    bits_BC = torch.cat(parts, 1).view(torch.int32).long()
    places_C = torch.arange(1, bits_BC.shape[1] + 1, device=bits_BC.device) * STEP
    keys_B = _mixed(bits_BC + places_C).sum(1)
    lengths_FB = batch.sparse.lengths().long()
    at_L = torch.arange(len(lengths_FB), device=keys_B.device).repeat_interleave(lengths_FB)
    if rows and len(at_L):
        feature_L = at_L // rows + 1
        hashed_L = _mixed(batch.sparse.values().long() ^ (feature_L * FACTORS[0]))
        keys_B.index_add_(0, at_L % rows, hashed_L)
    return _mixed(keys_B)


def poisson_weights(keys_B: Tensor, replicates: int) -> Tensor:
    """Return numbers with the distribution Poisson(1), fp64 [B, R], equal for equal keys."""
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

    def __init__(self, metrics: Mapping[str, Metric], replicates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metrics: Any = torch.nn.ModuleDict(metrics)
        self.replicates = replicates
        zeros = torch.zeros(replicates, dtype=torch.float64)
        self.add_state("weights", zeros, dist_reduce_fx="sum")

    def update(self, sample: Sample) -> None:
        """Add a batch.

        Args:
            sample: The samples.
        """
        weight_BR = poisson_weights(keys_of_rows(sample.batch), self.replicates)
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

    def compute(self) -> Tensor:
        """Return the number of drawn rows of each sample, [R]."""
        return self.weights

    def record(self) -> dict[str, Any]:
        """Return the values of each metric, and the number of drawn rows: two models that were
        measured on the same rows have the same numbers of drawn rows.
        """
        drawn = self.compute().tolist()
        values = {name: metric.compute().tolist() for name, metric in self.metrics.items()}
        return {"drawn": drawn, "metrics": values}
