"""Table facts: facts about a table and the machine, known before the table is sharded. The
conditions of plan rules test them; this file defines their words in numbers.

    rows, columns                       of its config
    lookups per row, access             ids per sample x samples of all ranks / rows
    share of memory                     its weights / the smallest rank's memory for tables
    interconnect, hosts                 of the machines
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.planner.rank_memory import row_bytes
from recapp.planner.topology import Topology
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup, lookups_of

# each row is read in every step, so a replica's gradients are not larger than the table
FREQUENT_LOOKUPS_PER_ROW = 1.0
SPARSE_LOOKUPS_PER_ROW = 0.01  # a step reads at most one row of a hundred
# sent by a rank in a large all-to-all: NVLink of a V100 gives 37 and more, InfiniBand NDR 40; PCIe
# 4.0 and InfiniBand HDR give 20 to 25
FAST_GB_PER_S = 30.0


@dataclass(frozen=True)
class TableFacts:
    """The facts that conditions of rules test; None is unknown.

    Args:
        name: The name of the table.
        rows: The number of rows, R.
        dim: The number of columns, D.
        lookups_per_row: Mean lookups of a row in a step of all ranks.
        memory_share: The weights as a share of the smallest rank's memory for tables.
        interconnect_gb_per_s: 10^9 bytes that a rank sends a second in a large all-to-all.
        hosts: The number of hosts.
    """

    name: str
    rows: int
    dim: int
    lookups_per_row: float | None = None
    memory_share: float | None = None
    interconnect_gb_per_s: float | None = None
    hosts: int = 1

    @property
    def access(self) -> str | None:
        """Return `frequent`, `sparse` or `between`."""
        per_row = self.lookups_per_row
        if per_row is None:
            return None
        return (
            "frequent"
            if per_row >= FREQUENT_LOOKUPS_PER_ROW
            else "sparse"
            if per_row <= SPARSE_LOOKUPS_PER_ROW
            else "between"
        )

    @property
    def interconnect(self) -> str | None:
        """Return `fast` or `slow`."""
        speed = self.interconnect_gb_per_s
        return None if speed is None else "fast" if speed >= FAST_GB_PER_S else "slow"


def table_facts(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    *,
    statistics: Mapping[str, Any] | None = None,
    batch_per_rank: int | None = None,
    lookups: Sequence[TableLookup] | None = None,
) -> list[TableFacts]:
    """Return the facts of each table.

    Args:
        tables: The tables of the model.
        topology: The ranks, their hosts, memory and hardware.
        statistics: Objects with `ids_per_sample`, by table name; without them every lookup counts
            one id in each sample.
        batch_per_rank: The samples of a rank's batch.
        lookups: The lookups that read the tables; None takes those that the tables declare.
    """
    memory = min(topology.memory_bytes) - topology.reserve_bytes if topology.memory_bytes else None
    batch = batch_per_rank * topology.world_size if batch_per_rank else None
    known = statistics or {}
    read = Counter(x.table.name for x in (lookups_of(tables) if lookups is None else lookups))
    speed = _gb_per_s(topology)

    def of(t: EmbeddingConfig) -> TableFacts:
        ids = float(known[t.name].ids_per_sample if t.name in known else read[t.name])
        return TableFacts(
            t.name,
            t.num_embeddings,
            t.embedding_dim,
            ids * batch / t.num_embeddings if batch else None,
            None if memory is None else weight_bytes(t) / max(memory, 1),
            speed,
            topology.hosts,
        )

    return [of(t) for t in tables]


def weight_bytes(table: EmbeddingConfig) -> int:
    """Return the bytes of a table's weights."""
    return table.num_embeddings * row_bytes(table, table.embedding_dim)


def _gb_per_s(topology: Topology) -> float | None:
    """Return the 10^9 bytes a second that a rank sends in a large all-to-all among all ranks; None
    for unknown hardware.
    """
    if topology.hardware is None:
        return None
    link = topology.hardware.all_to_all["network" if topology.hosts > 1 else "host"]
    return float(1 / link.seconds(max(topology.world_size, 2), 1e9))
