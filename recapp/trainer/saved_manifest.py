"""What the manifest of a checkpoint says of the run that saves it."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from recapp.engine.shard_model import sharded_tables, weight_names
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.trainer.data_protocols import KeepsPosition, ProvidesExample, datamodule_of
from recapp.trainer.stored_tables import dynamic_entry


def manifest_of(trainer: Trainer, module: LightningModule, plan: ShardingPlan) -> dict[str, Any]:
    """Return the entries of a manifest beside those of its format. Every rank calls it.

    Args:
        trainer: The trainer, whose metrics of validation are those of the state that is saved.
        module: The module, sharded.
        plan: The plan of its tables.
    """
    tables = sharded_tables(module)
    data = datamodule_of(trainer)
    dynamic = dynamic_entry(tables)  # ends a step that waits, before updates are counted
    continues = isinstance(data, KeepsPosition)
    measured = trainer.callback_metrics.items()
    return {
        "plan": plan.to_dict(),
        "metrics": {name: float(value) for name, value in measured if name.startswith("val_")},
        "step": trainer.global_step,
        "position": data.state_dict() if continues else None,
        "ids": data.id_encoding() if continues else None,
        "example": data.example() if isinstance(data, ProvidesExample) else [],
        "updates": [shared.updates for shared in tables],
        "rules": {name: rule.name for shared in tables for name, rule in shared.rules.items()},
        "weights": weight_names(module),
        **dynamic,
    }
