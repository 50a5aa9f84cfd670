"""Lightning's cluster environment: which rank this is, as `recapp/processes/rank_environment.py`
reads it, so that the whole product has one answer.

Lightning's own environments differ in what they accept: its SLURM refuses `srun -n 2`, installs a
handler that requeues the job, and meets at one port for all steps of a job; ranks started by hand
are not ranks to it unless LOCAL_RANK is there.
"""

import re

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from recapp.errors import LaunchError, RankError
from recapp.processes.rank_environment import RankInfo, started_externally

LATE = re.compile(r"timed? ?out", re.IGNORECASE)
"""What torch says where ranks that are there have waited for others that are not."""


def meeting_error(error: Exception, cluster: ClusterEnvironment) -> LaunchError | RankError:
    """Return the error of ranks that could not meet: a `RankError` where others did not come in
    time.

    Args:
        error: What torch has raised.
        cluster: Where they were to meet.
    """
    kind = RankError if LATE.search(str(error)) else LaunchError
    return kind(
        f"the ranks could not meet at {cluster.main_address}:{cluster.main_port} "
        f"(MASTER_ADDR, MASTER_PORT): {' '.join(str(error).split())}"
    )


class RankEnvironment(ClusterEnvironment):
    """A cluster in which all ranks have been started.

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
        """Return the number of this rank among those of its host, which is its GPU's, too."""
        return self.info.local_rank

    def node_rank(self) -> int:
        """Return the number of this host."""
        return self.info.node
