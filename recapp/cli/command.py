"""Run a command: `python -m recapp.<command> [verb] key=value ...`.

    argv -> verb | Hydra: conf/<command>.yaml and overrides -> plain settings, Job
         -> the command's task -> exit code

Hydra composes the settings and runs one job, or with `-m` one job after the other. Hydra's output
about a mistake (a traceback, five lines of advice) becomes one line that names the setting and
close matches, with exit code 1. A failed job is reported when it fails, and a sweep goes on with
the next job. A signal ends all jobs, with exit code 130 for Ctrl-C and 143 for SIGTERM.

Settings become recipes:

command line                          -> recipe                              recipe_of_job
command line, ckpt_path of a model    -> its recipe, changed                 stored_recipe
+plan=mixed                           -> the recipe of that command line     recipe_under
-m seed=1,x                           -> seed=x: must be a whole number      check_sweep

This file imports Hydra but not torch, so that `--help` and a misspelt setting are answered at once.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recapp.cli import compose
from recapp.cli.job import Job
from recapp.cli.stored_recipe import as_scored, match_stored
from recapp.console import note, stop_printing, tracebacks_wanted
from recapp.errors import ConfigError, RecappError, suggest
from recapp.processes.fork_server import variables
from recapp.processes.rank_environment import (
    external_rank,
    locked,
    locked_as_named,
    shared_run_directory,
)
from recapp.processes.rank_process import wait_for_rank_0_error, write_error_file
from recapp.processes.stopping import (
    Stopped,
    describe_stop,
    raising_if_stopped,
    stoppable,
)
from recapp.reporting import run_record, summary
from recapp.run.recipe import COMMANDS, Train, read_settings
from recapp.settings import option_files
from recapp.settings.option_files import FLAGS, Folders, is_group, named_folders
from recapp.settings.records import override_names
from recapp.settings.uris import is_uri, path_to
from recapp.settings.whole_file import write_whole

HELP = ("--help", "-h")
VERSION = "--version"
OLD_OPTUNA = (
    ": optuna 2 keeps no study (hydra.sweeper.storage) with SQLAlchemy 2: pip install "
    '"sqlalchemy<2" alembic'
)
# The function that runs one job. It gets the record of the command's settings.
Task = Callable[[Any, Job], Any]


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
        compose.refuse_secrets(overrides, folders)
        first = (
            *directory_overrides(writes, overrides),
            *compose.stored_choices(overrides, folders),
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
            write_whole(
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
        name, [*compose.stored_choices(overrides, folders), *overrides], folders
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

    Raises:
        ConfigError: A directory is a URI, which Hydra would take for a path.
    """
    rank = external_rank()
    for name, _, value in (override.partition("=") for override in overrides):
        if name in ("hydra.run.dir", "hydra.sweep.dir") and is_uri(value.strip("'\"")):
            raise ConfigError(
                f"{name}={value}: curves, metrics and settings of a run are written to a disk; "
                "checkpoints=URI writes its checkpoints there"
            )
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
    sys.argv = [f"recapp.{name}", *arguments]
    kept_mode = Hydra.get_mode
    if not any(argument.startswith("hydra.mode=") for argument in arguments):
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        with variables({**os.environ, "HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        Hydra.get_mode = kept_mode  # type: ignore[method-assign]
        sys.argv = kept_arguments


# ---- recipes

LENGTH = ("max_epochs", "max_steps")


def recipe_of_job(
    config: DictConfig,
    command: str,
    overrides: Sequence[str],
    choices: Mapping[str, str],
    folders: Folders,
) -> Any:
    """Return the record of a command's settings. Paths are absolute, so that a run's checkpoint
    works from any directory.

    Args:
        config: The settings that Hydra composed.
        command: The name of the command.
        overrides: The command line.
        choices: The option chosen of each group.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: A setting is wrong.
        CheckpointError: The checkpoint does not exist, is damaged, or is of a later version.
        ArtefactError: The same for an artefact.
    """
    if compose.names_checkpoint(config):
        path = path_to(str(config.ckpt_path)).expanduser().absolute()
        return stored_recipe(path, command, overrides, folders, config)
    plain = compose.with_absolute_paths(compose.to_plain(config))
    return read_settings(plain | {"choices": choices}, command)


def stored_recipe(
    path: Path,
    command: str,
    overrides: Sequence[str],
    folders: Folders,
    composed: DictConfig | None = None,
) -> Any:
    """Return the recipe that a stored model was trained with. The command line replaces only the
    settings that it names.

    Args:
        path: The checkpoint or artefact.
        command: The command, which gives the type of the record.
        overrides: The command line.
        folders: Directories with further options, besides recapp's own.
        composed: What Hydra has composed of the command line; None composes it.
    """
    from recapp.stored.stored_model import read_manifest, read_stored

    manifest = read_stored(path) if command in ("eval", "predict") else read_manifest(path)
    recipe = match_stored(
        compose.recipe_over(manifest.config, command, overrides, folders, composed), manifest
    )
    if command == "train":
        return with_one_length(recipe, overrides)
    # an artefact has no plan of training
    scores = command == "predict" or not manifest.kind.resumes
    return as_scored(recipe, overrides) if scores else recipe


def with_one_length(recipe: Train, overrides: Sequence[str]) -> Train:
    """Return the recipe of a resumed run with one limit of training: if the command line sets one
    of trainer.max_epochs and trainer.max_steps, the checkpoint's other limit is dropped.
    """
    named = override_names(overrides)
    trainer: Any = recipe.trainer
    for one, other in (LENGTH, LENGTH[::-1]):
        sets_only_one = f"trainer.{one}" in named and f"trainer.{other}" not in named
        if sets_only_one and getattr(trainer, one) is not None:
            trainer = replace(trainer, **{other: None})
    return replace(recipe, trainer=trainer)


def recipe_under(command: str, overrides: Sequence[str]) -> Any:
    """Return the recipe of a command under some overrides. In a job, `--config-dir` adds options.

    Args:
        command: The name of the command.
        overrides: Overrides that name no stored model.

    Raises:
        ConfigError: A setting or an option does not exist, or has a wrong value.
    """
    try:
        config = compose.without_hydra(compose.compose(command, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        known = compose.known_settings(command, overrides)
        raise ConfigError(compose.in_one_line(error, known)) from error
    return recipe_of_job(config, command, overrides, {}, ())


# ---- a sweep


def check_sweep(
    command: str, first: Sequence[str], overrides: Sequence[str], folders: Folders
) -> None:
    """Check that a job accepts every value of a sweep, before the first job: a misspelt number must
    not end the sweep after hours.

    Each swept setting takes its values in turn, with the first values of the other settings. Values
    that a sweeper draws (intervals, distributions) are checked by their job. glob(...) finds only
    options that exist.

    Args:
        command: The command.
        first: Overrides that come before the command line.
        overrides: The overrides of the command line.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: A value is not allowed.
        HydraException: A setting or an option does not exist.
    """
    parser = OverridesParser.create()
    values = [texts for text in overrides if (texts := _values(parser.parse_override(text), text))]
    first_values = [of_one[0] for of_one in values]
    whole = compose.compose(command, [*first, *first_values], folders)
    if compose.names_checkpoint(whole):  # its settings are not known yet
        return
    recipe_of_job(compose.without_hydra(whole), command, (), {}, folders)
    for number, of_one in enumerate(values):
        for value in of_one[1:]:
            job = [*first_values[:number], value, *first_values[number + 1 :]]
            parsed = parser.parse_override(value)
            if is_group(parsed.key_or_group, folders):
                config = compose.compose(command, [*first, *job], folders)
            else:  # composing again takes a fifth of a second, too long for hundreds of seeds
                config = whole.copy()
                OmegaConf.set_struct(config, False)
                OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=False)
            if not compose.names_checkpoint(config):
                recipe_of_job(compose.without_hydra(config), command, (), {}, folders)


def _values(override: Override, text: str) -> list[str]:
    """Return the overrides of single jobs that an override of a sweep stands for, if they are known
    before the first job.
    """
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    key = override.get_key_element()
    return [f"{key}={value!s}" for value in override.sweep_string_iterator()]
