"""Tables in a model's `state_dict`: under their unsharded names, with the strips of this rank.

    unsharded    bags.embedding_bags.users.weight: tensor [1000, 16]
    rank 0       bags.embedding_bags.users.weight: ((0, 500), (0, 16), tensor [500, 16])
    rank 1       bags.embedding_bags.users.weight: ((500, 1000), (0, 16), tensor [500, 16])

A strip is (rows, cols, tensor), where rows and cols are the begin and end of its rows and columns.
A rank may hold several strips of a table, or none. Where the plan mixes rows, a strip has a fourth
entry, (multiplier, shift) of `recapp/tables/positions.py`, and its rows are positions. Whole tables
are always in the order of rows. Tensors are views, as in any state dict: copy them to keep them.
`torch.save` writes such a dict, and `torch.load(..., weights_only=True)` reads it.

`load_state_dict` takes strips, also from a file, or whole tables. Every rank copies the part of its
own strips. So a whole table loads on all ranks, and strips of another plan load where they cover
the strips of the rank. A state dict that lacks a table is refused, as torch refuses one that lacks
a parameter.

A dynamic table has the weights and the keys of its rows:

    embedding_bags.users.weight     strips of [N, D], rows in the order of their keys' positions
    embedding_bags.users.keys       strips of [N, 1]

A rank takes the rows whose keys belong to it. So whole tables (`gathered_state_dict`) load under
any plan, and strips load on the rank that saved them, under the same plan. Only checkpoints contain
optimiser state and counts of keys.

A table that is a parameter (`recapp/engine/table_weights.py`) is a whole tensor, as in any
module.

The state dict contains only weights. The state of the optimiser has the same form in the state dict
of the tables' fused optimiser (`recapp/compat/torchrec/keyed.py`).

In memory the entry of a table has the methods of torch's ShardedTensor, so that programs that fill
shards run:

    for shard in model.state_dict()["bags.embedding_bags.users.weight"].local_shards():
        row, column = shard.metadata.shard_offsets
        rows, columns = shard.metadata.shard_sizes
        part = pretrained[row : row + rows, column : column + columns]
        shard.tensor.copy_(part)       # into the table itself

In a file an entry is plain: `torch.save` writes an OrderedDict of `shape` and `strips`, which
`torch.load(weights_only=True)` reads without recapp. That reader calls only a few constructors.
`OrderedDict` is one of them; none of them makes a list.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recapp.engine.dynamic_keys import KEYS, ROWS, WAITING
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.sharding.layout import Block, Layout, copy_rows, overlap
from recapp.sparse.transfer import true_indices
from recapp.tables.config import EmbeddingConfig
from recapp.tables.positions import STRETCHES, RowOrder, positions_of, stretches_of
from recapp.transport.communicator import Comm

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

# (begin, end) of the rows, (begin, end) of the columns, the values, and (multiplier, shift) where
# rows are mixed.
Strip = (
    tuple[tuple[int, int], tuple[int, int], Tensor]
    | tuple[tuple[int, int], tuple[int, int], Tensor, tuple[int, int]]
)

_STRIPS = "strips"
_SHAPE = "shape"


@dataclass(eq=False)
class TableStrips:
    """A rank's strips of one tensor of a table. Iteration gives (rows, cols, tensor).

    Args:
        name: The name of the table.
        strips: The strips.
        shape: The shape of the whole tensor; None for a dynamic table, whose rows come and go.
        rank: This rank.
        placed: (rank, rows, cols) of the rectangles of all ranks; rows and cols as in strips.
    """

    name: str
    strips: list[Strip]
    shape: tuple[int, int] | None
    rank: int
    placed: list[tuple[int, tuple[int, int], tuple[int, int]]]

    @staticmethod
    def of(
        blocks: Iterable[Block],
        table: EmbeddingConfig,
        columns: int,
        layout: Layout,
        rank: int,
    ) -> "TableStrips":
        """Return a rank's strips of a tensor of a table.

        Args:
            blocks: The rank's rectangles of the tensor.
            table: The table.
            columns: The number of columns of the tensor: the columns of the table, or 1 for a
                tensor with one value per row.
            layout: The places of the rows of all tables.
            rank: The rank.
        """
        dynamic = table.dynamic is not None
        shape = None if dynamic else (table.num_embeddings, columns)
        per_row = columns != table.embedding_dim
        placed = [
            (
                s.rank,
                (s.rows.start, s.rows.stop),
                (0, 1) if per_row else (s.cols.start, s.cols.stop),
            )
            for s in layout.shards_of(table.name)
        ]
        strips: list[Strip] = [
            (
                (b.rows.start, b.rows.stop),
                (b.cols.start, b.cols.stop),
                b.data[:],  # a view, or a copy of rows of a dynamic table
                *(((b.order.multiplier, b.order.shift),) if b.order else ()),
            )
            for b in blocks
            if b.rows or dynamic  # strips without rows have the width of an empty table
        ]
        return TableStrips(table.name, strips, shape, rank, placed)

    def __iter__(self) -> Iterator[Strip]:
        return iter(self.strips)

    def __len__(self) -> int:
        return len(self.strips)

    def __getitem__(self, number: int) -> Strip:
        return self.strips[number]

    def local_shards(self) -> "list[LocalShard]":
        """Return the shards of this rank, like ShardedTensor's method. Each has `tensor`, a view of
        the table's rows, and `metadata` with `shard_offsets`, `shard_sizes` and `placement`.

        Raises:
            ConfigError: Rows are mixed, or the table is dynamic: offsets would not be rows.
        """
        from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

        self._check_numbered("local_shards")
        return [
            LocalShard(tensor, _metadata(self.rank, rows, cols, tensor.device))
            for rows, cols, tensor, *_ in self.strips
        ]

    def metadata(self) -> "ShardedTensorMetadata":
        """Return `size` and `shards_metadata` of the whole tensor, like ShardedTensor's method.
        `shards_metadata` has the shards of all ranks, with one shard per rank for a replica.

        Raises:
            ConfigError: Rows are mixed, or the table is dynamic: offsets would not be rows.
        """
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

        self._check_numbered("metadata")
        device = self.strips[0][2].device if self.strips else torch.device("cpu")
        shards = [_metadata(*place, device) for place in self.placed]
        return ShardedTensorMetadata(shards_metadata=shards, size=self.size())

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor.

        Raises:
            ConfigError: The table is dynamic: its rows come and go.
        """
        if self.shape is None:
            self._check_numbered("size")
        return torch.Size(self.shape or ())

    def _check_numbered(self, asked: str) -> None:
        """Check that the rows of strips are row numbers.

        Raises:
            ConfigError: Rows are mixed, or the table is dynamic.
        """
        if self.shape is None:
            raise ConfigError(
                f"table {self.name}: {asked}: the table is dynamic, and only static tables have "
                "shards of numbered rows: read its rows by `for rows, cols, tensor in` the "
                "entry and its keys from the entry `keys`, and write both by load_state_dict"
            )
        if any(len(strip) > 3 for strip in self.strips):
            raise ConfigError(
                f"table {self.name}: {asked}: its plan mixes rows (row_order=mixed), so offsets "
                "would be positions, not rows: give load_state_dict the whole table, or leave "
                "row_order out of the plan"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        plain = {} if self.shape is None else {_SHAPE: tuple(self.shape)}
        return OrderedDict, ([*plain.items(), (_STRIPS, list(self.strips))],)

    def __copy__(self) -> "TableStrips":
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableStrips":
        return replace(self, strips=deepcopy(self.strips, memo))


def strips_in(value: Any) -> list[Strip] | None:
    """Return the strips of an entry of a state dict: a whole tensor, `TableStrips`, the dict that a
    file has for them, or a list of (rows, cols, tensor). Return None for other values.
    """
    if isinstance(value, Tensor):
        return [((0, value.shape[0]), (0, value.shape[1]), value)] if value.dim() == 2 else None
    if isinstance(value, Mapping):
        value = value.get(_STRIPS)
    return list(value) if isinstance(value, TableStrips | list | tuple) else None


def _metadata(rank: int, rows: tuple[int, int], cols: tuple[int, int], device: torch.device) -> Any:
    """Return the metadata of a rectangle in the form of torch's sharded tensors."""
    from torch.distributed._shard.metadata import ShardMetadata

    sizes = [rows[1] - rows[0], cols[1] - cols[0]]
    return ShardMetadata([rows[0], cols[0]], sizes, f"rank:{rank}/{device.type}")


def stored_names(weight: str, table: EmbeddingConfig) -> list[str]:
    """Return the names of the tensors of a table, from the name of its weight."""
    keys = weight.removesuffix("weight") + KEYS
    return [weight] if table.dynamic is None else [weight, keys]


def load_strips(
    value: Any, blocks: Sequence[Block], shape: tuple[int, int], dtype: torch.dtype
) -> str:
    """Copy a stored tensor of a table to this rank's blocks.

    Args:
        value: A whole tensor, or strips that cover the blocks of this rank.
        blocks: The blocks of the tensor on this rank.
        shape: The shape of the whole tensor.
        dtype: The dtype of the tensor.

    Returns:
        The reason why the tensor cannot be loaded, in which case nothing is copied; empty after
        success.
    """
    fault, stored = blocks_in(value, shape, dtype)
    if fault:
        return fault
    for block in blocks:
        if not _covered(block, stored):
            return (
                f"the stored strips do not cover rows {block.rows.start} to {block.rows.stop}, "
                f"columns {block.cols.start} to {block.cols.stop}, which are on this rank: load "
                "the state of the same plan and rank, or whole tables (gathered_state_dict)"
            )
    with torch.no_grad():
        for block in blocks:
            for s in stored:
                copy_rows(block, s.data.detach(), s.rows, s.cols, s.order)
    return ""


def blocks_in(value: Any, shape: tuple[int, int], dtype: torch.dtype) -> tuple[str, list[Block]]:
    """Return the strips of a stored tensor of a table as rectangles, without names of table and
    tensor; and first the reason why the value is no such tensor, empty if it is.

    Args:
        value: An entry of a state dict (`strips_in`).
        shape: The shape of the whole tensor.
        dtype: The dtype of the tensor.
    """
    known = value.get(_SHAPE) if isinstance(value, Mapping) else getattr(value, "shape", None)
    stored_shape = tuple(known) if isinstance(known, list | tuple) else shape
    if stored_shape != shape:
        return f"a tensor of shape {stored_shape} is stored, the table is {shape}", []
    strips = strips_in(value)
    if strips is None:
        kind = type(value).__name__
        why = f"a {kind} is stored, neither a whole tensor nor a list of (rows, cols, tensor)"
        return why, []
    blocks = [_block_of(strip, shape) for strip in strips]
    for number, block in enumerate(blocks):
        if block is None:
            return f"entry {number} is no (rows, cols, tensor) of a table of shape {shape}", []
        stored = block.data.dtype
        if stored != dtype:
            return f"{stored} is stored, the table is {dtype}: convert it with .to({dtype})", []
        if block.data.device.type == "meta":
            return "a tensor on the meta device is stored, which has no values", []
    return "", [block for block in blocks if block is not None]


def _block_of(strip: Any, shape: tuple[int, int]) -> Block | None:
    """Return a strip of a tensor of this shape as a rectangle; None for other values."""
    with suppress(TypeError, ValueError):
        (r0, r1), (c0, c1), tensor, *mixed = strip
        order = RowOrder(shape[0], *mixed[0]) if mixed else None
        block = Block("", "", shape, range(r0, r1), range(c0, c1), tensor, True, order)
        inside = 0 <= r0 <= r1 <= shape[0] and 0 <= c0 <= c1 <= shape[1]
        if inside and isinstance(tensor, Tensor) and tensor.shape == (r1 - r0, c1 - c0):
            return block
    return None


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


class _GivenKeys(NamedTuple):
    """The keys of a state dict, in the order of their positions.

    Args:
        total: The rows of the table.
        row_N: The row of each key in the state dict.
        key_N: The keys.
        stretch_N: The stretches of the keys.
        are_distinct: Whether no key occurs twice.
    """

    total: int
    row_N: Tensor
    key_N: Tensor
    stretch_N: Tensor
    are_distinct: bool

    @staticmethod
    def of(blocks: Sequence[Block]) -> "_GivenKeys":
        """Read rectangles of [N, 1]."""
        total = max((block.rows.stop for block in blocks), default=0)
        key_N = torch.zeros(total, dtype=torch.int64, device="cpu")
        known_N = torch.zeros(total, dtype=torch.bool, device="cpu")
        for block in blocks:
            here = _from(block.rows, 0)
            key_N[here] = block.data[:, 0].detach().cpu()
            known_N[here] = True
        row_N = true_indices(known_N)
        position_N, order_N = positions_of(key_N[row_N]).sort()
        row_N = row_N[order_N]
        distinct = bool((position_N[1:] != position_N[:-1]).all())
        return _GivenKeys(total, row_N, key_N[row_N], stretches_of(position_N), distinct)


def load_dynamic(
    shared: ShardedTables, table: EmbeddingConfig, weights: Any, keys: Any, lacking: bool
) -> str:
    """Replace the rows of a dynamic table by those of a state dict. Every rank calls it.

    Args:
        shared: The sharded tables that contain the table.
        table: The table.
        weights: The rows of the table, whole or as strips of [N, D].
        keys: The keys of the table, whole or as strips of [N, 1].
        lacking: Whether this rank's state dict lacks the keys or the weights.

    Returns:
        The reason why a rank cannot load the table, in which case nothing changes; empty after
        success.
    """
    fault = "keys or rows are missing" if lacking else ""
    given: dict[str, list[Block]] = {KEYS: [], "weight": []}
    total = 0
    with suppress(TypeError, ValueError, IndexError):  # of an entry that is no strip
        total = max((rows[1] for rows, *_ in strips_in(keys) or ()), default=0)
    for name, value, width, dtype in (
        (KEYS, keys, 1, torch.int64),
        ("weight", weights, table.embedding_dim, table.data_type.dtype),
    ):
        if not fault:
            fault, given[name] = blocks_in(value, (total, width), dtype)
            fault = fault and f"{name}: {fault}"
    stored_keys = _GivenKeys.of([] if fault else given[KEYS])
    strips = [] if fault else given["weight"]
    pieces = _pieces(shared, table.name)
    if not stored_keys.are_distinct:
        fault = "a key is stored twice"
    elif not _has_rows(stored_keys, strips, pieces, table.embedding_dim):
        fault = fault or "the stored strips do not have every row whose key they have"
    fault = _fault_of_ranks(shared, fault, stored_keys, pieces)
    if not fault:
        _fill(shared, table.name, stored_keys, strips)
    return fault


def _pieces(shared: ShardedTables, table: str) -> list[tuple[range, range]]:
    """Return the stretches and columns of a table that this rank holds."""
    return [
        (piece.rows, strip.cols)
        for store in shared.state.stores
        if isinstance(store, DynamicStore)
        for strip in store.strips
        if strip.table.name == table
        for piece in strip.pieces
    ]


def _has_rows(
    stored_keys: _GivenKeys,
    strips: Sequence[Block],
    pieces: Sequence[tuple[range, range]],
    dim: int,
) -> bool:
    """Return whether the strips contain all weights that this rank takes."""
    filled_ND = torch.zeros(stored_keys.total, dim, dtype=torch.bool, device="cpu")
    for strip in strips:
        filled_ND[_from(strip.rows, 0), _from(strip.cols, 0)] = True
    return all(
        bool(
            filled_ND[
                stored_keys.row_N[_inside(stored_keys.stretch_N, stretches)], cols.start : cols.stop
            ].all()
        )
        for stretches, cols in pieces
    )


def _fault_of_ranks(
    shared: ShardedTables,
    fault: str,
    stored_keys: _GivenKeys,
    pieces: Sequence[tuple[range, range]],
) -> str:
    """Return the reason why a rank cannot load its part, or why some rows reach no rank that takes
    them; else an empty string. The result is the same on all ranks.
    """
    rows_R = torch.bincount(stored_keys.stretch_N, minlength=STRETCHES).tolist()
    rows_of_stretch = {stretch: rows_R[stretch] for stretches, _ in pieces for stretch in stretches}
    answers_W = shared.comm.all_gather((fault, stored_keys.total, rows_of_stretch))
    for rank, (of_rank, _, _) in enumerate(answers_W):
        if of_rank:
            return fault or f"rank {rank} cannot load it: {of_rank}"
    total = max(n for _, n, _ in answers_W)
    rows_reached = sum(
        min(n[stretch] for _, _, n in answers_W if stretch in n) for stretch in range(STRETCHES)
    )
    if rows_reached == total:
        return ""
    return (
        f"only {rows_reached} of {total} stored rows reach the ranks that own their keys: load the "
        "state of the same plan and rank, or whole tables (gathered_state_dict)"
    )


def _fill(
    shared: ShardedTables, table: str, stored_keys: _GivenKeys, strips: Sequence[Block]
) -> None:
    """Replace the rows of a table by the rows of the given keys."""
    number_N = torch.full((stored_keys.total,), -1, device="cpu")
    number_N[stored_keys.row_N] = torch.arange(len(stored_keys.row_N), device="cpu")
    rows_R = torch.bincount(stored_keys.stretch_N, minlength=STRETCHES).tolist()
    counts = {table: {ROWS: rows_R, WAITING: [0] * STRETCHES}}
    for block in shared.blocks_to_load(counts, shared.updates, table):
        if block.tensor == KEYS:
            block.data.copy_(stored_keys.key_N[block.rows.start : block.rows.stop, None])
        elif block.tensor == "weight":
            for strip in strips:
                to_N = number_N[_from(strip.rows, 0)]
                inside_N = _inside(to_N, block.rows)
                if cols := overlap(strip.cols, block.cols):
                    at_N = (to_N[inside_N] - block.rows.start).to(block.data.device)
                    values = strip.data.detach()[:, _from(cols, strip.cols.start)]
                    part = values[inside_N.to(values.device)]
                    block.data[at_N, _from(cols, block.cols.start)] = part.to(block.data)
    shared.loaded()


def _inside(number_N: Tensor, numbers: range) -> Tensor:
    return (number_N >= numbers.start) & (number_N < numbers.stop)


def _from(numbers: range, start: int) -> slice:
    return slice(numbers.start - start, numbers.stop - start)


PART_BYTES = 64 * 2**20  # of a message: rank 0 needs this memory in addition to the tables


def gathered_state_dict(model: nn.Module) -> dict[str, Any]:
    """Assemble the state dict of the unsharded model on rank 0. Every rank calls it.

    Rank 0 needs memory for all tables. The others send their strips in messages of at most 64 MiB.

    Args:
        model: A `DistributedModelParallel` or any other module with sharded collections.

    Returns:
        On rank 0 a copy on the CPU with the entries of the unsharded model's `state_dict`. It loads
        into the unsharded model, and on every rank into a sharded model. On other ranks an empty
        dict.
    """
    tables = [m for m in model.modules() if isinstance(m, ShardedTables)]
    comm = tables[0].comm if tables else Comm()
    state = model.state_dict()
    strips_of = {
        name: value.strips for name, value in state.items() if isinstance(value, TableStrips)
    }
    headers_W = comm.all_gather(
        {
            name: [(rows, cols, part.dtype, tuple(mixed)) for rows, cols, part, *mixed in strips]
            for name, strips in strips_of.items()
        }
    )
    whole = {
        name: _gathered(strips, [headers[name] for headers in headers_W], comm)
        for name, strips in strips_of.items()
    }
    if comm.rank:
        return {}
    copied = {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    return copied | whole


StripHeader = tuple[tuple[int, int], tuple[int, int], torch.dtype, tuple[tuple[int, int], ...]]


def _gathered(strips: list[Strip], headers_W: list[list[StripHeader]], comm: Comm) -> Tensor:
    """Return a whole table on rank 0; on other ranks an empty tensor. Where several ranks hold a
    strip, the first of them sends it.
    """
    described = [
        (rank, number, *strip)
        for rank, headers in enumerate(headers_W)
        for number, strip in enumerate(headers)
    ]
    shape = (
        max(rows[1] for *_, rows, _, _, _ in described),
        max(cols[1] for *_, cols, _, _ in described),
    )
    here = shape if comm.rank == 0 else (0, 0)
    whole = torch.empty(here, dtype=described[0][-2], device="cpu")
    target = Block("", "", shape, range(shape[0]), range(shape[1]), whole, True)
    seen = set()
    for rank, number, rows, cols, dtype, mixed in described:
        if (rows, cols) in seen:
            continue
        seen.add((rows, cols))
        step = max(1, PART_BYTES // max(1, (cols[1] - cols[0]) * dtype.itemsize))
        for first in range(rows[0], rows[1], step):
            part = (first, min(first + step, rows[1]))
            sent = (
                strips[number][2][part[0] - rows[0] : part[1] - rows[0]]
                if comm.rank == rank
                else None
            )
            arrived = _to_rank_0(sent, rank, (part[1] - part[0], cols[1] - cols[0]), dtype, comm)
            if arrived is not None:
                order = RowOrder(shape[0], *mixed[0]) if mixed else None
                copy_rows(target, arrived, range(*part), range(*cols), order)
    return whole


def _to_rank_0(
    sent: Tensor | None, source: int, shape: tuple[int, int], dtype: torch.dtype, comm: Comm
) -> Tensor | None:
    """Send the rows of one rank to rank 0 and return them there. Other ranks get None without
    waiting.
    """
    if comm.rank not in (0, source):
        return None
    if source == 0:
        return sent
    size = shape[0] * shape[1] * dtype.itemsize
    bytes_N = (
        torch.empty(size, dtype=torch.uint8, device=comm.device)
        if sent is None
        else sent.contiguous().view(-1).view(torch.uint8)
    )
    nothing = [(0, 0)] * comm.world
    spans = [(0, 0)] * comm.world
    spans[source if comm.rank == 0 else 0] = (0, size)
    comm.swap(bytes_N, *((nothing, spans) if comm.rank == 0 else (spans, nothing)))()
    return bytes_N.view(dtype).view(shape) if comm.rank == 0 else None
