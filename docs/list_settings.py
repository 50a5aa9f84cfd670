"""Write the list of all settings into `docs/configuration.md`: `python docs/list_settings.py`.

    conf/*.yaml, conf/*/*.yaml    values and words       -> a line for each setting
    recapp/settings               what a value may be

What stands above the mark in that page is written by hand, what stands below it by this script.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from recapp.cli.help_text import comments_of
from recapp.errors import ConfigError
from recapp.run.recipe import COMMANDS, Command, Train
from recapp.settings.option_files import conf_dir, option_file, options
from recapp.settings.records import Constructor, fields_of, parts_of, records_of
from recapp.settings.values import read, shown

PAGE = Path(__file__).parent / "configuration.md"
MARK = "<!-- What follows is written by docs/list_settings.py: edit conf/ and run it again. -->"
WIDTH = 100
SHOWN = 50  # characters of a value
EXPERIMENT = "experiment"  # the group whose options list settings of other groups
WORD = re.compile(r"[\w-]+")
OF_LISTS = {"a", "list", "of", "one", "or", "some", "them"}
WHOLE = ("hardware", "plans")  # mappings that are listed without what is in them


def page() -> str:
    """Return the page as it should be: its hand-written part and the list of today."""
    head, _, _ = PAGE.read_text().partition(MARK)
    return f"{head}{MARK}\n\n" + "\n".join(listing())


def listing() -> Iterator[str]:
    """Yield the lines of the list: the commands, then group by group."""
    conf = conf_dir()
    yield "## Settings of the commands"
    yield ""
    yield from command_lines(conf)
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        yield ""
        yield f"## {folder.name}"
        yield ""
        yield from group_lines(folder.name)


def command_lines(conf: Path) -> Iterator[str]:
    """Yield what each command's own file says."""
    for name in ("command", *COMMANDS):
        found = comments_of(conf / f"{name}.yaml")
        plain = yaml.safe_load((conf / f"{name}.yaml").read_text())
        kinds = _hints(COMMANDS.get(name, Command))
        title = "every command" if name == "command" else f"recapp.{name.replace('_', ' ')}"
        yield f"### {title}"
        yield ""
        if name != "command":
            yield from wrapped(found.about)
            yield ""
        for key, words in found.of.items():
            if not key.startswith("hydra"):
                yield from setting(key, _at(plain, key), words, _kind(kinds, key))
        yield ""


def group_lines(group: str) -> Iterator[str]:
    """Yield the options of a group and a line for each of its settings; an experiment has none of
    its own.
    """
    chosen = default_of(group)
    names = sorted(options(group), key=lambda name: (name != chosen, name))
    for name in names:
        path = option_file(group, name)
        about = comments_of(path).about if path else ""
        said = f"`{group}={name}`{' (default)' if name == chosen else ''}: {about}"
        yield from wrapped(said.replace("`plan=", "`+plan="), "- ")
    yield ""
    if group == EXPERIMENT:
        yield from wrapped(f"Yours: a file `FOLDER/{group}/NAME.yaml`, see above.")
        return
    names.sort(key=lambda name: (bool(_parents(group, name)), name != chosen))
    lines: dict[str, list[str]] = {}
    for name in names:
        for key, line in option_lines(group, name).items():
            lines.setdefault(key, line)
    parts = list(dict.fromkeys(key.partition(".")[0] for key in lines))
    for key in sorted(lines, key=lambda key: parts.index(key.partition(".")[0])):
        yield from lines[key]
    yield from inner_lines(group, names)


def option_lines(group: str, option: str) -> dict[str, list[str]]:
    """Return the lines of each setting of an option, by its name in the group."""
    path = option_file(group, option)
    assert path is not None
    plain = yaml.safe_load(path.read_text()) or {}
    kinds = _kinds(group)
    return {
        key: list(setting(f"{group}.{key}", _at(plain, key), words, _kind(kinds, key)))
        for key, words in comments_of(path).of.items()
        if not set(key.split(".")[:-1]) & set(WHOLE) and key != "defaults"
    }


def inner_lines(group: str, names: Sequence[str]) -> Iterator[str]:
    """Yield lines of the options of groups inside of a group, such as optimizer/schedule."""
    folders = {path.parent for name in names if (path := option_file(group, name))}
    for inner in sorted({inner for folder in folders for inner in folder.glob("*/*.yaml")}):
        yield ""
        name = f"{inner.parent.name}={inner.stem}"
        yield from wrapped(f"`{group}/{name}`: {comments_of(inner).about}")
        yield ""
        inside = yaml.safe_load(inner.read_text())
        for key, words in comments_of(inner).of.items():
            yield from setting(f"{group}.{inner.parent.name}.{key}", _at(inside, key), words, Any)


def setting(name: str, value: Any, words: str, kind: Any) -> Iterator[str]:
    """Yield the lines of one setting: name, value, what is allowed, what it means."""
    said = "must be given" if value == "???" else allowed(kind)
    if set(WORD.findall(said)) - OF_LISTS <= set(WORD.findall(words)):
        said = ""  # the words list it
    text = shown(value)
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    left = f"`{name}`" if value == "???" else f"`{name}={text}`"
    yield from wrapped(f"{left}{f' ({said})' if said else ''}: {words}", "- ")


def allowed(kind: Any) -> str:
    """Say what a setting may be, in the words of the error that refuses other values."""
    try:
        read(object(), kind, "setting")
    except ConfigError as refused:
        *others, last = str(refused).partition(": must be ")[2].split(", or ")
        return f"{', '.join(others)} or {last}" if others else last
    return ""


def wrapped(text: str, bullet: str = "") -> list[str]:
    """Break words into lines of the page; what stands between backticks is not torn apart."""
    kept = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        kept,
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def default_of(group: str) -> str:
    """Find the option that `recapp.train` chooses of a group; empty where it chooses none."""
    listed = yaml.safe_load((conf_dir() / "train.yaml").read_text())["defaults"]
    found = [each[group] for each in listed if isinstance(each, dict) and group in each]
    return str(found[0] or "") if found else ""


def _parents(group: str, option: str) -> tuple[str, ...]:
    path = option_file(group, option)
    return comments_of(path).parents if path else ()


def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a record's settings, by name."""
    return {name: hint for name, (hint, _) in fields_of(kind).items()}


def _kinds(group: str) -> Mapping[str, Any]:
    """The annotations of a group's settings, by name; those of all records that it may be."""
    found: dict[str, Any] = {}
    for part in records_of(_hints(Train).get(group)):
        found = _hints(part) | found
    return found


def _kind(kinds: Mapping[str, Any], key: str) -> Any:
    """The annotation of a setting; of settings inside of others where a record has them."""
    first, _, rest = key.partition(".")
    kind = kinds.get(first, Any)
    inner = records_of(kind)
    if not rest:
        whole = inner and str not in parts_of(kind)  # a file may stand for a record
        return Any if whole or Constructor in parts_of(kind) else kind
    return _kind(_hints(inner[0]), rest) if inner else Any


def _at(plain: Any, key: str) -> Any:
    for part in key.split("."):
        plain = plain[int(part)] if isinstance(plain, list) else plain[part]
    return plain


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
