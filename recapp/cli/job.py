"""A job of a command, and its run on ranks.

    recipe, Job -> JOB/resolved.yaml.tmp -> ranks, each reads it -> JOB/metrics.json

Each rank sets up its process before its run, and leaves its group afterwards. Ranks import this
file, so it does not import Hydra.
"""

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from recapp.console import emit, note, short_path
from recapp.errors import LaunchError
from recapp.processes.fork_server import MODULES_OF_TRAINING
from recapp.processes.launch import LaunchSettings, launch, rank_count, stdout_to_stderr
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import as_rank
from recapp.processes.stopping import Stopped, disregard_signals, freeze_loaded_objects, loading
from recapp.reporting import run_record
from recapp.run.recipe import Train
from recapp.settings.records import to_plain

RANKS_PER_CORE = 4  # above this a note is printed


@dataclass(frozen=True)
class Job:
    """One run of a command.

    Args:
        directory: The absolute directory in which the job writes.
        overrides: The overrides of the command line, as typed: `+plan=mixed`, `seed=2`.
        choices: The option chosen of each configuration group: `{"model": "dlrm", "plan":
            "mixed"}`.
        verb: The word after the command; empty for commands without verbs.
        number: The number of the job in a sweep, from 0; None for a single run.
        sweep: The directory of the sweep; None for a single run.
        folders: The directories of `--config-dir`, which hold further options.
    """

    directory: Path
    overrides: tuple[str, ...]
    choices: dict[str, str]
    verb: str = ""
    number: int | None = None
    sweep: Path | None = None
    folders: tuple[Path, ...] = ()


def run_recipe(recipe: Train, job: Job, module: str) -> dict[str, Any]:
    """Run a recipe on its ranks and return its metrics (`run_on_ranks`)."""
    devices = recipe.trainer.devices
    ranks = 0 if external_rank() is not None else rank_count(devices, recipe.trainer.accelerator)
    if ranks > RANKS_PER_CORE * (cores := len(os.sched_getaffinity(0))):
        note(
            f"trainer.devices={ranks}: {ranks} ranks share the {cores} cores of this machine; "
            "fewer ranks are faster"
        )
    to_stderr = recipe.format == "json"
    return run_on_ranks(to_plain(recipe), job, module, ranks, recipe.launch, to_stderr=to_stderr)


def emit_json(metrics: Mapping[str, Any], recipe: Train) -> None:
    """Print the metrics of a job as JSON if `format=json` asks for it. Of several ranks that
    torchrun or srun started, rank 0 prints.
    """
    if recipe.format == "json" and not external_rank():
        emit([metrics], "json")


def run_on_ranks(
    settings: dict[str, Any],
    job: Job,
    module: str,
    ranks: int,
    starting: LaunchSettings,
    *,
    to_stderr: bool,
    preload: str = MODULES_OF_TRAINING,
) -> dict[str, Any]:
    """Run a job on ranks and return its metrics.

    This function starts the ranks. If this process is already one of several ranks, it runs its own
    part of the job instead.

    Args:
        settings: Plain settings. They become `resolved.yaml` in the job's directory once the job
            writes there.
        job: The job. Ranks write in its directory.
        module: The module that a rank runs. It has a function `run(settings, directory)`.
        ranks: The number of ranks to start.
        starting: The settings of their start.
        to_stderr: Whether ranks print on standard error, because standard output is for JSON only.
        preload: The modules that a fork server imports for all ranks, unless it runs already.

    Returns:
        The content of rank 0's `metrics.json`; an empty dict on other ranks.

    Raises:
        RecappError: A setting is not allowed, or a rank has failed.
        Stopped: A signal has ended the run. Its checkpoints, curves and metrics are in its
            directory.
    """
    rank = external_rank()
    written = run_record.written_at(job.directory)
    pending = run_record.pending_settings(job.directory)
    try:
        if not rank:
            run_record.update_settings(settings, job.directory)
        if rank is None:
            if sys.stderr.isatty():
                note(
                    f"starting {ranks} rank{'s' if ranks > 1 else ''} in "
                    f"{short_path(job.directory)}"
                )
            launch(
                pending,
                ranks,
                module=module,
                preload=preload,
                method=starting.start_method,
                to_stderr=to_stderr,
                grace=starting.grace,
            )
        else:
            printing = stdout_to_stderr() if to_stderr else nullcontext()
            with as_rank(job.directory), printing:
                import_module(module).run(settings, job.directory)
        if rank:
            return {}
        if run_record.written_at(job.directory) in (None, written):
            raise LaunchError(
                "the ranks ended without an error, but wrote no "
                f"{job.directory / run_record.METRICS_FILE}"
            )
        run_record.publish_settings(job.directory)
    finally:
        if not rank:
            pending.unlink(missing_ok=True)
    return run_record.read_metrics(job.directory)


# ---- each rank


def prepare_process(recipe: Train) -> None:
    """Import torch and Lightning, and set memory, precision and messages before a run begins.

    Args:
        recipe: The recipe of the run.
    """
    with loading():
        import torch
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        from recapp.kernels.row_memory import keep_rows_from_children
        from recapp.processes.process_memory import keep_freed_memory
        from recapp.run import training  # noqa: F401  (imports the modules of a run)

        # Lightning read the rank when it was imported, maybe in a fork server, which has none
        vars(rank_zero_only)["rank"] = external_rank() or 0
        # Lightning's hints address authors of training loops, not users of a command; after its
        # import, which sets the levels of its loggers
        for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if "profiler" in recipe.trainer.more:  # its report is still printed
            logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
        warnings.filterwarnings("ignore", module=r"lightning\.")
        # torch warns about a function that Lightning calls
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    freeze_loaded_objects()
    if recipe.engine.keep_freed_memory:
        keep_freed_memory()
    keep_rows_from_children()
    torch.set_float32_matmul_precision("high")


def wants_bar(recipe: Train) -> bool:
    """Return whether to show a progress bar. It needs a terminal; elsewhere lines are printed."""
    return recipe.trainer.enable_progress_bar and sys.stderr.isatty() and sys.stdout.isatty()


def leave_ranks(stopped: Stopped | None = None) -> None:
    """Leave the process group. After a signal, wait for the other ranks first, because the launcher
    ends them as soon as one rank has left.

    Args:
        stopped: The signal that has ended training, or None.

    Raises:
        Stopped: A signal has ended training.
    """
    from recapp.transport.communicator import leave_process_group, wait_for_all

    if stopped is not None:
        disregard_signals()
        wait_for_all()
    leave_process_group()
    if stopped is not None:
        raise stopped
