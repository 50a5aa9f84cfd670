"""The integers of a batch, group by group: the functions of a backend, called for each group. Every
backend has them, for every mode and table; they define the result.

    begin    ids -> rows, distinct rows, the counts of the requests to each rank
    write    the message of ids; `link`: the links from bags to vectors
    serve    the requests of the ranks -> links of the owner

A single rank requests nothing: its bags sum rows of the store, and these learn by the same links.

`recapp/engine/fused_integers.py` does the same for all groups at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import (
    PooledRequests,
    ServedRequests,
    UniqueRequests,
)
from recapp.engine.state import EngineState
from recapp.kernels.links import Counts, Routes, Scratch
from recapp.tables.ids import LookupRows
from recapp.transport.step_messages import MessageLayout, swap_counts

NO_IDS, UNWEIGHTED, WEIGHTED, TRAINED_WEIGHTS = range(4)  # sample weights in the header


class GroupIntegers:
    """The integers of one batch.

    Args:
        state: The engine state of the tables.
        rows: The rows of the batch.
        taken: Whether each collection looks up this batch.
        lease: The memory of the batch, by group.

    Attributes:
        asked: The requests of each group.
        counts_WG3: The numbers of rows, vectors and words requested of each rank.
    """

    failure = None

    def __init__(
        self, state: EngineState, rows: LookupRows, taken: Sequence[bool], lease: Sequence[Scratch]
    ) -> None:
        self.state = state
        self.rows = rows
        self.output = state.outputs.of(rows, taken)
        world = state.comm.world
        plain = rows if rows.weights_L is None else replace(rows, weights_L=rows.weights_L.detach())
        self.several = world > 1
        modes = modes_of(state.routes, weighting(rows))
        kinds = [
            PooledRequests if mode == "pooled" and self.several else UniqueRequests
            for mode in modes
        ]
        self.asked = [
            kind(state.backend, r, world, take)
            for kind, r, take in zip(kinds, state.routes, lease, strict=False)
        ]
        counts_GW3 = [
            a.route(b) for a, b in zip(self.asked, state.bags(plain, self.output), strict=True)
        ]
        self.counts_WG3 = np.stack(counts_GW3, 1) * self.several

    def send(self, header: Sequence[int]) -> Callable[[], tuple[Counts, Counts]]:
        """Start to send the counts. Return a function that waits for the headers and the counts of
        the other ranks.

        Args:
            header: The header of this rank.
        """
        return swap_counts(self.state.comm, header, self.counts_WG3)

    def write(
        self, ids: Tensor, words: MessageLayout, vectors: MessageLayout, vector: torch.dtype
    ) -> None:
        """Write the message of ids.

        Args:
            ids: The message of ids.
            words: Its offsets.
            vectors: The offsets of the message of vectors.
            vector: The type of these offsets.
        """
        for g, a in enumerate(self.asked if self.several else ()):
            a.write_requests(ids, words.asked_WG1[:, g], vectors.asked_WG1[:, g], vector)

    def link(self, *, late: bool) -> None:
        """Make the matrices of the groups whose store finds rows only in the batch's own step, or
        those of the other groups.
        """
        trains = torch.is_grad_enabled()
        for a, store in zip(self.asked, self.state.stores, strict=True):
            if isinstance(a, UniqueRequests) and (a.routes.dynamic and a.local) is late:
                a.link(self.state.dtype, partial(store.locate, trains=trains))

    def serve(
        self,
        ids: Tensor,
        words: MessageLayout,
        vectors: MessageLayout,
        vector: torch.dtype,
        in_WG3: Counts,
        weighting: int,
    ) -> list[ServedRequests]:
        """Return the requests of all ranks, by group.

        Args:
            ids: The message of ids.
            words: Its offsets.
            vectors: The offsets of the message of vectors.
            vector: The type of these offsets.
            in_WG3: The numbers of rows, vectors and words that each rank requests.
            weighting: The sample weights of the ranks with ids, in whose mode a rank without ids
                also serves requests.
        """
        state = self.state
        modes = modes_of(state.routes, weighting)
        served = [
            ServedRequests(state.backend, r, mode, a.take)
            for a, r, mode in zip(self.asked, state.routes, modes, strict=True)
        ]
        trains = torch.is_grad_enabled()
        pairs = zip(served, state.stores, strict=True)
        for g, (s, store) in enumerate(pairs if self.several else ()):
            s.serve(
                ids,
                words.served_WG1[:, g],
                vectors.served_WG1[:, g],
                in_WG3[:, g],
                state.dtype,
                vector,
                partial(store.locate, trains=trains),
            )
        self.link(late=True)  # the requests have decided on each new key
        for s, a in zip(served, self.asked, strict=True):
            if isinstance(a, UniqueRequests) and not self.several:
                s.row_U = a.located_U
                s.gradient_links = a.gradient_links
        return served


def weighting(rows: LookupRows) -> int:
    """Return whether the ids of a batch have sample weights, as the header tells it."""
    if not len(rows.rows_L):
        return NO_IDS
    if rows.weights_L is None:
        return UNWEIGHTED
    trains = rows.weights_L.requires_grad and torch.is_grad_enabled()
    return TRAINED_WEIGHTS if trains else WEIGHTED


def no_rows(state: EngineState) -> LookupRows:
    """Return the rows of a batch without samples."""
    device = state.comm.device
    lengths = torch.zeros(len(state.layout.lookups), 0, dtype=torch.int64, device=device)
    return LookupRows(
        torch.zeros(0, dtype=torch.int64, device=device), lengths, None, [0] * len(lengths)
    )


def modes_of(routes: list[Routes], weighting: int) -> list[str]:
    """Return the mode of each group. Sample weights that need a gradient are applied at home."""
    return [
        "unique" if weighting == TRAINED_WEIGHTS and r.mode == "pooled" else r.mode for r in routes
    ]
