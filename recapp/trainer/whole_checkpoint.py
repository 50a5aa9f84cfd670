"""Checkpoints whose tables were sharded, for `load_from_checkpoint` and for a plain Trainer.

    DIR/meta.pt                   -> state dict of the dense part, hyper-parameters
    DIR/*.safetensors, manifest   -> whole tables, under their names in the module

A plain Trainer validates, tests and predicts with them. It cannot go on training: the state of the
tables' optimiser lies in shards.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recapp.errors import CheckpointError
from recapp.stored.checkpoint import load_table, read_manifest, read_meta
from recapp.stored.directories import is_checkpoint
from recapp.stored.meta_file import check_state
from recapp.stored.run_files import with_absolute_paths


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
        CheckpointError: A table is dynamic, so an unsharded module cannot hold its rows; or the
            checkpoint does not name the weights of the module that its tables are.
    """
    manifest = read_manifest(path)
    if manifest.dynamic:
        raise CheckpointError(
            f"checkpoint {path}: table {next(iter(manifest.dynamic))} is dynamic, and an unsharded "
            "module has no such rows: use recapp.load_model(path, module=...)"
        )
    names = manifest.weights
    if not names:
        raise CheckpointError(
            f"checkpoint {path} does not say which weights of the module its tables are: it is "
            "older than load_from_checkpoint; use recapp.load_model(path, module=...)"
        )
    meta = read_meta(path)
    check_state(meta, path)
    tables = {table: load_table(path, table) for table in set(names.values())}
    named = {name: tables[table] for name, table in names.items()}
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
    found = whole_checkpoint(path_or_url)
    if isinstance(map_location, str | torch.device):
        state = found["state_dict"].items()
        found["state_dict"] = {
            n: v.to(map_location) if isinstance(v, Tensor) else v for n, v in state
        }
    return found
