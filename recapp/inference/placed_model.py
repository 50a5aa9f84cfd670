"""Place the tables of a read-only model on one rank or over several, and make the stores of its
collections from whole tables.

    meta model --placed--> collections of the engine, each rank with its part of the rows
    HeldTable (rows of a file or of a tensor) --HeldTables.make_store--> the rows of a group

One rank holds whole tables and needs no process group. For several ranks the planner makes a plan
for read-only tables; the scores have the bits of one rank.

Rows of several tables may lie in one matrix, table by table. A rank that holds whole tables reads
that matrix without a copy, for any number of tables. A rank that holds some rows or columns of
tables copies those. The row files of an artefact are mapped into memory (`mapped_tables`): pages
are read on first use, and processes share them.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

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
from recapp.engine.sharded_collection import shard_model
from recapp.errors import RecappError
from recapp.inference.storage import held, row_bytes, stored
from recapp.kernels.quantised import QuantisedRows
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.problem import Topology
from recapp.processes.process_memory import free_memory_bytes, memory_pools
from recapp.sharding.layout import Piece
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.config import DataType
from recapp.tables.dynamic import RUNS, first_position, keys_of
from recapp.tables.initial import values_of_hash
from recapp.transport.communicator import Comm, raise_together

T = TypeVar("T")


def placed(
    model: nn.Module,
    comm: Comm,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace the collections of a model, which are on the meta device. Every rank calls it.

    Args:
        model: The model; it is changed in place.
        comm: The ranks that hold its tables, with the device of this rank.
        make_store: Makes the store of each group; None makes stores that the caller fills.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        PlanError: The tables do not fit.
    """
    if comm.world == 1:
        return one_rank(model, comm.device, make_store)
    free_W = free_memory_bytes(comm.all_gather(memory_pools(comm.device)))
    plan = comm.broadcast(together(comm, lambda: _plan(model, comm, free_W)))
    return _under(plan, model, comm, make_store)


def one_rank(
    model: nn.Module,
    device: torch.device,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
) -> nn.Module:
    """Replace the collections of a model by collections of one rank, without a process group.

    Arguments and result are those of `placed`, with the device of the tables instead of ranks.
    """
    whole = {
        t.name: TableSharding(
            (Shard(0, range(t.plan_rows), range(t.embedding_dim)),), "unique", "table_wise"
        )
        for t in embedding_tables(model)
    }
    plan = ShardingPlan(whole, 1, name="one_rank")
    return _under(plan, model, Comm(device=device, alone=True), make_store)


def _under(
    plan: ShardingPlan,
    model: nn.Module,
    comm: Comm,
    make_store: Callable[[StoredGroup], RowStore] | None,
) -> nn.Module:
    module = shard_model(model, plan, comm, None, trains=False, make_store=make_store)
    return module.to(comm.device).eval().requires_grad_(False)


def together(comm: Comm, step: Callable[[], T]) -> T:
    """Run a step on each rank and return its result; either all ranks return, or all raise.

    Args:
        comm: The ranks.
        step: The step; it must not communicate with other ranks.

    Raises:
        RecappError: The step has failed on this rank.
        RankError: The step has failed on another rank.
    """
    failure = None
    try:
        result = step()
    except RecappError as error:
        failure = error
    raise_together(failure, comm.all_gather(failure and str(failure)), "could not load the model")
    return result


def _plan(model: nn.Module, comm: Comm, free_W: list[int | None]) -> ShardingPlan | None:
    """Return the plan on rank 0, which decides; return None on other ranks."""
    if comm.rank:
        return None
    known = [free for free in free_W if free is not None]
    memory = known if len(known) == comm.world else None
    topology = Topology(comm.world, compute_device=comm.device.type, memory_bytes=memory)
    return serving_plan(embedding_tables(model), topology, embedding_lookups(model))


@dataclass(frozen=True)
class HeldTable:
    """A table's rows, as a slice of a larger matrix.

    Args:
        data_type: The data type of the stored rows.
        dim: The columns of a row.
        rows: The matrix; it may also hold the rows of other tables of this data type.
        first_row: The table's first row in the matrix.
        count: The number of its rows.
        keys: The positions of the keys of all rows of the matrix, ascending within each table; None
            for a static table.
        start_hash: The hash from which start values of keys without a row are computed
            (`start_hash`).
        start_range: The largest distance of those values from 0.
    """

    data_type: DataType
    dim: int
    rows: Held
    first_row: int
    count: int
    keys: Tensor | None = None
    start_hash: int = 0
    start_range: float = 0.0

    @property
    def positions(self) -> Tensor | None:
        """Return the ascending positions of the table's keys; None for a static table."""
        if self.keys is None:
            return None
        return self.keys[self.first_row : self.first_row + self.count]

    def start_rows(self, position_N: Tensor) -> Held:
        """Return the start values of keys without a row, in the table's stored data type."""
        compute = torch.float64 if self.data_type is DataType.FP64 else torch.float32
        cols = range(self.dim)
        keys = keys_of(position_N)
        values = values_of_hash(keys, self.start_hash, self.start_range, cols, compute)
        return stored(values, self.data_type)


class HeldTables:
    """Make the stores of a read-only model.

    Args:
        tables: The tables, by name.
    """

    def __init__(self, tables: Mapping[str, HeldTable]) -> None:
        self.tables = dict(tables)

    def make_store(self, group: StoredGroup) -> RowStore:
        """Return the rows of a group on a rank."""
        parts = [(p, self._rows_of(group, p)) for p in group.pieces]
        rows = self._joined(group, [(p, r) for p, r in parts if len(r)])
        rows = like(rows, values_of(rows).to(group.device))
        layout = group.layout
        if not layout.groups[group.number].dynamic:
            return ReadOnlyStore(group, rows)
        strips = [i for i, s in enumerate(layout.strips) if s.group == group.number]
        numbers, edges = self._numbers(group, strips, parts)

        def start(strip: int, position_N: Tensor) -> Held:
            table = self._table(group, strips[strip])
            return _columns(table.start_rows(position_N), layout.strips[strips[strip]].cols)

        return KeyedStore(group, rows, numbers.to(group.device), edges, start)

    def _table(self, group: StoredGroup, strip: int) -> HeldTable:
        layout = group.layout
        return self.tables[layout.tables[layout.strips[strip].table].name]

    def _numbers(
        self, group: StoredGroup, strips: list[int], parts: list[tuple[Piece, range]]
    ) -> tuple[Tensor, list[int]]:
        """Return the positions of the keys of some pieces, and the offset of each strip in them."""
        counts = [sum(len(r) for p, r in parts if p.strip == strip) for strip in strips]
        edges = [0, *accumulate(counts)]
        sources = [(self._table(group, p.strip), r) for p, r in parts if len(r)]
        if not sources:
            return torch.empty(0, dtype=torch.int64), edges
        keys = sources[0][0].keys
        assert keys is not None
        if all(table.keys is keys for table, _ in sources):
            spans = [(t.first_row + r.start, t.first_row + r.stop) for t, r in sources]
            slices = [keys[slice(*span)] for span in _merged(spans)]
        else:
            slices = [t.positions[r.start : r.stop] for t, r in sources if t.positions is not None]
        return slices[0] if len(slices) == 1 else torch.cat(slices), edges

    def _rows_of(self, group: StoredGroup, piece: Piece) -> range:
        """Return the row numbers of a piece in its table.

        The rows of a piece of a dynamic table are 64ths of its key space. The keys lie in order, so
        each 64th is a range of rows, found by the first position in it.
        """
        positions = self._table(group, piece.strip).positions
        if positions is None:
            return piece.rows
        first, last = (
            int(torch.searchsorted(positions, first_position(run)))
            if run < RUNS
            else len(positions)
            for run in (piece.rows.start, piece.rows.stop)
        )
        return range(first, last)

    def _joined(self, group: StoredGroup, parts: list[tuple[Piece, range]]) -> Held:
        """Return the rows of some pieces: a slice of the matrix if they are consecutive there, else
        a copy.
        """
        if not parts:
            strip = next(i for i, s in enumerate(group.layout.strips) if s.group == group.number)
            return stored(torch.empty(0, group.width), self._table(group, strip).data_type)
        tables = [self._table(group, piece.strip) for piece, _ in parts]
        matrix = tables[0].rows
        if all(t.rows is matrix for t in tables) and all(
            self._is_whole(group, p) for p, _ in parts
        ):
            spans = [
                (t.first_row + rows.start, t.first_row + rows.stop)
                for t, (_, rows) in zip(tables, parts, strict=True)
            ]
            together = _merged(spans)
            return join_rows([like(matrix, values_of(matrix)[slice(*span)]) for span in together])
        return join_rows([self._copied(group, piece, rows) for piece, rows in parts])

    def _is_whole(self, group: StoredGroup, piece: Piece) -> bool:
        """Return whether a piece has all columns of its table, and rows in the table's order."""
        strip = group.layout.strips[piece.strip]
        whole = len(strip.cols) == self._table(group, piece.strip).dim
        return whole and group.layout.orders[strip.table] is None

    def _copied(self, group: StoredGroup, piece: Piece, rows: range) -> Held:
        """Return a copy of the rows and columns of a piece, rows in the layout's order."""
        strip = group.layout.strips[piece.strip]
        table = self._table(group, piece.strip)
        order = group.layout.orders[strip.table]
        if order is None:
            first = table.first_row + rows.start
            part = like(table.rows, values_of(table.rows)[first : first + len(rows)])
        else:
            row_N = order.rows_at(torch.arange(rows.start, rows.stop)) + table.first_row
            part = take_rows(table.rows, row_N)
        return _columns(part, strip.cols)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in spans:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def _columns(rows: Held, cols: range) -> Held:
    if isinstance(rows, QuantisedRows):
        return rows.strip_of(range(len(rows)), cols)
    return rows if len(cols) == rows.shape[1] else rows[:, cols.start : cols.stop].contiguous()


def mapped_tables(artefact: Artefact) -> HeldTables:
    """Return the tables of an artefact.

    Raises:
        ArtefactError: A file is missing, smaller than its tables, or of another data type.
    """
    files = {x for t in artefact.manifest.tables for x in (t.file, t.keys) if x is not None}
    raw = {file: _map(artefact, file) for file in sorted(files)}
    rows: dict[str, Held] = {}
    keys: dict[str, Tensor] = {}
    tables = {}
    kinds: dict[str, tuple[object, ...]] = {}
    for t in artefact.manifest.tables:
        kind = (t.storage, t.dim, t.keys)
        if kinds.setdefault(t.file, kind) != kind:
            raise artefact.manifest.damaged(
                f"table {t.name} is not stored as the other tables of {t.file}"
            )
        width = row_bytes(t.data_type, t.dim)
        if t.file not in rows:
            if len(raw[t.file]) % width:
                raise artefact.manifest.damaged(
                    f"{t.file} has no whole number of rows of table {t.name}"
                )
            rows[t.file] = held(raw[t.file].view(-1, width), t.data_type, t.dim)
        end = t.first_row + t.rows
        if len(raw[t.file]) < end * width:
            raise artefact.manifest.damaged(f"table {t.name} has rows that {t.file} has not")
        if t.keys is not None:
            if t.keys not in keys:
                if len(raw[t.keys]) % torch.int64.itemsize:
                    raise artefact.manifest.damaged(f"{t.keys} has no whole number of keys")
                keys[t.keys] = raw[t.keys].view(torch.int64)
            if len(keys[t.keys]) < end:
                raise artefact.manifest.damaged(f"table {t.name} has keys that {t.keys} has not")
        tables[t.name] = HeldTable(
            t.data_type,
            t.dim,
            rows[t.file],
            t.first_row,
            t.rows,
            None if t.keys is None else keys[t.keys],
            t.start_hash,
            t.start_range,
        )
    return HeldTables(tables)


def _map(artefact: Artefact, file: str) -> Tensor:
    if not artefact.manifest.files[file]["bytes"]:
        return torch.empty(0, dtype=torch.uint8)
    # a private map is writable; torch requires writable memory
    mapped = mmap.mmap(artefact.opened(file).fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)
