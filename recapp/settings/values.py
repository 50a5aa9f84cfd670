"""What the value of a setting may be, said by the type annotation of whoever takes it.

    annotation                         allowed in YAML    refused with
    Annotated[int, Within(1)] | None   20, null           must be a whole number of at least 1,
                                                          or null
    Literal["auto", "gloo"]            auto               did you mean auto?
    list[str]                          [user, item]       must be a list of names, such as [user]

Both sources of annotations are read alike: the dataclasses of `recapp/settings/groups.py`, one for
each group of settings, and the signatures of the constructors that a `_target_` names. Settings are
plain values, so of `float | Tensor` only the number counts. An annotation that says nothing about
plain values refuses nothing.
"""

import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from recapp.errors import ConfigError, suggest

LISTS = (list, AbstractSequence, Iterable, tuple)
MAPPINGS = (dict, Mapping)
ARTICLES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SHOWN_CHARACTERS = 80  # of a value in a message
PLURALS = {bool: "flags", int: "whole numbers", float: "numbers", str: "names"}


@dataclass(frozen=True)
class Within:
    """The range of a number; a whole one or not.

    Args:
        least: The smallest that is allowed.
        most: The largest that is allowed; None is no bound.
        above: What it must exceed, where the bound itself is not allowed.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def holds(self, value: float) -> bool:
        """Answer whether a number lies inside."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        """What follows "a number" in a sentence."""
        low = f" of at least {self.least:g}" if self.least is not None else ""
        low = low if self.above is None else f" above {self.above:g}"
        high = (
            "" if self.most is None else f"{' and' if low else ' of'} at most {_plain(self.most)}"
        )
        return low + high


class Wrong(ValueError):
    """A value that an annotation does not allow; its text says what is allowed."""


def read(value: Any, annotation: Any, name: str) -> Any:
    """Check a value of the settings and convert what YAML could not know.

    A whole number that was written as 1e3 becomes one where only whole numbers are allowed, and a
    number becomes text where only text is (columns may be called 0 and 1).

    Args:
        value: Plain, as Hydra composed it.
        annotation: What is allowed.
        name: The setting, dotted, for the error.

    Returns:
        The value, converted where need be.

    Raises:
        ConfigError: The value is not allowed; it names the setting, the value and what is.
    """
    try:
        return _read(value, annotation)
    except Wrong as wrong:
        raise ConfigError(f"{name}={shown(value)}: {wrong}") from None


def takes(target: Callable[..., Any]) -> dict[str, Any]:
    """List the arguments that a constructor takes by name, each with its annotation, `Any` where it
    has none.

    Arguments that it takes by `**kwargs` are listed as `**`.
    """
    hints = _hints(target)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found["**"] = Any
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            found[name] = hints.get(name, Any)
    return found


def check_arguments(
    target: Callable[..., Any],
    wanted: Mapping[str, Any],
    name: str,
    *,
    given: Iterable[str] = (),
    positional: int = 0,
) -> None:
    """Refuse arguments that a constructor does not take, that it needs and nobody gives, or of a
    wrong type.

    Args:
        target: The constructor.
        wanted: The arguments that the settings name.
        name: The setting that names the constructor, dotted.
        given: Arguments that recapp gives by name.
        positional: How many arguments recapp gives by position.

    Raises:
        ConfigError: Naming the setting and what the constructor takes.
    """
    known = takes(target)
    label = f"{target.__module__}.{target.__qualname__}"
    own = [argument for argument in known if argument not in given and argument != "**"][
        positional:
    ]
    for argument, value in wanted.items():
        if argument not in own and ("**" not in known or argument in known):
            says = suggest(argument, own)
            raise ConfigError(
                f"unknown setting {name}.{argument}: {says}; {label} takes no such argument from "
                f"the settings (~{name}.{argument} leaves out one that a file sets)"
            )
        read(value, known.get(argument, Any), f"{name}.{argument}")
    parameters = inspect.signature(target).parameters
    for argument in own:
        if parameters[argument].default is inspect.Parameter.empty and argument not in wanted:
            raise ConfigError(f"{name}.{argument} must be given: {label} has no default for it")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a constructor; none where one of them cannot be resolved."""
    made = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        return get_type_hints(made, include_extras=True)
    except Exception:
        return {}


# ---- a value and an annotation


def _read(value: Any, annotation: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Wrong("must be a number of 64 bits")
    options = _options(annotation)
    if any(option is Any for option, _ in options):
        return value
    for option, bounds in options:
        if _is(value, option) and all(bound.holds(value) for bound in bounds):
            return _inside(value, option)
    converted = _converted(value, options)
    if converted is not value:
        return _read(converted, annotation)
    raise Wrong(_allowed(value, options))


Options = list[tuple[Any, tuple[Within, ...]]]


def _options(annotation: Any) -> Options:
    """The alternatives of an annotation with their ranges; those that no plain value can be are
    left out.
    """
    origin = _origin(annotation)
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    if origin is Annotated:
        inner, *more = get_args(annotation)
        bounds = tuple(bound for bound in more if isinstance(bound, Within))
        return [(option, (*own, *bounds)) for option, own in _options(inner)]
    kind = origin or annotation
    if annotation is Any:
        return [(Any, ())]
    if annotation is None or annotation is type(None):
        return [(type(None), ())]
    if origin is Literal or kind in (bool, int, float, str, *LISTS, *MAPPINGS):
        return [(annotation, ())]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [(Literal[tuple(str(member.value) for member in kind)], ())]
    if isinstance(kind, type) and issubclass(kind, PathLike):
        return [(str, ())]
    if isinstance(kind, type) and kind is not object:
        return []  # a class of somebody's own: not written in YAML
    return [(Any, ())]


def _origin(annotation: Any) -> Any:
    """Of `list[int]` the list; None where nothing is in brackets. The type of `get_origin` itself
    forbids to compare it with a class.
    """
    return get_origin(annotation)


def _is(value: Any, option: Any) -> bool:
    origin = _origin(option)
    kind = origin or option
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(option))
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, list) if kind in LISTS else isinstance(value, dict)


def _inside(value: Any, option: Any) -> Any:
    """The values of a list or a mapping are read in turn."""
    kind = _origin(option)
    parts = get_args(option)
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        if len(value) != len(parts):
            raise Wrong(f"must have {len(parts)} values")
        return [_part(item, part) for item, part in zip(value, parts, strict=True)]
    if kind in LISTS and parts:
        return [_part(item, parts[0]) for item in value]
    if kind in MAPPINGS and parts:
        return {
            _part(key, parts[0]): _part(item, parts[1], f"{key}: ") for key, item in value.items()
        }
    return value


def _part(value: Any, annotation: Any, where: str = "") -> Any:
    try:
        return _read(value, annotation)
    except Wrong as wrong:
        raise Wrong(f"{where}{shown(value)}: {wrong}") from None


def _converted(value: Any, options: Options) -> Any:
    kinds = [option for option, _ in options]
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and str in kinds
        and not {int, float} & set(kinds)
    ):
        return str(value)
    return value


# ---- what is allowed, in words


def _allowed(value: Any, options: Options) -> str:
    """What would be right, as the end of a sentence that begins with the setting and its value."""
    words = [
        word for option, _ in options if _origin(option) is Literal for word in get_args(option)
    ]
    others = [(option, bounds) for option, bounds in options if _origin(option) is not Literal]
    if (
        words
        and not [option for option, _ in others if option is not type(None)]
        and isinstance(value, str)
    ):
        return suggest(value, [shown(word) for word in words])
    if not options:
        return "must be left out: settings cannot write what it takes"
    parts = [_said(option, bounds) for option, bounds in others if option is not type(None)]
    parts += [shown(word) for word in words]
    parts += ["null" for option, _ in others if option is type(None)]
    hint = _example(value, options)
    return f"must be {', or '.join(dict.fromkeys(parts))}{hint}"


def _said(option: Any, bounds: tuple[Within, ...]) -> str:
    kind = _origin(option) or option
    parts = get_args(option)
    if kind in LISTS:
        return f"a list{f' of {_plural(parts[0])}' if parts else ''}"
    if kind in MAPPINGS:
        return f"a mapping{f' of names to {_plural(parts[1])}' if parts else ''}, {{name: value}}"
    return ARTICLES[kind] + "".join(map(str, bounds))


def _plural(annotation: Any) -> str:
    options = _options(annotation)
    words = [
        word for option, _ in options if _origin(option) is Literal for word in get_args(option)
    ]
    if words:
        return f"some of {', '.join(map(shown, words))}"
    found = [
        PLURALS[option] + "".join(map(str, bounds))
        for option, bounds in options
        if option in PLURALS
    ]
    return " or ".join(found) or "values"


def _example(value: Any, options: Options) -> str:
    """The value in brackets, where a list of such values would be right."""
    lists = [get_args(option) for option, _ in options if (_origin(option) or option) in LISTS]
    if not lists or isinstance(value, list | dict) or value is None:
        return ""
    try:
        for parts in lists:
            _read(value, parts[0] if parts else Any)
    except Wrong:
        return ""
    return f", such as [{shown(value)}]"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def shown(value: Any) -> str:
    """A value as YAML writes it on one line, a long one cut short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{shown(key)}: {shown(item)}" for key, item in value.items()) + "}"
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
