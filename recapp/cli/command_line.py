"""Read the command line before Hydra does: verb, flags in any order, help, directory of a run.

argv -> verb | help | flags, overrides -> Hydra's own arguments
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from recapp.cli import compose
from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import external_rank, shared_run_directory
from recapp.reporting import about
from recapp.settings.check_settings import override_names
from recapp.settings.option_files import FLAGS, is_group, named_folders

HELP = ("--help", "-h")
VERSION = "--version"


def versions() -> str:
    """Return the versions of recapp and of the packages that its results depend on, in a line."""
    return ", ".join(f"{name} {text}" for name, text in about.versions().items())


def help_of(name: str, arguments: Sequence[str]) -> str:
    """Return the help of a command, or of the group after `--help`. Values are those of the command
    line.

    Args:
        name: The command.
        arguments: The command line.
    """
    from recapp.cli.help_text import help_text

    overrides = [
        argument for argument in arguments if "=" in argument and not argument.startswith("-")
    ]
    behind = list(arguments[min(arguments.index(word) for word in HELP if word in arguments) + 1 :])
    words = [word for word in behind[:1] if word not in overrides and not word.startswith("-")]
    folders = named_folders(arguments)
    composed = compose.compose(
        name, [*compose.stored_choices(name, overrides, folders), *overrides], folders
    )
    config: Any = OmegaConf.to_container(composed, resolve=False)
    del config["hydra"]
    if "callbacks" in config:  # their monitors come from the task
        config["callbacks"] = OmegaConf.to_container(composed.callbacks, resolve=True)
    columns = shutil.get_terminal_size((80, 24)).columns
    chosen = override_names(override for override in overrides if not override.startswith("~"))
    words += [name for name in chosen if is_group(name, folders)]
    only = words[0] if words else ""
    return help_text(
        name, config, compose.choices(composed.hydra), folders, only=only, columns=columns
    )


def directory_overrides(writes: bool, overrides: Sequence[str]) -> list[str]:
    """Return overrides of Hydra's directory settings. They come before those of the command line.

    A command that writes nothing gets no directory. A single process gets Hydra's dated one. Ranks
    that torchrun or srun started share one.

    Args:
        writes: Whether each job of the command has a directory.
        overrides: The overrides of the command line.
    """
    rank = external_rank()
    if not writes:
        return ["hydra.run.dir=.", "hydra.output_subdir=null"]
    if rank is None:
        return []
    given = any(override.startswith("hydra.run.dir=") for override in overrides)
    directory = [] if given else [f"hydra.run.dir='{shared_run_directory()}'"]
    return directory if rank == 0 else [*directory, "hydra.output_subdir=null"]


def take_verb(name: str, verbs: Sequence[str], arguments: list[str]) -> str:
    """Remove the verb from the front of the arguments and return it. `--help` needs no verb.

    Args:
        name: The command.
        verbs: The verbs of the command; empty if it has none.
        arguments: The command line; its verb is removed.

    Raises:
        ConfigError: The verb is missing or unknown.
    """
    first = arguments[0] if arguments else ""
    word = "" if "=" in first or first.startswith(("-", "+", "~")) else first
    if not verbs or (not word and {*HELP, "--hydra-help"} & set(arguments)):
        return ""
    if word not in verbs:
        wrong = f"unknown verb {word}: {suggest(word, verbs)}" if word else "a verb is missing"
        raise ConfigError(f"{wrong}; write python -m recapp.{name} {'|'.join(verbs)} key=value ...")
    return arguments.pop(0)


def flags_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return the flags and the overrides of a command line, and whether it asks by `-m` for one job
    for each of several values.

    Hydra needs its flags first, but users write them anywhere. Hydra answers a wrong flag with a
    page of help and exit code 2; here a wrong flag is an error of one line.

    Raises:
        ConfigError: A flag is unknown, or `-m` was given to one of several ranks that torchrun or
            srun started.
    """

    def is_override(argument: str) -> bool:
        return argument.startswith(("+", "~")) or ("=" in argument and not argument.startswith("-"))

    def complain(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the settings")

    folders = {k + 1 for k, argument in enumerate(arguments) if argument in FLAGS}  # also `a=b`
    said = [k not in folders and is_override(argument) for k, argument in enumerate(arguments)]
    overrides = [argument for argument, is_one in zip(arguments, said, strict=True) if is_one]
    flags = [argument for argument, is_one in zip(arguments, said, strict=True) if not is_one]
    parser = get_args_parser()
    vars(parser)["error"] = complain
    sweeps = bool(parser.parse_args([*flags, *overrides]).multirun)
    if sweeps and external_rank() is not None:
        raise ConfigError(
            "-m starts the ranks of its jobs itself: without torchrun and srun, or one job at a "
            "time"
        )
    return flags, overrides, sweeps


@contextmanager
def hydra_process(name: str, arguments: list[str]) -> Iterator[None]:
    """Set the process's arguments and environment for Hydra within the block.

    Hydra reads `sys.argv`, and raises its errors only if `HYDRA_FULL_ERROR` is set.

    Args:
        name: The command.
        arguments: The arguments after the command that Hydra finds in `sys.argv`.
    """
    kept_arguments = sys.argv
    kept_flag = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"recapp.{name}", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = kept_arguments
        if kept_flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = kept_flag
