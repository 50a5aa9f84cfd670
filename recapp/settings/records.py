"""Records of settings: a frozen dataclass for each group of `conf/`. It is in the package that the
group configures.

    plain settings, checked   {"dim": 16, ...}          record(TablesOfDataset, plain, "tables")
    a record in hand          tables.dim                attributes that mypy sees
    plain settings again      {"dim": 16, ...}          to_plain(tables), with the same keys

A field is a setting. Its annotation holds the allowed values (`recapp/settings/values.py`), its
default equals that of the group's first option, and a comment in `conf/`, where users look,
explains it. A setting without a field is refused, so every accepted setting has an effect. Settings
that depend on each other are checked in `__post_init__`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from recapp.errors import ConfigError

T = TypeVar("T")
TARGET = "_target_"


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


def not_a_setting(factory: Callable[[], Any] = dict) -> Any:
    """Return a field that plain settings carry but that no user sets."""
    return dataclasses.field(default_factory=factory, metadata={"setting": False})


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


def constructor(plain: Mapping[str, Any]) -> Constructor:
    """Return the constructor of a mapping with a `_target_`."""
    arguments = {key: value for key, value in plain.items() if key != TARGET}
    return Constructor(str(plain.get(TARGET)), arguments)


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
            hint = hint if each.metadata["null"] else _without_null(hint)
        settings[each.name.rstrip("_")] = hint, default
    return settings


def _without_null(annotation: Any) -> Any:
    parts = tuple(part for part in parts_of(annotation) if part is not type(None))
    return Union[parts]  # noqa: UP007 (made of a tuple)


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


def item_of(annotation: Any) -> Any:
    """Return the annotation of a list's items; None if the annotation is no list."""
    return get_args(annotation)[0] if get_origin(annotation) in (list, tuple) else None


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


def record(kind: type[T], plain: Mapping[str, Any], name: str = "") -> T:
    """Return the record of checked plain settings.

    Args:
        kind: The class of the record.
        plain: The settings, each checked by itself. A key that is no setting goes into the field
            `not_a_setting` of the same name, or else into `more`, the constructor's other
            arguments.
        name: The dotted name of the settings, for errors; empty for a command.

    Raises:
        ConfigError: A setting is missing, or two settings conflict.
    """
    prefix = f"{name}." if name else ""
    of_kind: Any = kind
    fields = fields_of(of_kind)
    names = {each.name for each in dataclasses.fields(of_kind)}
    others = {each for each in names if each.rstrip("_") not in fields}
    arguments = {key: value for key, value in plain.items() if key in others}
    more = {k: v for k, v in plain.items() if k not in fields and k not in others}
    if more:
        arguments["more"] = more
    for key, (annotation, default) in fields.items():
        if key in plain:
            value = _value(plain[key], annotation, f"{prefix}{key}")
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


def _value(value: Any, annotation: Any, name: str) -> Any:
    """Convert a plain value to the type that a record holds."""
    parts = parts_of(annotation)
    if isinstance(value, Mapping) and (kinds := records_of(annotation)):
        return record(closest(value, kinds), value, name)
    if isinstance(value, Mapping) and Constructor in parts:
        return constructor(value)
    if isinstance(value, Mapping) and (inner := values_of(annotation)):
        return {key: _value(item, inner, f"{name}.{key}") for key, item in value.items()}
    if get_origin(annotation) is Annotated:
        parts = parts_of(get_args(annotation)[0])
    if isinstance(value, list) and any(get_origin(part) is tuple for part in parts):
        inner = next(item_of(part) for part in parts if get_origin(part) is tuple)
        return tuple(_value(item, inner, f"{name}[{k}]") for k, item in enumerate(value))
    return value


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
