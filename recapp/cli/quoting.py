"""Say which sign of a setting Hydra's grammar does not take, and how the setting is quoted."""

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from recapp.settings.values import in_quotes, in_shell

_PLAIN = r"[^A-Za-z0-9_/\\.+$%*@?|: \t-]"  # signs that Hydra reads only in quotes or as brackets


def unreadable(override: str) -> str:
    """Describe what is wrong with a setting that Hydra cannot read, and the form that works.

    Args:
        override: The setting, as in the command line.
    """
    name, equals, text = override.partition("=")
    begin = f"cannot read {override!r}: "
    if not equals or not _is_read(f"{name}=x"):
        return f"{begin}settings are key=value, and a key has letters, digits, _ and dots"
    signs = " ".join(dict.fromkeys(re.findall(_PLAIN, text)))
    needs = f"a value with {signs} needs quotes" if signs else "the value needs quotes"
    if text[:1] in ("[", "{"):
        needs = "a list is [a,b] and a mapping {a: b}; as one text it needs quotes"
    return f"{begin}{needs}: {in_shell(f'{name}={in_quotes(text, evaluated=False)}')}"


def _is_read(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True
