"""The settings of a run that differ from the defaults, as a table.

A chosen option of a group is one row, `plan  mixed`. It explains all settings in the option's file,
so a setting has a row of its own only if it also differs from this file.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column
from recapp.reporting import page

CHOICES = "choices"  # the key in resolved.yaml of the options of groups
ABSENT = object()
Defaults = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""A function from the options of groups to the default settings under these options, in the form of
`resolved.yaml`: `{"plan": "mixed"}` -> `{"plan": {...}, "tables": {...}, ...}`.
"""


def settings_table(settings: Mapping[str, Any], defaults: Defaults) -> str:
    """Return the settings that differ from the defaults as HTML.

    Args:
        settings: The content of `resolved.yaml`; empty if there is no such file.
        defaults: Composes the default settings for the comparison.
    """
    if not settings:
        return page.paragraph("Its settings were not left (resolved.yaml).", "quiet")
    own = _chosen(settings)
    usual = _chosen(defaults({}))
    rows = [
        {"name": group, "own": own.get(group), "default": usual.get(group)}
        for group in dict.fromkeys((*own, *usual))
        if own.get(group) != usual.get(group)
    ]
    set_ = dict(_flat(settings))
    as_chosen = dict(_flat(defaults(own)))
    rows += [
        {"name": name, "own": _shown(set_, name), "default": _shown(as_chosen, name)}
        for name in dict.fromkeys((*set_, *as_chosen))
        if set_.get(name, ABSENT) != as_chosen.get(name, ABSENT)
    ]
    if not rows:
        return page.paragraph("None: everything is as it comes.")
    columns = [Column("name", "setting"), Column("own", "this run"), Column("default", "default")]
    return page.table(rows, columns, f"{len(rows)} settings" if len(rows) > page.LONG else "")


def _chosen(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of each group."""
    found = settings.get(CHOICES)
    return dict(found) if isinstance(found, Mapping) else {}


def _shown(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as one line of YAML; None if there is no setting of this name."""
    value = settings.get(name, ABSENT)
    if value is ABSENT or isinstance(value, str):
        return None if value is ABSENT else str(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name, without the options chosen for groups."""
    for name, value in settings.items():
        if not above and name == CHOICES:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
