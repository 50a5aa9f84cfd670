"""From settings to the Strategy: topology, engine, launch, and the function that makes the plan."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from recapp.app import build
from recapp.app.planning_problem import plan_of_run
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.optim.rules import sgd
from recapp.planner.topology import RESERVE_BYTES, hardware_of
from recapp.stored.checkpoint import read_manifest
from recapp.trainer.strategy import EmbeddingShardingStrategy


def build_strategy(
    settings: build.Settings,
    *,
    training: bool,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> EmbeddingShardingStrategy:
    """Return the Strategy that shards the tables.

    Args:
        settings: Those of `recapp.train` or `recapp.eval`.
        training: Whether tables are updated; evaluation holds no optimiser state.
        make_store: Makes the rows of each group where no checkpoint fills them.
    """
    rule = build.build_rules(settings) if training else sgd(0.0)
    topology = settings["topology"]
    filled = settings["ckpt_path"] and make_store is None
    stored = read_manifest(settings["ckpt_path"]).plan.tables if filled else {}
    modes = {
        name: sharding.mode for name, sharding in stored.items() if sharding.mode != "replicated"
    }
    engine = settings["engine"]
    reserve = topology["reserve_bytes"]
    return EmbeddingShardingStrategy(
        partial(plan_of_run, settings),
        rule,
        hosts=topology["hosts"],
        memory_bytes=topology["memory_bytes"],
        reserve_bytes=RESERVE_BYTES if reserve is None else reserve,
        hardware=hardware_of(topology["hardware"]),
        transport=engine["transport"],
        backend=engine["backend"],
        payload=build.PAYLOADS[engine["payload"]],
        modes=modes,
        look_ahead=engine["look_ahead"],
        clip_tables=engine["clip_tables"],
        compiled=engine["compile"],
        stored={"config": dict(settings)},
        make_store=make_store,
        timeout=timedelta(seconds=settings["launch"]["timeout"]),
    )
