"""The Strategy of a recipe: topology, engine, launch, and the function that makes the plan."""

from collections.abc import Callable
from datetime import timedelta

import torch

from recapp.engine.row_store import RowStore, StoredGroup
from recapp.optim.rules import sgd
from recapp.planner.topology import RESERVE_BYTES, hardware_of
from recapp.processes.rank_environment import rank_info
from recapp.run.lightning_trainer import build_trainer
from recapp.run.plan_of_run import plan_of_run
from recapp.run.recipe import Recipe, Train
from recapp.settings.records import to_plain
from recapp.stored.checkpoint import read_manifest
from recapp.trainer.strategy import EmbeddingShardingStrategy

PAYLOADS: dict[str, torch.dtype | None] = {
    "full": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype of messages for each value of `engine.payload`; None keeps the dtype of the
computation.
"""


def build_strategy(
    recipe: Train,
    *,
    training: bool,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
    sized: Callable[[], Recipe] | None = None,
) -> EmbeddingShardingStrategy:
    """Return the Strategy that shards the tables.

    Args:
        recipe: The recipe.
        training: Whether tables are updated; evaluation holds no optimiser state.
        make_store: Makes the store of each group, with its rows; None fills the stores from
            `ckpt_path`, if set.
        sized: Returns the recipe with the sizes of tables that the data module found; None uses
            `recipe`.
    """
    now = sized or (lambda: recipe)
    filled = recipe.ckpt_path if make_store is None else None
    stored = read_manifest(filled).plan.tables if filled else {}
    topology = recipe.topology
    engine = recipe.engine
    reserve = topology.reserve_bytes
    return EmbeddingShardingStrategy(
        lambda found: plan_of_run(now(), found),
        recipe.rules if training else sgd(0.0),
        hosts=topology.hosts,
        memory_bytes=topology.memory_bytes,
        reserve_bytes=RESERVE_BYTES if reserve is None else reserve,
        hardware=hardware_of(topology.hardware),
        transport=engine.transport,
        backend=engine.backend,
        payload=PAYLOADS[engine.payload],
        modes={name: s.mode for name, s in stored.items() if s.mode != "replicated"},
        look_ahead=engine.look_ahead,
        clip_tables=engine.clip_tables,
        compiled=engine.compile,
        stored=lambda: {"config": to_plain(now())},
        make_store=make_store,
        timeout=timedelta(seconds=recipe.launch.timeout),
    )


def meet(recipe: Train) -> None:
    """Make the process group of several ranks, as a trainer does. Every rank calls it."""
    here = rank_info()
    if here is None or here.world == 1:
        return
    strategy = build_strategy(recipe, training=False)
    build_trainer(recipe, strategy, [], [])
    strategy.setup_distributed()
