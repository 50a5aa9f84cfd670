"""Run a command: `python -m recapp.<command> [verb] key=value ...`.

    argv -> verb | Hydra: conf/<command>.yaml and overrides -> plain settings, Job
         -> the command's task -> exit code

Hydra composes the settings and runs one job, or with `-m` one job after the other. Hydra's output
about a mistake (a traceback, five lines of advice) becomes one line that names the setting and
close matches, with exit code 1. A failed job is reported when it fails, and a sweep goes on with
the next job. A signal ends all jobs, with exit code 130 for Ctrl-C and 143 for SIGTERM.

This file imports Hydra but not torch, so that `--help` and a misspelt setting are answered at once.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recapp.cli import compose
from recapp.cli.job import Job
from recapp.cli.recipe_of_job import check_sweep, recipe_of_job
from recapp.console import note, stop_printing, tracebacks_wanted
from recapp.errors import ConfigError, RecappError, suggest
from recapp.processes.lock import locked, locked_as_named
from recapp.processes.rank_environment import external_rank, shared_run_directory
from recapp.processes.rank_process import wait_for_rank_0_error, write_error_file
from recapp.processes.stopping import (
    Stopped,
    describe_stop,
    raising_if_stopped,
    stoppable,
)
from recapp.reporting import run_record, summary
from recapp.run.recipe import COMMANDS
from recapp.settings import option_files
from recapp.settings.check_settings import override_names
from recapp.settings.option_files import FLAGS, is_group, named_folders

HELP = ("--help", "-h")
VERSION = "--version"
OLD_OPTUNA = (
    ": optuna 2 keeps no study (hydra.sweeper.storage) with SQLAlchemy 2: pip install "
    '"sqlalchemy<2" alembic'
)
Task = Callable[[Any, Job], Any]
"""The function that runs one job. It gets the record of the command's settings."""


def run(
    name: str,
    task: Task,
    *,
    verbs: Sequence[str] = (),
    writes: bool = True,
    after: Callable[[Job], None] = lambda job: None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a command and return its exit code.

    Args:
        name: The command. Its settings are `conf/<name>.yaml`, its module is `recapp.<name>`.
        task: Runs one job. A sweeper takes its result as the objective.
        verbs: The allowed first words; empty for a command without verbs.
        writes: Whether each job has a directory. A command that only prints has none.
        after: Called after each job, also after a failed one.
        argv: The arguments; None takes those of the process.

    Returns:
        0; 1 if a job failed or the command line is wrong; 128 plus the number of a signal: 130
        after Ctrl-C, 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if VERSION in arguments:
            print(versions())
            return 0
        verb = take_verb(name, verbs, arguments)
        if f"{name}_{verb}" in COMMANDS:  # a verb with settings of its own
            name = f"{name}_{verb}"
        if set(HELP) & set(arguments):
            print(help_of(name, arguments), end="")
            return 0
        compose.check_groups(name, arguments)
        flags, overrides, sweeps = flags_and_overrides(arguments)
        folders = named_folders(flags)
        first = (
            *directory_overrides(writes, overrides),
            *compose.stored_choices(name, overrides, folders),
        )
        if sweeps:
            check_sweep(name, first, overrides, folders)
        writes_here = writes and not external_rank()
        jobs = _Jobs(name, task, verb, first, folders, writes_here, after)
        named = locked_as_named(flags, overrides, writes_here)
        with stoppable(), named, hydra_process(name, [*flags, *first, *overrides]):
            main = hydra.main(str(option_files.conf_dir()), name, compose.HYDRA_VERSION_BASE)
            main(jobs.as_function())()
        return 1 if jobs.failed else 0
    except (KeyboardInterrupt, Stopped) as stop:
        note(describe_stop(_signal_of(stop)))
        return 128 + _signal_of(stop)
    except (HydraException, OmegaConfBaseException) as error:
        known = compose.known_settings(name, arguments)
        report(ConfigError(compose.in_one_line(error, known)), error)
    except BrokenPipeError:  # `recapp train --help | head` has read enough
        stop_printing()
    except OSError as error:  # raised by Hydra; a job's errors are caught in `_Jobs`
        text = (
            f"{error.filename}: cannot be written ({error.strerror}): choose another "
            "hydra.run.dir or hydra.sweep.dir"
        )
        report(ConfigError(text), error)
    except Exception as error:
        report(_error_outside_of_jobs(error), error)
    return 1


def report(error: BaseException, cause: BaseException | None = None) -> None:
    """Print an error on standard error: the notes of a rank, then one line.

    Also print the traceback if `RECAPP_TRACEBACK=1` is set, or if the error is recapp's own fault.

    Args:
        error: The error to print in one line.
        cause: The exception with the traceback to print; None takes `error`.
    """
    rank = external_rank()
    if rank is not None and isinstance(error, RecappError):
        write_error_file(error)
        wait_for_rank_0_error()
    if not isinstance(error, RecappError) or tracebacks_wanted():
        traceback.print_exception(cause or error)
    else:
        for remark in getattr(error, "__notes__", ()):
            note(remark)
    note(f"error (rank {rank}): {one_line(error)}" if rank else f"error: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line.

    If the error is recapp's own fault, its type comes first.
    """
    text = " ".join(str(error).split())
    if isinstance(error, RecappError):
        return text
    frames = list(traceback.walk_tb(error.__traceback__))
    if not text and frames:
        frame, line = frames[-1]
        text = f"raised without a text in {frame.f_globals['__name__']}, line {line}"
    return f"{type(error).__name__}: {text}"


def _error_outside_of_jobs(error: Exception) -> Exception:
    """Return an error of one line for an exception of Hydra or of one of its plugins, and others
    unchanged. Some mistakes on the command line cause a plain ValueError deep in Hydra; a plugin is
    a sweeper or a launcher, which may lack something that it needs.
    """
    last = list(traceback.walk_tb(error.__traceback__))[-1][0]
    module = str(last.f_globals["__name__"])
    package = module.partition(".")[0]
    if isinstance(error, RecappError) or package in ("recapp", "__main__"):
        return error
    if package in ("hydra", "omegaconf"):
        return ConfigError(str(error))
    hint = OLD_OPTUNA if package == "optuna" and isinstance(error, AssertionError) else ""
    return ConfigError(
        f"{package}, which hydra/sweeper or hydra/launcher runs, failed: {one_line(error)}{hint}; "
        "RECAPP_TRACEBACK=1 shows the traceback"
    )


def _signal_of(stop: BaseException) -> int:
    """Return the number of the signal that has ended a command; Ctrl-C is SIGINT."""
    return getattr(stop, "number", signal.SIGINT)


@dataclass
class _Jobs:
    """Run the jobs of a command when Hydra calls them, and count failed jobs. `writes` says whether
    this process writes into the directories of jobs.
    """

    name: str
    task: Task
    verb: str
    first: tuple[str, ...]
    folders: tuple[Path, ...]
    writes: bool
    after: Callable[[Job], None]
    failed: int = 0

    def as_function(self) -> Callable[[DictConfig], Any]:
        """Return the function that Hydra calls for each job. Hydra reads the command from its
        module.
        """

        def task(config: DictConfig) -> Any:
            # Hydra would take a job that a signal ended for a failed one
            with raising_if_stopped():
                return self._run(config)

        task.__module__ = f"recapp.{self.name}"
        return task

    def _run(self, config: DictConfig) -> Any:
        job = self._job()
        if job.number is not None:
            note(f"\njob {job.number}: {' '.join(job.overrides)}")
        try:
            with locked(job.directory) if self.writes else nullcontext():
                return self._run_here(config, job)
        except ConfigError as error:  # another job writes there
            self.failed += 1
            return report(error)

    def _run_here(self, config: DictConfig, job: Job) -> Any:
        written = run_record.written_at(job.directory)
        earlier = self._earlier_run(job)
        if earlier is None:
            self._forget_error(job)
        try:
            with raising_if_stopped():
                recipe = recipe_of_job(config, self.name, job.overrides, job.choices, job.folders)
                result = self.task(recipe, job)
            self._forget_error(job)
            return result
        # `| head` has read enough and closed standard output
        except BrokenPipeError:
            stop_printing()
            self.failed += 1
        # Hydra starts the next job; a sweeper takes None for a failed job
        except Exception as error:
            self.failed += 1
            report(error)
            self._note_error(one_line(error), job, earlier)
        # Ctrl-C, SIGTERM: there is no next job
        except BaseException as stop:
            # if the run has written its metrics, they hold how it ended
            if run_record.written_at(job.directory) in (None, written):
                ending = describe_stop(_signal_of(stop))
                self._note_error(ending, job, earlier, status="stopped")
            raise
        finally:
            self.after(job)
        return None

    def _job(self) -> Job:
        hydra_config = HydraConfig.get()
        task: Any = OmegaConf.to_container(
            OmegaConf.create(hydra_config.overrides.task), resolve=False
        )
        typed = tuple(override for override in task if override not in self.first)
        sweeps = hydra_config.mode is RunMode.MULTIRUN
        return Job(
            Path(hydra_config.runtime.output_dir),
            typed,
            compose.choices(hydra_config),
            self.verb,
            int(hydra_config.job.num) if sweeps else None,
            Path(hydra_config.sweep.dir).absolute() if sweeps else None,
            self.folders,
        )

    def _earlier_run(self, job: Job) -> int | None:
        """Return the time when an earlier run wrote settings in this directory, or None.

        A job of a sweep has a directory of its own, so the result is None.
        """
        return (
            run_record.written_at(job.directory, run_record.SETTINGS_FILE)
            if job.sweep is None
            else None
        )

    def _forget_error(self, job: Job) -> None:
        if self.writes:
            (job.directory / run_record.ERROR_FILE).unlink(missing_ok=True)

    def _note_error(self, text: str, job: Job, earlier: int | None, **more: str) -> None:
        begun = earlier is None or self._earlier_run(job) != earlier
        if not (self.writes and begun):
            return  # before it begins, the directory still belongs to the earlier run
        with suppress(OSError):  # the error was printed, and may itself be a full disk
            run_record.write_whole(
                job.directory / run_record.ERROR_FILE, json.dumps({"error": text, **more}) + "\n"
            )


# ---- the command line, before Hydra reads it


def versions() -> str:
    """Return the versions of recapp and of the packages that its results depend on, in a line."""
    return ", ".join(f"{name} {text}" for name, text in summary.versions().items())


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
    names = override_names(override for override in overrides if not override.startswith("~"))
    words += [name for name in names if is_group(name, folders)]
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
    is_named = any(override.startswith("hydra.run.dir=") for override in overrides)
    directory = [] if is_named else [f"hydra.run.dir='{shared_run_directory()}'"]
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
    flags: list[str] = []
    overrides: list[str] = []
    for k, argument in enumerate(arguments):
        (overrides if k not in folders and is_override(argument) else flags).append(argument)
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

    Hydra reads `sys.argv`, and raises its errors only if `HYDRA_FULL_ERROR` is set. It would
    compose the settings once more to look for `hydra.mode`, which `-m` says unless an argument
    does.

    Args:
        name: The command.
        arguments: The arguments after the command that Hydra finds in `sys.argv`.
    """
    kept_arguments = sys.argv
    kept_flag = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"recapp.{name}", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    kept_mode = Hydra.get_mode
    if not any(argument.startswith("hydra.mode=") for argument in arguments):
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = kept_mode  # type: ignore[method-assign]
        sys.argv = kept_arguments
        if kept_flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = kept_flag
