"""The planning problem: tables, ranks, batches, optimiser, ids and the dense part of the model.

    settings, or the facts of a run's start -> PlanningProblem -> planner, prices, reports

`recapp/planner/cost.py` and `recapp/planner/pricing.py` compute prices from a problem.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from recapp.optim.named_rules import Rules, distinct_rules, rule_of
from recapp.planner.hardware import Hardware
from recapp.planner.topology import Topology
from recapp.tables.collections import collections_in, embedding_lookups
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.statistics import TableStatistics, default_statistics

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
