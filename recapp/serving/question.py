"""A request in the form that all protocols share: raw rows, and a function that writes the answer.

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
        body: The bytes of the answer.
        content_type: The media type of the body.
        headers: Further headers.
    """

    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of a request, and the writer of its answer.

    Args:
        table: The rows, with the column names of the model's schema.
        write: Writes the answer from the logits of the rows, [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Tensor], Reply]


def scores_of(logits_B: Tensor) -> Tensor:
    """Return the probabilities of logits, as `Scorer.scores` does."""
    return torch.sigmoid(logits_B.float())
