"""Load a dynamic table of a checkpoint as a table of numbered rows, for other programs."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from recapp.errors import CheckpointError, suggest
from recapp.stored.checkpoint import load_table, read_manifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.rectangles import WEIGHT


class StaticTable(NamedTuple):
    """Rows in the order of their keys.

    Args:
        keys_R: The key of each row, ascending, int64; `torch.searchsorted(keys_R, ids)` finds rows.
        tensor_RD: The rows.
    """

    keys_R: Tensor
    tensor_RD: Tensor


def static_table(path: str | Path, table: str, tensor: str = WEIGHT) -> StaticTable:
    """Load a dynamic table without a plan, ranks or a model, for notebooks and exports.

    A table trained with the ids 0 .. R - 1 gives the rows of a static table of R rows, in the same
    order.

    Args:
        path: The checkpoint.
        table: The name of the table.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        The keys and rows of the table; both are empty before training.

    Raises:
        CheckpointError: The checkpoint has no dynamic table of this name.
    """
    manifest = read_manifest(path)
    stored = manifest.dynamic
    if table not in stored:
        hint = suggest(table, list(stored)) if stored else "it has none"
        raise CheckpointError(f"checkpoint {path} has no dynamic table {table}: {hint}")
    if not sum(stored[table]["rows"]):
        return StaticTable(
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, _width(manifest, table))
        )
    keys_R = load_table(path, table, "keys")[:, 0]
    order_R = keys_R.argsort()
    return StaticTable(keys_R[order_R], load_table(path, table, tensor)[order_R])


def _width(manifest: CheckpointManifest, table: str) -> int:
    """Return the number of columns of a table without stored rows."""
    return max(shard.cols.stop for shard in manifest.plan.tables[table].shards)
