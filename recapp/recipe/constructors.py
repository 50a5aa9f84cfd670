"""Call the constructors that settings name by `_target_`."""

from inspect import signature
from typing import Any

from recapp.errors import ConfigError, RecappError
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor

REFUSALS = (TypeError, ValueError, ImportError)  # ImportError: a logger is not installed
MISCONFIGURED = "MisconfigurationException"  # Lightning's; scoring does not import it


def make(settings: Constructor, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call the constructor that settings name, with their arguments.

    Hydra's own `instantiate` would pass its list type instead of plain lists and wrap the
    exceptions of constructors.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        args: Positional arguments that recapp adds.
        extra: Keyword arguments that recapp adds.

    Raises:
        ConfigError: The constructor does not exist, does not take an argument, or refuses a value.
    """
    wanted = settings.arguments
    target = find_constructor(settings.target, setting)
    try:
        signature(target).bind(*args, **wanted, **extra)
    except TypeError as e:
        raise ConfigError(f"{setting} ({settings.target}): {e}") from None
    return construct(target, f"{setting} ({settings.target})", *args, **wanted, **extra)


def construct(target: Any, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call a constructor, and turn exceptions that wrong settings cause into a ConfigError.

    These are the types of `REFUSALS` and Lightning's MisconfigurationException.

    Args:
        target: The constructor.
        setting: The dotted name of the constructor's settings, for errors.
        args: Its positional arguments.
        extra: Its keyword arguments.

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
