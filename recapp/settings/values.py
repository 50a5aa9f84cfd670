"""Check the value of a setting against the type annotation of its field or argument.

    annotation                         allowed in YAML    refused with
    Annotated[int, Within(1)] | None   20, null           must be a whole number of at least 1,
                                                          or null
    Annotated[int, "; see x"]          20                 must be a whole number; see x
    Literal["auto", "gloo"]            auto               did you mean auto? known: auto, gloo
    list[str]                          [user, item]       must be a list of names, such as [user]

Annotations come from records (`recapp/settings/records.py`), one for each group of settings, and
from the signatures of the constructors that a `_target_` names. A setting is a value of YAML, so
`float | Tensor` allows only numbers. `Any` and annotations of unknown kinds allow every value.
"""

import inspect
import math
import re
import shlex
import types
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from recapp.errors import ConfigError, alike, meant, suggest

LISTS = (list, AbstractSequence, Iterable, tuple)
MAPPINGS = (dict, Mapping)
ARTICLES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SHOWN_CHARACTERS = 80  # the most characters of a value in an error
FP32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)  # the smallest size (with all bits) and the largest
PLURALS = {bool: "flags", int: "whole numbers", float: "numbers", str: "names"}


@dataclass(frozen=True)
class Within:
    """The range of a number.

    Args:
        least: The smallest allowed value; None is no bound.
        most: The largest allowed value; None is no bound.
        above: The number must be larger than this; None is no bound.
        below: The number must be smaller than this; None is no bound.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Return the words that follow "a number" in a sentence."""
        low = f" of at least {self.least:g}" if self.least is not None else ""
        low = low if self.above is None else f" above {self.above:g}"
        high = (
            "" if self.most is None else f"{' and' if low else ' of'} at most {_plain(self.most)}"
        )
        high = high if self.below is None else f"{' and' if low else ''} below {self.below:g}"
        return low + high


class Wrong(ValueError):
    """The error for a value that an annotation refuses. Its text names the allowed values."""


def read(value: Any, annotation: Any, name: str) -> Any:
    """Check a value of the settings and return it, converted if YAML could not know its type.

    1e3, which YAML reads as a float, becomes an int if only ints are allowed. A number becomes text
    if only text is allowed: columns may be called 0 and 1.

    Args:
        value: A plain value, as Hydra composed it.
        annotation: The annotation of the allowed values.
        name: The setting, dotted, for the error.

    Raises:
        ConfigError: The value is not allowed; the error names the setting, the value and the
            allowed values.
    """
    try:
        return _read(value, annotation)
    except Wrong as wrong:
        raise ConfigError(f"{name}={shown(value)}: {wrong}") from None


def takes(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments of a constructor, each with its annotation (default: `Any`).

    `**kwargs` appears as `**`.
    """
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # one of them cannot be resolved
        hints = {}
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments["**"] = Any
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            arguments[name] = hints.get(name, Any)
    return arguments


def check_arguments(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    name: str,
    *,
    extra: Mapping[str, str] | None = None,
    positional: int = 0,
) -> None:
    """Check that a constructor takes the arguments of the settings, and that no required one is
    missing.

    Args:
        target: The constructor.
        arguments: The arguments that the settings name.
        name: The setting that names the constructor, dotted.
        extra: Keyword arguments that recapp passes, each with a description.
        positional: The number of positional arguments that recapp passes.

    Raises:
        ConfigError: An argument is unknown, missing or of a wrong type; the error names the setting
            and the arguments that the constructor takes.
    """
    extra = extra or {}
    known = takes(target)
    label = f"{target.__module__}.{target.__qualname__}"
    settable_names = [each for each in known if each not in extra and each != "**"][positional:]
    for argument, value in arguments.items():
        if argument in extra:
            raise ConfigError(f"{name}.{argument}: cannot be set: recapp gives {extra[argument]}")
        if argument not in settable_names and ("**" not in known or argument in known):
            says = suggest(argument, settable_names)
            raise ConfigError(
                f"unknown setting {name}.{argument}: {says}; {label} takes no such argument from "
                f"the settings (~{name}.{argument} leaves out one that a file sets)"
            )
        read(value, known.get(argument, Any), f"{name}.{argument}")
    parameters = inspect.signature(target).parameters
    for argument in settable_names:
        if parameters[argument].default is inspect.Parameter.empty and argument not in arguments:
            raise ConfigError(f"{name}.{argument} must be given: {label} has no default for it")


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
    beside = getattr(annotation, "__metadata__", ())  # what a user may look for here
    advice = [text for text in beside if isinstance(text, str)]
    raise Wrong("".join([_allowed(value, options), *advice]))


Options = list[tuple[Any, tuple[Within, ...]]]


def _options(annotation: Any) -> Options:
    """Return the alternatives of an annotation with their ranges, without types that YAML cannot
    write.
    """
    origin = _origin(annotation)
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    if origin is Annotated:
        inner, *more = get_args(annotation)
        bounds = tuple(bound for bound in more if isinstance(bound, Within))
        return [(option, (*ranges, *bounds)) for option, ranges in _options(inner)]
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
        return []  # another class: YAML cannot write its objects
    return [(Any, ())]


def _origin(annotation: Any) -> Any:
    """Return the type in front of the brackets, such as `list` in `list[int]`; None without
    brackets.

    mypy does not allow comparing the result of `get_origin` with a class. This function's result
    is `Any`.
    """
    return get_origin(annotation)


def _is(value: Any, option: Any) -> bool:
    kind = _origin(option) or option
    if kind is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(option))
    if isinstance(value, bool):  # which Python takes for a whole number
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and _is_of_fp32(value)
    if kind in LISTS:
        return isinstance(value, list)
    return isinstance(value, dict if kind in MAPPINGS else kind)


def _is_of_fp32(value: float) -> bool:
    """Return whether a number is one for fp32, in which models compute: neither infinite nor 0
    there, unless it is 0.
    """
    return value == 0 or FP32[0] <= abs(value) <= FP32[1]


def _inside(value: Any, option: Any) -> Any:
    """Return a value; if it is a list or a mapping, check and convert its items."""
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


# ---- the allowed values, as text


def _allowed(value: Any, options: Options) -> str:
    """Name the allowed values, as the end of a sentence that begins with setting and value."""
    words = [
        word for option, _ in options if _origin(option) is Literal for word in get_args(option)
    ]
    others = [(option, bounds) for option, bounds in options if _origin(option) is not Literal]
    only_words = words and not [option for option, _ in others if option is not type(None)]
    if only_words and isinstance(value, str | int | float) and not isinstance(value, bool):
        known = list(dict.fromkeys(map(shown, words)))  # all of them, also if one is close
        close = f"{meant(similar)} " if (similar := alike(shown(value), known)) else ""
        return f"{close}known: {', '.join(sorted(known))}"
    if not options:
        return "must be left out: settings cannot write what it takes"
    of_words = f"a list of {_some_of(words)}"
    parts = [_described(option, bounds) for option, bounds in others if option is not type(None)]
    if words and of_words in parts:  # name the words only once
        parts.remove(of_words)
        parts += [f"one of {_some_of(words).partition(' of ')[2]}", "a list of some of them"]
    else:
        parts += [shown(word) for word in words]
    parts += ["null" for option, _ in others if option is type(None)]
    hint = _example(value, options)
    if isinstance(value, float) and math.isfinite(value) and not _is_of_fp32(value):
        hint += ", which fp32 can hold: 0, or in size from 1.2e-38 to 3.4e38"
    return f"must be {', or '.join(dict.fromkeys(parts))}{hint}"


def _described(option: Any, bounds: tuple[Any, ...]) -> str:
    kind = _origin(option) or option
    parts = get_args(option)
    if kind in LISTS:
        return f"a list{f' of {_plural(parts[0])}' if parts else ''}"
    if kind in MAPPINGS:
        values = re.sub("^some of", "one of", _plural(parts[1])) if parts else ""
        return f"a mapping{f' of names to {values}' if parts else ''}, {{name: value}}"
    return ARTICLES[kind] + "".join(map(str, bounds))


def _plural(annotation: Any) -> str:
    options = _options(annotation)
    words = [
        word for option, _ in options if _origin(option) is Literal for word in get_args(option)
    ]
    if words:
        return _some_of(words)
    kinds = [
        PLURALS[option] + "".join(map(str, bounds))
        for option, bounds in options
        if option in PLURALS
    ]
    return " or ".join(kinds) or "values"


def _some_of(words: AbstractSequence[Any]) -> str:
    return f"some of {', '.join(map(shown, words))}"


def _example(value: Any, options: Options) -> str:
    """Return the value in brackets, as an example, if a list of such values is allowed."""
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
    exact = float(number).is_integer() and abs(number) < 2**63
    return str(int(number)) if exact else f"{number:g}"


def shown(value: Any) -> str:
    """Return a value as YAML writes it on one line, shortened if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{shown(key)}: {shown(item)}" for key, item in value.items()) + "}"
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./+@%:-]+")  # of a path; neither shells nor Hydra change it
READ_IN_QUOTES = re.compile(r'[$`"!]|\\\\')  # what a shell reads inside of double quotes
Positive = Annotated[int, Within(1)]
Natural = Annotated[int, Within(0)]
Width = Annotated[int, Within(1, 2**31 - 1)]  # numbers in an embedding vector
Rows = Annotated[int, Within(1, 2**48)]  # rows of a table; no machine holds more
Timeout = Annotated[float, Within(above=0, most=31_536_000)]  # seconds, at most a year
Share = Annotated[float, Within(above=0, most=1)]
Paths = str | tuple[str, ...]
Storage = Literal["fp32", "fp64", "fp16", "bf16"]
IdRule = Literal["error", "hash", "clamp", "drop"]
Transport = Literal["auto", "gloo", "shared_memory"]


def literal(value: Any) -> Any:
    """Return a text, or plain settings with their texts, so that a composed setting has it as it is
    and evaluates no `${...}` in it. Whatever a file or a directory brings becomes a setting by this
    function alone.

    Args:
        value: A text, or nested mappings and lists of plain values; keys are never evaluated.
    """
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [literal(part) for part in value]
    if not isinstance(value, str):
        return value
    # backslashes before a reference are read as pairs
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)


def in_quotes(text: object, *, evaluated: bool = True) -> str:
    """Return a text as a quoted value of the command line, so that Hydra takes it as it is: also
    commas, `=`, brackets, quotes, backslashes and `${`.

    Args:
        text: The text, or a path.
        evaluated: Whether the setting is one whose references are evaluated: all but the search
            path.
    """
    plain = literal(str(text)) if evaluated else str(text)
    # backslashes before a quote, or at the end, are read as pairs
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", plain)
    return "'" + re.sub(r"(\\+)$", lambda match: match[1] * 2, escaped) + "'"


def typed(setting: str, value: object) -> str:
    """Return `setting=value` as people type it into a shell: in quotes where the shell or Hydra
    would read the value otherwise.
    """
    if PLAIN_VALUE.fullmatch(str(value)):
        return f"{setting}={value}"
    return in_shell(f"{setting}={in_quotes(value)}")


def in_shell(word: str) -> str:
    """Return a word that a shell takes as it is: in double quotes if that suffices, because a
    setting has single ones inside.
    """
    return shlex.quote(word) if READ_IN_QUOTES.search(word) else f'"{word}"'
