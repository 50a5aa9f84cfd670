"""The plan where none was given: rules that hold for any model, and the memory they must fit.

Small tables are replicated (their rows are read at home and nothing is asked), large ones are spread by rows, the rest is dealt whole,
largest first. One process keeps every table whole.
"""

from collections.abc import Mapping, Sequence

from recapp.optim.rules import RowRule
from recapp.planner.memory import check_memory
from recapp.planner.rules import PlanRule, plan_by_rules
from recapp.planner.topology import Topology
from recapp.sharding.plan import ShardingPlan
from recapp.tables.config import EmbeddingBagConfig

# 6,000 and 100,000 rows: the bounds of HugeCTR's well-known Criteo plans, the same as in conf/plan/mixed.yaml
RULES = (PlanRule("data_parallel", rows_at_most=6_000, dim_below=256), PlanRule("row_wise", rows_above=100_000), PlanRule("table_wise"))
ALONE = (PlanRule("table_wise"),)


def automatic_plan(tables: Sequence[EmbeddingBagConfig], topology: Topology, rule: RowRule | None = None, *,
                   overrides: Mapping[str, str] | None = None, mode: str = "unique") -> ShardingPlan:
    """A sensible plan for these tables on these ranks.

    Args:
        tables: of the model.
        topology: the ranks.
        rule: the tables' optimiser, whose state takes memory too.
        overrides: sharding type by table name or glob.
        mode: how tables ask for rows, "unique" or "pooled".

    Raises:
        PlanError: it does not fit; the message says what would help.
    """
    rules = RULES if topology.world_size > 1 else ALONE
    plan = plan_by_rules(tables, topology, rules, name="automatic", overrides=overrides, mode=mode)
    check_memory(tables, plan, rule, topology)
    return plan
