"""Tell training, validation and test files apart by their names, and refuse them as one data set.

    train.parquet valid.parquet test.parquet      train-00000-of-00002.parquet ..
    train/ test/                                  split=train/ split=test/

A word counts at the beginning or the end of a name: `shop_test.parquet`, not `latest.parquet`.
"""

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from glob import escape
from itertools import takewhile
from pathlib import Path

from recapp.dataset.formats import all_suffixes
from recapp.errors import DataError
from recapp.settings.values import PLAIN_VALUE, in_quotes, in_shell

TRAINING = "path"
LISTED = 16  # the most files of a list that a message spells out
_KEYS = {
    TRAINING: "train training",
    "val_path": "valid val validation dev eval",
    "test_path": "test",
}
_KEY_OF_WORD = {word: key for key, words in _KEYS.items() for word in words.split()}
_SUFFIXES = {suffix.strip(". ") for suffix in f"{all_suffixes()}, snappy".split(",")}


def refuse_splits(names: Sequence[str], top: Path, setting: str, given: str) -> None:
    """Refuse files of several splits, because they would be read as one data set.

    Args:
        names: The files or directories that would be read.
        top: The directory below which names tell a split; its own name does not count.
        setting: The setting that names them.
        given: Its value.

    Raises:
        DataError: Some names are of validation or test data, and some are not.
    """
    by_key: dict[str | None, dict[str, None]] = {}
    for name in names:
        key, told = _split(name, top)
        by_key.setdefault(key, {})[told] = None
    if len(by_key) < 2 or not {*by_key} & ({*_KEYS} - {TRAINING}):
        return
    if rest := by_key.pop(None, {}):
        by_key[TRAINING] = rest | by_key.get(TRAINING, {})
    values = {key: _value([*by_key[key]], names) for key in _KEYS if key in by_key}
    if setting.startswith("dataset."):
        settings = " ".join(_set(f"dataset.{key}", value) for key, value in values.items())
    else:
        settings = " or ".join(_set(setting, value) for value in values.values())
    first = {_split(name, top)[0]: name for name in reversed(names)}
    shown = ", ".join(os.path.relpath(name, top) for name in sorted(first.values()))
    raise DataError(
        f"{setting}={given}: {shown} are of several splits, and would be read as one: set "
        f"{settings}; a list, {setting}=[...], reads all that it names"
    )


def _glob_of(names: Sequence[str]) -> str | None:
    """Return a glob that matches some files, and maybe others; None if their names begin unlike."""
    ends = zip(min(names), max(names), strict=False)
    begin = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    begin = begin.rstrip("0123456789")
    same = len({Path(name).suffix for name in names}) == 1
    end = Path(names[0]).suffix if same else ""
    return f"{escape(begin)}*{end}" if not begin.endswith("/") and begin else None


def _split(name: str, top: Path) -> tuple[str | None, str]:
    """Return the setting for the split of a file, and the file or the directory whose name tells
    it; None for no split.
    """
    parts = Path(os.path.relpath(name, top)).parts
    for count, part in enumerate(parts, 1):
        words = [
            word.rstrip("0123456789")
            for word in re.split(r"[-_.\s]+", part.rpartition("=")[2].lower())
        ]
        words = [word for word in words if word and word not in _SUFFIXES]
        for word in (words[:1] + words[-1:]) if "=" not in part or len(words) == 1 else ():
            if key := _KEY_OF_WORD.get(word):
                above = Path(name).parts
                return key, str(Path(*above[: len(above) - len(parts) + count]))
    return None, name


def _value(told: Sequence[str], names: Iterable[str]) -> str:
    """Return the value of a setting that names some files: a path, a glob or a list."""
    if len(told) == 1:
        return _quoted(told[0])
    pattern = _glob_of(told)
    if pattern and {name for name in names if fnmatchcase(name, pattern)} == {*told}:
        return _quoted(pattern)
    more = ",.." if len(told) > LISTED else ""
    return f"[{','.join(map(_quoted, told[: 1 if more else None]))}{more}]"


def _quoted(text: str) -> str:
    return text if PLAIN_VALUE.fullmatch(text.replace("*", "")) else in_quotes(text)


def _set(setting: str, value: str) -> str:
    """Return a setting and its value as a word of a shell."""
    word = f"{setting}={value}"
    return word if PLAIN_VALUE.fullmatch(value) else in_shell(word)
