"""The ranks to plan for, and the planning problem: tables, ranks, batches, optimiser, ids and the
dense part of the model.

    settings, or the facts of a run's start -> PlanningProblem -> planner, prices, reports

A topology has the number, hosts, memory and speed of ranks. It is plain numbers, without a process
group or a device. Hosts are only a number, so one machine can stand for two "hosts" of two ranks:
`topology.hosts=2`.

    Topology(world_size=8, compute_device="cuda")                       eight GPUs of one host
    Topology(world_size=16, local_world_size=8, compute_device="cuda")  on two
    machine("dgx_h100_x2")                                              a shipped machine, with its
                                                                        memory and hardware

`recapp/planner/cost.py` and `recapp/planner/pricing.py` compute prices from a problem.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from recapp.errors import ConfigError, suggest
from recapp.optim.named_rules import Rules, distinct_rules, rule_of
from recapp.planner.hardware import (
    DEVICES,
    Hardware,
    default_hardware,
    read_machine,
)
from recapp.planner.planner_settings import Machines
from recapp.settings.records import record
from recapp.sharding.sharding_types import equal_ranges
from recapp.tables.collections import collections_in, embedding_lookups
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.statistics import TableStatistics, default_statistics

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


# ---- the problem

NUMBER_BYTES = 4


@dataclass(frozen=True)
class Dense:
    """The costs of the dense part of the model.

    Args:
        flops: Operations of a sample, forward and backward.
        bytes: Bytes of the dense gradients, which all ranks sum.
        vector_bytes: Bytes of a sample's pooled vectors. The dense part reads them forward and
            backward, and writes as many bytes of gradients.
        activation_bytes: Bytes of a sample's activations that layers keep for backward, with their
            gradients.
    """

    flops: float = 0.0
    bytes: float = 0.0
    vector_bytes: float = 0.0
    activation_bytes: float = 0.0


def dense_of(module: nn.Module) -> Dense:
    """Return the costs of the dense part of any model: two operations for each weight and sample
    forward and four backward, as in linear layers.

    A module with further products has their operations in `flops_per_sample`, with backward, like a
    DLRM for its interaction.
    """
    inside = {id(p) for _, collection in collections_in(module) for p in collection.parameters()}
    dense = [p for p in module.parameters() if p.requires_grad and id(p) not in inside]
    weights = sum(p.numel() for p in dense)
    # a layer keeps its input, which backward reads, its output and the output's gradient
    activations = sum(p.shape[1] + 2 * p.shape[0] for p in dense if p.ndim == 2)
    more = sum(getattr(m, "flops_per_sample", 0.0) for m in module.modules())
    width = sum(x.columns for x in embedding_lookups(module))
    return Dense(
        6.0 * weights + more,
        NUMBER_BYTES * float(weights),
        NUMBER_BYTES * float(width),
        NUMBER_BYTES * float(activations),
    )


def dense_weights(dense: Dense) -> int:
    """Return the number of trained weights of a dense part."""
    return round(dense.bytes / NUMBER_BYTES)


@dataclass(frozen=True)
class PlanningProblem:
    """The inputs of the planner and of the prices that compare plans.

    Args:
        tables: The tables of the model.
        topology: The ranks; its hardware prices the work.
        batch_per_rank: The samples of a rank's training batch, B.
        rule: The update of touched rows, or rules by table name or glob; None prices serving, which
            has no backward.
        statistics: Id statistics by table name; a table without an entry gets `default_statistics`.
        dense: The costs of the dense part of the model.
        payload_bytes: Bytes of each number of a vector or gradient in messages.
        val_batch_per_rank: The samples of a rank's validation batch, which takes memory but is not
            part of a step; 0 without validation.
        look_ahead: The training batches whose ids are exchanged before their turn; they take
            memory.
        lookups: The lookups that read the tables; an empty list takes the lookups that tables
            declare.
        reserve: The parts of `topology.reserve_bytes` by purpose, if they were computed.
        average_every: The steps between two updates of an average of all rows, infinity if epochs
            lie between them; None without an average.
        graphs: Whether steps are recorded where that is possible.
    """

    tables: Sequence[EmbeddingConfig]
    topology: Topology
    batch_per_rank: int = 1024
    rule: Rules | None = None
    statistics: Mapping[str, TableStatistics] = field(default_factory=dict)
    dense: Dense = Dense()
    payload_bytes: int = NUMBER_BYTES
    val_batch_per_rank: int = 0
    look_ahead: int = 1
    lookups: Sequence[TableLookup] = ()
    reserve: Mapping[str, int] = field(default_factory=dict)
    average_every: float | None = None
    graphs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookups", tuple(self.lookups) or lookups_of(self.tables))

    @cached_property
    def lookups_per_table(self) -> Mapping[str, int]:
        """Return the number of lookups that read each table, by its name."""
        return dict(Counter(lookup.table.name for lookup in self.lookups))

    @cached_property
    def unsummed(self) -> frozenset[str]:
        """Return the tables with a lookup that does not sum; these tables request distinct rows."""
        return frozenset(x.table.name for x in self.lookups if not x.may_be_pooled)

    def vectors_per_sample(self, table: EmbeddingConfig) -> float:
        """Return the number of a table's vectors in the output of a sample: one for each sum or
        mean, the hotness of each concatenation, one for each id of a sequence.
        """
        lookups = [x for x in self.lookups if x.table.name == table.name]
        ids = self.statistics_of(table).ids_per_sample / len(lookups)
        return float(sum(x.columns / x.dim if x.columns else ids for x in lookups))

    @property
    def averaged(self) -> bool:
        """Return whether there is an average of all rows."""
        return self.average_every is not None

    @cached_property
    def hardware(self) -> Hardware:
        """Return the hardware of these ranks."""
        return self.topology.costs

    @property
    def recorded(self) -> str:
        """Return what of a training step is one CUDA graph: "step"; "dense", what is between lookup
        and update, where lookups need the host; or "", nothing.
        """
        several = self.topology.world_size > 1
        grown = [x.table.dynamic for x in self.lookups if x.table.dynamic]
        decides = any(t.bytes_of_sketch or t.max_rows for t in grown)
        cut = several or decides or any(x.hotness for x in self.lookups)
        fixed = not cut or all(x.columns for x in self.lookups)
        known = self.rule is not None and self.hardware.graph_us is not None
        if not (self.graphs and known and fixed):
            return ""
        return "dense" if cut else "step"

    @property
    def dense_us(self) -> float:
        """Return the microseconds of the calls of the dense part; 0 where a graph has those of the
        whole step.
        """
        hardware = self.hardware
        of_part = {"step": 0.0, "dense": hardware.cut_us, "": hardware.dense_us}
        return of_part[self.recorded] or 0.0

    @cached_property
    def seconds_per_byte(self) -> tuple[float, float]:
        """Return the seconds that the busiest rank needs for a byte of each home: inside of its
        host, and between hosts.
        """
        topology = self.topology
        links = self.hardware.all_to_all
        W = topology.world_size
        mates = topology.ranks_per_host
        hosts = topology.hosts
        near = (
            (links["host"].seconds(mates, 1e9) - links["host"].seconds(mates, 0)) / 1e9
            if mates > 1
            else 0.0
        )
        far = (
            (links["network"].seconds(hosts, 1e9) - links["network"].seconds(hosts, 0)) / 1e9
            if hosts > 1
            else 0.0
        )
        return float(near * (mates - 1)), float(far * (W - mates))

    @cached_property
    def rule_numbers(self) -> Mapping[str, int]:
        """Return the number of each table's rule among the distinct rules, by table name. Tables
        with different rules share no kernel call.
        """
        rules = {t.name: rule_of(self.rule, t.name) for t in self.tables}
        distinct = distinct_rules(rule for rule in rules.values() if rule)
        return {name: distinct.index(rule) if rule else 0 for name, rule in rules.items()}

    def statistics_of(self, table: EmbeddingConfig) -> TableStatistics:
        """Return the id statistics of a table."""
        known = self.statistics.get(table.name)
        return known or default_statistics(table, lookups=self.lookups_per_table[table.name])
