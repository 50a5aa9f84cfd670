"""What a plan is made for: tables, ranks, batches, optimiser, ids and the rest of the model.

    settings, or what ranks find at start -> PlanningProblem -> planner, prices, reports

`recapp/planner/cost.py` and `recapp/planner/pricing.py` make prices of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import nn

from recapp.optim.rules_by_table import Rules, distinct_rules, rule_of
from recapp.planner.hardware import Hardware
from recapp.planner.topology import Topology
from recapp.tables.collections import collections_in, embedding_lookups
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup, lookups_of
from recapp.tables.statistics import TableStatistics, default_statistics

NUMBER_BYTES = 4


@dataclass(frozen=True)
class Dense:
    """The part of the model that is not sharded.

    Args:
        flops: Operations of a sample's forward and backward.
        bytes: Bytes of its gradients, which all ranks sum.
        vector_bytes: Bytes of a sample's pooled vectors, which it reads forward and backward and
            answers with as many gradients.
        activation_bytes: Bytes of a sample that its layers keep for backward, with their gradients.
    """

    flops: float = 0.0
    bytes: float = 0.0
    vector_bytes: float = 0.0
    activation_bytes: float = 0.0


@runtime_checkable
class CountsOperations(Protocol):
    """A module that computes more than two operations for each of its weights and samples."""

    def flops_per_sample(self) -> float:
        """Return the operations of a sample, forward and backward, beyond those of the weights."""
        ...


def dense_of(module: nn.Module) -> Dense:
    """Return the costs of the dense part of any model: two operations for each weight and sample
    forward and four backward, as linear layers have.

    A module that multiplies more than its weights returns how much by `flops_per_sample()`, as a
    DLRM does for its interaction.
    """
    inside = {id(p) for _, collection in collections_in(module) for p in collection.parameters()}
    dense = [p for p in module.parameters() if p.requires_grad and id(p) not in inside]
    weights = sum(p.numel() for p in dense)
    # of a layer: its input, which backward reads, its output and the output's gradient
    kept = sum(p.shape[1] + 2 * p.shape[0] for p in dense if p.ndim == 2)
    more = sum(m.flops_per_sample() for m in module.modules() if isinstance(m, CountsOperations))
    width = sum(x.columns for x in embedding_lookups(module))
    return Dense(
        6.0 * weights + more,
        NUMBER_BYTES * float(weights),
        NUMBER_BYTES * float(width),
        NUMBER_BYTES * float(kept),
    )


@dataclass(frozen=True)
class PlanningProblem:
    """What a plan is made for, and what plans are compared by.

    Args:
        tables: The tables of the model.
        topology: The ranks; its hardware prices the work.
        batch_per_rank: Samples of a rank's training batch, B.
        rule: The update of touched rows, or rules by table name or glob; None prices serving, which
            has no backward.
        statistics: Id statistics of each table, by its name; a table that is not there gets
            `default_statistics`.
        dense: Costs of the part of the model that is not sharded.
        payload_bytes: Bytes of a number of a vector or gradient that travels.
        val_batch_per_rank: Samples of a rank's validation batch, which takes memory and is no part
            of a step; 0 for no validation.
        look_ahead: Training batches whose ids are exchanged before their turn, which take memory.
        lookups: What reads the tables; empty, it becomes the lookups that the tables declare.
        reserve: The bytes of `topology.reserve_bytes` by what needs them, where they were computed.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookups", tuple(self.lookups) or lookups_of(self.tables))

    @cached_property
    def lookups_per_table(self) -> Mapping[str, int]:
        """Return the number of lookups that read each table, by its name."""
        return dict(Counter(lookup.table.name for lookup in self.lookups))

    @cached_property
    def unsummed(self) -> frozenset[str]:
        """Return the tables that some lookup reads without summing: they ask for distinct rows."""
        return frozenset(x.table.name for x in self.lookups if not x.may_be_pooled)

    def vectors_per_sample(self, table: EmbeddingConfig) -> float:
        """Return how many vectors of a table a sample's output has: one for each sum or mean, the
        hotness of each concatenation, one for each id of a sequence.
        """
        own = [x for x in self.lookups if x.table.name == table.name]
        ids = self.statistics_of(table).ids_per_sample / len(own)
        return float(sum(x.columns / x.dim if x.columns else ids for x in own))

    @cached_property
    def hardware(self) -> Hardware:
        """Return what work costs on these ranks."""
        return self.topology.costs

    @cached_property
    def seconds_per_byte(self) -> tuple[float, float]:
        """Return the seconds that a byte asked by each home costs the busiest rank: inside its
        host, and beyond it.
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
        """Return the number of each table's rule among the distinct ones, by the table's name;
        tables of different rules share no kernel's call.
        """
        rules = {t.name: rule_of(self.rule, t.name) for t in self.tables}
        distinct = distinct_rules(rule for rule in rules.values() if rule)
        return {name: distinct.index(rule) if rule else 0 for name, rule in rules.items()}

    def statistics_of(self, table: EmbeddingConfig) -> TableStatistics:
        """Return the id statistics of a table."""
        known = self.statistics.get(table.name)
        return known or default_statistics(table, lookups=self.lookups_per_table[table.name])
