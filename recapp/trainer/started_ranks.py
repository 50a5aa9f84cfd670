"""The ranks under Lightning: ranks that were started from outside, and ranks that a notebook forks.

Lightning's cluster environment tells Lightning the rank of this process. recapp's environment takes
the rank from `recapp/processes/rank_environment.py`, so that all of recapp uses the same rank.
Lightning's own environments accept other launches. Its SLURM environment refuses `srun -n 2`,
installs a handler that requeues the job, and uses one port for all steps of a job. Ranks that were
started by hand are ranks for Lightning only if LOCAL_RANK is set.

A notebook forks its ranks, because a new interpreter cannot run the notebook's cells again.
"""

import os
import re
import sys
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from recapp.errors import ConfigError, LaunchError, RankError
from recapp.processes.rank_environment import RankInfo, external_rank
from recapp.processes.stopping import die_with_parent

FORK: Literal["fork"] = "fork"
THREADS = "OMP_NUM_THREADS"
TABLES_LEFT = "tables_left_in_ranks"
"""The attribute of a module whose tables were trained in forked ranks and are not in this
process."""
LATE = re.compile(r"timed? ?out", re.IGNORECASE)
"""The text of torch's error after some ranks have waited in vain for others."""


def meeting_error(error: Exception, cluster: ClusterEnvironment) -> LaunchError | RankError:
    """Return the error of ranks that cannot meet: a `RankError` if the other ranks did not come in
    time, else a `LaunchError`.

    Args:
        error: The error that torch has raised.
        cluster: The environment with the address of the meeting.
    """
    kind = RankError if LATE.search(str(error)) else LaunchError
    return kind(
        f"the ranks could not meet at {cluster.main_address}:{cluster.main_port} "
        f"(MASTER_ADDR, MASTER_PORT): {' '.join(str(error).split())}"
    )


class RankEnvironment(ClusterEnvironment):
    """A cluster whose ranks were all started from outside.

    Args:
        info: The number, host and address of this rank.
    """

    def __init__(self, info: RankInfo) -> None:
        self.info = info

    @property
    def creates_processes_externally(self) -> bool:
        """Return True, because Lightning starts no ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Return the address at which rank 0 listens."""
        return self.info.address

    @property
    def main_port(self) -> int:
        """Return the port at which rank 0 listens."""
        return self.info.port

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank."""
        return external_rank() is not None

    def world_size(self) -> int:
        """Return the number of ranks on all hosts."""
        return self.info.world

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's product of devices and nodes, because hosts may have different numbers
        of ranks.
        """

    def global_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's number, which follows from its product of devices and nodes."""

    def local_rank(self) -> int:
        """Return the number of this rank among the ranks of its host; its GPU has the same
        number.
        """
        return self.info.local_rank

    def node_rank(self) -> int:
        """Return the number of this host."""
        return self.info.node


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
