"""Records of settings: a frozen dataclass for each group of `conf/`. It is in the package that the
group configures.

    plain settings            {"dim": 16, ...}          record(TablesOfDataset, plain, "tables")
    a record in hand          tables.dim                attributes that mypy sees
    plain settings again      {"dim": 16, ...}          to_plain(tables), with the same keys

A field is a setting. Its annotation holds the allowed values (`recapp/settings/values.py`), its
default equals that of the group's first option, and a comment in `conf/`, where users look,
explains it. A setting without a field is refused, so every accepted setting has an effect. Settings
that depend on each other are checked in `__post_init__`.

Every command checks the settings that Hydra composed, or those of a checkpoint after the command
line has changed them, before ranks start: unknown keys, missing keys, wrong values. The check
imports no `_target_`: importing torch and Lightning takes seconds. Its arguments are checked where
it is called (`recapp/run/constructors.py`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from importlib import import_module
from traceback import extract_tb
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from recapp.errors import ConfigError, alike, listed, meant, suggest
from recapp.settings.values import read, shown, takes

T = TypeVar("T")
TARGET = "_target_"
# keys of Hydra's own instantiate, which recapp does not call
CONVERSIONS = ("_partial_", "_args_", "_recursive_", "_convert_")


ABSENT: Any = object()  # the default of a setting that plain settings may leave out


def absent(default: Any = None, *, null: bool = False) -> Any:
    """Return a field for a setting that only some options of a group have.

    Plain settings leave the field out if it has its default.

    Args:
        default: The value in the record if no option sets the field.
        null: Whether a user may write null; if not, only the record may hold None.
    """
    return dataclasses.field(default=default, metadata={"absent": True, "null": null})


def composed() -> Any:
    """Return a field for a group that Hydra always composes and that has no default."""
    return dataclasses.field(metadata={"absent": True, "null": True})


def not_a_setting() -> Any:
    """Return a field with a mapping that plain settings carry but that no user sets."""
    return dataclasses.field(default_factory=dict, metadata={"setting": False})


def in_hand() -> Any:
    """Return a field that only the record in hand has, such as a fact found in data; None at
    first. Plain settings do not carry it.
    """
    return dataclasses.field(
        default=None, compare=False, repr=False, metadata={"setting": False, "plain": False}
    )


@dataclasses.dataclass(frozen=True)
class Constructor:
    """A constructor that settings name, with its arguments.

    Args:
        target: The dotted path, `_target_`.
        arguments: The other keys of the mapping.
    """

    target: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the mapping that settings have: `_target_` and arguments."""
        return {TARGET: self.target, **self.arguments}

    def without(self, *names: str) -> "Constructor":
        """Return the constructor without some arguments."""
        arguments = {name: value for name, value in self.arguments.items() if name not in names}
        return Constructor(self.target, arguments)


def constructor(plain: Any, name: str) -> Constructor:
    """Return the constructor of a mapping with a `_target_`.

    Args:
        plain: The mapping.
        name: The setting that holds it.

    Raises:
        ConfigError: It names no constructor, or has a key of Hydra's own `instantiate`.
    """
    if not isinstance(plain, Mapping) or not isinstance(plain.get(TARGET), str):
        raise ConfigError(
            f"{name}={plain}: must name a constructor, {name}.{TARGET}=package.module.Class"
        )
    for key in plain:
        if key in CONVERSIONS:
            raise ConfigError(
                f"unknown setting {name}.{key}: only {TARGET} and the constructor's arguments "
                "are read"
            )
    arguments = {key: value for key, value in plain.items() if key != TARGET}
    return Constructor(plain[TARGET], arguments)


@lru_cache
def fields_of(kind: type) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each setting of a record, by the setting's name.

    Args:
        kind: The class of the record. A field `as_` is the setting `as`.
    """
    hints = get_type_hints(kind, include_extras=True)
    settings = {}
    for each in dataclasses.fields(kind):
        if not each.metadata.get("setting", True):
            continue
        factory = each.default_factory
        default = each.default if factory is dataclasses.MISSING else factory()
        hint = hints[each.name]
        if each.metadata.get("absent"):
            default = ABSENT
            if not each.metadata["null"]:
                allowed = [part for part in parts_of(hint) if part is not type(None)]
                hint = Union[tuple(allowed)]  # noqa: UP007 (made of a tuple)
        settings[each.name.rstrip("_")] = hint, default
    return settings


def parts_of(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def records_of(annotation: Any) -> list[Any]:
    """Return the records among the alternatives of an annotation. A constructor is none."""
    parts = parts_of(annotation)
    return [part for part in parts if dataclasses.is_dataclass(part) and part is not Constructor]


def closest(value: Mapping[str, Any], kinds: list[Any]) -> Any:
    """Return the record, out of several, whose fields match most keys."""
    return max(kinds, key=lambda kind: len(set(fields_of(kind)) & set(value)))


def values_of(annotation: Any) -> Any:
    """Return the annotation of the values of a mapping from names to constructors or to records;
    else None.
    """
    for part in parts_of(annotation):
        inner = get_args(part)[1] if get_origin(part) is dict else None
        if dataclasses.is_dataclass(inner):
            return inner
    return None


# ---- plain settings and records


def record(kind: type[T], plain: Mapping[str, Any], name: str = "", *, check: bool = False) -> T:
    """Return the record of plain settings.

    Args:
        kind: The class of the record.
        plain: The settings. A key that is no setting goes into the field `not_a_setting` of the
            same name, or else into `more`, the constructor's other arguments.
        name: The dotted name of the settings, for errors; empty for a command.
        check: Whether to check each setting by itself, and to convert it to the type that its
            annotation names; if not, that was done before.

    Raises:
        ConfigError: A setting does not exist, is missing, or has a value that is not allowed; or
            two settings conflict.
    """
    return cast(T, _Reader(kind if check else None).record(kind, plain, name))


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Makes records of plain settings, from a command's groups down to single values.

    Args:
        command: The record of the command, whose settings are checked; None checks nothing.
    """

    command: Any

    def record(self, kind: Any, plain: Mapping[str, Any], name: str) -> Any:
        """Return the record of the settings of a group."""
        prefix = f"{name}." if name else ""
        fields = fields_of(kind)
        names = {each.name for each in dataclasses.fields(kind)}
        arguments: dict[str, Any] = {}
        more = {}
        for key in [key for key in plain if key not in fields]:
            if self.command is not None:
                more[key] = self.other(plain[key], kind, str(key), prefix)
            else:
                (arguments if key in names else more)[key] = plain[key]
        if more:
            arguments["more"] = more
        for key, (annotation, default) in fields.items():
            if key in plain:
                value = self.value(plain[key], annotation, f"{prefix}{key}")
                arguments[key if key in names else f"{key}_"] = value
            elif default is dataclasses.MISSING:
                raise ConfigError(f"{prefix}{key} must be given: {prefix}{key}=...")
        try:
            return kind(**arguments)
        except ConfigError as error:
            top = name.partition(".")[0]
            if not name or str(error).startswith((f"{top}.", f"{top}=", f"{top} ")):
                raise
            raise ConfigError(f"{prefix}{error}") from None

    def value(self, value: Any, annotation: Any, name: str) -> Any:
        """Return the value of a setting, which may be a group, as its record holds it."""
        parts = parts_of(annotation)
        kinds = records_of(annotation)
        inner = values_of(annotation)
        if value is None and type(None) in parts:
            return None
        if isinstance(value, Mapping):
            if kinds:
                return self.record(closest(value, kinds), value, name)
            if inner and Constructor not in parts:
                return {
                    str(key): self.value(item, inner, f"{name}.{key}")
                    for key, item in value.items()
                }
        only = {*parts} <= {Constructor, type(None)}
        if Constructor in parts and (isinstance(value, Mapping) or (only and self.command)):
            return constructor(value, name)
        if get_origin(annotation) is Annotated:
            parts = parts_of(get_args(annotation)[0])
        item = next((get_args(part)[0] for part in parts if get_origin(part) is tuple), None)
        of_records = isinstance(value, list) and dataclasses.is_dataclass(item)
        if self.command is not None and not of_records:
            if kinds and not {*parts} - {*kinds, type(None)}:
                raise ConfigError(f"{name}={value}: is a group of settings, {name}.NAME=...")
            if inner:
                key = TARGET if inner is Constructor else next(iter(fields_of(inner)))
                raise ConfigError(
                    f"{name}={value}: is a mapping of names to settings, +{name}.NAME.{key}=..."
                )
            value = read(value, annotation, name)
        if isinstance(value, list) and item is not None:
            reader = self if of_records else _Reader(None)
            return tuple(reader.value(each, item, f"{name}[{k}]") for k, each in enumerate(value))
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


def to_plain(value: Any) -> Any:
    """Return a record, or a value in it, as the plain settings that made it: dicts and lists."""
    if isinstance(value, Constructor):
        return to_plain(value.plain())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            field_value = getattr(value, each.name)
            if not each.metadata.get("plain", True):
                continue
            if each.metadata.get("absent") and field_value == each.default:
                continue
            if each.name == "more" and not each.metadata.get("setting", True):
                plain |= to_plain(field_value)
            else:
                plain[each.name.rstrip("_")] = to_plain(field_value)
        return plain
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def leaves(
    value: Any, name: str = "", is_whole: Callable[[str, Mapping[str, Any]], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each single setting.

    Args:
        value: Plain settings.
        name: Their own dotted name.
        is_whole: Returns whether a mapping is a single setting, from its name and itself; None for
            empty mappings alone.
    """
    if isinstance(value, Mapping) and value and not (is_whole and is_whole(name, value)):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key), is_whole)
    else:
        yield name, value


# ---- names and constructors

# fields of `recapp.tables.positions.DynamicRows`, which is not imported here
OF_TABLES_THAT_GROW = (
    "expected_rows",
    "max_rows",
    "seen",
    "counter",
    "sketch_width",
    "eviction",
    "ttl_steps",
)
# arguments of `recapp.tasks.task.ClickTask`, which is not imported here
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


def names_of(kind: type, prefix: str = "") -> list[str]:
    """Return the dotted names of a record's settings and groups, but not of a `_target_`'s
    arguments.

    Args:
        kind: The class of the record.
        prefix: What stands before each name.
    """
    names = []
    for key, (annotation, _) in fields_of(kind).items():
        names.append(f"{prefix}{key}")
        if str not in parts_of(annotation):  # no file's
            for part in records_of(annotation):
                names += names_of(part, f"{prefix}{key}.")
    return names


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
