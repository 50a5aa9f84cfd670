"""The state that requests, lookup and update of sharded tables share: a plain object, no module.

    EngineState <- FusedUpdate <- Requests <- Lookup <- ShardedTables

Each class gets the objects to its left, and knows no class to its right.

All lookups of all collections write a batch's vectors to one flat buffer:

    | samples x (room + columns of sums, means, concatenated vectors) |   a collection of bags
    | ids of a lookup x D | ids of the next lookup x D | ...          |   a collection of sequences

Kernels know only bags and offsets. The bag of a sum or mean has the ids of a sample, and its vector
lies in the row of the sample. The bag of a concatenation is one place of a sample, with one id or
none. The bag of a sequence is one id. So the same kernels request, answer, combine and train every
kind of lookup.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import make_routes
from recapp.engine.row_statistics import RowStatistics
from recapp.engine.row_store import RowStore
from recapp.kernels.backend import Backend
from recapp.kernels.links import Bags, Counts, Scratch, offset_dtype
from recapp.kernels.widths import CACHE_LINE_BYTES
from recapp.sharding.layout import Layout
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import to_device
from recapp.tables.config import PoolingType, TableLookup
from recapp.tables.ids import IdRules, LookupRows, PendingCheck, check_have_values
from recapp.transport.communicator import Comm, Sent, Waits
from recapp.transport.step_messages import Buffers, Header


@dataclass(frozen=True)
class Member:
    """One collection's share of an exchange.

    Args:
        lookups: The lookups of the collection, in the order of its output.
        is_weighted: Whether ids must have sample weights; None where batches decide.
        own_ids: Whether the collection is called with ids of its own, which other collections do
            not look up.
    """

    lookups: tuple[TableLookup, ...]
    is_weighted: bool | None = None
    own_ids: bool = False

    @cached_property
    def columns(self) -> int:
        """The columns of the collection's vectors side by side; 0 for sequences."""
        return sum(x.columns for x in self.lookups)

    @property
    def sequences(self) -> tuple[TableLookup, ...]:
        """The lookups of sequences, whose vectors are not pooled."""
        return tuple(x for x in self.lookups if x.pooling is PoolingType.NONE)


class BatchOutput(NamedTuple):
    """The layout of one batch's output.

    Args:
        taken: For each member, whether it looks up this batch.
        bags: Number of samples B.
        count_F: The number of bags of each lookup.
        lengths_N: The number of ids of each bag, lookup by lookup.
        first_F: The offset of the first bag of each lookup.
        per_F: The number of ids of each lookup.
        numel: The number of elements of the buffer.
    """

    taken: tuple[bool, ...]
    bags: int
    count_F: Counts
    lengths_N: Tensor
    first_F: Counts
    per_F: Sequence[int]
    numel: int


class Outputs:
    """The output layout of collections that share an exchange.

    Args:
        members: The collections, in order.
        device: Device of the vectors.

    `room` has the number of free columns before the first vector of a sample, for each member.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.members = tuple(members)
        self.device = device
        self.lookups = tuple(x for m in members for x in m.lookups)
        self.member_F = [i for i, m in enumerate(members) for _ in m.lookups]
        self.ragged = any(m.sequences for m in members)
        self.room = [0] * len(members)
        self._uniform = all(x.columns == x.dim for x in self.lookups)  # a bag for each sample
        self.column_F = [
            column
            for m in members
            for column in [0, *accumulate(x.columns for x in m.lookups)][: len(m.lookups)]
        ]

    def width(self, member: int) -> int:
        """Return the number of columns of a member's matrix, with the free columns."""
        columns = self.members[member].columns
        return self.room[member] + columns if columns else 0

    def whole_lines(self, elements: int) -> bool:
        """Return whether every vector begins at a cache line, if widths of vectors are whole cache
        lines.

        Args:
            elements: The number of elements of a cache line.
        """
        rows = [x for i in range(len(self.members)) for x in (self.room[i], self.width(i))]
        places = [*self.column_F, *(x.dim for x in self.lookups if not x.columns)]
        return not any(n % elements for n in [*rows, *places])

    def of(self, rows: LookupRows, taken: Sequence[bool]) -> BatchOutput:
        """Return the layout of a batch's output.

        Args:
            rows: The rows of the batch.
            taken: For each member, whether it looks up this batch. The others have no bags and no
                output.
        """
        B = rows.lengths_FB.shape[1]
        if self._uniform and all(taken):
            lengths_N = rows.lengths_FB.reshape(-1)
            count_F = np.full(len(self.lookups), B, np.int64)
        else:
            per_lookup = [
                _bag_lengths(x, rows.lengths_FB[i], rows.per_F[i])
                for i, x in enumerate(self.lookups)
                if taken[self.member_F[i]]
            ]
            count_F = np.zeros(len(self.lookups), np.int64)
            count_F[[taken[m] for m in self.member_F]] = list(map(len, per_lookup))
            lengths_N = torch.cat(per_lookup)
        first_F, numel = self._firsts(rows.per_F, B, taken)
        return BatchOutput(tuple(taken), B, count_F, lengths_N, first_F, rows.per_F, numel)

    def _firsts(self, per_F: Sequence[int], B: int, taken: Sequence[bool]) -> tuple[Counts, int]:
        """Return the offset of each lookup's first bag, and the number of elements of the
        buffer.
        """
        first_F = np.zeros(len(self.lookups), np.int64)
        end = 0
        for i, x in enumerate(self.lookups):
            member = self.member_F[i]
            if i == 0 or member != self.member_F[i - 1]:
                start = end
                end += B * self.width(member) if taken[member] else 0
            first_F[i] = start + self.room[member] + self.column_F[i] if x.columns else end
            end += 0 if x.columns else per_F[i] * x.dim
        return first_F, end

    def where(self, lookup: int, output: BatchOutput) -> Tensor:
        """Return the offset of each bag of a lookup, int64.

        Args:
            lookup: The number of the lookup.
            output: The output of the batch.
        """
        x = self.lookups[lookup]
        step = self.width(self.member_F[lookup]) if x.columns else x.dim
        places = max(x.columns // x.dim, 1)
        sample_N = torch.arange(int(output.count_F[lookup]) // places, device=self.device)
        first_N = sample_N * step + int(output.first_F[lookup])
        if places == 1:
            return first_N
        return (first_N[:, None] + torch.arange(places, device=self.device) * x.dim).view(-1)

    def parts(self, flat: Tensor, output: BatchOutput) -> list[Tensor]:
        """Return the vectors of every member: one matrix with a row per sample, or for each
        sequence a matrix with a row per id. They share the memory of the buffer, but autograd does
        not treat them as views.
        """
        parts = []
        end = 0
        for i, m in enumerate(self.members):
            shapes = [(output.bags, self.width(i))] if m.columns else []
            shapes += [
                (int(output.count_F[f]), x.dim)
                for f, x in enumerate(self.lookups)
                if self.member_F[f] == i and not x.columns
            ]
            for n, width in shapes if output.taken[i] else []:
                part = flat.new_empty(0).set_(flat.untyped_storage(), end, (n, width), (width, 1))
                parts.append(part)
                end += n * width
        return parts

    def of_members(self, parts: Sequence[Tensor], output: BatchOutput) -> dict[int, list[Tensor]]:
        """Return the parts of the output by member, for members that look up the batch."""
        left = iter(parts)
        return {
            i: list(islice(left, (1 if m.columns else 0) + len(m.sequences)))
            for i, m in enumerate(self.members)
            if output.taken[i]
        }


def _bag_lengths(lookup: TableLookup, lengths_B: Tensor, ids: int) -> Tensor:
    """Return the number of ids of each bag of a lookup."""
    if not lookup.columns:
        return lengths_B.new_ones(ids)
    places = lookup.columns // lookup.dim
    if places == 1:
        return lengths_B
    taken_BH = lengths_B[:, None] > torch.arange(places, device=lengths_B.device)
    return taken_BH.to(lengths_B.dtype).view(-1)


Message = TypeVar("Message")
# The messages of a step.
PHASES = ("counts", "ids", "vectors", "gradients")
# A kernel for all lookups in one pass: (rows_L, edges, numbers_F3) -> positions in the dtype of the
# rows. `numbers_F3` has the three numbers of each lookup's `RowOrder`; `rows` is 0 where the rows
# of a lookup are not mixed.
Kernel = Callable[[Tensor, Sequence[int], Tensor], Tensor]


@dataclass(frozen=True)
class EngineObserver:
    """Two functions that a sharded collection calls during its work. The default functions do
    nothing.

    Args:
        begins: Called when the exchange of a batch or the `forward` of the collection begins. Time
            before the call is not the collection's.
        ends: Called at the end of each part of the work, with the name of the part
            (`recapp/reporting/phases.py` lists the names).
    """

    begins: Callable[[], None] = lambda: None
    ends: Callable[[str], None] = lambda part: None


class MixedLookups:
    """The lookups of a layout whose tables have mixed rows.

    Args:
        layout: The places of the rows of all tables.
        kernel: A faster implementation for rows on the CPU. The torch operations of this class
            define the result.

    `order_F` has the order of the rows of each lookup's table; None where rows are not mixed.
    """

    def __init__(self, layout: Layout, kernel: Kernel | None = None) -> None:
        order_of = {t.name: order for t, order in zip(layout.tables, layout.orders, strict=True)}
        self.order_F = [order_of[x.table.name] for x in layout.lookups]
        self._numbers_F3 = torch.tensor(
            [(o.multiplier, o.shift, o.rows) if o else (1, 0, 0) for o in self.order_F],
            device="cpu",
        )
        self._kernel = kernel

    def positions_of(self, rows: LookupRows) -> Tensor:
        """Return the positions of a batch's rows. Rows of tables that are not mixed stay as they
        are.
        """
        if not any(self.order_F):
            return rows.rows_L
        if self._kernel is not None:
            return self._kernel(rows.rows_L, [0, *accumulate(rows.per_F)], self._numbers_F3)
        made_L = rows.rows_L.clone()
        parts = torch.split(made_L, list(rows.per_F))
        for order, part_N in zip(self.order_F, parts, strict=True):
            if order is not None:
                part_N.copy_(order.positions_of(part_N))
        return made_L


class EngineState:
    """The communicator, kernels, layout, stores and reused memory of sharded tables.

    Args:
        layout: The places of the rows of all tables.
        comm: Communicator of the ranks.
        backend: Kernels.
        stores: The rows of this rank, one store per group of the layout.
        dtype: The compute type, which is also the type of outputs.
        payload: The dtype of vectors and gradients in messages.
        row_statistics: Sums row-wide statistics over the strips of a row; None where rows are whole
            or no rule needs statistics.
        members: The collections that share the exchange. Their lookups are the lookups of the
            layout.

    `header` travels with the counts of every batch, `waits` measures the time of waiting for
    messages, and `observer` is called at the end of every part of the work.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        backend: Backend,
        stores: Sequence[RowStore],
        dtype: torch.dtype,
        payload: torch.dtype,
        row_statistics: RowStatistics | None,
        members: Sequence[Member],
    ) -> None:
        self.layout = layout
        self.comm = comm
        self.backend = backend
        self.stores = list(stores)
        self.dtype = dtype
        self.payload = payload
        self.row_statistics = row_statistics
        self.routes = [
            make_routes(layout, g, comm.rank, comm.device) for g in range(len(layout.groups))
        ]
        self.widths_G = np.array([g.width for g in layout.groups])
        # a single rank reads its own store, as all ranks do in replicated groups
        self.answered = sum(g.mode != "replicated" and comm.world > 1 for g in layout.groups)
        # the table of each strip of a group of dynamic tables; nothing for other groups
        self.dynamic_tables_G = [
            [layout.tables[s.table] for s in layout.strips if s.group == g and of_group.dynamic]
            for g, of_group in enumerate(layout.groups)
        ]
        self.mixed = MixedLookups(layout, backend.positions_of_rows)
        self.outputs = Outputs(members, comm.device)
        self.id_rules = IdRules(
            layout.lookups,
            backend.rows_of_ids,
            [m.is_weighted for m in members for _ in m.lookups],
        )
        mean = [x.pooling is PoolingType.MEAN for x in layout.lookups]
        self.any_mean = any(mean)
        self._mean_F = torch.tensor(mean, device=comm.device)
        # While the device judges ids itself (`step_graph.py`): the number that it sets for an
        # error, and the integers whose reports nobody has read.
        self.stopped: Tensor | None = None
        self.unread: list[Any] = []
        self.counts_ids = False  # whether features have room for more ids: the device counts them
        self.records = False  # whether a step is recorded, and not done now
        self.header = Header()
        # the host reads the counts with every transport
        self.waits = Waits(PHASES if comm.host_waits else PHASES[:1])
        self.observer = EngineObserver()
        self.messages = Buffers()
        # with the mark that ends the work of the batch before
        self._free_leases: dict[bool, list[tuple[list[Scratch], Any]]] = {False: [], True: []}
        self._output_offsets: dict[tuple[int, int], Tensor] = {}
        self._find_lines()

    def leave_room(self, member: int, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next batch on.

        Args:
            member: The number of a collection of bags.
            columns: The number of columns; `KeyedTensor.prepend` writes to them.
        """
        self.outputs.room[member] = columns
        self._output_offsets.clear()
        self._find_lines()

    def _find_lines(self) -> None:
        """Find the groups that fill whole cache lines of the output."""
        line = CACHE_LINE_BYTES // self.dtype.itemsize
        whole = self.outputs.whole_lines(line)
        self.in_lines_G = [
            whole and not (np.array([r.width, *r.column_S]) % line).any() for r in self.routes
        ]
        self.backend.in_lines = all(self.in_lines_G)

    def wait(self, phase: str, message: Sent[Message]) -> Message:
        """Wait for a message of `waits.sent`, and return its contents."""
        arrived = self.waits.arrived(phase, message)
        self.observer.ends(phase)
        return arrived

    def rows_of(
        self, features: KeyedJaggedTensor, taken: Sequence[bool]
    ) -> tuple[LookupRows, PendingCheck]:
        """Return the rows of a batch, and the check of its ids, which runs when it is called.
        Lengths and weights stand one behind the other in memory, as kernels read them.

        Args:
            features: Raw ids.
            taken: Whether each collection that shares the exchange looks up this batch.

        Raises:
            OutsideTable: An id is outside its table. On a GPU only the check raises it.
            ConfigError: The ids are not integers, or sample weights are missing.
        """
        check_have_values(features)
        rows, check = self.id_rules.begin(features, self._taken_lookups(taken))
        rows.lengths_FB = rows.lengths_FB.contiguous()
        if rows.weights_L is not None:
            rows.weights_L = rows.weights_L.to(self.dtype).contiguous()
        return rows, check

    def ids_of(self, features: KeyedJaggedTensor, taken: Sequence[bool]) -> LookupRows:
        """Return the raw ids of a batch in the place of its rows; see `rows_of`. Dropped ids are
        gone, unless the kernels leave them out. Ids, and weights, stand one behind the other in
        memory, as kernels read them.
        """
        check_have_values(features)
        ids = self.id_rules.raw(features, self._taken_lookups(taken))
        if not self.leaves_out(ids):
            ids = self.id_rules.inside(ids)
        ids.rows_L = ids.rows_L.contiguous()
        if ids.weights_L is not None:
            ids.weights_L = ids.weights_L.to(self.dtype).contiguous()
        return ids

    def leaves_out(self, ids: LookupRows) -> bool:
        """Return whether the kernels for all groups at once leave dropped ids out: those of bags,
        without weights that need a gradient.
        """
        learns = ids.weights_L is not None and ids.weights_L.requires_grad
        return self.id_rules.drops and not (self.id_rules.shortens or learns)

    def _taken_lookups(self, taken: Sequence[bool]) -> list[bool]:
        return [taken[member] for member in self.outputs.member_F]

    def lease(self, trains: bool) -> list[Scratch]:
        """Lease scratch memory to one batch in flight, by group.

        Evaluation batches have leases of their own. They may be larger than training batches, and
        would in time grow every lease of training to their size.

        Where streams overlap, the current stream waits for the work of the batch that had the
        memory before. For a batch in look-ahead that is the step before the last, because a lease
        of training stays free.
        """
        free = self._free_leases[trains]
        side = self.comm.side
        if len(free) <= (trains and side.overlaps):
            return [Scratch(self.comm.device) for _ in self.routes]
        lease, end = free.pop(0 if side.overlaps else -1)
        side.wait_for(end)
        return lease

    def give_back(self, lease: list[Scratch], trains: bool) -> None:
        """Take back the lease of a batch that no longer needs it, but for work of the current
        stream that is queued.
        """
        used = any(len(list(scratch.tensors())) for scratch in lease)
        end = self.comm.side.mark_current() if used else None
        self._free_leases[trains].append((lease, end))

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that are kept between batches and are not leased now."""
        yield from self.messages.free()
        yield from self._output_offsets.values()
        for lease, _ in (*self._free_leases[False], *self._free_leases[True]):
            for scratch in lease:
                yield from scratch.tensors()

    def bags(self, rows: LookupRows, output: BatchOutput) -> list[Bags]:
        """Return the bags of a batch for each group, with rows by their positions. Every strip of a
        table repeats the rows of the table's lookups.
        """
        rows_L = self.mixed.positions_of(rows)
        edge_F1 = np.array([0, *accumulate(rows.per_F)], np.int64)
        bag_F1 = np.array([0, *accumulate(output.count_F.tolist())], np.int64)
        scale_N = self.scales(rows, output)
        bags_G = []
        for g, r in enumerate(self.routes):
            bags = Bags(
                rows_L,
                output.lengths_N,
                bag_F1[r.lookups],
                np.array([0, *accumulate(output.count_F[r.lookups].tolist())], np.int64),
                edge_F1[r.lookups],
                edge_F1[1:][r.lookups],
                self._where(g, output),
                None,
                rows.weights_L,
            )
            bags.scale_M = None if scale_N is None else bags.per_bag(scale_N)
            bags_G.append(bags)
        return bags_G

    def scales(self, rows: LookupRows, output: BatchOutput) -> Tensor | None:
        """Return the factor of each bag of the batch; None where all factors are 1 and ids have no
        weights.
        """
        if not self.any_mean and rows.weights_L is None:
            return None
        mean_N = torch.repeat_interleave(
            self._mean_F,
            to_device(output.count_F, self.comm.device),
            output_size=len(output.lengths_N),
        )
        lengths_N = torch.where(mean_N, output.lengths_N.clamp(min=1), 1)
        return lengths_N.to(self.dtype).reciprocal()

    def _where(self, group: int, output: BatchOutput) -> Tensor:
        """Return the offset of each bag of a group in the output, slot by slot.

        The offsets depend only on the number of samples and are cached, unless the batch has
        sequences or a collection looks nothing up.
        """
        keeps = not self.outputs.ragged and all(output.taken)
        if keeps and (offsets := self._output_offsets.get((group, output.bags))) is not None:
            return offsets
        r = self.routes[group]
        slots = zip(r.lookups, r.column_S.tolist(), strict=True)
        where_M = torch.cat([self.outputs.where(f, output) + column for f, column in slots])
        where_M = where_M.to(offset_dtype(output.numel))
        if keeps:
            self._output_offsets[group, output.bags] = where_M
        return where_M
