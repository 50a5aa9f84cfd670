"""Ranks that are forked from a notebook, whose cells no fresh interpreter could run again."""

import os
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from recapp.processes.data_workers import die_with_parent

THREADS = "OMP_NUM_THREADS"


class ForkedRanks(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for sharded tables.

    A rank computes on one thread: the threads of OpenMP that the notebook has used are not there
    after a fork, and a rank that waits for them hangs. The notebook's own module gets the dense
    part back; whole tables come from `load_from_checkpoint`.
    """

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        os.environ[THREADS] = "1"  # Lightning sets more where this is not said
        torch.set_num_threads(1)
        super()._wrapping_function(process_idx, *args, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        strategy: Any = self._strategy
        with strategy.without_tables():
            return super()._collect_rank_zero_results(trainer, results)
