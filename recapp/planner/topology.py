"""The ranks a plan is made for: how many, on which hosts, with how much memory, how fast. Plain
numbers: no process group, no device.

Hosts are a number, so two "hosts" of two ranks can be tried on one machine: `topology.hosts=2`.

    Topology(world_size=8, compute_device="cuda")                       eight GPUs of one host
    Topology(world_size=16, local_world_size=8, compute_device="cuda")  on two
    machine("dgx_h100_x2")                                              a shipped machine, with its
                                                                        memory and what it costs
                                                                        there
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.planner.hardware import (
    DEVICES,
    Hardware,
    default_hardware,
    hardware_from,
    read_hardware,
    read_machine,
)
from recapp.planner.planner_settings import Machines
from recapp.sharding.sharding_types import equal_ranges

RESERVE_BYTES = 134_217_728  # left free where nothing says more: 128 MiB


@dataclass(frozen=True)
class Topology:
    """The ranks on which shards may lie.

    Args:
        world_size: Ranks W.
        hosts: Hosts the ranks are spread over, equally, in rank order.
        compute_device: "cpu" or "cuda".
        memory_bytes: Bytes that each rank can still give to tables and optimiser state; None where
            they are not known.
        reserve_bytes: Bytes of those that messages, activations and batches need.
        hardware: What steps cost there; None: `costs` takes the default of the device.
        local_world_size: Ranks of a host, instead of `hosts`.

    Raises:
        ConfigError: The ranks cannot be spread over the hosts, or the numbers contradict each
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
                f"{self.world_size} ranks: one each"
            )
        self._spread()

    def _spread(self) -> None:
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
        """Return what steps cost there: its own hardware, else the default of its device."""
        return self.hardware or default_hardware(self.compute_device)


def topology_of(machines: Machines, ranks: int, compute_device: str = "cpu") -> Topology:
    """Return the topology that the settings of `conf/topology` describe, without looking at this
    machine: a laptop plans for a cluster.

    Hosts that are not named follow from the hardware's ranks per host; without hardware all ranks
    are on one.

    Args:
        machines: The settings.
        ranks: The ranks where the settings name no number of them.
        compute_device: The device where the settings name no hardware.

    Raises:
        ConfigError: The hardware cannot be read, or the ranks do not fill hosts.
    """
    hardware = hardware_of(machines.hardware)
    world = machines.ranks or ranks
    hosts = machines.hosts
    memory = machines.memory_bytes
    reserve = machines.reserve_bytes
    if hardware is not None:
        compute_device = hardware.compute_device
        hosts = hosts or _hosts_of(world, hardware)
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
    """Return a shipped machine, such as `dgx_h100`.

    Args:
        name: A file of `conf/topology`, without its suffix.
        ranks: The number of ranks; None takes as many as the machine has.

    Raises:
        ConfigError: There is no such machine.
    """
    machines = Machines(**read_machine(name))
    assert machines.ranks is not None
    return (
        topology_of(machines, machines.ranks)
        if ranks is None
        else topology_of(replace(machines, ranks=ranks), ranks)
    )


def hardware_of(setting: Any) -> Hardware | None:
    """Return the hardware that `topology.hardware` names: nothing, the path of a file, or the
    hardware itself as plain values.
    """
    if setting is None or isinstance(setting, Hardware):
        return setting
    return (
        read_hardware(Path(setting))
        if isinstance(setting, str | Path)
        else hardware_from(setting, "topology.hardware")
    )


def _hosts_of(world: int, hardware: Hardware) -> int:
    per_host = hardware.ranks_per_host
    if world > per_host and world % per_host:
        raise ConfigError(
            f"topology: {world} ranks do not fill hosts of {per_host} ranks ({hardware.name}): "
            f"use a multiple of {per_host}, or topology.hosts=1"
        )
    return max(1, world // per_host)


def hosts_in_blocks(host_W: Sequence[str]) -> int:
    """Return the number of hosts, given the host of each rank; 1 where they do not hold equal
    shares of the ranks in rank order.

    Then there are no hosts within which a plan could keep a table (`srun --distribution=cyclic`,
    hosts of different size); all else works.
    """
    hosts = list(dict.fromkeys(host_W))
    if len(host_W) % len(hosts):
        return 1
    blocks = [
        hosts[i] for i, ranks in enumerate(equal_ranges(len(host_W), len(hosts))) for _ in ranks
    ]
    return len(hosts) if blocks == list(host_W) else 1
