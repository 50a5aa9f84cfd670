"""Annotations of values that settings of several packages share: ranges, words, lists."""

from typing import Annotated, Literal

from recapp.settings.values import Within

Positive = Annotated[int, Within(1)]
Natural = Annotated[int, Within(0)]
Width = Annotated[int, Within(1, 2**31 - 1)]  # numbers in an embedding vector
Rows = Annotated[int, Within(1, 2**48)]  # rows of a table; no machine holds more
Timeout = Annotated[float, Within(above=0, most=31_536_000)]  # seconds, at most a year
Share = Annotated[float, Within(above=0, most=1)]
Paths = str | tuple[str, ...]
Storage = Literal["fp32", "fp64", "fp16", "bf16"]
IdRule = Literal["error", "hash", "clamp", "drop"]
