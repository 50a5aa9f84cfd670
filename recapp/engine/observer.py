"""How measuring attaches to the engine: without replacing any of its methods."""

from collections.abc import Callable
from dataclasses import dataclass


def _ignore_begin() -> None:
    """Do nothing."""


def _ignore_end(part: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class EngineObserver:
    """Two functions that a sharded collection calls while it works; this default ignores the calls.

    Args:
        begins: Called when the collection begins to exchange a batch and when its `forward`
            begins: what came before was somebody else's work.
        ends: Called with the name of a part of the work when that part has ended
            (`recapp/reporting/phases.py` lists the names).
    """

    begins: Callable[[], None] = _ignore_begin
    ends: Callable[[str], None] = _ignore_end
