"""Tables in a model's `state_dict`: under their unsharded names, as what this rank holds.

    unsharded    bags.embedding_bags.users.weight: tensor [1000, 16]
    rank 0       bags.embedding_bags.users.weight: [((0, 500), (0, 16), tensor [500, 16])]
    rank 1       bags.embedding_bags.users.weight: [((500, 1000), (0, 16), tensor [500, 16])]

A strip is (rows, cols, tensor) with begin and end of its rows and columns; a rank may hold several
strips of a table, or none. Tensors are views, as in any state dict: copy them to keep them.
`torch.save` writes such a dict, and `torch.load(..., weights_only=True)` reads it.

`load_state_dict` takes strips or whole tables. Every rank keeps what lies in its own strips, so a
whole table loads on all ranks, and strips of another plan load where they cover what the rank
holds. A state without a table is refused, as torch refuses one without a parameter.

Only weights are meant. The state of the tables' optimiser has the same form in the state dict of
their fused optimiser (`recapp/engine/fused_optimizer.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recapp.sharding.layout import Block
from recapp.tables.config import EmbeddingConfig

Strip = tuple[tuple[int, int], tuple[int, int], Tensor]
"""First row and the one behind the last, the same of columns, and the values."""


class HoldsTables(Protocol):
    """A sharded collection, as its state dict sees it."""

    tables_in_state: bool

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""

    def weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict of the collection."""

    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles of the tables that this rank holds, as views."""


def put_tables_in_state(collection: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of every module around a collection know its tables.

    Args:
        collection: Has what `HoldsTables` says.
    """
    collection.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
    collection.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


@contextmanager
def without_tables(collections: Sequence[HoldsTables]) -> Iterator[None]:
    """Leave tables out of state dicts for a while, so that one without tables lacks none: they are
    stored elsewhere.
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
        if block.tensor == "weight":
            held[block.table].append(block)
    return held


def _save(collection: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put what this rank holds of each table into a state dict. Every rank calls it."""
    c: Any = collection
    if c.tables_in_state:
        held = _weights(c)
        for name, table in _names(c, prefix).items():
            state[name] = strips_of(held[table.name])


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
    """Copy the tables of a state dict to where they lie, and take them out, as torch knows no such
    names.
    """
    c: Any = collection
    if not c.tables_in_state:
        return
    held = _weights(c)
    for name, table in _names(c, prefix).items():
        if name not in state:
            missing.append(name)
            continue
        shape = (table.num_embeddings, table.embedding_dim)
        fault = load_strips(state.pop(name), held[table.name], shape, table.data_type.dtype)
        if fault:
            errors.append(f"table {table.name} ({name}): {fault}")


def strips_of(blocks: Sequence[Block]) -> list[Strip]:
    """Return what this rank holds of one tensor of a table, as views."""
    return [
        ((b.rows.start, b.rows.stop), (b.cols.start, b.cols.stop), b.data) for b in blocks if b.rows
    ]


def load_strips(
    value: Any, held: Sequence[Block], shape: tuple[int, int], dtype: torch.dtype
) -> str:
    """Copy a stored tensor of a table to where it lies on this rank.

    Args:
        value: A whole tensor, or strips that cover what this rank holds.
        held: What this rank holds of it.
        shape: The shape of the whole tensor.
        dtype: Its dtype.

    Returns:
        Why it cannot be loaded, in which case nothing is copied; empty where it was.
    """
    fault = _fault(value, held, shape, dtype)
    if not fault:
        for block in held:
            for strip in _strips(value):
                _copy(strip, block)
    return fault


def _strips(value: Any) -> list[Strip]:
    """Return the strips of either form."""
    if isinstance(value, Tensor):
        return [((0, value.shape[0]), (0, value.shape[1]), value)]
    return list(value)


def _fault(value: Any, held: Sequence[Block], shape: tuple[int, int], dtype: torch.dtype) -> str:
    """Return why a value cannot be loaded into what is held of a table; empty where it can."""
    if isinstance(value, Tensor) and tuple(value.shape) != shape:
        return f"a tensor of shape {tuple(value.shape)} is stored, the table is {shape}"
    if not isinstance(value, Tensor | list | tuple):
        kind = type(value).__name__
        return f"a {kind} is stored, neither a whole tensor nor a list of (rows, cols, tensor)"
    for number, strip in enumerate(_strips(value)):
        if not _is_strip(strip, shape):
            return f"entry {number} is no (rows, cols, tensor) of a table of shape {shape}"
        tensor = strip[2]
        if tensor.dtype != dtype:
            return f"{tensor.dtype} is stored, the table is {dtype}: convert it with .to({dtype})"
        if tensor.device.type == "meta":
            return "a tensor on the meta device is stored, which has no values"
    for block in held:
        if not _covered(block, _strips(value)):
            return (
                f"the stored strips do not cover rows {block.rows.start} to {block.rows.stop}, "
                f"columns {block.cols.start} to {block.cols.stop}, which this rank holds: load the "
                "state of the same plan and rank, or whole tables (gathered_state_dict)"
            )
    return ""


def _is_strip(strip: Any, shape: tuple[int, int]) -> bool:
    try:
        (r0, r1), (c0, c1), tensor = strip
        inside = 0 <= r0 <= r1 <= shape[0] and 0 <= c0 <= c1 <= shape[1]
        return inside and isinstance(tensor, Tensor) and tuple(tensor.shape) == (r1 - r0, c1 - c0)
    except (TypeError, ValueError):
        return False


def _covered(block: Block, strips: Sequence[Strip]) -> bool:
    """Return whether strips, which may overlap, hold every value of a block: looked up on the grid
    of all their edges.
    """
    parts = [part for strip in strips if all(part := _common(strip, block))]
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


def _common(strip: Strip, block: Block) -> tuple[range, range]:
    """Return the rows and columns that a strip and a block have in common; an empty range where
    there are none.
    """
    (r0, r1), (c0, c1), _ = strip
    return (
        range(max(r0, block.rows.start), min(r1, block.rows.stop)),
        range(max(c0, block.cols.start), min(c1, block.cols.stop)),
    )


@torch.no_grad()
def _copy(strip: Strip, block: Block) -> None:
    """Copy what a strip and a block have in common."""
    rows, cols = _common(strip, block)
    if rows and cols:
        (r0, _), (c0, _), tensor = strip
        to = block.data[_from(rows, block.rows.start), _from(cols, block.cols.start)]
        to.copy_(tensor.detach()[_from(rows, r0), _from(cols, c0)])


def _from(numbers: range, start: int) -> slice:
    return slice(numbers.start - start, numbers.stop - start)
