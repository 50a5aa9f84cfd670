"""Lightning's cluster environment, which tells Lightning the rank of this process. It takes the
rank from `recapp/processes/rank_environment.py`, so that all of recapp uses the same rank.

Lightning's own environments accept other launches. Its SLURM environment refuses `srun -n 2`,
installs a handler that requeues the job, and uses one port for all steps of a job. Ranks that were
started by hand are ranks for Lightning only if LOCAL_RANK is set.
"""

import re

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from recapp.errors import LaunchError, RankError
from recapp.processes.rank_environment import RankInfo, started_externally

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
        return started_externally()

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
