"""Pictures of what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(verb: str, rows: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """none yet"""
    return []
