"""The ranks a plan is made for: how many, on which hosts, with how much memory. Plain numbers: no process group, no device.

Hosts are a number, so two "hosts" of two ranks can be tried on one machine: `topology.hosts=2`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recapp.errors import ConfigError
from recapp.sharding.tilings import cut


@dataclass(frozen=True)
class Topology:
    """Where shards may go.

    Args:
        world_size: ranks W.
        hosts: hosts the ranks are spread over, equally, in rank order.
        compute_device: "cpu" or "cuda".
        memory_bytes: what each rank can still give to tables and optimiser state; None where nobody knows.
        reserve_bytes: of that, what messages, activations and batches need.

    Raises:
        ConfigError: the ranks cannot be spread over the hosts.
    """

    world_size: int
    hosts: int = 1
    compute_device: str = "cpu"
    memory_bytes: Sequence[int] | None = None
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"topology: world_size={self.world_size}: must be at least 1")
        if self.hosts < 1 or self.world_size % self.hosts:
            fitting = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ConfigError(f"topology.hosts={self.hosts}: {self.world_size} ranks must spread equally; "
                              f"use one of {fitting} or other trainer.devices")

    def host_ranks(self) -> list[list[int]]:
        """The ranks of each host."""
        return [list(r) for r in cut(self.world_size, self.hosts)]


def hosts_in_blocks(host_W: Sequence[str]) -> int:
    """How many hosts there are, given that of each rank; 1 where they do not hold equal shares in rank order.

    Such ranks have no hosts that a plan could keep a table within (`srun --distribution=cyclic`, hosts of different size); all else works.
    """
    hosts = list(dict.fromkeys(host_W))
    if len(host_W) % len(hosts):
        return 1
    blocks = [hosts[i] for i, ranks in enumerate(cut(len(host_W), len(hosts))) for _ in ranks]
    return len(hosts) if blocks == list(host_W) else 1
