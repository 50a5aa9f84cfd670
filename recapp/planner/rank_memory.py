"""Count the bytes of a plan on each rank, and check that they fit before any allocation."""

from collections.abc import Sequence
from dataclasses import dataclass

from recapp.console import size
from recapp.errors import PlanError
from recapp.kernels.quantised import bytes_of_packed_row
from recapp.optim.named_rules import Rules, rule_of
from recapp.optim.rules import RowRule
from recapp.planner.problem import Topology
from recapp.sharding.sharding_plan import Shard, ShardingPlan
from recapp.tables.collections import compute_dtype
from recapp.tables.config import DataType, EmbeddingConfig, IdRule

STEPS_BYTES = 4  # the number of steps that a row has taken, under a rule of all rows


@dataclass(frozen=True)
class RankBytes:
    """The bytes on one rank: weights and optimiser state, by table. The average of weights counts
    as state.
    """

    weights: dict[str, int]
    state: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of weights and optimiser state together."""
        return sum(self.weights.values()) + sum(self.state.values())


def shard_bytes(
    table: EmbeddingConfig,
    shard: Shard,
    rule: RowRule | None,
    itemsize: int,
    averaged: bool = False,
) -> tuple[int, int]:
    """Return the bytes of a shard's weights, with the key index of a dynamic table, and the bytes
    of its optimiser state and of the average of its rows.

    Args:
        table: The table.
        shard: A rectangle of the table.
        rule: The row rule of the table; None for read-only rows.
        itemsize: The bytes of a number of the compute type.
        averaged: Whether there is an average of the rows.
    """
    rows = table.rows_in(shard.rows)
    columns = len(shard.cols)
    state = state_bytes(rule, columns, itemsize) + averaged * average_bytes(
        table, columns, itemsize
    )
    return rows * (row_bytes(table.data_type, columns) + table.bytes_to_find_a_row), rows * state


def state_bytes(rule: RowRule | None, columns: int, itemsize: int) -> int:
    """Return the bytes of the optimiser's state of some columns of a row, with the steps that it
    has taken under a rule of all rows. Numbers of the state have `itemsize` bytes.
    """
    if rule is None:
        return 0
    numbers = sum(columns if kind == "element" else 1 for _, kind in rule.state)
    return numbers * itemsize + (STEPS_BYTES if rule.all_rows else 0)


def average_bytes(table: EmbeddingConfig, columns: int, itemsize: int) -> int:
    """Return the bytes of the average of some columns of a row, in the compute type, and of the
    rounded copy that lookups read if the table has a narrower type.
    """
    narrower = table.data_type.dtype.itemsize < itemsize
    return columns * itemsize + (row_bytes(table.data_type, columns) if narrower else 0)


def row_bytes(data_type: DataType, columns: int) -> int:
    """Return the bytes of some columns of a row; quantised rows include their scale and bias."""
    if data_type.bits is None:
        return columns * data_type.dtype.itemsize
    return bytes_of_packed_row(columns, data_type.bits)


def weight_bytes(table: EmbeddingConfig) -> int:
    """Return the bytes of a table's weights."""
    return table.num_embeddings * row_bytes(table.data_type, table.embedding_dim)


def bytes_per_rank(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    rule: Rules | None,
    averaged: bool = False,
) -> list[RankBytes]:
    """Return the bytes of a plan on each rank.

    Args:
        tables: The tables.
        plan: The plan.
        rule: One rule for all tables, or rules by table; None is no optimiser (serving).
        averaged: Whether there is an average of all rows.
    """
    rank_bytes = [RankBytes({}, {}) for _ in range(plan.world_size)]
    itemsize = compute_dtype(tables).itemsize
    for t in tables:
        for s in plan.tables[t.name].cells(t, plan.world_size):
            weights, state = shard_bytes(t, s, rule_of(rule, t.name), itemsize, averaged)
            rank_bytes[s.rank].weights[t.name] = rank_bytes[s.rank].weights.get(t.name, 0) + weights
            rank_bytes[s.rank].state[t.name] = rank_bytes[s.rank].state.get(t.name, 0) + state
    return rank_bytes


def check_memory(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    rule: Rules | None,
    topology: Topology,
    averaged: bool = False,
) -> None:
    """Refuse a plan that does not fit, before any allocation. Arguments as for `bytes_per_rank`.

    Raises:
        PlanError: The plan does not fit; the text names the missing bytes, the rank, its largest
            tables and the fixes.
    """
    if topology.memory_bytes is None:
        return
    check_reserve(topology)
    rank_bytes = bytes_per_rank(tables, plan, rule, averaged)
    missing_W = [
        h.total + topology.reserve_bytes - free
        for h, free in zip(rank_bytes, topology.memory_bytes, strict=True)
    ]
    missing = max(missing_W)
    if missing <= 0:
        return
    rank = missing_W.index(missing)
    worst = sorted(rank_bytes[rank].weights, key=lambda t: -rank_bytes[rank].weights[t])[:3]
    blame = ", ".join(
        f"{t} ({size(rank_bytes[rank].weights[t] + rank_bytes[rank].state[t])})" for t in worst
    )
    raise PlanError(
        f"plan {plan.name} does not fit: rank {rank} lacks {missing:,} bytes ({size(missing)}): "
        f"it would hold {size(rank_bytes[rank].total)} of tables and optimiser state beside "
        f"{size(topology.reserve_bytes)} reserved, and {size(topology.memory_bytes[rank])} are "
        f"free; largest there: {blame}. What helps: "
        f"{_what_helps([t for t in tables if t.name in worst], plan, rank)}"
    )


def check_reserve(topology: Topology) -> None:
    """Refuse a topology whose reserve leaves no memory for tables.

    Raises:
        PlanError: The memory of a rank is not larger than its reserve.
    """
    if topology.memory_bytes is None or not topology.reserve_bytes:
        return
    memory = min(topology.memory_bytes)
    if memory <= topology.reserve_bytes:
        raise PlanError(
            f"topology.reserve_bytes={topology.reserve_bytes} ({size(topology.reserve_bytes)}), "
            "which stay free for messages, activations and batches, leave nothing of "
            f"topology.memory_bytes={memory} ({size(memory)}) to tables: use a smaller "
            f"topology.reserve_bytes, such as {memory // 10}, smaller batches "
            "(dataset.batch_size), or devices of more memory"
        )


def _what_helps(largest: Sequence[EmbeddingConfig], plan: ShardingPlan, rank: int) -> str:
    """Return as text the measures that would reduce the bytes of a rank's largest tables and that
    the plan does not have yet.
    """

    def in_equal_parts(t: EmbeddingConfig) -> bool:
        fair = -(-t.plan_rows // plan.world_size)
        return all(
            len(s.rows) <= fair
            for s in plan.tables[t.name].cells(t, plan.world_size)
            if s.rank == rank
        )

    replicated = all(plan.tables[t.name].mode == "replicated" for t in largest)
    hashed = any(t.id_rule == IdRule.HASH for t in largest)
    dynamic = any(t.dynamic is not None for t in largest)
    remedies = {
        "more ranks (trainer.devices)": plan.world_size == 1 or not replicated,
        "+plan=row_wise": any(
            plan.tables[t.name].mode == "replicated" or not in_equal_parts(t) for t in largest
        ),
        "fewer rows (tables.dynamic.max_rows, or expected_rows if they are fewer)": dynamic,
        "fewer rows (tables.max_rows)": hashed and not dynamic,
        "hashed tables of fewer rows (id_rule hash)": not hashed and not dynamic,
        "a smaller tables.data_type": any(t.data_type.dtype.itemsize > 2 for t in largest),
    }
    *others, last = [remedy for remedy, fits in remedies.items() if fits]
    return f"{', '.join(others)} or {last}" if others else last
