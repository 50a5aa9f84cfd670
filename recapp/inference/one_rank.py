"""Give a model read-only tables of one rank: the engine without a process group."""

from collections.abc import Callable

import torch
from torch import nn

from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import shard_model
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.collections import embedding_tables
from recapp.transport.communicator import Comm


def one_rank(
    model: nn.Module,
    device: torch.device,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace the collections of a model, which are on the meta device, by collections of one rank.

    Args:
        model: The model; it is changed in place.
        device: The device of its tables.
        make_store: Makes the store of each group; None makes stores that the caller fills.

    Returns:
        The model, in evaluation mode and without gradients.
    """
    tables = embedding_tables(model)
    whole = {
        t.name: TableSharding(
            (Shard(0, range(t.plan_rows), range(t.embedding_dim)),), "unique", "table_wise"
        )
        for t in tables
    }
    plan = ShardingPlan(whole, 1, name="one_rank")
    comm = Comm(device=device, alone=True)
    made = shard_model(model, plan, comm, None, trains=False, make_store=make_store)
    return made.to(device).eval().requires_grad_(False)
