"""The modes of a group of tables: each splits `out = A . S . rows` in its own way between the home
of a batch (A) and the owners of rows (S). This file has local arithmetic and no collectives.

| mode       | a requested vector is              | the owner (S)  | home (A)       |
|------------|------------------------------------|----------------|----------------|
| unique     | one distinct row                   | selects rows   | sums bags      |
| pooled     | the sum of a bag's rows of an owner | sums rows     | sums owners    |
| replicated | one distinct row, read from the own store; its gradient goes to all ranks |
| one rank   | none: the own store is read, and rows learn from the output's gradient    |

At home a batch goes through three functions. `route` counts the requests to each rank.
`write_requests` fills the message of ids and fixes the offset of each vector in the message of
vectors. `link` links the vectors to their bags while the requests travel. At the owner the batch
goes through `serve` and, in training, `group`. A single rank is both home and owner, so its rows
learn by the links of the home (`recapp/engine/integers.py`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.engine.row_statistics import RowPieces
from recapp.engine.row_store import RowStore
from recapp.kernels.backend import Backend
from recapp.kernels.links import Bags, Counts, Links, Routes, Scratch
from recapp.sharding.layout import Layout
from recapp.sparse.transfer import to_device
from recapp.tables.positions import first_position

MANY_ROWS = 2**62  # kernels take this as the number of positions: more than any batch has

# `RowStore.locate` of the group's store: takes rows and, where positions of keys identify rows, the
# strip of each row.
Locate = Callable[[Tensor, Tensor | None], Tensor]


def make_routes(layout: Layout, number: int, rank: int, device: torch.device) -> Routes:
    """Return a group as arrays on a device. Of replicas, only the copy of this rank is in them."""
    group = layout.groups[number]
    slots = sorted(group.slots, key=lambda s: s.strip)
    strips = [i for i, s in enumerate(layout.strips) if s.group == number]
    pieces = [
        p
        for p in layout.pieces
        if layout.strips[p.strip].group == number and (group.mode != "replicated" or p.rank == rank)
    ]
    last = [
        max((i for i, p in enumerate(pieces) if p.strip == strip), default=-1) + 1
        for strip in strips
    ]

    def numbers(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    wide = any(g.dynamic or max(g.rows_W) >= 2**31 for g in layout.groups)
    start_K = [first_position(p.rows.start) if group.dynamic else p.rows.start for p in pieces]
    return Routes(
        group.mode,
        group.width,
        [s.lookup for s in slots],
        np.array([s.column for s in slots], np.int64),
        numbers(strips.index(s.strip) for s in slots),
        numbers(
            MANY_ROWS if group.dynamic else layout.tables[layout.strips[i].table].num_embeddings
            for i in strips
        ),
        numbers([0, *last]),
        numbers(start_K),
        numbers(p.rank for p in pieces),
        numbers(start_K if group.dynamic else (p.base for p in pieces)),
        torch.int64 if wide else torch.int32,
        group.dynamic,
    )


class HomeRequests:
    """The requests of this rank's batch to the owners of one group's rows.

    Args:
        backend: Kernels.
        routes: The group.
        world: The number of ranks W.
        take: The memory of this batch and group.

    `combine_links` is the matrix A. `gradient_links` is the transpose of A: it sums the gradient of
    the output to the gradients of the requested vectors, at their offsets in the message.
    """

    bags: Bags
    rows_I: Counts
    combine_links: Links
    gradient_links: Links

    def __init__(self, backend: Backend, routes: Routes, world: int, take: Scratch) -> None:
        self.backend = backend
        self.routes = routes
        self.world = world
        self.take = take
        self.everywhere = routes.mode == "replicated"  # gradients go to all ranks
        # bags sum rows of the own store, not of a message
        self.local = self.everywhere or world == 1


class UniqueRequests(HomeRequests):
    """Requests at home in the modes `unique` and `replicated`: one vector per distinct row."""

    at_U: Tensor | None = None

    def route(self, bags: Bags) -> Counts:
        """Find the distinct rows. Return the numbers of rows, vectors and words in the request to
        each rank: [W, 3].
        """
        self.bags = bags
        self.routing, n_IW = self.backend.route_rows(self.routes, bags, self.world, self.take)
        self.rows_I = n_IW.sum(1)
        if self.everywhere:
            n_IW = np.repeat(self.rows_I[:, None], self.world, 1)
        self.rows_WI = np.ascontiguousarray(n_IW.T)
        counts_W3 = np.repeat(n_IW.sum(0)[:, None], 3, 1)
        counts_W3[:, 2] += strip_words(self.routes)
        return counts_W3

    def write_requests(
        self, ids: Tensor, id_first_W: Counts, vector_first_W: Counts, offset_dtype: torch.dtype
    ) -> None:
        """Fill the requests and fix the offset of each vector.

        Args:
            ids: The message of ids.
            id_first_W: The offset of each rank's request in the message of ids.
            vector_first_W: The offset of each rank's first vector in the message of vectors.
            offset_dtype: The type of the vectors' offsets.
        """
        if self.routes.dynamic:
            at_N = _strip_words_at(id_first_W, self.routes, ids.device)
            ids[at_N] = to_device(self.rows_WI.reshape(-1), ids.device)
            id_first_W = id_first_W + strip_words(self.routes)
        self.at_U = self.backend.write_row_requests(
            self.routes,
            self.routing,
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(vector_first_W),
            offset_dtype,
            self.take,
        )
        if self.everywhere:
            for first in id_first_W.tolist():
                ids[first : first + len(self.routing.row_U)] = self.routing.row_U

    def link(self, dtype: torch.dtype, locate: Locate) -> None:
        """Make the matrix A and its transpose.

        Args:
            dtype: The dtype of the entries.
            locate: A function that finds rows in the own store.
        """
        source_U = self.at_U
        if self.local or source_U is None:
            row_U = self.routing.row_U
            strip_U = None
            if self.routes.dynamic:
                counts = to_device(self.rows_I, row_U.device)
                strip_U = strips_of(counts, len(self.rows_I), len(row_U))
            source_U = self.located_U = locate(row_U, strip_U)
        self.combine_links, gradient_links = self.backend.link_rows(
            self.routes, self.bags, self.routing, source_U, dtype, self.take
        )
        self.gradient_links = gradient_links._replace(at_M=self.at_U)


def strip_words(routes: Routes) -> int:
    """Return the number of words at the head of a request that count its rows per strip. Requests
    for dynamic tables have such words, because a position does not identify its strip.
    """
    return len(routes.rows_I) if routes.dynamic else 0


def _strip_words_at(id_first_W: Counts, routes: Routes, device: torch.device) -> Tensor:
    """Return the offsets of the strip words of all ranks in the message of ids."""
    words = np.arange(strip_words(routes))
    return to_device((id_first_W[:, None] + words).reshape(-1), device)


def strips_of(count_N: Tensor, strips: int, rows: int) -> Tensor:
    """Return the strip of each row of some requests, int16.

    Args:
        count_N: The number of rows of each strip, request by request.
        strips: The number of strips.
        rows: The number of rows.
    """
    strip_N = torch.arange(strips, dtype=torch.int16, device=count_N.device)
    strip_N = strip_N.repeat(len(count_N) // max(1, strips))
    return torch.repeat_interleave(strip_N, count_N, output_size=rows)


class PooledRequests(HomeRequests):
    """Requests at home in the mode `pooled`: one vector per bag and owner. Dynamic tables and
    single ranks do not use this mode.
    """

    def route(self, bags: Bags) -> Counts:
        """Return the numbers of rows, vectors and words in the request to each rank: [W, 3]. The
        words are the rows, the end of each bag among them, and the bits of the sample weights.
        """
        self.bags = bags
        self.words_L = weight_words(bags.weights_L, self.routes.row_dtype)
        self.routing, counts_W2 = self.backend.route_bags(self.routes, bags, self.world, self.take)
        words = 1 if self.words_L is None else 1 + self.words_L.shape[1]
        return np.concatenate([counts_W2, counts_W2[:, :1] * words + counts_W2[:, 1:]], 1)

    def write_requests(
        self, ids: Tensor, id_first_W: Counts, vector_first_W: Counts, offset_dtype: torch.dtype
    ) -> None:
        """Fill the requests, fix the offset of each vector, and make both matrices."""
        self.combine_links, self.gradient_links = self.backend.write_bag_requests(
            self.routes,
            self.bags,
            self.routing,
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(vector_first_W),
            self.words_L,
            offset_dtype,
            self.take,
        )


class ServedRequests:
    """The requests of all ranks for this rank's rows of one group.

    Args:
        backend: Kernels.
        routes: The group.
        mode: The mode of the requests. Sample weights that need a gradient turn `pooled` into
            `unique`.
        take: The memory of this batch and group.

    `answer_links` is the matrix S over located rows. `row_U` has the distinct requested rows,
    located. `gradient_links` sums the gradients of the vectors to the gradients of these rows.
    `pieces` has their pieces, where they are known and row statistics need them.
    """

    answer_links: Links
    row_U: Tensor
    gradient_links: Links
    pieces: RowPieces | None = None

    def __init__(self, backend: Backend, routes: Routes, mode: str, take: Scratch) -> None:
        self.backend = backend
        self.routes = routes
        self.pooled = mode == "pooled"
        self.take = take

    def serve(
        self,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        counts_W3: Counts,
        weights: torch.dtype,
        offset_dtype: torch.dtype,
        locate: Locate,
    ) -> None:
        """Read the requests of all ranks.

        Args:
            ids: The message of ids.
            id_first_W: The offset of each rank's request in the message of ids.
            vector_first_W: The offset of each rank's first answer in the message of vectors.
            counts_W3: The rows, vectors and words of each request.
            weights: The type of the sample weights.
            offset_dtype: The type of the answers' offsets.
            locate: A function that finds rows in the store.
        """
        strip_N = None
        if self.routes.dynamic:
            at_N = _strip_words_at(id_first_W, self.routes, ids.device)
            words = strip_words(self.routes)
            strip_N = strips_of(ids[at_N], words, int(counts_W3[:, 0].sum()))
            id_first_W = id_first_W + words
            counts_W3 = counts_W3 - np.array([0, 0, words])
        rows, vectors, words = counts_W3.sum(0).tolist()
        extra = (words - rows - vectors) // max(rows, 1) if self.pooled else 0
        wire = weights_on_wire(weights, ids.dtype)
        links = self.backend.serve(
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(counts_W3),
            np.ascontiguousarray(vector_first_W),
            self.routes.width,
            self.pooled,
            extra,
            wire,
            offset_dtype,
            self.take,
        )
        if links.weights_N is not None and wire != weights:
            links = links._replace(weights_N=links.weights_N.to(weights))
        self.answer_links = links._replace(index_N=locate(links.index_N, strip_N))

    def group(self, store: RowStore) -> None:
        """Group equal rows of the store, unless they were grouped with those of all groups, or by
        the home that is the owner.
        """
        if not hasattr(self, "gradient_links"):
            self.row_U, self.gradient_links = self.backend.group_rows(
                store.rows, self.answer_links, self.take, store.finds_rows
            )


def weight_words(weights_L: Tensor | None, row_dtype: torch.dtype) -> Tensor | None:
    """Return the bits of sample weights as integers of a request, [L, words]."""
    if weights_L is None:
        return None
    wire = weights_L.to(weights_on_wire(weights_L.dtype, row_dtype)).contiguous()
    wire = wire.as_strided(wire.shape, (1,))  # a single weight may have any stride
    return wire.view(row_dtype).view(len(weights_L), wire.element_size() // row_dtype.itemsize)


def weights_on_wire(weights: torch.dtype, rows: torch.dtype) -> torch.dtype:
    """Return the dtype in which sample weights travel. Their bits travel among the row numbers, so
    the dtype may not be narrower than a row number.
    """
    return torch.float64 if rows == torch.int64 else weights
