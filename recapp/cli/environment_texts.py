"""Refuse texts of the environment where they may be secrets.

    callbacks.notify: {_target_: own.Notify, url: "${oc.env:HOOK}"}

Settings are stored in checkpoints and `resolved.yaml`, and logged to loggers. What a setting of
recapp's own takes from the environment, such as a path, is one of them. But only the class that a
`_target_` names knows whether an argument is a secret.
"""

import re
from collections.abc import Iterator
from typing import Any

from recapp.errors import ConfigError
from recapp.settings.records import TARGET

# a backslash before a reference makes it a plain text
OF_ENVIRONMENT = re.compile(r"(?<!\\)(?:\\\\)*\$\{.*?oc\.env\s*:\s*([^,}\s]+)")


def refuse_secrets(written: Any, resolved: Any) -> None:
    """Refuse texts that a constructor would get from the environment.

    Args:
        written: Composed settings as plain values, with their references.
        resolved: The same settings with the values of the references.

    Raises:
        ConfigError: An argument of a constructor is such a text.
    """
    for name, variable in _texts(written, resolved, "", of_constructor=False):
        raise ConfigError(
            f"{name}=${{oc.env:{variable}}}: its value would be stored and logged, and may be a "
            f'secret: leave it out, and let the class read os.environ["{variable}"], as most '
            "loggers do by themselves"
        )


def _texts(
    written: Any, resolved: Any, name: str, *, of_constructor: bool
) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the variable of each text that a constructor would get."""
    if isinstance(written, dict) and isinstance(resolved, dict):
        within = of_constructor or TARGET in written
        for key in written.keys() & resolved.keys():
            inner = f"{name}.{key}" if name else str(key)
            yield from _texts(written[key], resolved[key], inner, of_constructor=within)
    elif isinstance(written, list) and isinstance(resolved, list):
        for one, other in zip(written, resolved, strict=True):
            yield from _texts(one, other, name, of_constructor=of_constructor)
    elif of_constructor and isinstance(resolved, str):
        yield from ((name, found) for found in OF_ENVIRONMENT.findall(str(written))[:1])
