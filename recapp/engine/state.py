"""The state that requests, lookup and update of sharded tables share: a plain object, no module.

    EngineState <- FusedUpdate <- Requests <- Lookup <- ShardedTables

Each class gets the objects to its left, and knows no class to its right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import make_routes
from recapp.engine.outputs import BatchOutput, Member, Outputs
from recapp.engine.row_statistics import RowStatistics
from recapp.engine.row_store import RowStore
from recapp.kernels.backend import Backend
from recapp.kernels.constants import CACHE_LINE_BYTES
from recapp.kernels.links import Bags, Scratch, offset_dtype
from recapp.sharding.layout import Layout
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import to_device
from recapp.tables.config import PoolingType
from recapp.tables.ids import IdRules, LookupRows, PendingCheck, check_have_values
from recapp.tables.row_order import affine
from recapp.transport.communicator import Comm, Sent, Waits
from recapp.transport.step_messages import Buffers, Header

Message = TypeVar("Message")
PHASES = ("counts", "ids", "vectors", "gradients")
"""The messages of a step."""
Kernel = Callable[[Tensor, Sequence[int], Tensor], Tensor]
"""A kernel for all lookups in one pass: (rows_L, edges, numbers_F3) -> positions in the dtype of
the rows. `numbers_F3` has the three numbers of each lookup's `RowOrder`; `rows` is 0 where the rows
of a lookup are not mixed.
"""


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
            define the result; they process a run of neighbouring lookups at once.
    """

    def __init__(self, layout: Layout, kernel: Kernel | None = None) -> None:
        order_of = {t.name: order for t, order in zip(layout.tables, layout.orders, strict=True)}
        order_F = [order_of[x.table.name] for x in layout.lookups]
        runs = groupby(range(len(order_F)), key=lambda f: order_F[f] is not None)
        self._runs = [list(run) for mixed, run in runs if mixed]
        self._most = max((o.rows for o in order_F if o is not None), default=0)
        self._numbers_F3 = np.array(
            [(o.multiplier, o.shift, o.rows) if o else (1, 0, 0) for o in order_F], np.int64
        )
        self._kernel = kernel

    def positions_of(self, rows: LookupRows) -> Tensor:
        """Return the positions of a batch's rows. Rows of tables that are not mixed stay as they
        are.
        """
        if not self._runs:
            return rows.rows_L
        edges = [0, *accumulate(rows.per_F)]
        if self._kernel is not None:
            return self._kernel(rows.rows_L, edges, torch.from_numpy(self._numbers_F3))
        made_L = rows.rows_L.clone()
        for run in self._runs:
            part_N = made_L[edges[run[0]] : edges[run[-1] + 1]]
            part_N.copy_(self._run(part_N, run, rows.per_F))
        return made_L

    def _run(self, row_N: Tensor, run: list[int], per_F: list[int]) -> Tensor:
        numbers_R3 = self._numbers_F3[run]
        if len(run) == 1:
            multiplier, shift, rows = numbers_R3[0].tolist()
            return affine(row_N, multiplier, shift, rows, self._most)
        counts = np.array([per_F[f] for f in run], np.int64)
        *each, count_R = to_device(np.vstack([numbers_R3.T, counts]), row_N.device)
        multiplier_N, shift_N, rows_N = (
            torch.repeat_interleave(number_R, count_R, output_size=len(row_N)) for number_R in each
        )
        return affine(row_N, multiplier_N, shift_N, rows_N, self._most)


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
        groups = range(len(layout.groups))
        self.routes = [make_routes(layout, g, comm.rank, comm.device) for g in groups]
        self.widths_G = np.array([g.width for g in layout.groups])
        self.answered = sum(g.mode != "replicated" for g in layout.groups)
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
        self.header = Header()
        # the host reads the counts with every transport
        self.waits = Waits(PHASES if comm.host_waits else PHASES[:1])
        self.observer = EngineObserver()
        self.messages = Buffers()
        self._free_leases: dict[bool, list[list[Scratch]]] = {False: [], True: []}
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

    def wait(self, phase: str, message: Sent[Message]) -> Message:
        """Wait for a message of `waits.sent`, and return its contents."""
        arrived = self.waits.arrived(phase, message)
        self.observer.ends(phase)
        return arrived

    def rows_of(
        self, features: KeyedJaggedTensor, taken: Sequence[bool]
    ) -> tuple[LookupRows, PendingCheck]:
        """Return the rows of a batch, and the check of its ids, which runs when it is called.

        Args:
            features: Raw ids.
            taken: Whether each collection that shares the exchange looks up this batch.

        Raises:
            OutsideTable: An id is outside its table. On a GPU only the check raises it.
            ConfigError: The ids are not integers, or sample weights are missing.
        """
        check_have_values(features)
        rows, check = self.id_rules.begin(features, [taken[m] for m in self.outputs.member_F])
        if rows.weights_L is not None:
            rows.weights_L = rows.weights_L.to(self.dtype)
        return rows, check

    def lease(self, trains: bool) -> list[Scratch]:
        """Lease scratch memory to one batch in flight, by group.

        Evaluation batches have leases of their own. They may be larger than training batches, and
        would in time grow every lease of training to their size.
        """
        free = self._free_leases[trains]
        return free.pop() if free else [Scratch() for _ in self.routes]

    def give_back(self, lease: list[Scratch], trains: bool) -> None:
        """Take back the lease of a batch that no longer needs it."""
        self._free_leases[trains].append(lease)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that are kept between batches and are not leased now."""
        yield from self.messages.free()
        yield from self._output_offsets.values()
        for lease in (*self._free_leases[False], *self._free_leases[True]):
            for scratch in lease:
                yield from scratch.tensors()

    def bags(self, rows: LookupRows, output: BatchOutput) -> list[Bags]:
        """Return the bags of a batch for each group, with rows by their positions. Every strip of a
        table repeats the rows of the table's lookups.
        """
        rows_L = self.mixed.positions_of(rows)
        edge_F1 = np.array([0, *accumulate(rows.per_F)], np.int64)
        bag_F1 = np.array([0, *accumulate(output.count_F.tolist())], np.int64)
        scale_N = self._scales(rows, output)
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

    def _scales(self, rows: LookupRows, output: BatchOutput) -> Tensor | None:
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
