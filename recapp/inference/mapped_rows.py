"""The rows of an artefact as stores of the engine, under any plan: mapped where they lie together,
else copied.

One rank that holds whole tables maps each file once, whatever the number of tables; a rank that
holds parts of tables, or some columns of them, takes copies of those.
"""

import mmap

import torch
from torch import Tensor

from recapp.engine.read_only_store import (
    Held,
    KeyedStore,
    ReadOnlyStore,
    join_rows,
    like,
    take_rows,
    values_of,
)
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.inference.artefact import Artefact, StoredTable
from recapp.inference.storage import held, row_bytes, stored
from recapp.kernels.quantised import QuantisedRows
from recapp.sharding.layout import Piece
from recapp.tables.dynamic import RUNS, first_position, keys_of
from recapp.tables.initial import values_of_hash


class MappedRows:
    """Makes the stores of a model of its artefact.

    Args:
        artefact: The artefact.
    """

    def __init__(self, artefact: Artefact) -> None:
        self.artefact = artefact
        self._tables = {t.name: t for t in artefact.tables}
        self._mapped: dict[str, Tensor] = {}

    def make_store(self, group: StoredGroup) -> RowStore:
        """Return the rows of a group on a rank.

        Raises:
            ArtefactError: A file is smaller than its tables.
        """
        dynamic = group.layout.groups[group.number].dynamic
        parts = [(p, self._rows_of(group, p)) for p in group.pieces]
        rows = self._joined(group, [(p, r) for p, r in parts if len(r)])
        rows = like(rows, values_of(rows).to(group.device))
        if not dynamic:
            return ReadOnlyStore(group, rows)
        layout = group.layout
        strips = [i for i, s in enumerate(layout.strips) if s.group == group.number]
        number_I = [
            torch.cat(
                [
                    torch.empty(0, dtype=torch.int64),
                    *(
                        self._positions(group, p)[r.start : r.stop]
                        for p, r in parts
                        if p.strip == i
                    ),
                ]
            ).to(group.device)
            for i in strips
        ]

        def start(strip: int, position_N: Tensor) -> Held:
            return self._start(group, strips[strip], position_N)

        return KeyedStore(group, rows, number_I, start)

    def _table(self, group: StoredGroup, strip: int) -> StoredTable:
        layout = group.layout
        return self._tables[layout.tables[layout.strips[strip].table].name]

    def _rows_of(self, group: StoredGroup, piece: Piece) -> range:
        """Return the rows of a piece, as its table counts them."""
        if not group.layout.groups[group.number].dynamic:
            return piece.rows
        positions = self._positions(group, piece)
        first = torch.searchsorted(positions, first_position(piece.rows.start))
        if piece.rows.stop == RUNS:
            return range(int(first), len(positions))
        return range(
            int(first), int(torch.searchsorted(positions, first_position(piece.rows.stop)))
        )

    def _positions(self, group: StoredGroup, piece: Piece) -> Tensor:
        """Return the sorted positions of the keys of a piece's table."""
        table = self._table(group, piece.strip)
        assert table.keys is not None
        here = slice(table.first_row, table.first_row + table.rows)
        return self._map(table.keys).view(torch.int64)[here]

    def _joined(self, group: StoredGroup, parts: list[tuple[Piece, range]]) -> Held:
        """Return the rows of some pieces: a part of the mapped file where they follow each other
        there.
        """
        if not parts:
            return self._none(group)
        spans = [self._span(group, piece, rows) for piece, rows in parts]
        if all(span is not None for span in spans):
            file = self._file(self._table(group, parts[0][0].strip))
            together = _merged([span for span in spans if span is not None])
            return join_rows([like(file, values_of(file)[slice(*span)]) for span in together])
        return join_rows([self._copied(group, piece, rows) for piece, rows in parts])

    def _span(self, group: StoredGroup, piece: Piece, rows: range) -> tuple[int, int] | None:
        """Return between which rows of its file a piece lies; None where it has some of the columns
        or its rows in another order.
        """
        strip = group.layout.strips[piece.strip]
        table = self._table(group, piece.strip)
        if len(strip.cols) < table.dim or group.layout.orders[strip.table] is not None:
            return None
        return table.first_row + rows.start, table.first_row + rows.stop

    def _copied(self, group: StoredGroup, piece: Piece, rows: range) -> Held:
        """Return a copy of a piece: its columns, its rows in the layout's order."""
        strip = group.layout.strips[piece.strip]
        table = self._table(group, piece.strip)
        order = group.layout.orders[strip.table]
        file = self._file(table)
        if order is None:
            first = table.first_row + rows.start
            part = like(file, values_of(file)[first : first + len(rows)])
        else:
            row_N = order.rows_at(torch.arange(rows.start, rows.stop)) + table.first_row
            part = take_rows(file, row_N)
        return _columns(part, strip.cols)

    def _none(self, group: StoredGroup) -> Held:
        """Return no rows, as those of the group are stored."""
        strip = next(i for i, s in enumerate(group.layout.strips) if s.group == group.number)
        return stored(torch.empty(0, group.width), self._table(group, strip).data_type)

    def _start(self, group: StoredGroup, strip: int, position_N: Tensor) -> Held:
        """Return the start values of keys without a row, stored as rows are."""
        table = self._table(group, strip)
        keys = keys_of(position_N)
        compute = torch.float64 if table.storage == "fp64" else torch.float32
        cols = range(table.dim)
        values = values_of_hash(keys, table.start_hash, table.start_range, cols, compute)
        return _columns(stored(values, table.data_type), group.layout.strips[strip].cols)

    def _file(self, table: StoredTable) -> Held:
        """Return all rows of a table's file."""
        raw = self._map(table.file)
        width = row_bytes(table.data_type, table.dim)
        rows = len(raw) // width
        if len(raw) != rows * width or rows < table.first_row + table.rows:
            raise self.artefact.damaged(f"table {table.name} has rows that {table.file} has not")
        return held(raw.view(rows, width), table.data_type, table.dim)

    def _map(self, file: str) -> Tensor:
        """Return the bytes of a file, mapped: pages are read when they are used, and shared."""
        if file not in self._mapped:
            with self.artefact.open(file) as source:
                if self.artefact.files[file]["bytes"]:
                    # a private map may be written to, which torch asks of memory that it is given
                    mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
                    self._mapped[file] = torch.frombuffer(mapped, dtype=torch.uint8)
                else:
                    self._mapped[file] = torch.empty(0, dtype=torch.uint8)
        return self._mapped[file]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans with those joined that follow each other."""
    made: list[tuple[int, int]] = []
    for first, last in spans:
        if made and made[-1][1] == first:
            made[-1] = (made[-1][0], last)
        else:
            made.append((first, last))
    return made


def _columns(rows: Held, cols: range) -> Held:
    """Return some columns of rows."""
    if isinstance(rows, QuantisedRows):
        return rows if len(cols) == rows.width else rows.strip_of(range(len(rows)), cols)
    return rows if len(cols) == rows.shape[1] else rows[:, cols.start : cols.stop].contiguous()
