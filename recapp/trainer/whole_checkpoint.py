"""`LightningModule.load_from_checkpoint` for checkpoints whose tables were sharded.

    DIR/meta.pt                   -> state dict of the dense part, hyper-parameters
    DIR/*.safetensors, manifest   -> whole tables, under their names in the module

`load_from_checkpoint` reads a checkpoint as one file, before a module, trainer or strategy exists,
and has no hook for another reader. So the import of the strategy replaces Lightning's reader, for
recapp's directories alone; Lightning's own reader reads all other paths.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor

from recapp.errors import CheckpointError
from recapp.stored.checkpoint import load_table, read_manifest, read_meta
from recapp.stored.directories import is_checkpoint
from recapp.stored.training_state import check_state

_lightnings_reader = saving.pl_load  # type: ignore[attr-defined]


def whole_checkpoint(path: str | Path) -> dict[str, Any]:
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
    return meta | {"state_dict": {**meta["state_dict"], **named}}


def _read(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Read a checkpoint of recapp or of Lightning, for Lightning."""
    if not (isinstance(path_or_url, str | Path) and is_checkpoint(path_or_url)):
        return _lightnings_reader(path_or_url, map_location, weights_only)
    found = whole_checkpoint(path_or_url)
    if isinstance(map_location, str | torch.device):
        state = found["state_dict"].items()
        moved = {n: v.to(map_location) if isinstance(v, Tensor) else v for n, v in state}
        found = found | {"state_dict": moved}
    return found


def read_for_lightning() -> None:
    """Make `load_from_checkpoint` read recapp's checkpoints from now on."""
    saving.pl_load = _read  # type: ignore[attr-defined]
