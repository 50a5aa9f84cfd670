"""Checks of the arguments of HugeCTR's programs, at the call that passes them.

    whole("CreateSolver", "batchsize", 1.5, 1)
        -> CreateSolver: batchsize=1.5: must be a whole number of at least 1

The checks turn numbers of NumPy into Python's own, because recapp writes settings into YAML.
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
    """Check and return a whole number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.

    Raises:
        ConfigError: The value is no whole number, or out of bounds.
    """
    made = index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if made is None or not least <= made <= MOST:
        raise ConfigError(f"{owner}: {name}={value}: must be a whole number of at least {least}")
    return made


def number(owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf) -> float:
    """Check and return a finite number.

    Args:
        owner: The class or function that has the argument, for errors.
        name: The name of the argument.
        value: The value of the argument.
        least: The smallest allowed value.
        below: The value must be smaller than this.

    Raises:
        ConfigError: The value is no finite number, or out of bounds.
    """
    right = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not right or not least <= value < below:
        bounds = f" of at least {least:g}" if least > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ConfigError(f"{owner}: {name}={value}: must be a finite number{bounds}")
    return value if type(value) is int else float(value)


def switch(owner: str, name: str, value: Any) -> bool:
    """Check and return True or False; 1 and 0 count as these.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{owner}: {name}={value}: must be True or False")
    return bool(value)


def text(owner: str, name: str, value: Any) -> str:
    """Check and return a text that is not empty; a path is a text, too.

    Raises:
        ConfigError: The value is no such text.
    """
    made = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(made, str) or not made:
        raise ConfigError(f"{owner}: {name}={value!r}: must be a text that is not empty")
    return made


def member(owner: str, name: str, value: Any, kind: type[Member]) -> Member:
    """Check and return a member of an enumeration.

    Raises:
        ConfigError: The value is no member of it.
    """
    if not isinstance(value, kind):
        known = ", ".join(kind.__members__)
        raise ConfigError(f"{owner}: {name}={value}: must be a {kind.__name__}: {known}")
    return value
