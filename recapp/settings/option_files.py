"""Files of settings: find those of configuration options, in recapp's own `conf/` and in the
folders that the command line names by `--config-dir`; read small files that a user or a data set
brings.

    conf/model/dlrm.yaml        model=dlrm
    FOLDER/model/wide.yaml      --config-dir FOLDER model=wide

A small file may come from another person. So a device, a pipe, an endless or huge file is refused
before it is read, and brackets that would exhaust the stack of a parser are refused as well.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

FLAGS = ("--config-dir", "-cd")
Folders = Sequence[Path]  # of the command line; recapp's own `conf/` comes before them


def conf_dir() -> Path:
    """Return recapp's `conf/`: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


@cache
def named_targets() -> tuple[str, ...]:
    """Return what the files of recapp's own `conf/` name as `_target_`."""
    texts = [file.read_text() for file in sorted(conf_dir().rglob("*.yaml"))]
    return tuple(name for text in texts for name in re.findall(r"\b_target_: *([\w.]+)", text))


def named_folders(arguments: Sequence[str]) -> tuple[Path, ...]:
    """Return the absolute folders that `--config-dir FOLDER` names in a command line.

    Folders that do not exist are left out here; Hydra refuses them.
    """
    behind = [value for flag, value in pairwise(arguments) if flag in FLAGS]
    joined = [
        argument.partition("=")[2] for argument in arguments if argument.startswith(f"{FLAGS[0]}=")
    ]
    return tuple(
        path for name in (*behind, *joined) if (path := Path(name).expanduser().absolute()).is_dir()
    )


def directories(folders: Folders = ()) -> tuple[Path, ...]:
    """Return all directories with options, in search order."""
    return conf_dir(), *folders


def is_group(name: str, folders: Folders = ()) -> bool:
    """Return whether a name is a group: a directory below one of `directories`."""
    relative = bool(name) and not Path(name).is_absolute()  # an absolute path is no group
    return relative and any((directory / name).is_dir() for directory in directories(folders))


def option_file(group: str, option: str, folders: Folders = ()) -> Path | None:
    """Return the file of an option, or None. The first directory that has it wins, as in Hydra."""
    files = (directory / group / f"{option}.yaml" for directory in directories(folders))
    return next((file for file in files if file.is_file()), None)


def options(group: str, folders: Folders = ()) -> list[str]:
    """Return the names of the options of a group, sorted."""
    return sorted(
        {
            file.stem
            for directory in directories(folders)
            for file in (directory / group).glob("*.yaml")
        }
    )


# ---- small files

MOST_BYTES = 2**26


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Args:
        path: The file.
        most: The largest size that is allowed, in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not regular, is larger, or is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    with os.fdopen(descriptor, "rb", closefd=True) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, and {most:,} are allowed")
        return file.read(most).decode()


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file.

    Arguments are those of `read_text`.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `read_text`; or the text is not JSON, or is nested too deeply.
    """
    return _parsed(json.loads, read_text(path, most))


def read_yaml(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return the content of a YAML file, as plain values.

    Arguments are those of `read_text`.

    Raises:
        OSError: The file cannot be read.
        ValueError: As in `read_text`; or the text is not YAML, or is nested too deeply.
    """
    return _parsed(yaml.safe_load, read_text(path, most))


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
