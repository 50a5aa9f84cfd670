"""The engine as benchmarks use it: which plan, transport and backend, in one place.

names on the command line -> ShardingPlan, Comm, ShardedEmbeddingBagCollection
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.errors import ConfigError, suggest
from recapp.kernels.backend import backend as make_backend
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes
from recapp.planner.initial_plan import initial_plan
from recapp.planner.plan_rules import plan_by_rules, read_rule
from recapp.planner.topology import Topology
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.tilings import COLUMN_WIDTH
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.choose_transport import TRANSPORTS
from recapp.transport.communicator import Comm

LEARNING_RATE = 0.01
EPS = 1e-8


def check_names(setting: str, given: object, known: Sequence[str]) -> list[str]:
    """The names that a setting chooses: one, several, or with null all.

    Raises:
        ConfigError: a name that is none, with close matches.
    """
    names = list(known) if given is None else given if isinstance(given, list) else [given]
    for name in names:
        if name not in known:
            raise ConfigError(f"{setting}={name}: {suggest(str(name), known)}")
    if not names:
        raise ConfigError(f"{setting}=[]: name at least one of {', '.join(known)}")
    return list(dict.fromkeys(map(str, names)))


def check_transports(given: object) -> list[str]:
    """The transports that a setting names."""
    return check_names("transport", "auto" if given is None else given, TRANSPORTS)


def check_backend(name: object) -> str:
    """Raises ConfigError for a backend that is none, or that is not there."""
    chosen = str(name or "auto")
    make_backend(chosen, torch.device("cpu"))
    return chosen


def rule() -> RowRule:
    """What happens to touched rows in every benchmark, and at every rival."""
    return rowwise_adagrad(LEARNING_RATE, EPS)


def make_plan(
    name: str,
    plain: Mapping[str, Any],
    tables: Sequence[EmbeddingBagConfig],
    comm: Comm,
    batches: Sequence[KeyedJaggedTensor],
) -> ShardingPlan:
    """The plan of that name on these ranks; open modes are decided as in training, on rank 0's
    batches. Every rank calls it.

    Strips are narrow enough that every rank can have one: at dim 64 the usual 64 columns would make
    one strip of a table, on two ranks they become 32.
    """
    rules = [read_rule(r, f"plan {name}, rule {i}") for i, r in enumerate(plain["rules"])]
    widest = max(t.embedding_dim for t in tables)
    width = min(plain.get("column_width", COLUMN_WIDTH), -(-widest // comm.world))
    make = partial(
        plan_by_rules,
        tables,
        Topology(comm.world),
        rules,
        name=name,
        mode=plain.get("mode", "auto"),
        column_width=width,
    )
    return initial_plan(
        make, comm, count=lambda plan: decide_modes(tables, plan, batches[:SAMPLE_BATCHES])
    )


def pooled_tables(plan: ShardingPlan) -> int:
    """How many tables ask for pooled bags instead of distinct rows."""
    return sum(s.mode == "pooled" for s in plan.tables.values())


def torchrec_sharding(plan: ShardingPlan) -> dict[str, tuple[str, list[int]]]:
    """A plan as TorchRec is told it: type and ranks of each table, a rank for each column strip."""
    return {
        name: (s.sharding_type, [shard.rank for shard in s.shards])
        for name, s in plan.tables.items()
    }


def make_collection(
    tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, comm: Comm, backend: str
) -> ShardedEmbeddingBagCollection:
    """The sharded collection that is measured."""
    return ShardedEmbeddingBagCollection(list(tables), plan, comm, rule(), backend=backend)
