"""A request in the form that all protocols share: raw rows, and a function that writes the answer.

body -> Question(table, write)        the protocol's own file reads it
outputs by name -> write -> Reply     and writes the answer
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
        write: Writes the answer from the outputs of the rows by name, each [B] on the CPU.
    """

    table: RawTable
    write: Callable[[Mapping[str, Tensor]], Reply]
