"""Plan read-only tables, and find the fewest ranks on which they fit.

Serving has no optimiser state and no backward. Tables request distinct rows: sums of bags at the
owners would have other last bits for other numbers of ranks, and served scores must equal those of
one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from recapp.console import size
from recapp.errors import ConfigError, PlanError
from recapp.planner.constraints import Constraints, ParameterConstraints
from recapp.planner.embedding_planner import plan_tables
from recapp.planner.problem import PlanningProblem
from recapp.planner.rank_memory import bytes_per_rank, check_reserve, weight_bytes
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup

MOST_RANKS = 4096
SERVED = "served"
DISTINCT_ROWS = ParameterConstraints(modes=["unique"])


@dataclass(frozen=True)
class Fit:
    """The fewest ranks on which tables fit.

    Args:
        plan: The plan on these ranks.
        bytes: The bytes of all tables, each counted once.
        largest: The bytes of the fullest rank.
    """

    plan: ShardingPlan
    bytes: int
    largest: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.plan.world_size


def serving_plan(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    lookups: Sequence[TableLookup] = (),
    constraints: Constraints | None = None,
) -> ShardingPlan:
    """Return the fastest plan for read-only tables.

    Args:
        tables: The tables, with their stored data types.
        topology: The ranks.
        lookups: The lookups that read the tables; an empty list takes the lookups that tables
            declare.
        constraints: The constraints of the plan, by table name or glob.

    Raises:
        PlanError: No plan fits.
    """
    given = dict(constraints or {})
    given["*"] = DISTINCT_ROWS.over(given.get("*", ParameterConstraints()))
    problem = PlanningProblem(tables, topology, rule=None, lookups=lookups, look_ahead=0)
    made = plan_tables(problem, given, name=SERVED).plan
    return made.with_modes(dict.fromkeys(made.undecided, "unique"))


def fewest_ranks(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], topology: Topology
) -> Fit:
    """Return the fewest ranks on which tables fit, with the memory of the topology's ranks, on one
    host.

    Args:
        tables: The tables, with their stored data types.
        lookups: The lookups that read the tables; an empty list takes the lookups that tables
            declare.
        topology: The topology; each rank gets the memory of its first rank.

    Raises:
        ConfigError: The topology does not set its memory.
        PlanError: The tables fit on no number of ranks.
    """
    if topology.memory_bytes is None:
        raise ConfigError(
            "topology.memory_bytes must be given: the bytes of a device for tables, or a machine "
            "that has them, such as topology=dgx_h100"
        )
    check_reserve(topology)
    memory = topology.memory_bytes[0]
    total = sum(weight_bytes(t) for t in tables)
    least = max(1, -(-total // max(1, memory - topology.reserve_bytes)))
    if memory <= topology.reserve_bytes or least > MOST_RANKS:
        raise PlanError(
            f"{size(total)} of tables do not fit on {MOST_RANKS} devices of {size(memory)}, of "
            f"which topology.reserve_bytes={topology.reserve_bytes} "
            f"({size(topology.reserve_bytes)}) stay free"
        )
    failure: PlanError | None = None
    for ranks in range(least, min(2 * least + 8, MOST_RANKS) + 1):
        there = replace(
            topology,
            world_size=ranks,
            hosts=1,
            local_world_size=None,
            memory_bytes=[memory] * ranks,
        )
        try:
            plan = serving_plan(tables, there, lookups)
        except PlanError as error:
            failure = error
            continue
        held = bytes_per_rank(tables, plan, None)
        return Fit(plan, total, max(rank.total for rank in held))
    assert failure is not None
    raise failure


def stored_as(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], data_types: Mapping[str, str]
) -> tuple[list[EmbeddingConfig], list[TableLookup]]:
    """Return tables and their lookups, with another data type for some tables.

    Args:
        tables: The tables.
        lookups: The lookups that read them.
        data_types: The data type of some tables, by name.
    """
    changed = {
        t.name: replace(t, data_type=data_types.get(t.name, t.data_type))  # type: ignore[arg-type]
        for t in tables
    }
    read = [replace(x, table=changed[x.table.name]) for x in lookups]
    return list(changed.values()), read
