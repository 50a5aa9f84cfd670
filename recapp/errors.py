"""Errors meant for people: each is one line that names the setting, its value, what is allowed and
the fix.

Commands print such a line alone and exit with code 1; `RECAPP_TRACEBACK=1` shows the traceback as
well. Anything that is not a `RecappError` is a fault of recapp, and its traceback is always shown.

    RecappError
      ConfigError       a setting, a config group, a model's shapes
      DataError         files, columns, labels, dense values
      IdError           an id outside its table
      PlanError         a plan that is unknown, does not tile its tables or does not fit
      CheckpointError   a checkpoint that is incomplete or does not match
      ArtefactError     an exported model that is incomplete, damaged or not for this machine
      LaunchError       ranks that could not be started or died
      RankError         another rank failed; its own message says why
      TrainingError     a loss or a metric that is no finite number
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

ALIKE = 0.61  # of the letters of two names: from here on one may have been meant by the other
PART = 3  # letters of the shortest name that counts as a part of another


class RecappError(Exception):
    """An error that a user can act on; its text is one line. Names of files and columns may hold
    control characters: ends of lines and tabs become blanks in it, others are escaped.

    `secondhand` is true where the error repeats what another rank reported. That rank has the
    traceback that helps, so its own error is printed instead of this one where there is one.
    """

    secondhand = False

    def __str__(self) -> str:
        """Return the text, as a screen and a log may show it."""
        return "".join(
            letter
            if letter.isprintable()
            else " "
            if letter.isspace()
            else letter.encode("unicode_escape").decode()
            for letter in super().__str__()
        )


class ConfigError(RecappError, ValueError):
    """A setting has a value it may not have."""


class DataError(RecappError, ValueError):
    """The data set is missing, broken or holds values that cannot be trained on."""


class IdError(RecappError, IndexError):
    """An id lies outside its table and the table's id rule is `error`."""


class PlanError(RecappError, ValueError):
    """A sharding plan is unknown, does not tile its tables or does not fit."""


class CheckpointError(RecappError, RuntimeError):
    """A checkpoint is missing, incomplete or does not belong to this model."""


class ArtefactError(RecappError, RuntimeError):
    """An exported model is missing, incomplete, damaged, or cannot run here."""


class LaunchError(RecappError, RuntimeError):
    """A rank could not be started, or one of them died."""


class RankError(RecappError, RuntimeError):
    """Another rank failed first; the launcher names that rank's own error instead of this one."""

    secondhand = True


class TrainingError(RecappError, ArithmeticError):
    """A loss or a metric is not a finite number."""


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return the names, at most three, that somebody may have meant by another, the closest first.

    Most of their letters are the same in the same order; or else one is a part of the other.
    """
    names = list(known)
    parts = (
        other
        for other in names
        if (name in other or other in name) and min(len(name), len(other)) >= PART
    )
    return get_close_matches(name, names, n=3, cutoff=ALIKE) or list(parts)[:3]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return what to append to 'unknown NAME': the names that are alike, or else all known ones."""
    names = _sorted(known)
    return meant(close) if (close := alike(name, names)) else listed(names)


def meant(names: Iterable[str]) -> str:
    """Return the question whether one of some names was meant."""
    return f"did you mean {' or '.join(names)}?"


def listed(known: Iterable[str]) -> str:
    """Return which names there are, at most thirty."""
    names = _sorted(known)
    return f"known: {', '.join(names[:30]) or 'none'}{', ...' if len(names) > 30 else ''}"


def _sorted(names: Iterable[str]) -> list[str]:
    """Sort names as people count: C2 before C10."""
    return sorted(
        names,
        key=lambda name: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
        ],
    )
