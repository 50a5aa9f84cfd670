"""Find the files of configuration options: in recapp's own `conf/`, and in the folders that the
command line names by `--config-dir`.

    conf/model/dlrm.yaml        model=dlrm
    FOLDER/model/wide.yaml      --config-dir FOLDER model=wide
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

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
