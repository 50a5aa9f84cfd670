"""Tells Lightning which rank this is, as `recapp/processes/rank_environment.py` reads it: one
answer in the whole product.

Lightning's own environments differ in what they accept: its SLURM refuses `srun -n 2`, installs a
handler that requeues the job, and meets at one port for all steps of a job; ranks started by hand
are not ranks to it unless LOCAL_RANK is there.
"""

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from recapp.processes.rank_environment import RankInfo, started_externally


class RankEnvironment(ClusterEnvironment):
    """A cluster in which all ranks have been started.

    Args:
        info: Number, host and address of this rank.
    """

    def __init__(self, info: RankInfo) -> None:
        self.info = info

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 listens."""
        return self.info.address

    @property
    def main_port(self) -> int:
        """The same."""
        return self.info.port

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank."""
        return started_externally()

    def world_size(self) -> int:
        """Ranks in all."""
        return self.info.world

    def set_world_size(self, size: int) -> None:
        """Lightning's product of devices and nodes; hosts may have different numbers of ranks, so
        it is not asked.
        """

    def global_rank(self) -> int:
        """Among all ranks."""
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        """As `set_world_size`."""

    def local_rank(self) -> int:
        """Among the ranks of this host: the number of its GPU."""
        return self.info.local_rank

    def node_rank(self) -> int:
        """Number of this host."""
        return self.info.node
