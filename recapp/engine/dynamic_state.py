"""Dynamic tables in a model's `state_dict`: the weights and the keys of their rows.

    embedding_bags.users.weight     strips of [N, D], rows in the order of their keys' positions
    embedding_bags.users.keys       strips of [N, 1]

`recapp/engine/sharded_state.py` describes strips. A rank takes the rows whose keys belong to it. So
whole tables (`gathered_state_dict`) load under any plan, and strips load on the rank that saved
them, under the same plan. Only checkpoints contain optimiser state and counts of keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recapp.engine.dynamic_blocks import KEYS, ROWS, WAITING
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_strips import strips_in
from recapp.sparse.transfer import true_indices
from recapp.tables.config import EmbeddingConfig
from recapp.tables.dynamic import RUNS, positions_of, runs_of

_Strip = tuple[tuple[int, int], tuple[int, int], Tensor]


class _GivenKeys(NamedTuple):
    """The keys of a state dict, in the order of their positions.

    Args:
        total: The rows of the table.
        row_N: The row of each key in the state dict.
        key_N: The keys.
        run_N: The runs of the keys.
        are_distinct: Whether no key occurs twice.
    """

    total: int
    row_N: Tensor
    key_N: Tensor
    run_N: Tensor
    are_distinct: bool

    @staticmethod
    def of(strips: Sequence[_Strip]) -> "_GivenKeys":
        """Read strips of [N, 1]."""
        total = max((rows[1] for rows, _, _ in strips), default=0)
        key_N = torch.zeros(total, dtype=torch.int64, device="cpu")
        known_N = torch.zeros(total, dtype=torch.bool, device="cpu")
        for (first, last), _, values in strips:
            key_N[first:last] = values[:, 0].detach().cpu()
            known_N[first:last] = True
        row_N = true_indices(known_N)
        position_N, order_N = positions_of(key_N[row_N]).sort()
        row_N = row_N[order_N]
        distinct = bool((position_N[1:] != position_N[:-1]).all())
        return _GivenKeys(total, row_N, key_N[row_N], runs_of(position_N), distinct)


def load_dynamic(
    shared: ShardedTables, table: EmbeddingConfig, keys: Any, weights: Any, lacking: bool = False
) -> str:
    """Replace the rows of a dynamic table by those of a state dict. Every rank calls it.

    Args:
        shared: The sharded tables that contain the table.
        table: The table.
        keys: The keys of the table, whole or as strips of [N, 1].
        weights: The rows of the table, whole or as strips of [N, D].
        lacking: Whether this rank's state dict lacks the keys or the weights.

    Returns:
        The reason why a rank cannot load the table, in which case nothing changes; empty after
        success.
    """
    fault = "keys or rows are missing" if lacking else _fault(table, keys, weights)
    given = _GivenKeys.of([] if fault else _strips(keys))
    strips: list[_Strip] = [] if fault else _strips(weights)
    pieces = _pieces(shared, table.name)
    if not given.are_distinct:
        fault = "a key is stored twice"
    elif not _has_rows(given, strips, pieces, table.embedding_dim):
        fault = fault or "the stored strips do not have every row whose key they have"
    fault = _fault_of_ranks(shared, fault, given, pieces)
    if not fault:
        _fill(shared, table.name, given, strips)
    return fault


def _pieces(shared: ShardedTables, table: str) -> list[tuple[range, range]]:
    """Return the runs and columns of a table that this rank holds."""
    return [
        (piece.rows, strip.cols)
        for store in shared.state.stores
        if isinstance(store, DynamicStore)
        for strip in store.strips
        if strip.table.name == table
        for piece in strip.pieces
    ]


def _has_rows(
    given: _GivenKeys, strips: Sequence[_Strip], pieces: Sequence[tuple[range, range]], dim: int
) -> bool:
    """Return whether the strips contain all weights that this rank takes."""
    filled_ND = torch.zeros(given.total, dim, dtype=torch.bool, device="cpu")
    for rows, cols, _ in strips:
        filled_ND[slice(*rows), slice(*cols)] = True
    return all(
        bool(filled_ND[given.row_N[_inside(given.run_N, runs)], cols.start : cols.stop].all())
        for runs, cols in pieces
    )


def _fault_of_ranks(
    shared: ShardedTables, fault: str, given: _GivenKeys, pieces: Sequence[tuple[range, range]]
) -> str:
    """Return the reason why a rank cannot load its part, or why some rows reach no rank that takes
    them; else an empty string. The result is the same on all ranks.
    """
    rows_R = torch.bincount(given.run_N, minlength=RUNS).tolist()
    held = {run: rows_R[run] for runs, _ in pieces for run in runs}
    said_W = shared.comm.all_gather((fault, given.total, held))
    for rank, (of_rank, _, _) in enumerate(said_W):
        if of_rank:
            return fault or f"rank {rank} cannot load it: {of_rank}"
    total = max(n for _, n, _ in said_W)
    taken = sum(min(n[run] for _, _, n in said_W if run in n) for run in range(RUNS))
    if taken == total:
        return ""
    return (
        f"of {total} stored rows {taken} are given to all ranks that hold their keys: load the "
        "state of the same plan and rank, or whole tables (gathered_state_dict)"
    )


def _fill(shared: ShardedTables, table: str, given: _GivenKeys, strips: Sequence[_Strip]) -> None:
    """Replace the rows of a table by the rows of the given keys."""
    number_N = torch.full((given.total,), -1, device="cpu")
    number_N[given.row_N] = torch.arange(len(given.row_N), device="cpu")
    rows_R = torch.bincount(given.run_N, minlength=RUNS).tolist()
    counts = {table: {ROWS: rows_R, WAITING: [0] * RUNS}}
    for block in shared.stored.blocks_to_load(counts, shared.updates, table):
        if block.tensor == KEYS:
            block.data.copy_(given.key_N[block.rows.start : block.rows.stop, None])
        elif block.tensor == "weight":
            for (first, last), (left, right), values in strips:
                to_N = number_N[first:last]
                inside_N = _inside(to_N, block.rows)
                cols = range(max(left, block.cols.start), min(right, block.cols.stop))
                if cols:
                    at_N = (to_N[inside_N] - block.rows.start).to(block.data.device)
                    part = values.detach()[:, _from(cols, left)][inside_N.to(values.device)]
                    block.data[at_N, _from(cols, block.cols.start)] = part.to(block.data)
    shared.stored.loaded()


def _inside(number_N: Tensor, numbers: range) -> Tensor:
    return (number_N >= numbers.start) & (number_N < numbers.stop)


def _strips(value: Any) -> list[_Strip]:
    """Return the strips of a value in any form, without an order of rows."""
    return [(rows, cols, values) for rows, cols, values, *_ in strips_in(value) or ()]


def _fault(table: EmbeddingConfig, keys: Any, weights: Any) -> str:
    """Return the reason why keys or rows do not fit a table; empty where they fit."""
    total = 0
    for name, value, width, dtype in (
        (KEYS, keys, 1, torch.int64),
        ("weight", weights, table.embedding_dim, table.data_type.dtype),
    ):
        if isinstance(value, Tensor) and (value.dim() != 2 or value.shape[1] != width):
            return f"{name} is a tensor of shape {tuple(value.shape)}, must be [rows, {width}]"
        if strips_in(value) is None:
            return f"{name} is a {type(value).__name__}: must be a tensor or (rows, cols, tensor)s"
        try:
            for (r0, r1), (c0, c1), tensor in _strips(value):
                inside = 0 <= r0 <= r1 and 0 <= c0 <= c1 <= width
                if not inside or tuple(tensor.shape) != (r1 - r0, c1 - c0):
                    return f"{name} has a strip that is none of a table of [rows, {width}]"
                if tensor.dtype != dtype:
                    return f"{name} is {tensor.dtype}, must be {dtype}: convert it"
                if tensor.device.type == "meta":
                    return f"{name} is on the meta device, which has no values"
                total = max(total, r1) if name == KEYS else total
                if r1 > total:
                    return f"weight has {r1} rows, but there are {total} keys"
        except (TypeError, ValueError, AttributeError):
            return f"{name} has an entry that is no (rows, cols, tensor)"
    return ""


def _from(numbers: range, start: int) -> slice:
    return slice(numbers.start - start, numbers.stop - start)
