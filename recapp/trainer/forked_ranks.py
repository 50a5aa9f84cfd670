"""Ranks that a notebook forks, because a new interpreter cannot run the notebook's cells again."""

import os
import sys
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from recapp.errors import ConfigError
from recapp.processes.start_and_end import die_with_parent

FORK: Literal["fork"] = "fork"
THREADS = "OMP_NUM_THREADS"
TABLES_LEFT = "tables_left_in_ranks"
"""The attribute of a module whose tables were trained in forked ranks and are not in this
process."""


def in_a_notebook() -> bool:
    """Return whether this process runs a notebook, whose cells no other process can run again."""
    return hasattr(sys, "ps1")


class ForkedRanks(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for sharded tables.

    A rank computes on one thread, because the notebook's OpenMP threads do not exist after a fork,
    and a rank that waits for them hangs. Tables stay in the ranks and are lost when the ranks end.
    So the launcher marks the notebook's own module as a module without trained tables.
    """

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        os.environ[THREADS] = "1"  # if it is not set, Lightning sets more threads
        torch.set_num_threads(1)
        super()._wrapping_function(process_idx, *args, **kwargs)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            setattr(trainer.lightning_module, TABLES_LEFT, True)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        strategy: Any = self._strategy
        with strategy.without_tables():
            return super()._collect_rank_zero_results(trainer, results)


def check_tables_are_here(module: LightningModule) -> None:
    """Check that the trained tables of a module are in this process.

    Args:
        module: The module that a trainer is about to run.

    Raises:
        ConfigError: Forked ranks have trained the module and ended with its tables, and no
            checkpoint was loaded since.
    """
    if getattr(module, TABLES_LEFT, False):
        name = type(module).__name__
        raise ConfigError(
            f"{name} was trained in forked ranks, which have taken its tables with them: give "
            f"ckpt_path=, or take {name}.load_from_checkpoint(path)"
        )
