"""How a group of tables asks: three ways to split `out = A . S . rows` between home (A) and owner
(S). Local arithmetic, no collectives.

| mode       | a requested vector is              | the owner (S)  | home (A)       |
|------------|------------------------------------|----------------|----------------|
| unique     | one distinct row                   | selects rows   | sums bags      |
| pooled     | what one bag wants of one owner    | sums rows      | sums owners    |
| replicated | one distinct row, read from the own store; its gradient goes to all ranks |

At home a batch goes through `route` (how much is asked of whom), `place` (where it stands in the
messages: fills the requests) and `link` (which vectors make which bag, while the requests travel);
at the owner through `serve` and, if it trains, `group`. A single rank is home and owner at once: it
reads its store and learns from the output's gradient, with no vector between.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recapp.kernels.links import Bags, Counts, Links, Routes, Scratch
from recapp.sharding.layout import Layout

if TYPE_CHECKING:
    from recapp.kernels.backend import Backend


def make_routes(layout: Layout, number: int, rank: int, device: torch.device) -> Routes:
    """A group as arrays on a device; of replicas, those of this rank."""
    group = layout.groups[number]
    slots = sorted(group.slots, key=lambda s: s.strip)
    strips = [i for i, s in enumerate(layout.strips) if s.group == number]
    held = [
        p
        for p in layout.pieces
        if layout.strips[p.strip].group == number and (group.mode != "replicated" or p.rank == rank)
    ]
    last = [
        max((i for i, p in enumerate(held) if p.strip == strip), default=-1) + 1 for strip in strips
    ]

    def numbers(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    features = [s.lookup for s in slots]
    wide = max(max(g.rows_W) for g in layout.groups) >= 2**31
    return Routes(
        group.mode,
        group.width,
        features,
        numbers(features),
        np.array([s.column for s in slots], np.int64),
        numbers(strips.index(s.strip) for s in slots),
        numbers(layout.tables[layout.strips[i].table].num_embeddings for i in strips),
        numbers([0, *last]),
        numbers(p.rows.start for p in held),
        numbers(p.rank for p in held),
        numbers(p.base for p in held),
        torch.int64 if wide else torch.int32,
    )


class RowRequests:
    """Modes unique and replicated, at home.

    Args:
        backend: the kernels.
        routes: the group.
        world: ranks W.
        me: this rank.
        take: memory of this batch and group.
    """

    found: Any
    combine: Links
    # spread: gradients of the asked vectors, placed in the message; one rank alone: of the rows
    # themselves
    learn: Links

    def __init__(
        self, backend: "Backend", routes: Routes, world: int, me: int, take: Scratch
    ) -> None:
        self.backend = backend
        self.routes = routes
        self.world = world
        self.me = me
        self.take = take
        self.everywhere = routes.mode == "replicated"
        self.alone = world == 1
        self.local = self.everywhere or self.alone  # combine reads the store, not a message

    def route(self, bags: Bags) -> Counts:
        """Rows, vectors and words asked of each rank: [W, 3]."""
        self.bags = bags
        self.found, n_W = self.backend.route_rows(self.routes, bags, self.world, self.take)
        if self.local:
            n_W[:] = 0 if self.alone else len(self.found.row_U)
        return np.repeat(n_W[:, None], 3, 1)

    def place(
        self, ids: Tensor, id_first_W: Counts, vector_first_W: Counts, place: torch.dtype
    ) -> None:
        """Fill the requests; fix where each vector will stand."""
        if self.alone:
            return
        self.at_U = self.backend.place_rows(
            self.routes,
            self.found,
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(vector_first_W),
            place,
            self.take,
        )
        if self.everywhere:
            for first in id_first_W.tolist():
                ids[first : first + len(self.found.row_U)] = self.found.row_U

    def link(self, dtype: torch.dtype) -> None:
        """The matrix A and its transpose."""
        source_U = self.found.row_U if self.local else self.at_U
        self.combine, learn = self.backend.link_rows(
            self.routes, self.bags, self.found, source_U, dtype, self.take
        )
        self.learn = learn if self.alone else learn._replace(at_M=self.at_U)


class BagRequests:
    """Mode pooled, at home; arguments as of `RowRequests`."""

    everywhere = local = alone = False
    found: Any
    combine: Links
    learn: Links

    def __init__(
        self, backend: "Backend", routes: Routes, world: int, me: int, take: Scratch
    ) -> None:
        self.backend = backend
        self.routes = routes
        self.world = world
        self.take = take

    def route(self, bags: Bags) -> Counts:
        """Rows, vectors and words asked of each rank: [W, 3]. Words: a row each, a length per bag,
        the bits of the sample weights.
        """
        self.bags = bags
        self.words_L = weight_words(bags.weights_L, self.routes.row_dtype)
        self.found, counts_W2 = self.backend.route_bags(self.routes, bags, self.world, self.take)
        words = 1 if self.words_L is None else 1 + self.words_L.shape[1]
        return np.concatenate([counts_W2, counts_W2[:, :1] * words + counts_W2[:, 1:]], 1)

    def place(
        self, ids: Tensor, id_first_W: Counts, vector_first_W: Counts, place: torch.dtype
    ) -> None:
        """Fill the requests; fix where each vector will stand."""
        self.combine, self.learn = self.backend.place_bags(
            self.routes,
            self.bags,
            self.found,
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(vector_first_W),
            self.words_L,
            place,
            self.take,
        )

    def link(self, dtype: torch.dtype) -> None:
        """Nothing is left."""


class Served:
    """The owner of a group: the matrix S for the answers; the distinct rows and its transpose for
    the update.

    Args:
        backend: the kernels.
        routes: the group.
        mode: as its askers say: sample weights that need a gradient make `unique` of `pooled`.
        take: memory of this batch and group.
    """

    answer: Links
    row_U: Tensor
    learn: Links

    def __init__(self, backend: "Backend", routes: Routes, mode: str, take: Scratch) -> None:
        self.backend = backend
        self.width = routes.width
        self.pooled = mode == "pooled"
        self.take = take

    def serve(
        self,
        ids: Tensor,
        id_first_W: Counts,
        vector_first_W: Counts,
        counts_W3: Counts,
        weights: torch.dtype,
        place: torch.dtype,
    ) -> None:
        """Read the requests of all ranks."""
        rows, vectors, words = counts_W3.sum(0).tolist()
        extra = (words - rows - vectors) // max(rows, 1) if self.pooled else 0
        wire = weights_on_wire(weights, ids.dtype)
        self.answer = self.backend.serve(
            ids,
            np.ascontiguousarray(id_first_W),
            np.ascontiguousarray(counts_W3),
            np.ascontiguousarray(vector_first_W),
            self.width,
            self.pooled,
            extra,
            wire,
            place,
            self.take,
        )
        if self.answer.weights_N is not None and wire != weights:
            self.answer = self.answer._replace(weights_N=self.answer.weights_N.to(weights))

    def group(self, rows: int) -> None:
        """Bring equal rows together; `rows` are those of the store."""
        self.row_U, self.learn = self.backend.group_rows(rows, self.answer, self.take)


def weight_words(weights_L: Tensor | None, row_dtype: torch.dtype) -> Tensor | None:
    """[L, words]: the bits of sample weights as integers of a request."""
    if weights_L is None:
        return None
    wire = weights_L.to(weights_on_wire(weights_L.dtype, row_dtype)).contiguous()
    return wire.view(row_dtype).view(len(weights_L), wire.element_size() // row_dtype.itemsize)


def weights_on_wire(weights: torch.dtype, rows: torch.dtype) -> torch.dtype:
    """Sample weights travel as bits among the row numbers, so they may not be narrower than one."""
    return torch.float64 if rows == torch.int64 else weights
