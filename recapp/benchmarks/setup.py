"""Set up the engine for benchmarks: plan, transport, backend and row rule.

names on the command line -> ShardingPlan, sharded collections
"""

from collections.abc import Sequence
from functools import partial

import torch

from recapp.benchmarks.workloads import Workload
from recapp.engine.shard_model import shard_model
from recapp.engine.sharded_collection import ShardedCollection
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes, initial_plan
from recapp.planner.plan_rules import plan_by_rules, read_rule
from recapp.planner.planner_settings import PlanSettings
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import COLUMN_WIDTH
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, PoolingType
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.lookups import TableLookup
from recapp.transport.communicator import Comm

LEARNING_RATE = 0.01
EPS = 1e-8
WHOLE_NAME = "table_wise"
WHOLE = PlanSettings(rules=({"type": WHOLE_NAME},))
"""The plan that does not cut tables, and its name."""


def rule() -> RowRule:
    """Return the row rule of every benchmark and every rival: row-wise Adagrad."""
    return rowwise_adagrad(LEARNING_RATE, EPS)


def make_plan(
    name: str,
    plan_settings: PlanSettings,
    tables: Sequence[EmbeddingConfig],
    comm: Comm,
    batches: Sequence[KeyedJaggedTensor],
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Return a plan by rules for these ranks. Every rank calls this function.

    Modes that the settings leave open are decided as in training, on rank 0's batches. Strips are
    narrow enough that every rank can have one: at dim 64 the usual 64 columns would make one strip
    of a table, and on two ranks they become 32 columns.

    Args:
        name: The name of the plan.
        plan_settings: The `rules`, and `mode`, `column_width` and `row_order` where they are set.
        tables: The tables.
        comm: The ranks.
        batches: This rank's batches.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
    """
    rules = [
        read_rule(r, f"plan {name}, rule {i}") for i, r in enumerate(plan_settings.rules or ())
    ]
    widest = max(t.embedding_dim for t in tables)
    width = min(plan_settings.column_width or COLUMN_WIDTH, -(-widest // comm.world))
    make = partial(
        plan_by_rules,
        tables,
        Topology(comm.world),
        rules,
        name=name,
        mode=plan_settings.mode or "auto",
        column_width=width,
        row_order=plan_settings.row_order or "natural",
    )
    return initial_plan(
        make, comm, count=lambda plan: decide_modes(tables, plan, batches[:SAMPLE_BATCHES], lookups)
    )


def pooled_tables(plan: ShardingPlan) -> int:
    """Return the number of tables in the mode `pooled`."""
    return sum(s.mode == "pooled" for s in plan.tables.values())


def torchrec_sharding(plan: ShardingPlan) -> dict[str, tuple[str, list[int]]]:
    """Return a plan in the format of `torchrec_worker.py`: the sharding type and the ranks of each
    table, one rank for each column strip.
    """
    return {
        name: (s.sharding_type, [shard.rank for shard in s.shards])
        for name, s in plan.tables.items()
    }


def shard_workload(
    workload: Workload, plan: ShardingPlan, comm: Comm, backend: str
) -> ShardedCollection:
    """Return the sharded collection for a workload. Every rank calls this function."""
    tables = workload.tables()
    meta = torch.device("meta")
    collection = (
        EmbeddingCollection(tables, meta)
        if workload.pooling is PoolingType.NONE
        else EmbeddingBagCollection(tables, device=meta, lookups=workload.lookups())
    )
    sharded = shard_model(collection, plan, comm, rule(), backend)
    assert isinstance(sharded, ShardedCollection)
    return sharded
