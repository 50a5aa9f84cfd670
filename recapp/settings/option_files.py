"""The files of configuration options: in recapp's own `conf/`, and in the folders of the command
line's `--config-dir`.

    conf/model/dlrm.yaml        model=dlrm
    FOLDER/model/wide.yaml      --config-dir FOLDER model=wide
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

FLAGS = ("--config-dir", "-cd")
Folders = Sequence[Path]  # the command line's; recapp's own directory comes before them


def conf_dir() -> Path:
    """Return the directory of the configuration: inside the package where recapp is installed,
    beside it in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def named_folders(arguments: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders that `--config-dir FOLDER` names in a command line (absolute); Hydra
    refuses one that does not exist.
    """
    behind = [value for flag, value in pairwise(arguments) if flag in FLAGS]
    joined = [
        argument.partition("=")[2] for argument in arguments if argument.startswith(f"{FLAGS[0]}=")
    ]
    return tuple(
        path for name in (*behind, *joined) if (path := Path(name).expanduser().absolute()).is_dir()
    )


def directories(folders: Folders = ()) -> tuple[Path, ...]:
    """Return all directories in which options are looked for, in order."""
    return conf_dir(), *folders


def is_group(name: str, folders: Folders = ()) -> bool:
    """Return whether a name is that of a group: a directory in one of those `directories`."""
    relative = bool(name) and not Path(name).is_absolute()  # else it is no name below them
    return relative and any((directory / name).is_dir() for directory in directories(folders))


def option_file(group: str, option: str, folders: Folders = ()) -> Path | None:
    """Return the file of an option, None where there is none; the first directory wins, as it does
    in Hydra.
    """
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
