"""Checks of the arguments of HugeCTR's programs, where they are given.

    whole("CreateSolver", "batchsize", 1.5, 1)
        -> CreateSolver: batchsize=1.5: must be a whole number of at least 1

Numbers of NumPy come back as Python's own, as settings are written into YAML.
"""

import math
import os
from enum import Enum
from numbers import Real
from operator import index
from typing import Any, TypeVar

from recapp.errors import ConfigError

MOST = 2**63 - 1
Member = TypeVar("Member", bound=Enum)


def whole(owner: str, name: str, value: Any, least: int = 0) -> int:
    """Return a whole number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: Its value.
        least: The smallest that is allowed.

    Raises:
        ConfigError: The value is no whole number, or too small.
    """
    made = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if made is None or not least <= made <= MOST:
        raise ConfigError(f"{owner}: {name}={value}: must be a whole number of at least {least}")
    return made


def number(owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf) -> float:
    """Return a finite number; arguments are those of `whole`.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: Its value.
        least: The smallest that is allowed.
        below: A number that the value must be smaller than.

    Raises:
        ConfigError: The value is no finite number, or out of these bounds.
    """
    right = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not right or not least <= value < below:
        bounds = f" of at least {least:g}" if least > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{owner}: {name}={value}: must be a finite number{bounds}")
    return value if type(value) is int else float(value)


def switch(owner: str, name: str, value: Any) -> bool:
    """Return True or False.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{owner}: {name}={value}: must be True or False")
    return bool(value)


def text(owner: str, name: str, value: Any) -> str:
    """Return a text that is not empty; a path is one, too.

    Raises:
        ConfigError: The value is no such text.
    """
    made = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(made, str) or not made:
        raise ConfigError(f"{owner}: {name}={value!r}: must be a text that is not empty")
    return made


def member(owner: str, name: str, value: Any, kind: type[Member]) -> Member:
    """Return a member of an enumeration.

    Raises:
        ConfigError: The value is no member.
    """
    if not isinstance(value, kind):
        known = ", ".join(kind.__members__)
        raise ConfigError(f"{owner}: {name}={value}: must be a {kind.__name__}: {known}")
    return value
