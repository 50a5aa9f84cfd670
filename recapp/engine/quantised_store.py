"""Rows in 8 or 4 bits that are only read, and a trained collection with such rows: for inference.

    trained = shard_bags(tables, plan, comm, rule)
    ...
    served = quantised(trained, bits=8)

`recapp/kernels/quantised.py` says what is stored. A store reads records, however they were made. A
trained row is quantised as it lies in its store: where a table is cut by columns, every strip of a
row has a scale and a bias of its own. (`QuantisedRows.strip_of` cuts records of whole rows, which
keep their scale and bias.)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from recapp.engine.row_store import FloatStore, RowStore, StoreBytes, StoredGroup
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection, shard_bags
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.kernels.links import Links
from recapp.kernels.quantised import (
    QuantisedRows,
    bytes_of_record,
    check_bits,
    empty_rows,
    quantise,
)
from recapp.optim.rules import Rate
from recapp.sharding.layout import Block, Layout, Piece, Strip


class QuantisedStore(RowStore):
    """Rows of 8 or 4 bits with a scale and a bias each. Read-only.

    Args:
        group: Which rows, and what computes with them.
        quantised_rows: Their records, on the group's device.

    Raises:
        ValueError: Other rows than the group's.
    """

    records: Tensor

    def __init__(self, group: StoredGroup, quantised_rows: QuantisedRows) -> None:
        super().__init__(group)
        if (len(quantised_rows), quantised_rows.width) != (self.rows, self.width):
            raise ValueError(
                f"{len(quantised_rows):,} rows x {quantised_rows.width} where the layout has "
                f"{self.rows:,} x {self.width}"
            )
        self.bits = quantised_rows.bits
        self.quantised_rows = quantised_rows
        self.register_buffer("records", quantised_rows.records_RK, persistent=False)

    @property
    def nbytes(self) -> StoreBytes:
        """Return the memory of the records."""
        return StoreBytes(self.records.nbytes, 0)

    @property
    def example(self) -> QuantisedRows:
        """Return a record of zeros."""
        return quantise(torch.zeros(1, self.width), self.bits)

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
        """Yield the records of every piece, as `records8` or `records4`.

        It has a column for each byte. Records of the strips of a table stand side by side.
        """
        layout = self.group.layout
        owner = self.group.writes_blocks
        for p in self.group.pieces:
            strips = _strips_of_table(layout, layout.strips[p.strip].table)
            number = strips.index(layout.strips[p.strip])
            sizes = [bytes_of_record(len(strip.cols), self.bits) for strip in strips]
            table = layout.tables[strips[0].table]
            order = layout.orders[strips[0].table]
            data = self.records[p.base : p.base + len(p.rows)]
            shape = (table.num_embeddings, sum(sizes))
            cols = range(sum(sizes[:number]), sum(sizes[: number + 1]))
            name = f"records{self.bits}"
            yield Block(table.name, name, shape, p.rows, cols, data, owner, order)

    def extra_repr(self) -> str:
        """Return the number of rows, their width and bits."""
        return f"{self.rows:,} rows x {self.width}, {self.bits} bits, read-only"


def _strips_of_table(layout: Layout, table: int) -> list[Strip]:
    """Return the strips of a table, in the order of their columns."""
    return sorted((s for s in layout.strips if s.table == table), key=lambda s: s.cols.start)


def quantised(
    collection: ShardedEmbeddingBagCollection, bits: int
) -> ShardedEmbeddingBagCollection:
    """Return a read-only collection with the rows of a trained one in 8 or 4 bits.

    Every rank calls it. The trained collection stays as it is; while both exist, a rank holds both.
    Its state dict holds no tables: the stored tensors are those of `blocks`.

    Args:
        collection: With rows of floats.
        bits: Bits of a value, 8 or 4.

    Raises:
        ConfigError: The rows are quantised already.
        ValueError: Other bits, or values that are not finite or too large.
    """
    check_bits(bits)
    shared = collection.shared
    shared.update.finish_step()

    def make(group: StoredGroup) -> RowStore:
        return QuantisedStore(group, _quantised_rows(shared, group, bits))

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


def _quantised_rows(shared: ShardedTables, group: StoredGroup, bits: int) -> QuantisedRows:
    """Return the records of a group's rows. The trained tables may hold them in several groups:
    they may have several rules, where tables that are only read have none.
    """
    layout = shared.state.layout
    held = {
        _rectangle(layout, p): (g, p)
        for g in range(len(layout.groups))
        for p in layout.pieces_of(group.rank, g)
    }
    made = empty_rows(group.rows, group.width, bits, group.device)
    for piece in group.pieces:
        table, rows, cols = _rectangle(group.layout, piece)
        number, own = held[table, rows, cols]
        trained = shared.store(number)
        if not isinstance(trained, FloatStore):
            raise ConfigError(
                f"group {number} is a {type(trained).__name__}: quantise a collection whose "
                "rows are floats"
            )
        here = range(piece.base, piece.base + len(rows))
        try:
            made.strip_of(here, range(group.width)).fill(
                0, trained.weights[own.base : own.base + len(rows)]
            )
        except ValueError as error:
            raise ValueError(f"table {table}, counted from row {rows.start:,}: {error}") from None
    return made
