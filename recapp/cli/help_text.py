"""The text of `--help`: a line for each setting, taken from the comments in `conf/`.

    conf/dataset/custom.yaml     lanes: 16    # the order of rows depends on ...
    --help dataset               dataset.lanes=16      the order of rows depends on ...

`--help` ends after the settings of a first week (`FIRST_WEEK`); `--help all` shows all of them.
A comment belongs to the setting on its line. A comment on lines of its own belongs to the setting
below it. Lines that continue further right belong to the comment above them. A comment at the top
of a file describes the option. Values are those of the command line: `--help dataset=criteo_kaggle`
shows that data set.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError, suggest
from recapp.run.recipe import COMMANDS, EXPERIMENTS
from recapp.settings.option_files import (
    Folders,
    conf_dir,
    directories,
    is_group,
    option_file,
    options,
)
from recapp.settings.records import leaves, names_of
from recapp.settings.values import shown

ADDED = ("plan", "experiment")  # groups without a default option
LEFT_COLUMNS = 34
LEAST_WORDS_COLUMNS = 24
OF_PLANS = "; +plan=OPTION chooses a sharding plan"
FOOTER = """\
Settings are key=value (lists: ranks=[8,16]), groups are group=option{plans}.
--help all shows all settings, --help GROUP those of one group, --help group=OPTION those under \
that option; --cfg job prints the settings.
Put -m in front to run one job for each of several values: -m +plan=mixed,row_wise seed=1,2,3
hydra.run.dir=DIR (with -m: hydra.sweep.dir=DIR) says where a run writes; \
--config-dir DIR adds options of your own.
An error is one line and exit code 1; RECAPP_TRACEBACK=1 in the environment shows its traceback \
as well.
"""
ALL = "all"
# The settings of groups that `--help` shows.
FIRST_WEEK = (
    *("dataset.path", "dataset.val_path", "dataset.val_share", "dataset.label", "dataset.weight"),
    *("dataset.dense", "dataset.sparse", "dataset.batch_size", "tables.dim", "tables.max_rows"),
    *("optimizer.dense.lr", "optimizer.sparse.lr", "trainer.devices", "trainer.max_epochs"),
    *("trainer.max_steps", "trainer.val_check_interval"),
)
# The groups whose options `--help` shows, beside those of `FIRST_WEEK`.
FIRST_GROUPS = ("dataset", "model", "task", "plan", "callbacks", "logger", "experiment")
# The settings and groups of both that commands show which take the others from a model.
OF_STORED_MODEL = ("dataset.path", "dataset.val_path", "trainer.devices", "plan")
# Ends of the names of mappings that are listed without what is in them.
WHOLE = (".hardware", ".plans", "settings_of", "histories", "sizes")


@dataclass(frozen=True)
class Comments:
    """The comments of a file of `conf/`.

    Args:
        about: The comment at the top of the file.
        of: The comment of each setting, by its dotted name in the file.
        parents: The options of the same group that are its defaults.
    """

    about: str
    of: dict[str, str]
    parents: tuple[str, ...]


def help_text(
    command: str,
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    folders: Folders,
    *,
    only: str = "",
    columns: int = 80,
) -> str:
    """Return the help of a command: of one group, of all, or of the first settings of each.

    Args:
        command: The name of the command.
        config: The plain settings that the command line composes.
        choices: The option chosen of each group.
        folders: Directories with further options, besides recapp's own.
        only: The one group to show; empty shows the first settings, `all` shows everything.
        columns: The width of the terminal.

    Raises:
        ConfigError: There is no such group.
    """
    groups = [
        name
        for name in dict.fromkeys([*config, *choices, *ADDED])
        if is_group(name, folders)
        and (
            name in names_of(COMMANDS[command]) or (name == "experiment" and command in EXPERIMENTS)
        )
    ]
    only = only.partition("/")[0]  # a group in a group is shown with the outer one
    short = not only and "dataset" in groups
    only = "" if only == ALL else only
    if only and only not in groups:
        raise ConfigError(f"--help {only}: there is no such group; {suggest(only, [ALL, *groups])}")
    parts = [] if only else list(_opening(command, config, groups, columns, short=short))
    of_model = "train" in comments_of(conf_dir() / f"{command}.yaml").parents
    first = OF_STORED_MODEL if of_model else (*FIRST_WEEK, *FIRST_GROUPS)
    names = first if short else None
    for group in [only] if only else groups:
        value = config.get(group)
        parts += _group(command, group, value, choices, folders, columns, names=names)
    wrapped = "".join(
        textwrap.fill(line, columns, subsequent_indent="  ") + "\n"
        for line in FOOTER.format(plans=OF_PLANS if "plan" in groups else "").splitlines()
    )
    return "\n".join([*parts, *([] if only else ["", wrapped])]).rstrip() + "\n"


def words_for(folders: Folders, group: str, option: str, name: str) -> str:
    """Return the comment of a group's setting: from the option's file, or else from the files of
    its defaults, or else from any file of the group.

    Args:
        folders: Directories with further options, besides recapp's own.
        group: The group of the setting.
        option: The chosen option of the group.
        name: The setting, dotted, without the group.
    """
    chain = list(_chain(folders, group, option))
    files = [
        (directory / group, path)
        for directory in directories(folders)
        for path in sorted((directory / group).rglob("*.yaml"))
    ]
    files.sort(key=lambda each: chain.index(each[1]) if each[1] in chain else len(chain))
    for home, path in files:
        inside = path.parent.relative_to(home).parts
        prefix = ".".join(inside) + "." if inside else ""
        if name.startswith(prefix) and (
            words := comments_of(path).of.get(name.removeprefix(prefix))
        ):
            return words
    return ""


@lru_cache
def comments_of(path: Path) -> Comments:
    """Return the comments of a file."""
    text = path.read_text()
    lines = text.splitlines()
    top = next(
        (number for number, line in enumerate(lines) if not line.startswith("#")), len(lines)
    )
    about = " ".join(_text(line) for line in lines[:top] if "@package" not in line and _text(line))
    node = yaml.compose(text)
    comments = dict(_of_mapping(node, lines, "")) if isinstance(node, yaml.MappingNode) else {}
    listed = (yaml.safe_load(text) or {}).get("defaults", [])
    parents = tuple(str(each) for each in listed if isinstance(each, str) and each != "_self_")
    return Comments(about, comments, parents)


# ---- the page


def _opening(
    command: str, config: Mapping[str, Any], groups: Sequence[str], columns: int, *, short: bool
) -> Iterator[str]:
    conf = conf_dir()
    file = comments_of(conf / f"{command}.yaml")
    of_training = comments_of(conf / "train.yaml").of
    yield textwrap.fill(file.about or f"python -m recapp.{command}", columns)
    yield ""
    parents = [
        comments_of(conf / f"{name}.yaml")
        for name in ("command", *file.parents)
        if (conf / f"{name}.yaml").is_file()
    ]
    for name, value in config.items():
        if name in groups or (conf / name).is_dir():
            continue
        if short and name in of_training and name not in (*file.of, "trust"):
            continue
        for key, item in leaves(value, name, _is_table):
            words = next(
                (comment for each in (file, *parents) if (comment := each.of.get(key))), ""
            )
            yield _line(key, item, words, columns)


def _group(
    command: str,
    group: str,
    value: Any,
    choices: Mapping[str, str],
    folders: Folders,
    columns: int,
    *,
    names: Sequence[str] | None,
) -> Iterator[str]:
    """Yield the lines of a group; only those of the wanted settings, unless all are wanted."""
    option = choices.get(group, "")
    inside = [name for name in names or () if name.startswith(f"{group}.")]
    if names is not None and group not in names and not inside:
        return
    yield ""
    yield textwrap.fill(
        f"{group}: {', '.join(options(group, folders))}",
        columns,
        subsequent_indent=" " * (len(group) + 2),
    )
    if names is None:
        yield from _about(group, option, folders, columns)
    if isinstance(value, Mapping):
        listed = list(leaves(value, group, _is_table)) if value else []
    else:  # no option is chosen by default: list all settings
        listed = [
            (f"+{name}", None)
            for name in names_of(COMMANDS[command])
            if name.startswith(f"{group}.")
        ]
    for name, item in listed:
        if names is None or name in names:
            words = words_for(folders, group, option, name.partition(".")[2])
            yield _line(name, item, words, columns)


def _about(group: str, option: str, folders: Folders, columns: int) -> Iterator[str]:
    """Yield the words on the chosen option of a group, and the options of groups inside of it."""
    file = option_file(group, option, folders) if option else None
    if file and (about := comments_of(file).about):
        yield textwrap.fill(
            f"{option}: {about}", columns, initial_indent="  ", subsequent_indent="  "
        )
    for inner in sorted(
        {path.name for directory in directories(folders) for path in (directory / group).glob("*/")}
    ):
        below = ", ".join(options(f"{group}/{inner}", folders))
        yield textwrap.fill(
            f"{group}/{inner}: {below}", columns, initial_indent="  ", subsequent_indent="    "
        )


def _is_table(name: str, _: Mapping[str, Any]) -> bool:
    return name.endswith(WHOLE)


def _line(name: str, value: Any, words: str, columns: int) -> str:
    setting = name if name.startswith("+") else f"{name}={shown(value)}"
    width = max(columns - LEFT_COLUMNS, LEAST_WORDS_COLUMNS)
    left = setting if len(setting) <= columns - 2 else f"{setting[: columns - 5]}..."
    lines = textwrap.wrap(words, width) or [""]
    if len(left) + 3 > LEFT_COLUMNS:
        return "\n".join([f"  {left}", *(" " * LEFT_COLUMNS + line for line in lines if line)])
    return "\n".join(
        [
            f"  {left}".ljust(LEFT_COLUMNS) + lines[0],
            *(" " * LEFT_COLUMNS + line for line in lines[1:]),
        ]
    ).rstrip()


# ---- comments in files


def _chain(folders: Folders, group: str, option: str) -> Iterator[Path]:
    """Yield the file of an option and the files of its defaults."""
    path = option_file(group, option, folders) if option else None
    if path:
        yield path
        for parent in comments_of(path).parents:
            yield from _chain(folders, group, parent)


def _of_mapping(node: Any, lines: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if words := _comment(key, value, lines):
            yield name, words
        if isinstance(value, yaml.MappingNode):
            yield from _of_mapping(value, lines, f"{name}.")


def _comment(key: Any, value: Any, lines: list[str]) -> str:
    """Return the comment on a setting's line and its continuation lines, or else the comment above
    the setting.
    """
    block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    mark = (key if block else value).end_mark
    number = mark.line
    if number < len(lines) and (sign := re.search(r"(?:^|\s)#", lines[number][mark.column :])):
        begin = mark.column + sign.end() - 1
        after = range(number + 1, len(lines))
        more = takewhile(
            lambda n: lines[n].lstrip().startswith("#") and lines[n].index("#") >= begin - 4, after
        )
        return " ".join([_text(lines[number][begin:]), *(_text(lines[n]) for n in more)])
    indent = key.start_mark.column
    before = range(key.start_mark.line - 1, -1, -1)
    above = list(takewhile(lambda n: lines[n].startswith(" " * indent + "#"), before))
    first_free = above and above[-1] == 0  # a comment at the top describes the option
    return "" if first_free else " ".join(_text(lines[n]) for n in reversed(above))


def _text(line: str) -> str:
    return line.strip().lstrip("#").strip()
