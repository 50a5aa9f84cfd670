"""Check plain settings against a record (`recapp/settings/records.py`) before ranks start: unknown
keys, missing keys, wrong values.

    composed settings -> unknown keys refused, defaults filled in, values read by their annotations
                      -> settings

Every command checks the settings that Hydra composed, or those of a checkpoint after the command
line has changed them. The check imports no `_target_`: importing torch and Lightning takes seconds.
Its arguments are checked where it is called (`recapp/run/constructors.py`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from traceback import extract_tb
from typing import Any

from recapp.errors import ConfigError, alike, listed, meant, suggest
from recapp.settings.records import (
    ABSENT,
    TARGET,
    Constructor,
    closest,
    fields_of,
    item_of,
    parts_of,
    records_of,
    to_plain,
    values_of,
)
from recapp.settings.values import read, shown, takes

MISSING = "???"  # Hydra's value of a setting that must be given
# keys of Hydra's own instantiate, which recapp does not call
CONVERSIONS = ("_partial_", "_args_", "_recursive_", "_convert_")
OF_TABLES_THAT_GROW = (  # fields of `recapp.tables.dynamic.DynamicRows`, which is not imported here
    "expected_rows",
    "max_rows",
    "seen",
    "counter",
    "sketch_width",
    "eviction",
    "ttl_steps",
)
# arguments of `recapp.tasks.click.ClickTask`, which is not imported here
OF_CLICKS = ("label_smoothing", "pos_weight", "focal", "ranking", "soft_labels")
INSTEAD = {  # pattern of the full name -> the end of a sentence that begins with the name
    r"((model|trainer|optimizer)\.)?(loss|criterion)(_\w+)?(\..+)?": (
        "the loss is that of the task, for task=click binary cross-entropy of the logits "
        "(task.focal and others change it); "
        "a task of your own computes any (CONTRIBUTING.md, A task)"
    ),
    r"dataset\.\w*neg\w*": (
        "recapp makes no negative samples: write them into the logs, as rows with label 0"
    ),
    r"metrics\..+": (
        "metrics.names chooses of those of the task, +metrics.extra.NAME._target_=... adds one of "
        "torchmetrics, and a task of your own measures others "
        "(CONTRIBUTING.md, A task)"
    ),
}


def checked(config: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the settings of a command, complete and with the types that the record names.

    Args:
        config: Plain settings, resolved. A setting that must be given may still be `???`.
        kind: The record of the command's settings.

    Raises:
        ConfigError: A setting does not exist, is missing, or has a value that is not allowed.
    """
    return _Checker(kind).group(dict(config), kind, "")


def names_of(kind: type) -> list[str]:
    """Return the dotted names of a record's settings and groups, but not of a `_target_`'s
    arguments.
    """
    return list(_names(kind, ""))


def may_be_set(config: Mapping[str, Any], kind: type) -> list[str]:
    """Return the dotted settings that the groups of plain settings may have, written or not.

    Args:
        config: Plain settings of a command.
        kind: The record of the command's settings.
    """
    names = []
    for key, (annotation, _) in fields_of(kind).items():
        kinds = records_of(annotation)
        if kinds and isinstance(value := config.get(key), dict):
            names += [f"{key}.{field}" for field in fields_of(closest(value, kinds))]
    return names


def override_names(overrides: Iterable[str]) -> list[str]:
    """Return the setting or group that each override of a command line sets, adds or removes:
    `plan` for `+plan=mixed`, `optimizer/sparse` for `optimizer/sparse=sgd`.
    """
    return [override.lstrip("+~").partition("=")[0] for override in overrides]


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown setting, with the names that are close to it.

    Args:
        name: The setting, dotted.
        known: The settings that exist, dotted.
    """
    known = list(known)
    home, _, leaf = name.rpartition(".")
    if home == "tables.dynamic" and leaf in OF_TABLES_THAT_GROW:
        return f"{name}: only dynamic tables have this setting: add tables=dynamic"
    if home == "task" and leaf in OF_CLICKS:
        return f"{name}: is of task=click: another task has no such loss or label"
    rules = "optimizer.sparse.tables"
    if name.startswith(f"{rules}."):
        table = name.removeprefix(f"{rules}.").partition(".")[0]
        return f'{name}: tables are named in a mapping: "{rules}={{{table}: {{rule: sgd}}}}"'
    same = [key for key in known if key.rpartition(".")[2] == leaf][:3]
    beside, close = _close(name, known)
    if similar := close or same or (not beside and _close(home, known)[1]):
        return f"unknown setting {name}: {meant(similar)}"
    instead = next((says for pattern, says in INSTEAD.items() if re.fullmatch(pattern, name)), "")
    there = beside or _close(home, known)[0] or known
    return f"unknown setting {name}: {instead or listed(there)}"


def _close(name: str, known: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the settings in the group of a setting, and those among them with a similar name."""
    home, _, leaf = name.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == home}
    return list(beside.values()), [beside[match] for match in alike(leaf, beside)]


# ---- one group after the other


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Check a command's settings, from its groups down to single values.

    Args:
        command: The record of the command's settings.
    """

    command: type

    def value(self, value: Any, annotation: Any, name: str) -> Any:
        """Check a setting, which may be a group, and return its value."""
        parts = parts_of(annotation)
        if value == MISSING or (value is None and type(None) in parts):
            return value
        kinds = records_of(annotation)
        if kinds and isinstance(value, dict):
            return self.group(value, closest(value, kinds), name)
        if kinds and not {*parts} - {*kinds, type(None)}:
            raise ConfigError(f"{name}={value}: is a group of settings, {name}.NAME=...")
        if Constructor in parts:
            return _constructor(value, name)
        if inner := values_of(annotation):
            if not isinstance(value, dict):
                key = TARGET if inner is Constructor else next(iter(fields_of(inner)))
                raise ConfigError(
                    f"{name}={value}: is a mapping of names to settings, +{name}.NAME.{key}=..."
                )
            return {
                str(key): self.value(item, inner, f"{name}.{key}") for key, item in value.items()
            }
        items = [i for i in map(item_of, parts) if dataclasses.is_dataclass(i)]
        if items and isinstance(value, list):
            return [
                self.value(item, items[0], f"{name}[{number}]") for number, item in enumerate(value)
            ]
        return read(value, annotation, name)

    def group(self, value: dict[str, Any], kind: type, name: str) -> dict[str, Any]:
        """Check the settings of a dataclass and return them, with its defaults for missing ones."""
        fields = fields_of(kind)
        prefix = f"{name}." if name else ""
        for key in value:
            if key not in fields:
                value = value | {key: self.other(value[key], kind, str(key), prefix)}
        for key, (annotation, default) in fields.items():
            if key in value:
                value = value | {key: self.value(value[key], annotation, f"{prefix}{key}")}
            elif default is dataclasses.MISSING:
                raise ConfigError(f"{prefix}{key} must be given: {prefix}{key}=...")
            elif default is not ABSENT:
                value = value | {key: to_plain(default)}
        return value

    def other(self, value: Any, kind: type, key: str, prefix: str) -> Any:
        """Check a setting that is no field of the dataclass but an argument of its constructor
        (`others`), and return its value.
        """
        refused = getattr(kind, "refused", {})
        if key in refused:
            raise ConfigError(f"{prefix}{key}={shown(value)}: cannot be set: {refused[key]}")
        every = names_of(self.command)
        names = [name for name in every if name.startswith(prefix)]
        names = names or [f"{prefix}{field}" for field in fields_of(kind)]  # for an item of a list
        if others := getattr(kind, "others", None):
            home, _, target = others.rpartition(".")
            hints = {
                name: hint
                for name, hint in takes(getattr(import_module(home), target)).items()
                if name not in refused
            }
            if key in hints:
                return read(value, hints[key], f"{prefix}{key}")
            names += [f"{prefix}{name}" for name in hints]
        raise ConfigError(unknown(f"{prefix}{key}", names if prefix else every))


def _constructor(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get(TARGET), str):
        raise ConfigError(
            f"{name}={value}: must name a constructor, {name}.{TARGET}=package.module.Class"
        )
    for key in value:
        if key in CONVERSIONS:
            raise ConfigError(
                f"unknown setting {name}.{key}: only {TARGET} and the constructor's arguments "
                "are read"
            )
    return value


def find_constructor(target: str, name: str) -> Any:
    """Return the constructor that a `_target_` names.

    Args:
        target: A dotted path.
        name: The setting that holds it.

    Raises:
        ConfigError: The module does not exist, cannot be imported, or has no callable of this name.
    """
    if not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(
            f"{name}.{TARGET}={target}: no such constructor: must be a module and a class, such as "
            "torch.optim.Adam"
        )
    home, _, leaf = target.rpartition(".")
    home = home or leaf
    try:
        module = import_module(home)
    except ImportError as error:
        missing = error.name or home
        itself = home == missing or home.startswith(f"{missing}.")
        why = f"there is no module {home}" if itself else f"{home} imports {missing}: {error}"
        raise ConfigError(f"{name}.{TARGET}={target}: no such constructor: {why}") from None
    except Exception as error:
        raise ConfigError(
            f"{name}.{TARGET}={target}: {home} cannot be imported: {told(error)}"
        ) from error
    if not callable(getattr(module, leaf, None)):
        known = [each for each in dir(module) if not each.startswith("_")]
        raise ConfigError(
            f"{name}.{TARGET}={target}: no such constructor in {home}; {suggest(leaf, known)}"
        )
    return getattr(module, leaf)


def told(error: Exception) -> str:
    """Return an exception of the user's own code in one line: its type, its text, its line."""
    *_, last = extract_tb(error.__traceback__)
    words = [f"{type(error).__name__}:" if str(error) else type(error).__name__]
    return " ".join([*words, *str(error).split(), f"({last.filename}:{last.lineno})"])


# ---- the records' fields and annotations


def _names(kind: type, prefix: str) -> Iterable[str]:
    for key, (annotation, _) in fields_of(kind).items():
        yield f"{prefix}{key}"
        for part in records_of(annotation):
            if str not in parts_of(annotation):  # no file's
                yield from _names(part, f"{prefix}{key}.")
