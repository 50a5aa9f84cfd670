"""What requests, lookup and update of one sharded collection share: a plain object, no module.

    EngineState <- FusedUpdate <- Requests <- Lookup <- ShardedEmbeddingBagCollection

Whatever stands to the right is handed what stands to the left of it, and nothing looks back.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import make_routes
from recapp.engine.observer import EngineObserver
from recapp.engine.row_statistics import RowStatistics
from recapp.engine.row_store import RowStore
from recapp.kernels.backend import Backend
from recapp.kernels.links import CACHE_LINE_BYTES, Bags, Scratch, offset_dtype
from recapp.sharding.layout import Layout
from recapp.sparse.transfer import to_device
from recapp.tables.config import PoolingType
from recapp.tables.ids import IdRules, Rows
from recapp.transport.communicator import Comm
from recapp.transport.message_layout import Buffers, Header
from recapp.transport.waits import Sent, Waits

Message = TypeVar("Message")


class EngineState:
    """The communicator, kernels, layout, stores and reused memory of a sharded collection.

    Args:
        layout: Where the rows of all tables lie.
        comm: Communicator of the ranks.
        backend: Kernels.
        stores: The rows of this rank, one store per group of the layout.
        dtype: Type that is computed in and handed out.
        payload: Type of vectors and gradients that travel.
        row_statistics: Sums row-wide statistics over the strips of a row; None where rows are
            whole or the optimiser needs none.
        is_weighted: Whether ids must have sample weights; None where batches decide.

    `header` travels with the counts of every batch, `waits` measures how long messages are waited
    for, `observer` hears of every part of the work that has ended.
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
        is_weighted: bool | None,
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
        self.id_rules = IdRules(layout.lookups, backend.rows_of_ids, is_weighted)
        self.width = sum(x.dim for x in layout.lookups)
        mean = [x.pooling is PoolingType.MEAN for x in layout.lookups]
        self.any_mean = any(mean)
        self._mean_F = torch.tensor(mean, device=comm.device)
        self.header = Header()
        self.waits = Waits(("counts", "ids", "vectors", "gradients"))
        self.observer = EngineObserver()
        self.messages = Buffers()
        self._free_leases: dict[bool, list[list[Scratch]]] = {False: [], True: []}
        self.leave_room(0)

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next batch on.

        Args:
            columns: How many; `KeyedTensor.after` writes there.
        """
        self.room = columns
        line = CACHE_LINE_BYTES // self.dtype.itemsize
        self.in_lines_G = [
            not (np.array([r.width, self.width, columns, *r.column_S]) % line).any()
            for r in self.routes
        ]
        self._output_offsets: dict[tuple[int, int], Tensor] = {}

    def wait(self, phase: str, message: Sent[Message]) -> Message:
        """Wait for a message that `waits.sent` knows, and return what arrived."""
        arrived = self.waits.arrived(phase, message)
        self.observer.ends(phase)
        return arrived

    def lease(self, trains: bool) -> list[Scratch]:
        """Lend memory for one batch in flight, by group.

        Batches that are only evaluated have their own. They may be larger, and whichever lease of
        training was free at that moment would grow to their size, in time all of them.
        """
        free = self._free_leases[trains]
        return free.pop() if free else [Scratch() for _ in self.routes]

    def give_back(self, lease: list[Scratch], trains: bool) -> None:
        """Take back the memory of a batch in flight that no longer needs it."""
        self._free_leases[trains].append(lease)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory that stays between batches and is lent to none now."""
        yield from self.messages.free()
        yield from self._output_offsets.values()
        for lease in (*self._free_leases[False], *self._free_leases[True]):
            for scratch in lease:
                yield from scratch.tensors()

    def bags(self, rows: Rows) -> list[Bags]:
        """Return a batch as each group sees it; a strip asks for its feature again."""
        edge_F1 = np.array([0, *accumulate(rows.per_F)], np.int64)
        B = rows.lengths_FB.shape[1]
        scale_FB = None
        if self.any_mean or rows.weights_L is not None:
            length_FB = torch.where(self._mean_F[:, None], rows.lengths_FB.clamp(min=1), 1)
            scale_FB = length_FB.to(self.dtype).reciprocal()
        found = []
        for g, r in enumerate(self.routes):
            if (g, B) not in self._output_offsets:
                column_S = to_device(self.room + r.column_S, self.comm.device)
                wide = self.room + self.width
                where = column_S[:, None] + wide * torch.arange(B, device=self.comm.device)
                self._output_offsets[g, B] = where.to(offset_dtype(B * wide)).view(-1)
            scale_M = None if scale_FB is None else scale_FB[r.feature_S].view(-1)
            found.append(
                Bags(
                    rows.rows_L,
                    rows.lengths_FB,
                    edge_F1[r.features],
                    edge_F1[1:][r.features],
                    self._output_offsets[g, B],
                    scale_M,
                    rows.weights_L,
                )
            )
        return found
