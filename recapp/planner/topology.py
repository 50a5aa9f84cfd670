"""The ranks to plan for: their number, hosts, memory and speed. A topology is plain numbers,
without a process group or a device.

Hosts are only a number, so one machine can stand for two "hosts" of two ranks: `topology.hosts=2`.

    Topology(world_size=8, compute_device="cuda")                       eight GPUs of one host
    Topology(world_size=16, local_world_size=8, compute_device="cuda")  on two
    machine("dgx_h100_x2")                                              a shipped machine, with its
                                                                        memory and hardware
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recapp.errors import ConfigError, suggest
from recapp.planner.hardware import (
    DEVICES,
    Hardware,
    default_hardware,
    read_machine,
)
from recapp.planner.planner_settings import Machines
from recapp.settings.records import record
from recapp.sharding.sharding_types import equal_ranges

RESERVE_BYTES = 134_217_728  # left free by default: 128 MiB


@dataclass(frozen=True)
class Topology:
    """The ranks of a plan.

    Args:
        world_size: The number of ranks, W.
        hosts: The number of hosts; each has an equal share of the ranks, in rank order.
        compute_device: "cpu" or "cuda".
        memory_bytes: Free bytes of each rank for tables and optimiser state; None if unknown.
        reserve_bytes: Bytes of these for messages, activations and batches.
        hardware: The costs of steps; None lets `costs` take the default of the device.
        local_world_size: The number of ranks of a host, instead of `hosts`.

    Raises:
        ConfigError: The ranks do not divide equally among the hosts, or the numbers contradict each
            other.
    """

    world_size: int
    hosts: int = 1
    compute_device: str = "cpu"
    memory_bytes: Sequence[int] | None = None
    reserve_bytes: int = 0
    hardware: Hardware | None = None
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"topology: world_size={self.world_size}: must be at least 1")
        if self.compute_device not in DEVICES:
            raise ConfigError(
                f"topology: compute_device={self.compute_device}: "
                f"{suggest(str(self.compute_device), DEVICES)}"
            )
        if self.memory_bytes is not None and len(self.memory_bytes) != self.world_size:
            raise ConfigError(
                f"topology: memory_bytes has {len(self.memory_bytes)} numbers for "
                f"{self.world_size} ranks: give one number for each rank"
            )
        if self.local_world_size is not None:
            local = self.local_world_size
            if (
                local < 1
                or self.world_size % local
                or self.hosts not in (1, self.world_size // local)
            ):
                raise ConfigError(
                    f"topology: local_world_size={local}: {self.world_size} ranks must spread "
                    "equally over the hosts, "
                    f"{f'of which there are {self.hosts}' if self.hosts > 1 else 'so many on each'}"
                )
            object.__setattr__(self, "hosts", self.world_size // local)
        if self.hosts < 1 or self.world_size % self.hosts:
            fitting = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ConfigError(
                f"topology.hosts={self.hosts}: {self.world_size} ranks must spread equally; "
                f"use one of {fitting} or other trainer.devices"
            )

    def host_ranks(self) -> list[list[int]]:
        """Return the ranks of each host."""
        return [list(r) for r in equal_ranges(self.world_size, self.hosts)]

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks of each host."""
        return self.world_size // self.hosts

    @property
    def costs(self) -> Hardware:
        """Return the topology's own hardware, else the default of its device."""
        return self.hardware or default_hardware(self.compute_device)


def topology_of(machines: Machines, ranks: int, compute_device: str = "cpu") -> Topology:
    """Return the topology of the settings of `conf/topology`, without any fact of this machine: a
    laptop plans for a cluster.

    Without `hosts`, the hardware's ranks per host give the number of hosts; without hardware, all
    ranks are on one host.

    Args:
        machines: The settings.
        ranks: The number of ranks if the settings do not set it.
        compute_device: The device if the settings do not set hardware.

    Raises:
        ConfigError: The hardware cannot be read, or the ranks do not fill all hosts.
    """
    hardware = machines.costs
    world = machines.ranks or ranks
    hosts = machines.hosts
    memory = machines.memory_bytes
    reserve = machines.reserve_bytes
    if hardware is not None:
        compute_device = hardware.compute_device
        per_host = hardware.ranks_per_host
        if not hosts and world > per_host and world % per_host:
            raise ConfigError(
                f"topology: {world} ranks do not fill hosts of {per_host} ranks "
                f"({hardware.name}): use a multiple of {per_host}, or topology.hosts=1"
            )
        hosts = hosts or max(1, world // per_host)
        memory = hardware.memory_bytes if memory is None else memory
    return Topology(
        world,
        hosts or 1,
        compute_device,
        None if memory is None else [memory] * world,
        RESERVE_BYTES if reserve is None else reserve,
        hardware,
    )


def machine(name: str, ranks: int | None = None) -> Topology:
    """Return the topology of a shipped machine, such as `dgx_h100`.

    Args:
        name: A file of `conf/topology`, without its suffix.
        ranks: The number of ranks; None takes all ranks of the machine.

    Raises:
        ConfigError: The machine does not exist.
    """
    machines = record(Machines, read_machine(name), "topology")
    assert machines.ranks is not None
    return (
        topology_of(machines, machines.ranks)
        if ranks is None
        else topology_of(replace(machines, ranks=ranks), ranks)
    )


def hosts_in_blocks(host_W: Sequence[str]) -> int:
    """Return the number of hosts, given the host of each rank; 1 if the hosts do not have equal
    shares of the ranks in rank order.

    In that case a plan cannot keep a table within a host (`srun --distribution=cyclic`, hosts of
    different size); the rest works.
    """
    hosts = list(dict.fromkeys(host_W))
    if len(host_W) % len(hosts):
        return 1
    blocks = [
        hosts[i] for i, ranks in enumerate(equal_ranges(len(host_W), len(hosts))) for _ in ranks
    ]
    return len(hosts) if blocks == list(host_W) else 1
