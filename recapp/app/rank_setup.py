"""The process of a rank before its run and after it: memory, precision, messages of libraries."""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from recapp.processes.rank_environment import external_rank, rank_info
from recapp.processes.startup_and_exit import freeze_loaded_objects, loading
from recapp.processes.stopping import Stopped, disregard_signals


def prepare_process(settings: Mapping[str, Any]) -> None:
    """Load torch and Lightning, and set what has to be set before a run begins.

    Args:
        settings: Those of the run.
    """
    with loading():
        import torch
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        from recapp.app import build_trainer  # noqa: F401  (imports what a run needs)
        from recapp.kernels.row_memory import keep_rows_from_children
        from recapp.processes.process_memory import keep_freed_memory

        # which Lightning asks the environment when it is imported: a fork server is no rank
        vars(rank_zero_only)["rank"] = external_rank() or 0
        # after Lightning: it sets its loggers' levels when it is imported
        silence_lightning(profiles="profiler" in settings["trainer"])
    freeze_loaded_objects()
    if settings["engine"]["keep_freed_memory"]:
        keep_freed_memory()
    keep_rows_from_children()
    torch.set_float32_matmul_precision("high")


def silence_lightning(*, profiles: bool) -> None:
    """Silence Lightning's hints, which are for those who write loops and not for those who run this
    command.

    Args:
        profiles: Whether a profiler runs, whose report is kept.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if profiles:
        logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    # a warning of torch about a tree that Lightning walks
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")


def ranks_here() -> tuple[int, int]:
    """Return the number of ranks on this host and the number of hosts, as the environment says:
    that of torch elastic, torchrun, srun or a person.
    """
    info = rank_info()
    return (info.local_world, -(-info.world // info.local_world)) if info else (1, 1)


def wants_bar(settings: Mapping[str, Any]) -> bool:
    """Return whether a progress bar is shown: it needs a terminal; elsewhere lines are printed."""
    return (
        bool(settings["trainer"]["enable_progress_bar"])
        and sys.stderr.isatty()
        and sys.stdout.isatty()
    )


def leave_ranks(stopped: Stopped | None) -> None:
    """Leave the process group; after a signal wait for the other ranks first, because the launcher
    ends them as soon as one has left.

    Args:
        stopped: The signal that has ended training; None where none has.

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
