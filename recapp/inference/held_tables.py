"""The tables of a read-only model: from the rows of a checkpoint to the files of an artefact, and
from rows in a file or a tensor to the collections of the engine, on one rank or over several.

    checkpoint --TrainedTables--> fp32 rows [R, D] --RowWriter--> rows/*.bin
    rows/*.bin --mapped_tables--> HeldTable        --HeldTables.make_store--> the rows of a group
    meta model --placed--> collections of the engine, each rank with its part of the rows

A table of more than `MEMORY_BYTES` becomes a mapped scratch file, whose pages the system may write
out. So an export reads tables of any size, stored under any plan and order of rows.

A file of an artefact holds the tables of one data type and one number of columns, in the order of
the model. A rank that holds whole tables reads that matrix without a copy, for any number of
tables. A rank that holds some rows or columns of tables copies those. Files are mapped into memory:
pages are read on first use, and processes share them.

One rank holds whole tables and needs no process group. For several ranks the planner makes a plan
for read-only tables; the scores have the bits of one rank.
"""

import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recapp.engine.dynamic_keys import KEYS
from recapp.engine.read_only_store import (
    Held,
    KeyedStore,
    ReadOnlyStore,
    join_rows,
    like,
    values_of,
)
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import shard_model
from recapp.errors import CheckpointError
from recapp.kernels.quantised import QuantisedRows, dequantise, quantise
from recapp.planner.embedding_planner import serving_plan
from recapp.planner.problem import Topology
from recapp.planner.rank_memory import row_bytes
from recapp.processes.process_memory import free_memory_bytes, memory_pools
from recapp.sharding.layout import WEIGHT, Block, Piece
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.stored.manifest import StoredTable
from recapp.stored.store import files_at
from recapp.stored.stored_model import Artefact, Checkpoint
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.initial import start_hash, values_of_hash
from recapp.tables.positions import STRETCHES, first_position, keys_of, positions_of
from recapp.transport.communicator import Comm, together

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
    plan = comm.broadcast(
        together(comm, lambda: _plan(model, comm, free_W), "could not load the model")
    )
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


@dataclass(frozen=True)
class HeldTables:
    """Make the stores of a read-only model.

    Args:
        tables: The tables, by name.
    """

    tables: Mapping[str, HeldTable]

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
            int(torch.searchsorted(positions, first_position(stretch)))
            if stretch < STRETCHES
            else len(positions)
            for stretch in (piece.rows.start, piece.rows.stop)
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
            return join_rows([matrix[slice(*span)] for span in together])
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
            part = table.rows[first : first + len(rows)]
        else:
            row_N = order.rows_at(torch.arange(rows.start, rows.stop)) + table.first_row
            part = table.rows[row_N]
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
        end = t.first_row + t.rows
        if len(raw[t.file]) % width or len(raw[t.file]) < end * width:
            raise artefact.manifest.damaged(f"table {t.name} has rows that {t.file} has not")
        if t.file not in rows:
            rows[t.file] = held(raw[t.file].view(-1, width), t.data_type, t.dim)
        if t.keys is not None:
            size = torch.int64.itemsize
            if len(raw[t.keys]) % size or len(raw[t.keys]) < end * size:
                raise artefact.manifest.damaged(f"table {t.name} has keys that {t.keys} has not")
            keys.setdefault(t.keys, raw[t.keys].view(torch.int64))
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


# ---- stored rows

# The values of `quantize` and `quantize_tables`; none keeps the data type of training.
QUANTIZE = ("none", "fp16", "int8", "int4")


def stored(rows_RD: Tensor, data_type: DataType) -> Held:
    """Convert rows of floats to a stored data type.

    Raises:
        ValueError: A value to quantise is not finite.
    """
    if data_type.bits is not None:
        return quantise(rows_RD, data_type.bits)
    return rows_RD.to(data_type.dtype)


def bytes_of(rows: Held) -> Tensor:
    """Return stored rows as bytes, [R, K], in the memory of the rows."""
    values = values_of(rows).contiguous()
    return values.view(torch.uint8).view(len(values), -1)


def held(raw_RK: Tensor, data_type: DataType, dim: int) -> Held:
    """Return bytes [R, K] as stored rows, in the memory of the bytes."""
    if data_type.bits is not None:
        return QuantisedRows(raw_RK, dim, data_type.bits)
    return raw_RK.view(data_type.dtype).view(len(raw_RK), dim)


def values(rows: Held, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return stored rows as floats, [R, D]."""
    if isinstance(rows, QuantisedRows):
        return dequantise(rows, torch.arange(len(rows)), dtype)
    return rows.to(dtype)


def storage_of(table: EmbeddingConfig, quantize: str) -> DataType:
    """Return the stored data type of a table under a `quantize` setting; narrower floats stay."""
    if quantize == "none":
        return table.data_type
    data_type = DataType(quantize)
    half = (DataType.FP16, DataType.BF16)
    return table.data_type if data_type in half and table.data_type in half else data_type


# ---- from a checkpoint to the files of an artefact

MEMORY_BYTES = 1 << 28  # the largest table that is read into memory


@dataclass(frozen=True)
class TrainedTables:
    """Read tables of an open checkpoint.

    Args:
        snapshot: The checkpoint, with all its files open.
        scratch: A directory for large tables, on the disk of the artefact.
    """

    snapshot: Checkpoint
    scratch: Path

    @contextmanager
    def rows(self, table: EmbeddingConfig) -> Iterator[Tensor]:
        """Yield the rows of a table as one tensor, [R, D]; rows of a dynamic table by the positions
        of their keys.

        Raises:
            CheckpointError: The checkpoint does not have the table, or is damaged.
            OSError: The disk has no space for the table.
        """
        shape = self._shape(table, WEIGHT, table.embedding_dim)
        dtype = table.data_type.dtype
        size = shape[0] * shape[1] * dtype.itemsize
        if size <= MEMORY_BYTES:
            yield self._filled(table, WEIGHT, torch.empty(shape, dtype=dtype))
            return
        file = self.scratch / "table.tmp"
        try:
            with open(file, "wb") as out:
                os.posix_fallocate(out.fileno(), 0, size)  # a full disk is an error, not a signal
            raw = torch.from_numpy(np.memmap(file, np.uint8, "r+"))
            yield self._filled(table, WEIGHT, raw.view(dtype).view(shape))
        finally:
            file.unlink(missing_ok=True)

    def positions(self, table: EmbeddingConfig) -> Tensor | None:
        """Return the ascending positions of a dynamic table's keys; None for other tables.

        Raises:
            CheckpointError: The checkpoint does not have the positions, or they do not ascend.
        """
        if table.dynamic is None:
            return None
        shape = self._shape(table, KEYS, 1)
        keys = self._filled(table, KEYS, torch.empty(shape, dtype=torch.int64))[:, 0]
        positions = positions_of(keys)
        if bool((positions[1:] <= positions[:-1]).any()):
            raise CheckpointError(f"table {table.name}: its keys are not in ascending positions")
        return positions

    def _shape(self, table: EmbeddingConfig, tensor: str, columns: int) -> tuple[int, int]:
        stored = self.snapshot.manifest.tensors.get((table.name, tensor))
        rows = (
            table.num_embeddings if table.dynamic is None else stored[0].shape[0] if stored else 0
        )
        return rows, columns

    def _filled(self, table: EmbeddingConfig, tensor: str, data: Tensor) -> Tensor:
        rows, columns = data.shape
        shape = (rows, columns)
        block = Block(table.name, tensor, shape, range(rows), range(columns), data, True)
        self.snapshot.fill([block])
        return data


PART_ELEMENTS = 1 << 22  # elements converted at a time


@dataclass
class _File:
    out: BinaryIO
    rows: int = 0
    size: int = 0
    crc: int = 0

    def write(self, raw: Any) -> None:
        view = memoryview(raw)
        self.out.write(view)
        self.size += view.nbytes
        self.crc = zlib.crc32(view, self.crc)


class RowWriter(ExitStack):
    """Write tables, one after the other; a context manager that closes the files.

    Args:
        folder: The directory of the artefact.

    Attributes:
        tables: The tables written so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.tables: list[StoredTable] = []
        self._files: dict[str, _File] = {}

    def add(
        self,
        table: EmbeddingConfig,
        rows_RD: Tensor,
        storage: DataType,
        positions_R: Tensor | None,
        seed: int,
    ) -> StoredTable:
        """Append a table to its file.

        Args:
            table: The table.
            rows_RD: Its rows, as floats; they may be mapped.
            storage: The data type to store them in.
            positions_R: The sorted positions of a dynamic table's keys; None for other tables.
            seed: The seed of its start values.

        Raises:
            CheckpointError: A value is not finite, or too large for the data type.
        """
        stem = f"rows/{storage}_{table.embedding_dim}"
        keys = None
        if positions_R is not None:
            stem += "_dynamic"
            keys = f"{stem}.keys"
            self._file(keys).write(positions_R.contiguous().numpy())
        file = self._file(f"{stem}.bin")
        step = max(1, PART_ELEMENTS // table.embedding_dim)
        for first in range(0, len(rows_RD), step):
            part = rows_RD[first : first + step]
            try:
                rows = stored(part, storage)
                if not bool(values_of(rows).isfinite().all()):
                    raise ValueError(f"there are values that {storage} cannot hold")
            except ValueError as error:
                raise CheckpointError(
                    f"table {table.name}, rows from {first} on: {error}"
                ) from error
            file.write(bytes_of(rows).numpy())
        entry = StoredTable(
            name=table.name,
            rows=len(rows_RD),
            dim=table.embedding_dim,
            storage=str(storage),
            file=f"{stem}.bin",
            first_row=file.rows,
            keys=keys,
            id_rule=str(table.id_rule),
            min_key=table.min_key,
            start_hash=start_hash(table, seed),
            start_range=float(table.start_range),
        )
        file.rows += len(rows_RD)
        self.tables.append(entry)
        return entry

    def finish(self) -> dict[str, Mapping[str, Any]]:
        """Flush all files to disk, and return the size and checksum of each."""
        self.close()
        return {name: {"bytes": f.size, "crc32": f"{f.crc:08x}"} for name, f in self._files.items()}

    def _file(self, name: str) -> _File:
        if name not in self._files:
            out = files_at(self.folder).create(self.folder / name)
            self._files[name] = _File(self.enter_context(out))
        return self._files[name]
