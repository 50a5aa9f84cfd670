"""TorchRec's eviction policies: which ids keep the rows of a full table, and which get one at all.

A policy scores ids by how often they occurred and when they did last. An unsharded table asks it at
every interval (`recapp/compat/managed_collisions.py`); of a table that is sharded it is a setting,
`eviction`, and the rows of dynamic tables leave by it (`recapp/engine/admission.py`).
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
"""Takes the count of each id of an interval; returns which may have rows, as a mask or by number,
and the threshold.
"""
COUNTS = "counts"
LAST_USED = "last_access_iter"


class MCHEvictionPolicy(ABC):
    """Which ids keep the rows of a full table.

    Args:
        threshold_filtering_func: Which ids of an interval count (`Threshold`), by their counts in
            it; None counts all. A table with one is looked up by numbers where it is sharded, too.

    Raises:
        ConfigError: `threshold_filtering_func` is no function.
    """

    keeps: ClassVar[tuple[str, ...]]
    """What is kept for each row: its count, when it was last used, or both."""
    eviction: Eviction
    """The policy of a dynamic table that is nearest."""

    def __init__(self, threshold_filtering_func: Threshold | None = None) -> None:
        if threshold_filtering_func is not None and not callable(threshold_filtering_func):
            raise ConfigError(
                f"threshold_filtering_func is a {type(threshold_filtering_func).__name__}: give a "
                "function of counts such as average_threshold_filter, or None"
            )
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return a score for each id; the lowest ones leave.

        Args:
            counts_N: How often each occurred.
            last_used_N: In which step it did last.
            now: The number of this step.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Those leave that occurred least often; of dynamic tables, those that were used in the fewest
    steps. Arguments as of `MCHEvictionPolicy`.
    """

    keeps = (COUNTS,)
    eviction = Eviction.LFU

    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return the counts."""
        return counts_N


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Those leave that were not used for the longest time.

    Args:
        decay_exponent: Above 0, where it does not change the order.
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
                f"decay_exponent={decay_exponent}: must be above 0 for LRU_EvictionPolicy, which "
                "else would not evict the rows unused for the longest time"
            )

    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return when the ids were used."""
        return last_used_N


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Those leave whose count, divided by a power of the steps since their last use, is lowest.

    Dynamic tables take the nearest policy that they have, and a note says so once: of rows kept
    with the default exponent, lru keeps 60 to 85 % and lfu 40 to 75 % (`docs/from_torchrec.md`);
    with the exponent 0 it is lfu.

    Args:
        decay_exponent: At least 0.
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
    """Say once that sharded tables evict by another policy, where they do."""
    if isinstance(policy, DistanceLFU_EvictionPolicy) and policy.eviction is Eviction.LRU:
        note_once(
            "DistanceLFU_EvictionPolicy: rows leave sharded tables by when they were used last, as "
            "with LRU_EvictionPolicy, the nearest policy there; LFU_EvictionPolicy counts uses"
        )


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Let ids count that occurred more often than a multiple of the mean count.

    Args:
        id_counts: The count of each id.
        threshold_skew_multiplier: The multiple.
    """
    threshold = id_counts.sum() * (threshold_skew_multiplier / max(1, id_counts.numel()))
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Let ids count that occurred more often than the mean.

    Args:
        id_counts: The count of each id.
    """
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Let an id count if one of its occurrences is drawn, by torch's generator.

    Args:
        id_counts: The count of each id.
        per_id_probability: The probability with which each occurrence is drawn.
    """
    missed_N = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float).pow(id_counts)
    threshold_N = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - missed_N > threshold_N, threshold_N
