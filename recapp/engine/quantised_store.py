"""Rows in 8 or 4 bits that are only read, and a trained collection with such rows: for inference.

    trained = shard_bags(tables, plan, comm, rule)
    ...
    served = quantised(trained, bits=8)

`recapp/kernels/quantised.py` says what is stored. A row of a store is quantised as it lies there:
where a table is cut by columns, every strip of a row has a scale and a bias of its own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from recapp.engine.row_store import FloatStore, RowStore, StoreBytes, StoredGroup
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection, shard_bags
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.kernels.links import Links
from recapp.kernels.quantised import QuantisedRows, bytes_of_row, check_bits, quantise
from recapp.optim.rules import Rate
from recapp.sharding.layout import Block, Layout, Piece, Strip

PART_ROWS = 1 << 16  # quantised at a time: each needs some floats beside its row


class QuantisedStore(RowStore):
    """Rows of 8 or 4 bits with a scale and a bias each. Read-only.

    Args:
        group: Which rows, and what computes with them.
        weights_RD: Their values, finite floats.
        bits: Bits of a value, 8 or 4.
        dtype: Type of scale and bias, fp32 or fp16.

    Raises:
        ValueError: Other bits, or values that are not finite in `dtype`.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self, group: StoredGroup, weights_RD: Tensor, bits: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(group)
        check_bits(bits)
        self.bits = bits
        shape = (self.rows, bytes_of_row(self.width, bits))
        device = group.device
        packed_RK = torch.empty(shape, dtype=torch.uint8, device=device)
        self.register_buffer("packed", packed_RK, persistent=False)
        for name in ("scale", "bias"):
            numbers_R = torch.empty(self.rows, dtype=dtype, device=device)
            self.register_buffer(name, numbers_R, persistent=False)
        for first in range(0, self.rows, PART_ROWS):
            here = slice(first, first + PART_ROWS)
            part = quantise(weights_RD[here], bits, dtype)
            self.packed[here] = part.packed_RK
            self.scale[here] = part.scale_R
            self.bias[here] = part.bias_R
        self.quantised_rows = QuantisedRows(self.packed, self.scale, self.bias, self.width, bits)

    @property
    def nbytes(self) -> StoreBytes:
        """Return the memory of the packed rows, their scales and biases."""
        return StoreBytes(self.packed.nbytes + self.scale.nbytes + self.bias.nbytes, 0)

    @property
    def example(self) -> QuantisedRows:
        """Return a row of zeros, packed."""
        return quantise(torch.zeros(1, self.width), self.bits, self.scale.dtype)

    def pool(
        self, links: Links, target: Tensor, scale: float = 1.0, in_lines: bool = False
    ) -> None:
        """Compute and sum rows along a sparse matrix, in one pass (`RowStore.pool`)."""
        self.backend.pool_quantised(
            self.quantised_rows, links, target, self.group.dtype, scale, in_lines
        )

    def update(
        self, gradients: Tensor, links: Links, row_U: Tensor, mean_U: Tensor | None, lr: Rate
    ) -> None:
        """Refuse: rows in so few bits are not trained.

        Raises:
            ConfigError: Always.
        """
        tables = self.group.layout.tables
        strips = self.group.layout.strips
        names = {tables[strips[p.strip].table].name: None for p in self.group.pieces}
        raise ConfigError(
            f"tables {', '.join(names)}: their rows have {self.bits} bits and are read-only: train "
            "the float tables and quantise them again"
        )

    def blocks(self) -> Iterator[Block]:
        """Yield packed rows, scales and biases of every piece.

        `packed8` or `packed4` has a column for each byte: a strip packs its own columns, so with 4
        bits strips of an odd width fill whole bytes, too. `scale` and `bias` have a column for
        each strip of the table.
        """
        layout = self.group.layout
        owner = self.group.writes_blocks
        for p in self.group.pieces:
            strips = _strips_of_table(layout, layout.strips[p.strip].table)
            number = strips.index(layout.strips[p.strip])
            sizes = [bytes_of_row(len(strip.cols), self.bits) for strip in strips]
            table = layout.tables[strips[0].table]
            order = layout.orders[strips[0].table]
            here = slice(p.base, p.base + len(p.rows))
            shape = (table.num_embeddings, sum(sizes))
            cols = range(sum(sizes[:number]), sum(sizes[: number + 1]))
            name = f"packed{self.bits}"
            yield Block(table.name, name, shape, p.rows, cols, self.packed[here], owner, order)
            shape = (table.num_embeddings, len(strips))
            cols = range(number, number + 1)
            for name, numbers_R in (("scale", self.scale), ("bias", self.bias)):
                data = numbers_R[here, None]
                yield Block(table.name, name, shape, p.rows, cols, data, owner, order)

    def extra_repr(self) -> str:
        """Return the number of rows, their width and bits."""
        return f"{self.rows:,} rows x {self.width}, {self.bits} bits, read-only"


def _strips_of_table(layout: Layout, table: int) -> list[Strip]:
    """Return the strips of a table, in the order of their columns."""
    return sorted((s for s in layout.strips if s.table == table), key=lambda s: s.cols.start)


def quantised(
    collection: ShardedEmbeddingBagCollection, bits: int, dtype: torch.dtype = torch.float32
) -> ShardedEmbeddingBagCollection:
    """Return a read-only collection with the rows of a trained one in 8 or 4 bits.

    Every rank calls it. The trained collection stays as it is; while both exist, a rank holds both.
    Its state dict holds no tables: the stored tensors are those of `blocks`.

    Args:
        collection: With rows of floats.
        bits: Bits of a value, 8 or 4.
        dtype: Type of the scale and bias of each row, fp32 or fp16.

    Raises:
        ConfigError: The rows are quantised already.
        ValueError: Other bits, or values that are not finite in `dtype`.
    """
    shared = collection.shared
    shared.update.finish_step()

    def make(group: StoredGroup) -> RowStore:
        return QuantisedStore(group, _trained_rows(shared, group), bits, dtype)

    made = shard_bags(
        collection.tables(),
        shared.plan.part([t.name for t in collection.tables()]),
        shared.comm,
        rule=None,
        backend=shared.state.backend.name,
        payload=shared.state.payload,
        make_store=make,
        lookups=collection.lookups,
        is_weighted=collection.is_weighted(),
    )
    made.leave_room(collection.room)
    made.tables_in_state = False
    return made


def _rectangle(layout: Layout, piece: Piece) -> tuple[str, range, range]:
    """Return the table, rows and columns of a piece."""
    strip = layout.strips[piece.strip]
    return layout.tables[strip.table].name, piece.rows, strip.cols


def _trained_rows(shared: ShardedTables, group: StoredGroup) -> Tensor:
    """Return the rows of a group, [R, width]. The trained tables may hold them in several groups:
    they may have several rules, where tables that are only read have none.
    """
    layout = shared.state.layout
    held = {
        _rectangle(layout, p): (g, p)
        for g in range(len(layout.groups))
        for p in layout.pieces_of(group.rank, g)
    }
    parts = []
    for piece in group.pieces:
        number, own = held[_rectangle(group.layout, piece)]
        trained = shared.store(number)
        if not isinstance(trained, FloatStore):
            raise ConfigError(
                f"group {number} is a {type(trained).__name__}: quantise a collection whose "
                "rows are floats"
            )
        if group.rows == trained.rows:  # the same pieces in the same order
            return trained.weights
        parts.append(trained.weights[own.base : own.base + len(own.rows)])
    if not parts:
        return torch.empty(0, group.width, device=group.device)
    return torch.cat(parts)
