"""Read a plan file as plain values: mappings, lists, texts and numbers, with a limit on their
number.

YAML has more than a plan needs: its own types, and references with which a few lines expand beyond
any memory. A plan file may have a few references to entries above; all other features raise a
PlanError.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.errors import PlanError
from recapp.settings.text_file import read_text

FILE_BYTES = 2**28
DEEPEST = 50  # levels of nested mappings and lists; a plan has seven
REPEATED = 2**20  # values that references may repeat
# libyaml, where it is installed, is ten times faster
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WRONG = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


class _Strict(_Loader):  # type: ignore[misc]
    """A safe loader that refuses a mapping with a duplicate key, which YAML allows."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if not isinstance(node, yaml.MappingNode):
            raise _refused("this is no mapping", node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise _refused(f"{key.value} stands twice", key.start_mark)
            seen.add(str(key.value) if isinstance(key.value, str) else "")
        return super().construct_mapping(node, deep)


def read_plain_values(path: str | Path) -> Any:
    """Read a plan file, JSON or YAML, as plain values.

    Raises:
        PlanError: The file cannot be read, is neither JSON nor YAML, or holds more than plain
            values.
    """
    text = _text(path)
    values = _parsed(path, text)
    if _count(path, values, 0, {}) > len(text) + REPEATED:
        raise PlanError(
            f"{path}: what its references repeat is far more than the file: write it out"
        )
    return values


def _text(path: str | Path) -> str:
    try:
        return read_text(path, FILE_BYTES)
    except (OSError, ValueError) as e:
        raise PlanError(
            f"plan.path={path}: {getattr(e, 'strerror', None) or 'not a text'}: name a plan file; "
            "python -m recapp.plan export writes one"
        ) from None


def _parsed(path: str | Path, text: str) -> Any:
    try:
        if text.lstrip()[:1] in ("[", "{"):
            with suppress(json.JSONDecodeError):  # JSON is YAML, unless tabs indent it
                return json.loads(text)
        _check_depth(path, text)
        return yaml.load(text, Loader=_Strict)  # safe: only adds checks to the safe loader
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(e, "problem", None) or str(e)
    except PlanError:
        raise
    except _WRONG as e:
        position = ""
        reason = "too many brackets" if isinstance(e, RecursionError) else str(e)
    raise PlanError(f"{path}{position}: neither YAML nor JSON: {' '.join(reason.split())}")


def _check_depth(path: str | Path, text: str) -> None:
    """Refuse nesting so deep that a loader, which recurs at each level, would crash."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _too_deep(path)


def _too_deep(path: str | Path) -> PlanError:
    return PlanError(f"{path}: is nested more than {DEEPEST} deep: a plan is not")


def _count(path: str | Path, value: Any, depth: int, known: dict[int, int]) -> int:
    """Count the values with all references expanded; each container is visited once."""
    if depth > DEEPEST:
        raise _too_deep(path)
    if isinstance(value, dict | list):
        if id(value) not in known:
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known[id(value)] = 1 + sum(_count(path, part, depth + 1, known) for part in parts)
        return known[id(value)]
    if value is None or isinstance(value, str | int | float):
        return 1
    raise PlanError(f"{path}: holds a {type(value).__name__}: a plan has texts and numbers only")


def _refused(why: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, mark)
