"""Constructors that settings name by `_target_`, called."""

from inspect import signature
from typing import Any

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor

REFUSALS = (TypeError, ValueError, ImportError)  # the last one of a logger that is not installed
MISCONFIGURED = "MisconfigurationException"  # of Lightning, which scoring does without


def make(settings: Constructor, setting: str, *args: Any, **extra: Any) -> Any:
    """Call the constructor that settings name, with their arguments.

    Hydra's own `instantiate` would pass its list type instead of plain lists and wrap the
    exceptions of constructors.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        args: Arguments that recapp passes by position.
        extra: Arguments that recapp passes by name.

    Raises:
        ConfigError: There is no such constructor, it takes no such argument, or refuses its value.
    """
    wanted = settings.arguments
    target = find_constructor(settings.target, setting)
    try:
        signature(target).bind(*args, **wanted, **extra)
    except TypeError as e:
        raise ConfigError(f"{setting} ({settings.target}): {e}") from None
    return construct(target, f"{setting} ({settings.target})", *args, **wanted, **extra)


def construct(target: Any, setting: str, *args: Any, **extra: Any) -> Any:
    """Call a constructor, and turn its exceptions into a ConfigError.

    Exceptions of libraries are mistakes in the settings as well.

    Args:
        target: The constructor.
        setting: The dotted name of its settings, for errors.
        args: Its arguments by position.
        extra: Its arguments by name.

    Raises:
        ConfigError: The constructor refuses its arguments.
    """
    try:
        return target(*args, **extra)
    except RecappError:
        raise
    except Exception as e:
        if isinstance(e, REFUSALS) or any(c.__name__ == MISCONFIGURED for c in type(e).__mro__):
            raise ConfigError(f"{setting}: {' '.join(str(e).split())}") from e
        raise
