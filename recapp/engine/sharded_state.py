"""Tables in a model's `state_dict`: under their unsharded names, with the strips of this rank.

    unsharded    bags.embedding_bags.users.weight: tensor [1000, 16]
    rank 0       bags.embedding_bags.users.weight: ((0, 500), (0, 16), tensor [500, 16])
    rank 1       bags.embedding_bags.users.weight: ((500, 1000), (0, 16), tensor [500, 16])

A strip is (rows, cols, tensor), where rows and cols are the begin and end of its rows and columns.
A rank may hold several strips of a table, or none. Where the plan mixes rows, a strip has a fourth
entry, (multiplier, shift) of `recapp/tables/row_order.py`, and its rows are positions. Whole tables
are always in the order of rows. Tensors are views, as in any state dict: copy them to keep them.
`torch.save` writes such a dict, and `torch.load(..., weights_only=True)` reads it
(`recapp/engine/table_strips.py`).

`load_state_dict` takes strips, also from a file, or whole tables. Every rank copies the part of its
own strips. So a whole table loads on all ranks, and strips of another plan load where they cover
the strips of the rank. A state dict that lacks a table is refused, as torch refuses one that lacks
a parameter.

A table that is a parameter (`recapp/engine/table_parameter.py`) is a whole tensor, as in any
module.

The state dict contains only weights. The state of the optimiser has the same form in the state dict
of the tables' fused optimiser (`recapp/engine/fused_optimizer.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recapp.engine.dynamic_blocks import ALWAYS_LOADED, KEYS
from recapp.engine.dynamic_state import load_dynamic
from recapp.engine.table_parameter import TableParameter
from recapp.engine.table_strips import Strip, TableStrips, shape_in, strips_in
from recapp.sharding.layout import Block, copy_rows, overlap
from recapp.tables.config import EmbeddingConfig
from recapp.tables.row_order import RowOrder


class HoldsTables(Protocol):
    """A sharded collection, in the view of its state dict."""

    tables_in_state: bool
    parameters_of: Mapping[str, TableParameter]

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""

    def weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict of the collection."""

    def blocks(self) -> Iterator[Block]:
        """Yield this rank's rectangles of the tables, as views."""


def put_tables_in_state(collection: nn.Module) -> None:
    """Add the tables of a collection to `state_dict` and `load_state_dict` of every module that
    contains it.

    Args:
        collection: A module with the attributes of `HoldsTables`.
    """
    collection.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
    collection.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


@contextmanager
def without_tables(collections: Sequence[HoldsTables]) -> Iterator[None]:
    """Leave tables out of state dicts inside the context, so that a state dict without tables
    loads. The tables are stored elsewhere.
    """
    before = [collection.tables_in_state for collection in collections]
    for collection in collections:
        collection.tables_in_state = False
    try:
        yield
    finally:
        for collection, in_state in zip(collections, before, strict=True):
            collection.tables_in_state = in_state


def _names(collection: HoldsTables, prefix: str) -> dict[str, EmbeddingConfig]:
    return {prefix + collection.weight_name(t.name): t for t in collection.tables()}


def _weights(collection: HoldsTables) -> dict[str, list[Block]]:
    held: dict[str, list[Block]] = {t.name: [] for t in collection.tables()}
    for block in collection.blocks():
        if block.tensor in ALWAYS_LOADED:
            held[block.table].append(block)
    return held


def _keys_name(weight: str) -> str:
    """Return the name of a dynamic table's keys, from the name of its weight."""
    return weight.removesuffix("weight") + KEYS


def _save(collection: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put this rank's strips of each table into a state dict. Every rank calls it."""
    c: Any = collection
    if not c.tables_in_state:
        for name in _of_parameters(c, prefix):
            state.pop(name, None)
    else:
        held = _weights(c)
        for name, table in _names(c, prefix).items():
            if table.name in c.parameters_of:  # torch has saved the whole table
                continue
            for stored in _stored_names(name, table):
                tensor = "weight" if stored == name else KEYS
                state[stored] = TableStrips.of(
                    [b for b in held[table.name] if b.tensor == tensor],
                    table,
                    table.embedding_dim if stored == name else 1,
                    c.shared.state.layout,
                    c.shared.comm.rank,
                )


def _load(
    collection: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Copy the tables of a state dict to this rank's rows, and remove them from the dict, because
    torch does not know their names.
    """
    c: Any = collection
    if not c.tables_in_state:
        state.update(_of_parameters(c, prefix))
        return
    held = _weights(c)
    for name, table in _names(c, prefix).items():
        if table.name in c.parameters_of:
            if name in state:
                errors.extend(_load_parameter(c, name, table, state, held[table.name]))
            continue
        lacking = [n for n in _stored_names(name, table) if n not in state]
        missing.extend(lacking)
        if table.dynamic is not None:  # all ranks take part, because they agree first
            weights, keys = (state.pop(n, None) for n in _stored_names(name, table))
            fault = load_dynamic(c.shared, table, keys, weights, bool(lacking))
            if fault and not lacking:
                errors.append(f"table {table.name} ({name}): {fault}")
            continue
        if lacking:
            continue
        shape = (table.num_embeddings, table.embedding_dim)
        fault = load_strips(state.pop(name), held[table.name], shape, table.data_type.dtype)
        if fault:
            errors.append(f"table {table.name} ({name}): {fault}")


def _of_parameters(collection: HoldsTables, prefix: str) -> dict[str, Tensor]:
    """Return the rows of the tables that are parameters, by the names of their weights."""
    return {
        prefix + collection.weight_name(table): parameter.weight.detach()
        for table, parameter in collection.parameters_of.items()
    }


def _load_parameter(
    collection: HoldsTables,
    name: str,
    table: EmbeddingConfig,
    state: dict[str, Any],
    held: Sequence[Block],
) -> list[str]:
    """Copy a table that is a parameter, whole or from strips. Then put the result into the state
    dict for torch to load.
    """
    shape = (table.num_embeddings, table.embedding_dim)
    fault = load_strips(state[name], held, shape, table.data_type.dtype)
    state[name] = collection.parameters_of[table.name].weight.detach()
    return [f"table {table.name} ({name}): {fault}"] if fault else []


def _stored_names(weight: str, table: EmbeddingConfig) -> list[str]:
    return [weight] if table.dynamic is None else [weight, _keys_name(weight)]


def block_of(strip: Strip, shape: tuple[int, int]) -> Block:
    """Return a strip of a tensor of this shape as a rectangle, without names of table and tensor.

    Raises:
        TypeError, ValueError: The value is not a strip.
    """
    rows, cols, tensor, *mixed = strip
    order = RowOrder(shape[0], *mixed[0]) if mixed else None
    return Block("", "", shape, range(*rows), range(*cols), tensor, True, order)


def load_strips(
    value: Any, held: Sequence[Block], shape: tuple[int, int], dtype: torch.dtype
) -> str:
    """Copy a stored tensor of a table to this rank's blocks.

    Args:
        value: A whole tensor, or strips that cover the blocks of this rank.
        held: The blocks of the tensor on this rank.
        shape: The shape of the whole tensor.
        dtype: The dtype of the tensor.

    Returns:
        The reason why the tensor cannot be loaded, in which case nothing is copied; empty after
        success.
    """
    fault = _fault(value, held, shape, dtype)
    if not fault:
        stored = _stored(value, shape)
        with torch.no_grad():
            for block in held:
                for s in stored:
                    copy_rows(block, s.data.detach(), s.rows, s.cols, s.order)
    return fault


def _stored(value: Any, shape: tuple[int, int]) -> list[Block]:
    return [block_of(strip, shape) for strip in strips_in(value) or ()]


def _fault(value: Any, held: Sequence[Block], shape: tuple[int, int], dtype: torch.dtype) -> str:
    """Return the reason why a value cannot be loaded into the blocks of a table; empty where it
    can.
    """
    stored_shape = shape_in(value) or shape
    if stored_shape != shape:
        return f"a tensor of shape {stored_shape} is stored, the table is {shape}"
    strips = strips_in(value)
    if strips is None:
        kind = type(value).__name__
        return f"a {kind} is stored, neither a whole tensor nor a list of (rows, cols, tensor)"
    for number, strip in enumerate(strips):
        if not _is_strip(strip, shape):
            return f"entry {number} is no (rows, cols, tensor) of a table of shape {shape}"
        tensor = strip[2]
        if tensor.dtype != dtype:
            return f"{tensor.dtype} is stored, the table is {dtype}: convert it with .to({dtype})"
        if tensor.device.type == "meta":
            return "a tensor on the meta device is stored, which has no values"
    for block in held:
        if not _covered(block, _stored(value, shape)):
            return (
                f"the stored strips do not cover rows {block.rows.start} to {block.rows.stop}, "
                f"columns {block.cols.start} to {block.cols.stop}, which this rank holds: load the "
                "state of the same plan and rank, or whole tables (gathered_state_dict)"
            )
    return ""


def _is_strip(strip: Any, shape: tuple[int, int]) -> bool:
    try:
        (r0, r1), (c0, c1), tensor, *_ = strip
        block_of(strip, shape)
        inside = 0 <= r0 <= r1 <= shape[0] and 0 <= c0 <= c1 <= shape[1]
        return inside and isinstance(tensor, Tensor) and tuple(tensor.shape) == (r1 - r0, c1 - c0)
    except (TypeError, ValueError):
        return False


def _covered(block: Block, stored: Sequence[Block]) -> bool:
    """Return whether strips of one row order, which may overlap, contain every value of a block.
    Strips of another order than the block's must contain all rows of its columns, because the
    block's rows may lie anywhere in them.
    """
    for order in {s.order for s in stored}:
        alike = [s for s in stored if s.order == order]
        whole = block._replace(rows=range(block.shape[0]))
        if _covers(alike, block if order == block.order else whole):
            return True
    return not len(block.rows)


def _covers(stored: Sequence[Block], block: Block) -> bool:
    """Return whether rectangles contain every value of a block, checked on the grid of all their
    edges.
    """
    parts = [
        part
        for s in stored
        if all(part := (overlap(s.rows, block.rows), overlap(s.cols, block.cols)))
    ]
    rows = sorted(
        {block.rows.start, block.rows.stop, *(edge for r, _ in parts for edge in (r.start, r.stop))}
    )
    cols = sorted(
        {block.cols.start, block.cols.stop, *(edge for _, c in parts for edge in (c.start, c.stop))}
    )
    filled = np.zeros((len(rows) - 1, len(cols) - 1), bool)
    for r, c in parts:
        filled[
            rows.index(r.start) : rows.index(r.stop), cols.index(c.start) : cols.index(c.stop)
        ] = True
    return bool(filled.all())
