"""Dynamic tables in a model's `state_dict`: beside the weights of each stand the keys of its rows.

    embedding_bags.users.weight     strips of [N, D], rows in the order of their keys' positions
    embedding_bags.users.keys       strips of [N, 1]

`recapp/engine/sharded_state.py` says what strips are. A rank takes the rows whose keys belong to
it, so whole tables (`gathered_state_dict`) load under any plan, and strips of the same plan on the
rank that has saved them. Optimiser state and counts of keys are in checkpoints alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recapp.engine.dynamic_blocks import ROWS, WAITING
from recapp.engine.sharded_tables import ShardedTables
from recapp.sparse.transfer import true_indices
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import RUNS, positions_of, runs_of

Strip = tuple[tuple[int, int], tuple[int, int], Tensor]


def load_dynamic(
    shared: ShardedTables,
    table: EmbeddingConfig,
    keys: Sequence[Strip],
    weights: Sequence[Strip],
) -> str:
    """Replace the rows of a dynamic table by those of a state dict. Every rank calls it.

    Args:
        shared: Holds the table.
        table: The table.
        keys: Strips of its keys, of [N, 1].
        weights: Strips of its rows, of [N, D].

    Returns:
        Why it cannot be loaded, in which case nothing changes; empty where it was.
    """
    total = max((rows[1] for rows, _, _ in keys), default=0)
    key_N = torch.zeros(total, dtype=torch.int64)
    known_N = torch.zeros(total, dtype=torch.bool)
    for (first, last), _, values in keys:
        key_N[first:last] = values[:, 0].cpu()
        known_N[first:last] = True
    row_N = true_indices(known_N)
    position_N = positions_of(key_N[row_N])
    order_N = position_N.argsort()
    row_N = row_N[order_N]
    position_N = position_N[order_N]
    if bool((position_N[1:] == position_N[:-1]).any()):
        return "a key is stored twice"
    number_N = torch.full((total,), -1)
    number_N[row_N] = torch.arange(len(row_N))
    rows_R = torch.bincount(runs_of(position_N), minlength=RUNS).tolist()
    counts = {table.name: {ROWS: rows_R, WAITING: [0] * RUNS}}
    blocks = shared.stored.blocks_to_load(counts, shared.updates, table.name)
    fault = ""
    for block in blocks:
        if block.tensor == "keys":
            block.data.copy_(key_N[row_N][block.rows.start : block.rows.stop, None])
        elif block.tensor == "weight":
            filled_NC = torch.zeros(block.data.shape, dtype=torch.bool)
            for (first, last), (left, right), values in weights:
                to_N = number_N[first:last]
                inside_N = (to_N >= block.rows.start) & (to_N < block.rows.stop)
                shared_cols = range(max(left, block.cols.start), min(right, block.cols.stop))
                if shared_cols:
                    at_N = to_N[inside_N] - block.rows.start
                    columns = _from(shared_cols, block.cols.start)
                    part = values.detach()[:, _from(shared_cols, left)][inside_N.to(values.device)]
                    block.data[at_N.to(block.data.device), columns] = part.to(block.data)
                    filled_NC[at_N, columns] = True
            if not bool(filled_NC.all()):
                fault = "the stored strips do not have every row whose key they have"
    shared.stored.loaded()
    return fault


def _from(numbers: range, start: int) -> slice:
    return slice(numbers.start - start, numbers.stop - start)
