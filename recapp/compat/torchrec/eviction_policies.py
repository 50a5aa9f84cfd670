"""TorchRec's eviction policies: they choose which ids keep the rows of a full table, and which ids
may get a row at all.

A policy scores ids by their number of occurrences and by the step of their last use. An unsharded
table calls it at every interval (`recapp/compat/torchrec/managed_collisions.py`). For a sharded
table it becomes the setting `eviction` of a dynamic table (`recapp/engine/admission.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from recapp.console import note_once
from recapp.errors import ConfigError
from recapp.tables.dynamic import Eviction

Threshold = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""Takes the count of each id of an interval; returns the ids that may have rows, as a mask or as
indices, and the threshold.
"""
COUNTS = "counts"
LAST_USED = "last_access_iter"


class MCHEvictionPolicy(ABC):
    """Chooses the ids that keep the rows of a full table.

    Args:
        threshold_filtering_func: Chooses the ids of an interval that count, by their occurrences
            in the interval (`Threshold`); None takes all. A table with such a function uses
            numbers of ids as rows even if it is sharded.

    Raises:
        ConfigError: `threshold_filtering_func` is no function.
    """

    keeps: ClassVar[tuple[str, ...]]
    """The values that a table keeps for each row: its count, the step of its last use, or both."""
    eviction: Eviction
    """The nearest policy that dynamic tables have."""

    def __init__(self, threshold_filtering_func: Threshold | None = None) -> None:
        if threshold_filtering_func is not None and not callable(threshold_filtering_func):
            raise ConfigError(
                f"threshold_filtering_func is a {type(threshold_filtering_func).__name__}: give a "
                "function of counts such as average_threshold_filter, or None"
            )
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return a score for each id; the ids of the lowest scores lose their rows.

        Args:
            counts_N: The number of occurrences of each id.
            last_used_N: The step in which each id occurred last.
            now: The number of this step.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids that occurred least often; in dynamic tables, the ids that were used in the
    fewest steps. The argument is that of `MCHEvictionPolicy`.
    """

    keeps = (COUNTS,)
    eviction = Eviction.LFU

    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return the counts."""
        return counts_N


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids that were not used for the longest time.

    Args:
        decay_exponent: A number above 0; it does not change the order of the ids.
        threshold_filtering_func: The filter of ids by their counts (`MCHEvictionPolicy`).

    Raises:
        ConfigError: `decay_exponent` is out of range, or `threshold_filtering_func` is no function.
    """

    keeps = (LAST_USED,)
    eviction = Eviction.LRU

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Threshold | None = None
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent > 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be above 0 for LRU_EvictionPolicy, "
                "because at 0 the time since the last use has no effect"
            )

    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return the step of the last use of each id."""
        return last_used_N


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids of the lowest score: the count divided by a power of the steps since the last
    use.

    Dynamic tables use their nearest policy, and recapp prints a note about this once. For the
    default exponent this is lru: of the rows that TorchRec keeps, lru keeps 60 to 85 % and lfu 40
    to 75 % (`docs/from_torchrec.md`). For the exponent 0 it is lfu.

    Args:
        decay_exponent: The power, at least 0.
        threshold_filtering_func: The filter of ids by their counts (`MCHEvictionPolicy`).

    Raises:
        ConfigError: `decay_exponent` is out of range, or `threshold_filtering_func` is no function.
    """

    keeps = (COUNTS, LAST_USED)

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Threshold | None = None
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent >= 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be at least 0 for "
                "DistanceLFU_EvictionPolicy"
            )
        self._decay_exponent = decay_exponent
        self.eviction = Eviction.LRU if decay_exponent else Eviction.LFU

    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return counts that decay with the steps since the last use."""
        return counts_N / (now - last_used_N + 1).double().pow(self._decay_exponent)


def note_of_nearest(policy: MCHEvictionPolicy) -> None:
    """Print a note, once, if sharded tables replace this policy by the nearest one."""
    if isinstance(policy, DistanceLFU_EvictionPolicy) and policy.eviction is Eviction.LRU:
        note_once(
            "DistanceLFU_EvictionPolicy: sharded tables evict the rows unused for the longest "
            "time, like LRU_EvictionPolicy, their nearest policy; LFU_EvictionPolicy counts uses"
        )


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Keep the ids whose count is above a multiple of the mean count.

    Args:
        id_counts: The count of each id.
        threshold_skew_multiplier: The multiple.
    """
    threshold = id_counts.sum() * (threshold_skew_multiplier / max(1, id_counts.numel()))
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the ids whose count is above the mean count.

    Args:
        id_counts: The count of each id.
    """
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Keep an id if at least one of its occurrences is drawn, by torch's generator.

    Args:
        id_counts: The count of each id.
        per_id_probability: The probability with which each occurrence is drawn.
    """
    missed_N = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float).pow(id_counts)
    threshold_N = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - missed_N > threshold_N, threshold_N
