"""Set up a rank's process before its run, and leave it afterwards: memory, precision, messages."""

import logging
import sys
import warnings

from recapp.processes.rank_environment import external_rank
from recapp.processes.start_and_end import freeze_loaded_objects, loading
from recapp.processes.stopping import Stopped, disregard_signals
from recapp.run.recipe import Train


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
        # after the import of Lightning, which sets the levels of its loggers
        _silence_lightning(profiles="profiler" in recipe.trainer.more)
    freeze_loaded_objects()
    if recipe.engine.keep_freed_memory:
        keep_freed_memory()
    keep_rows_from_children()
    torch.set_float32_matmul_precision("high")


def _silence_lightning(*, profiles: bool) -> None:
    """Silence Lightning's hints: they address authors of training loops, not users of a command.

    Args:
        profiles: Whether a profiler runs; its report is still printed.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if profiles:
        logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    # torch warns about a function that Lightning calls
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")


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
