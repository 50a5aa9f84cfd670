"""A request as the worker sees it, whatever its protocol: raw rows, and how it is answered.

body -> Question(table, write)    the protocol's own file reads it
logits [B] -> write -> Reply      and writes the answer
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recapp.dataset.raw_rows import RawTable

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Args:
        body: Its bytes.
        content_type: What they are.
        headers: Further headers.
    """

    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks.

    Args:
        table: Its rows, under the names of the model's schema.
        write: Writes the answer from their logits, [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Tensor], Reply]


def scores_of(logits_B: Tensor) -> Tensor:
    """Return the probabilities of logits, as `Scorer.scores` does."""
    return torch.sigmoid(logits_B.float())
