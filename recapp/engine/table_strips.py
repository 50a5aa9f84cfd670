"""The entry of a table in the state dict of a sharded model: the table's strips and their places.

In memory an entry has the methods of torch's ShardedTensor, so that programs that fill shards run:

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
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recapp.errors import ConfigError
from recapp.sharding.layout import Block, Layout
from recapp.tables.config import EmbeddingConfig

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

Strip = (
    tuple[tuple[int, int], tuple[int, int], Tensor]
    | tuple[tuple[int, int], tuple[int, int], Tensor, tuple[int, int]]
)
"""(begin, end) of the rows, (begin, end) of the columns, the values, and (multiplier, shift) where
rows are mixed.
"""

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
        strips = strips_of(blocks, keeps_empty=dynamic)
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


def strips_of(blocks: Iterable[Block], keeps_empty: bool = False) -> list[Strip]:
    """Return this rank's strips of one tensor of a table: views, or copies for dynamic tables.

    Args:
        blocks: The rank's rectangles of the tensor.
        keeps_empty: Whether to keep strips without rows, which have the width of an empty table.
    """
    return [
        (
            (b.rows.start, b.rows.stop),
            (b.cols.start, b.cols.stop),
            b.data[:],
            *(((b.order.multiplier, b.order.shift),) if b.order else ()),
        )
        for b in blocks
        if b.rows or keeps_empty
    ]


def strips_in(value: Any) -> list[Strip] | None:
    """Return the strips of an entry of a state dict: a whole tensor, `TableStrips`, the dict that a
    file has for them, or a list of (rows, cols, tensor). Return None for other values.
    """
    if isinstance(value, Tensor):
        return [((0, value.shape[0]), (0, value.shape[1]), value)] if value.dim() == 2 else None
    if isinstance(value, Mapping):
        value = value.get(_STRIPS)
    return list(value) if isinstance(value, TableStrips | list | tuple) else None


def shape_in(value: Any) -> tuple[int, ...] | None:
    """Return the shape of the whole tensor from an entry of a state dict; None where the entry has
    none.
    """
    if isinstance(value, Mapping):
        value = value.get(_SHAPE)
        return tuple(value) if isinstance(value, list | tuple) else None
    shape = value.shape if isinstance(value, Tensor | TableStrips) else None
    return None if shape is None else tuple(shape)


def _metadata(rank: int, rows: tuple[int, int], cols: tuple[int, int], device: torch.device) -> Any:
    """Return the metadata of a rectangle in the form of torch's sharded tensors."""
    from torch.distributed._shard.metadata import ShardMetadata

    sizes = [rows[1] - rows[0], cols[1] - cols[0]]
    return ShardMetadata([rows[0], cols[0]], sizes, f"rank:{rank}/{device.type}")
