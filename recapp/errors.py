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


def suggest(name: str, known: Iterable[str]) -> str:
    """Return what to append to 'unknown NAME': the close matches, or else all known names."""
    names = sorted(
        known,
        key=lambda name: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
        ],
    )
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
    return f"known: {shown or 'none'}"
