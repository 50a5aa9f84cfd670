"""Errors for users: each is one line that names the setting, its value, the allowed values and the
fix.

Commands print only this line and exit with code 1; `RECAPP_TRACEBACK=1` adds the traceback. Any
other exception is a bug of recapp, and commands always print its traceback.

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

ALIKE = 0.61  # the smallest similarity of two names for a suggestion, as a share of equal letters
PART = 3  # the fewest letters of a name that counts as a part of another


class RecappError(Exception):
    """An error that a user can fix; its text is one line. Names of files and columns in it may have
    control characters: line breaks and tabs become spaces, others are escaped.

    `secondhand` is true if the error repeats the report of another rank. The error of that rank has
    the useful traceback, so the launcher prints that error instead of this one if it can.
    """

    secondhand = False

    def __str__(self) -> str:
        """Return the text without control characters, for a screen or a log."""
        return "".join(
            letter
            if letter.isprintable()
            else " "
            if letter.isspace()
            else letter.encode("unicode_escape").decode()
            for letter in super().__str__()
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty, or its type."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


class ConfigError(RecappError, ValueError):
    """A setting has a value that is not allowed."""


class DataError(RecappError, ValueError):
    """The data set is missing, damaged or has values that training cannot use."""


class IdError(RecappError, IndexError):
    """An id lies outside its table and the table's id rule is `error`."""


class PlanError(RecappError, ValueError):
    """A sharding plan is unknown, does not tile its tables or does not fit."""


class CheckpointError(RecappError, RuntimeError):
    """A checkpoint is missing, incomplete or does not belong to this model."""


class ArtefactError(RecappError, RuntimeError):
    """An exported model is missing, incomplete, damaged, or cannot run here."""


class LaunchError(RecappError, RuntimeError):
    """A rank could not be started, or a rank died."""


class RankError(RecappError, RuntimeError):
    """Another rank failed first; the launcher prints the error of that rank instead of this one."""

    secondhand = True


class TrainingError(RecappError, ArithmeticError):
    """A loss or a metric is not a finite number."""


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three known names that a user may have meant by `name`, the closest first.

    These are names with mostly the same letters in the same order. If there are none, they are
    names that contain `name` or are contained in it.
    """
    names = list(known)
    parts = (
        other
        for other in names
        if (name in other or other in name) and min(len(name), len(other)) >= PART
    )
    return get_close_matches(name, names, n=3, cutoff=ALIKE) or list(parts)[:3]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an 'unknown NAME' message: the similar names, or else all known names."""
    names = _sorted(known)
    return meant(close) if (close := alike(name, names)) else listed(names)


def meant(names: Iterable[str]) -> str:
    """Return the question 'did you mean ...?' for some names."""
    return f"did you mean {' or '.join(names)}?"


def listed(known: Iterable[str]) -> str:
    """Return a text that lists the known names, at most thirty."""
    names = _sorted(known)
    return f"known: {', '.join(names[:30]) or 'none'}{', ...' if len(names) > 30 else ''}"


def one_line(text: str) -> str:
    """Return a text of a file, of at most 80 characters, for an error."""
    text = re.sub(r"[^ -~]+", " ", text)
    return text if len(text) <= 80 else text[:77] + "..."


def _sorted(names: Iterable[str]) -> list[str]:
    """Sort names with numbers in numeric order: C2 before C10."""
    return sorted(
        names,
        key=lambda name: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
        ],
    )
