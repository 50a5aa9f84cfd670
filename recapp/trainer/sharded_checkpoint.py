"""The checkpoint of a sharded module: the entries that describe the run, the whole checkpoint for
`load_from_checkpoint` and a plain Trainer, and the tensors of tables that a run loads from it.

    DIR/manifest.json, meta.pt    the run and its identity, by which its checkpoints know each other
                                  (`recapp/stored/checkpoint.py`); the dense part, hyper-parameters
    DIR/*.safetensors, manifest   whole tables, under their names in the module

A plain Trainer validates, tests and predicts with such a checkpoint. It cannot go on training: the
state of the tables' optimiser lies in shards.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recapp import console
from recapp.dataset.schema import Schema
from recapp.engine.dynamic_keys import (
    ALWAYS_LOADED,
    OF_ADMISSION,
    SKETCH,
    WAITING_COUNTS,
    without_waiting,
)
from recapp.engine.sharded_collection import sharded_tables, weight_names
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import CheckpointError
from recapp.optim.rules import FROZEN
from recapp.sharding.layout import AVERAGE, OF_WEIGHTS, RAW, WEIGHT, Block
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.checkpoint import with_absolute_paths, with_paths
from recapp.stored.manifest import CheckpointManifest
from recapp.stored.plain_parts import DERIVED_VALUES, check_state, plain_values
from recapp.stored.store import is_checkpoint
from recapp.stored.stored_model import load_table, read_manifest, read_meta
from recapp.tables.positions import Counter
from recapp.trainer.data_protocols import (
    KeepsPosition,
    datamodule_of,
)

if TYPE_CHECKING:  # scoring without ranks does without Lightning
    from lightning.pytorch import LightningModule, Trainer


@dataclass
class SavedRun:
    """The checkpoints of a run so far.

    Args:
        run: The identity of the run, as rank 0 has it; after a resume all ranks have the same.
        newest: The checkpoint that was saved last; None before the first.
        step: The step of `newest`.
    """

    run: str = field(default_factory=partial(token_hex, 8))
    newest: Path | None = None
    step: int = -1


def manifest_of(
    trainer: "Trainer", module: "LightningModule", plan: ShardingPlan
) -> dict[str, Any]:
    """Return the entries of a manifest, without the entries of the file format. It is collective.

    Args:
        trainer: The trainer; its validation metrics must belong to the state that is saved.
        module: The sharded module.
        plan: The plan of the module's tables.
    """
    tables = sharded_tables(module)
    data = datamodule_of(trainer)
    # ends a deferred step, before the updates are counted
    dynamic = {name: rows for t in tables for name, rows in t.rows_of_stretches().items()}
    begun = {name: number for t in tables for name, number in t.update.begun.items()}
    continues = isinstance(data, KeepsPosition)
    measured = trainer.callback_metrics.items()
    return {
        "plan": plan.to_dict(),
        "metrics": {name: float(value) for name, value in measured if name.startswith("val_")},
        "step": trainer.global_step,
        "position": data.state_dict() if continues else None,
        "ids": data.id_encoding() if continues else None,
        "example": (data.example() or []) if hasattr(data, "example") else [],
        **({"conversions": made} if (made := getattr(data, "conversions", None)) else {}),
        "updates": [shared.updates for shared in tables],
        "rules": {name: rule.name for shared in tables for name, rule in shared.rules.items()},
        "weights": weight_names(module),
        **({"dynamic": dynamic} if dynamic else {}),
        **({"begun": begun} if begun else {}),
    }


def plain_part_of(trainer: "Trainer", state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plain part of a checkpoint: Lightning's state, with paths relative to the
    checkpoint's directory, and the fitted values of derived columns.

    Args:
        trainer: The trainer.
        state: Lightning's state.
        folder: The directory in which the checkpoint will lie.
    """
    if "callbacks" in state:  # not where only weights are saved
        to = partial(os.path.relpath, start=folder.absolute())
        state = {**state, "callbacks": with_paths(state["callbacks"], to)}
    schema = getattr(datamodule_of(trainer), "schema", None)  # of a user's own, it may be anything
    values = schema.values if isinstance(schema, Schema) else {}
    return {**state, DERIVED_VALUES: plain_values(values)} if values else state


def dense_states(module: "LightningModule") -> dict[str, Tensor]:
    """Return the tensors of the state of the dense part's optimisers, by parameter and name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        f"{names.get(parameter, 'a parameter')}, {kind}": value
        for optimizer in module.trainer.optimizers
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }


class WholeCheckpoint(dict[str, Any]):
    """A checkpoint in Lightning's form, for weights alone."""

    def __getitem__(self, name: str) -> Any:
        if name == "optimizer_states":
            raise CheckpointError(
                "the checkpoint was trained sharded, and the state of its tables' optimiser lies "
                "in shards: go on training with Trainer(strategy=EmbeddingShardingStrategy()); "
                "validate, test, predict and load_from_checkpoint need no strategy"
            )
        return super().__getitem__(name)


def whole_checkpoint(path: str | Path) -> WholeCheckpoint:
    """Return a checkpoint in Lightning's form: one state dict with the dense part and whole tables,
    on the CPU. It needs memory for all tables.

    Raises:
        CheckpointError: A table is dynamic, so an unsharded module cannot hold its rows.
    """
    manifest = read_manifest(path)
    if manifest.dynamic:
        raise CheckpointError(
            f"checkpoint {path}: table {next(iter(manifest.dynamic))} is dynamic, and an unsharded "
            "module has no such rows: use recapp.load_model(path, module=...)"
        )
    meta = read_meta(path)
    check_state(meta, path)
    tables = {table: load_table(path, table) for table in set(manifest.weights.values())}
    named = {name: tables[table] for name, table in manifest.weights.items()}
    meta = with_absolute_paths(meta, path)
    return WholeCheckpoint(meta | {"state_dict": {**meta["state_dict"], **named}})


def read_for_lightning(path_or_url: Any, map_location: Any) -> dict[str, Any] | None:
    """Return a checkpoint of recapp as Lightning reads a file; None for any other path.

    Args:
        path_or_url: What Lightning shall read.
        map_location: The device of the tensors; a function or None leaves them on the CPU.
    """
    if not (isinstance(path_or_url, str | Path) and is_checkpoint(path_or_url)):
        return None
    checkpoint = whole_checkpoint(path_or_url)
    if isinstance(map_location, str | torch.device):
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {
            n: v.to(map_location) if isinstance(v, Tensor) else v for n, v in state
        }
    return checkpoint


@dataclass(frozen=True)
class StoredTables:
    """Fills tables from a checkpoint of any plan.

    Args:
        tables: The sharded tables of the model.
        fitting: Whether the run trains, so that it needs the optimiser's state too.
        speaks: Whether this rank prints notes about state that is not loaded.
    """

    tables: Sequence[ShardedTables]
    fitting: bool
    speaks: bool

    def to_fill(self, manifest: CheckpointManifest) -> Iterator[Block]:
        """Yield the rectangles that this rank reads from a checkpoint."""
        changed = self._changed_rules(manifest)
        dynamic = manifest.dynamic if self.fitting else without_waiting(manifest.dynamic)
        updates = [*manifest.updates, *([0] * len(self.tables))]
        averaged = self.fitting and any(tensor == RAW for _, tensor in manifest.tensors)
        for shared, number in zip(self.tables, updates, strict=False):
            for block in shared.blocks_to_load(dynamic, number, averaged=averaged):
                if self._is_wanted(block, changed, manifest):
                    yield _as_stored(block, manifest) if averaged else block

    def _is_wanted(
        self, block: Block, changed: Mapping[str, tuple[str, str]], manifest: CheckpointManifest
    ) -> bool:
        if block.tensor in (*ALWAYS_LOADED, *OF_WEIGHTS) or not self.fitting:
            return block.tensor in (*ALWAYS_LOADED, *OF_WEIGHTS)
        if block.tensor in OF_ADMISSION:
            return (block.table, block.tensor) in manifest.tensors
        return block.table not in changed

    def filled(self, manifest: CheckpointManifest) -> None:
        """Take over the loaded rows and the counts of updates. It is collective.

        Raises:
            CheckpointError: Keys of dynamic tables are in the wrong place.
        """
        for shared in self.tables:
            shared.loaded()
        changed = self._changed_rules(manifest)
        for shared, number in zip(self.tables, manifest.updates, strict=False):
            shared.updates = number
            # state that begins anew is corrected as that of first updates
            shared.update.count_from(manifest.begun | dict.fromkeys(changed, number))
        if self.speaks:
            for before, now in dict.fromkeys(changed.values()):
                tables = [name for name in changed if changed[name] == (before, now)]
                one = len(tables) == 1
                console.note(
                    f"{_some(tables)} {'is' if one else 'are'} frozen from here on"
                    if now == FROZEN.name
                    else f"{_some(tables)} go{'es' if one else ''} on by {now}, the checkpoint has "
                    f"{before}: weights stay, the optimizer's state begins anew"
                )
            # the tensor of the other counter
            tensor_of = {Counter.SKETCH: WAITING_COUNTS, Counter.EXACT: SKETCH}
            others = [
                table.name
                for shared in self.tables
                for table in shared.state.layout.tables
                if self.fitting
                and table.dynamic is not None
                and table.dynamic.seen > 1
                and (table.name, tensor_of[table.dynamic.counter]) in manifest.tensors
            ]
            if others:
                console.note(
                    f"{_some(others)}: the checkpoint counted keys by another dynamic.counter: how "
                    "often keys without a row were seen is counted anew"
                )

    def _changed_rules(self, manifest: CheckpointManifest) -> dict[str, tuple[str, str]]:
        """Return the names of the stored row rule and of the current one, by table, for tables
        whose row rule has changed. Their optimiser state is not loaded; empty if the run does not
        train.
        """
        if not self.fitting:
            return {}
        now = {name: rule.name for t in self.tables for name, rule in t.rules.items()}
        before = manifest.rules
        return {
            name: (before[name], rule)
            for name, rule in now.items()
            if before.get(name, rule) != rule
        }


def _as_stored(block: Block, manifest: CheckpointManifest) -> Block:
    """Return a block under the name of its tensor in a checkpoint with an average.

    Training goes on with the raw weights. Where the average has the type of the table, it is stored
    as the weights alone.
    """
    if block.tensor == WEIGHT:
        return block._replace(tensor=RAW)
    if block.tensor == AVERAGE and (block.table, AVERAGE) not in manifest.tensors:
        return block._replace(tensor=WEIGHT)
    return block


def _some(tables: Sequence[str]) -> str:
    named = ", ".join(tables[:3])
    more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
    return f"table{'s' if len(tables) > 1 else ''} {named}{more}"
