"""Names of settings and constructors in earlier versions of recapp.

    in a checkpoint or resolved.yaml    trainer: {look_ahead: 2}    read as engine: {look_ahead: 2}
    on the command line, in conf/       trainer.look_ahead=2        refused with the new name

Stored settings get their new names before any other code reads them.
"""

from collections.abc import Collection, Mapping
from typing import Any

SETTINGS = {
    "launch.keep_freed_memory": "engine.keep_freed_memory",
    "topology.backend": "engine.backend",
    "topology.payload": "engine.payload",
    "topology.transport": "engine.transport",
    "trainer.compile": "engine.compile",
    "trainer.look_ahead": "engine.look_ahead",
}
"""The new name of each renamed setting, by its old name."""

MODULES = {
    "recapp.compat.rowwise_adagrad": "recapp.compat.keyed_optimizers",
    "recapp.models.dlrm": "recapp.models.published_dlrm",
    "recapp.trainer.dynamic_rows": "recapp.trainer.callbacks",
    "recapp.trainer.performance": "recapp.trainer.callbacks",
    "recapp.trainer.performance_recorder": "recapp.trainer.callbacks",
}
"""The new name of each renamed module that holds constructors, by its old name."""


def new_name(name: str, known: Collection[str]) -> str | None:
    """Return the present name of a renamed setting, or None.

    Args:
        name: The setting, dotted.
        known: The settings of the command, dotted. A command without the group of the new name may
            have the setting at its top: `recapp.bench` has `keep_freed_memory`.
    """
    new = SETTINGS.get(name)
    if new is None or name in known:
        return None
    return next((each for each in (new, new.partition(".")[2]) if each in known), None)


def name_of_today(name: str) -> str:
    """Return the present name of a setting in a stored command line."""
    return SETTINGS.get(name, name)


def target_of_today(target: str) -> str:
    """Return the present name of the constructor that a `_target_` names.

    In a program, `recapp.models.dlrm` is TorchRec's path (`recapp/compat/torchrec_names.py`).
    """
    module, _, name = target.rpartition(".")
    return f"{MODULES.get(module, module)}.{name}" if module else target


def with_names_of_today(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings under the present names of settings and constructors.

    Args:
        stored: Plain settings of a checkpoint or of `resolved.yaml`, which are not checked yet.
            They are not changed.
    """
    settings = {key: _with_new_targets(value) for key, value in stored.items()}
    for old, new in SETTINGS.items():
        group, _, key = old.partition(".")
        if isinstance(settings.get(group), dict) and key in settings[group]:
            _move(settings, settings[group].pop(key), new)
    return settings


def _move(settings: dict[str, Any], value: Any, name: str) -> None:
    """Set a setting, unless it is set. If its group is new, the group's option is `default`."""
    group, _, key = name.partition(".")
    if group not in settings and isinstance(settings.get("choices"), dict):
        settings["choices"].setdefault(group, "default")
    home = settings.setdefault(group, {})
    if isinstance(home, dict):
        home.setdefault(key, value)


def _with_new_targets(value: Any) -> Any:
    """Return a copy in which every `_target_` has its present name."""
    if isinstance(value, list):
        return [_with_new_targets(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _with_new_targets(item) for key, item in value.items()}
    if isinstance(target := made.get("_target_"), str):
        made["_target_"] = target_of_today(target)
    return made
