"""Predicts scaling on paper: the time, traffic and memory of a step by the number of ranks, from
calibrated costs, and the least traffic that any sharding could have.

    weak      every rank keeps its batch: the step of a perfect machine would keep its length
    strong    all ranks share one batch: the step of a perfect machine would halve as ranks double

The tables come from MLPerf Training's DLRM-DCNv2 (multi-hot Criteo 1TB, 204 M rows of 128 columns,
214 ids a sample). A plan that does not fit into memory gets a record without numbers.
"""

from collections.abc import Sequence
from typing import Any

from recapp.errors import PlanError
from recapp.optim.named_rules import Rules
from recapp.planner.constraints import MODES
from recapp.planner.cost import ID_BYTES
from recapp.planner.embedding_planner import plan_tables
from recapp.planner.hardware import Hardware
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.problem import Dense, PlanningProblem
from recapp.planner.topology import Topology
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, IdRule
from recapp.tables.statistics import default_statistics

MLPERF_ROWS = (
    40_000_000,
    39_060,
    17_295,
    7_424,
    20_265,
    3,
    7_122,
    1_543,
    63,
    40_000_000,
    3_067_956,
    405_282,
    10,
    2_209,
    11_938,
    155,
    4,
    976,
    14,
    40_000_000,
    40_000_000,
    40_000_000,
    590_152,
    12_973,
    108,
    36,
)
# ids of a bag; 214 ids per sample
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_DIM = 128  # columns of each table
MLPERF_WEIGHTS = 16_100_000  # weights of the dense part: three cross layers of rank 512, two MLPs
STRONG_BATCH = 65_536  # samples of all ranks, as in MLPerf's reference runs


def mlperf_tables() -> list[EmbeddingConfig]:
    """Return MLPerf's 26 tables."""
    return [
        EmbeddingBagConfig(
            name=f"C{i + 1}",
            num_embeddings=rows,
            embedding_dim=MLPERF_DIM,
            feature_names=[f"C{i + 1}"],
            id_rule=IdRule.HASH,
        )
        for i, rows in enumerate(MLPERF_ROWS)
    ]


def scaled(
    ranks: Sequence[int],
    plans: Sequence[str],
    hardware: Hardware,
    rule: Rules,
    weak_batch: int,
    advance: Any = lambda n: None,
) -> list[dict[str, Any]]:
    """Return a record for each growth (weak or strong), plan, mode and number of ranks.

    Args:
        ranks: The numbers of ranks, ascending.
        plans: `best` for the planner's plan, or a sharding type for all tables.
        hardware: The costs of steps; the ranks fill hosts of this hardware.
        rule: The row rule of the tables.
        weak_batch: The samples of a rank under weak scaling.
        advance: Called with 1 after each record.
    """
    found = []
    for growth in ("weak", "strong"):
        for plan in plans:
            for mode in MODES:
                first: dict[str, Any] | None = None
                for world in ranks:
                    batch = weak_batch if growth == "weak" else max(1, STRONG_BATCH // world)
                    row = {
                        "growth": growth,
                        "plan": plan,
                        "mode": mode,
                        "ranks": world,
                        "batch_per_rank": batch,
                        **_one(plan, mode, world, batch, hardware, rule),
                    }
                    first = first or (row if row["step_ms"] else None)
                    found.append(row | {"efficiency": _efficiency(growth, first, row)})
                    advance(1)
    return found


def _efficiency(growth: str, first: dict[str, Any] | None, row: dict[str, Any]) -> float | None:
    """Return the efficiency against the smallest number of ranks that can hold the tables; None if
    the tables do not fit.
    """
    if first is None or not row["step_ms"]:
        return None
    perfect = (
        first["step_ms"] if growth == "weak" else first["step_ms"] * first["ranks"] / row["ranks"]
    )
    return float(perfect / row["step_ms"])


def _one(
    plan: str, mode: str, world: int, batch: int, hardware: Hardware, rule: Rules
) -> dict[str, Any]:
    hosts = max(1, world // hardware.ranks_per_host) if world % hardware.ranks_per_host == 0 else 1
    memory = None if hardware.memory_bytes is None else [hardware.memory_bytes] * world
    topology = Topology(world, hosts, hardware.compute_device, memory, hardware=hardware)
    tables = mlperf_tables()
    known = {t.name: default_statistics(t, bag) for t, bag in zip(tables, MLPERF_BAGS, strict=True)}
    problem = PlanningProblem(
        tables,
        topology,
        batch,
        rule,
        known,
        Dense(6.0 * MLPERF_WEIGHTS, 4.0 * MLPERF_WEIGHTS, 4.0 * MLPERF_DIM * len(tables)),
    )
    wanted = (
        ParameterConstraints(modes=[mode])
        if plan == "best"
        else ParameterConstraints(modes=[mode], sharding_types=[plan])
    )
    try:
        outcome = plan_tables(problem, {"*": wanted})
    except PlanError:
        return {
            "step_ms": None,
            "samples_per_second": None,
            "bytes_per_rank": None,
            "sent_per_rank": None,
            "least_sent_per_rank": None,
        }
    step = outcome.cost.step_seconds
    cost = outcome.cost
    return {
        "step_ms": step * 1e3,
        "samples_per_second": world * batch / step,
        "bytes_per_rank": float(cost.bytes_W.max()),
        "sent_per_rank": cost.sent_bytes / world,
        "least_sent_per_rank": least_sent(problem),
    }


def least_sent(problem: PlanningProblem) -> float:
    """Return the least bytes that a rank sends in a step, on average, if no table is replicated.

    For each table take the smaller of two sums: the ids, vectors and gradients of its distinct
    rows; or all its ids, and the vectors and gradients of its bags.
    """
    world = problem.topology.world_size
    total = 0.0
    for t in problem.tables:
        known = problem.statistics_of(t)
        vector = 2 * t.embedding_dim * problem.payload_bytes
        ids = problem.batch_per_rank * known.ids_per_sample
        bags = problem.batch_per_rank * known.bags_per_sample
        total += min(
            known.distinct_rows(ids) * (ID_BYTES + vector),
            ids * ID_BYTES + bags * (ID_BYTES + vector),
        )
    return total * (world - 1) / world
