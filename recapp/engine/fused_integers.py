"""The integers of a batch on a GPU, for all groups at once (`recapp/kernels/triton_integers.py`).

    begin    ids -> entries, distinct rows, counts for the ranks    (a launch each, and a sort)
    read     the counts have arrived: the only wait of the host
    write    the message of ids, and the links from bags to vectors
    serve    the requests of the ranks -> links of the owner

The host knows the number of ids of each lookup, and so the place of every slot and group in the
arrays. These places, room for the counts that leave and arrive, and room for the report of the
kernels stand in one array, the header, which reaches the device in one copy. Its end comes back in
one read: the counts, the first id that is an error, the number of changed ids of each lookup, and
the number of distinct rows of each piece.

`recapp/engine/integers.py` does the same group by group: for other backends, for modes and tables
that the kernels do not know, and as the definition of the result.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from recapp.engine.batch_places import (
    Places,
    Region,
    block_behind,
    in_regions,
    places_of_pieces,
    places_of_requests,
)
from recapp.engine.dynamic_keys import MOST_SLOTS
from recapp.engine.exchange_modes import HomeRequests, ServedRequests
from recapp.engine.row_statistics import RowPieces
from recapp.engine.row_store import RowStore
from recapp.engine.state import BatchOutput, EngineState
from recapp.kernels.batch_arrays import (
    NOTHING,
    DistinctRows,
    Entries,
    GroupRequests,
    PieceNumbers,
    Sizes,
    SlotNumbers,
)
from recapp.kernels.links import Counts, Links, Scratch, offset_dtype, starts
from recapp.sparse.transfer import to_device, to_host
from recapp.tables.config import PoolingType
from recapp.tables.ids import RULE_NUMBERS, LookupRows, OutsideTable, rule_of
from recapp.transport.step_messages import HEADER, MessageLayout


class LinkedServed(ServedRequests):
    """The requests of all ranks for a group, whose links were made with those of all groups. A
    single rank is answered from its own store.
    """

    @override
    def answer(self, store: RowStore, message: Tensor) -> None:
        if hasattr(self, "answer_links"):
            super().answer(store, message)

    @override
    def group(self, store: RowStore) -> None:
        """Do nothing: equal rows were grouped with those of all groups."""


class FusedIntegers:
    """Make the integers of batches for all groups at once.

    Args:
        state: The engine state of the tables.
    """

    def __init__(self, state: EngineState) -> None:
        self.state = state
        device = state.comm.device
        self.kernels = state.backend.fused_integers
        slots = _numbers_of_slots(state)
        pieces = _numbers_of_pieces(state)
        self.pieces = np.array(pieces, np.int64)
        self.slots = to_device(np.array(slots, np.int64), device)
        self.piece_rows = to_device(self.pieces, device)
        of_strips = [int(r.rows_I.sum()) for r in state.routes]
        self.own_pieces = _numbers_of_own_pieces(state)
        self.own_piece_rows = to_device(np.array(self.own_pieces, np.int64), device)
        self.own_requests = _groups_of_pieces(state, self.own_pieces)
        self.requests = _groups_of_pieces(state, pieces)
        self.counted = len(self.own_pieces if state.comm.world == 1 else pieces)
        self.home_keys = _keys(of_strips if state.comm.world > 1 else _rows_of_stores(state))
        self.store_keys = _keys(_rows_of_stores(state))
        self.lookup_S = np.array([f for r in state.routes for f in r.lookups], np.int64)
        self.column_S = np.concatenate([r.column_S for r in state.routes])
        self.slot_G1 = np.array([0, *accumulate(len(r.lookups) for r in state.routes)], np.int64)
        self.table_S, self.table_G = _numbers_of_tables(state)
        self.shape: Hashable = None  # of the last batch
        self._places: Places | None = None
        # the edges of ids, the bags and the mark of their kernels, for batches of single ids
        self.known_bags: dict[Hashable, tuple[Tensor, tuple[Tensor, Tensor], object]] = {}
        self.searched = _searched(state)
        self._most = {
            t.name: t.dynamic.max_rows
            for t in state.layout.tables
            if t.dynamic and t.dynamic.max_rows is not None
        }

    def places(self, output: BatchOutput) -> Places:
        """Return the places of slots and groups in a batch. Those of the last batch are kept for
        batches with as many ids of each lookup.
        """
        shape = tuple(output.per_F), output.bags, output.taken, tuple(self.state.outputs.room)
        if self._places is None or self.shape != shape:
            self._places = _places(self, output)
            self.shape = shape
        return self._places

    def has_room(self, ids: LookupRows) -> bool:
        """Return whether no table can have more ids in a batch than `max_rows`, so that nobody has
        to count the distinct ones.
        """
        lookups = self.state.layout.lookups
        return all(
            sum(n for x, n in zip(lookups, ids.per_F, strict=True) if x.table.name == name) <= most
            for name, most in self._most.items()
        )

    @staticmethod
    def takes(state: EngineState) -> bool:
        """Return whether the kernels know these tables: no rank sums bags for another. Dynamic
        tables must be on one rank, in whole rows.
        """
        return (
            state.backend.fused_integers is not None
            and all(
                s.finds_rows == r.dynamic for s, r in zip(state.stores, state.routes, strict=True)
            )
            and ((state.comm.world == 1 and not state.row_statistics) or not _searched(state))
            and (state.comm.world == 1 or all(r.mode != "pooled" for r in state.routes))
            # products of mixed rows have 64 bits
            and all(x.table.num_embeddings < 2**31 for x in state.layout.lookups)
        )


class FusedBatch:
    """The integers of one batch.

    Args:
        fused: The integers of all batches.
        ids: The raw ids of the lookups.
        output: The output of the batch.
        take: The memory of the batch.

    Attributes:
        asked: The requests of each group.
        counts_WG3: The numbers of rows, vectors and words requested of each rank, once they were
            read.
        failure: The error of an id, once the counts were read.
        pieces_G: The pieces of the distinct rows of each group, once the requests were served; None
            where the rule of a group needs no row statistics.
    """

    def __init__(
        self,
        fused: FusedIntegers,
        ids: LookupRows,
        output: BatchOutput,
        take: Scratch,
    ) -> None:
        self.fused = fused
        self.state = state = fused.state
        self.rows = ids
        self.output = output
        self.take = take
        self.failure: Exception | None = None
        self.distinct: DistinctRows | None = None
        world = state.comm.world
        self.counts_WG3 = np.zeros((world, len(state.routes), 3), np.int64)
        self.pieces_G: list[RowPieces | None] = [None] * len(state.routes)
        self.asked = [HomeRequests(state.backend, r, world, take) for r in state.routes]

    def send(self, header: Sequence[int]) -> Callable[[], tuple[Counts, Counts]]:
        """Find the rows of the batch, and start to send the counts. Return a function that waits
        for the headers and the counts of the other ranks, and reads the report.

        Args:
            header: The header of this rank, if no id is an error.
        """
        self._make_header(header)
        self._find_entries(self.rows, self.output)
        if not self.fused.searched:
            self._find_rows()
            self._link_home()
        comm = self.state.comm
        world = comm.world
        numbers = len(self.message) // (2 * world)
        spans = [(r * numbers, (r + 1) * numbers) for r in range(2 * world)]
        wait = comm.swap(self.message, spans[:world], spans[world:])

        def arrived() -> tuple[Counts, Counts]:
            wait()
            if self.state.stopped is not None:  # the host reads the report later
                self.state.unread.append(self)
                return np.array([header], np.int64), self.counts_WG3
            counts = to_host(self._read).numpy()
            both, report, self.rows_K = np.split(
                counts, [len(self.message), len(self.message) + len(self.report)]
            )
            out, into = both.reshape(2, world, numbers)
            into[comm.rank] = out[comm.rank]
            self.check(report.tolist())
            if isinstance(self.failure, OutsideTable):
                error = self.failure
                into[comm.rank, [0, HEADER - 2, HEADER - 1]] = 1, error.lookup, error.number
            self.counts_WG3 = out[:, HEADER:].reshape(self.counts_WG3.shape)
            return into[:, :HEADER], into[:, HEADER:].reshape(self.counts_WG3.shape)

        return arrived

    def read_here(self) -> None:
        """Link the bags of a batch to the rows of a single rank, for a lookup without training.

        Raises:
            OutsideTable: An id is outside of its table.
        """
        self._make_header([0] * HEADER)
        self._find_entries(self.rows, self.output)
        self._search(trains=False)
        self._link_home()
        self.check(to_host(self.report).tolist())
        if self.failure:
            raise self.failure

    def _on_device(self, name: str, *parts: Counts) -> list[Tensor]:
        """Return arrays of the host, flat, on the device, after one copy."""
        numbers = self.take.on_device(name, np.concatenate([part.ravel() for part in parts]))
        edges = [*accumulate(part.size for part in parts)]
        return [*numbers.tensor_split(edges[:-1])]

    def _make_header(self, header: Sequence[int]) -> None:
        """Bring the numbers of the batch to the device, and find its parts there."""
        places = self.fused.places(self.output)
        self.regions = places.regions
        world = self.state.comm.world
        numbers = len(header) + 3 * len(self.regions)
        ends = 2 * world * numbers, 2 * world * numbers + 1 + len(self.rows.per_F)
        read = np.zeros(ends[1] + self.fused.counted, np.int64)
        read[: world * numbers].reshape(world, numbers)[:, : len(header)] = header
        read[ends[0]] = NOTHING
        self.places, self.groups, self._read = self._on_device(
            "header", places.of_slots, places.of_groups, read
        )
        self.message, self.report, self.count_K = self._read.tensor_split(ends)

    def _find_entries(self, ids: LookupRows, output: BatchOutput) -> None:
        """Find the rows of all entries."""
        state = self.state
        weights_L = None if ids.weights_L is None else ids.weights_L.detach()
        scales = state.any_mean or weights_L is not None
        last = self.regions[-1]
        self.sizes = Sizes(
            block_behind(last.here.stop),
            block_behind(last.bag + last.bags),
            len(self.regions),
            state.routes[0].row_dtype,
            offset_dtype(self.fused.home_keys[-1]),
            offset_dtype(output.numel),
        )
        of_slots = (self.fused.slots, self.places, self.groups)
        self._find_bags(ids, output, of_slots)
        self.entries: Entries = self.fused.kernels.entries_of_ids(
            *(ids.rows_L, self.edge_N1, weights_L, output.bags, *of_slots, self.report),
            *(state.stopped, state.dtype if scales else None, self.sizes, self.take),
        )

    def _find_bags(
        self, ids: LookupRows, output: BatchOutput, of_slots: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Find where the ids of each bag begin, where its entries begin, and where its vector lies.

        A batch whose lengths are one number, expanded, has bags of equal sizes, and if there are as
        many ids as bags, the sizes are 1. Then all this follows from the shape: that of the first
        such batch is kept for others of its shape.
        """
        known = self.fused.known_bags
        single = ids.lengths_FB.stride() == (0, 0) and {*ids.per_F} == {output.bags}
        shape = self.fused.shape if single else None
        if shape in known:
            self.edge_N1, self.bags, end = known[shape]
            self.state.comm.side.wait_for(end)
            return
        self.edge_N1 = starts(ids.lengths_FB.reshape(-1).long())
        if self.state.counts_ids:
            self.state.backend.place_entries(self.edge_N1, output.bags, *of_slots)
        take = Scratch(self.state.comm.device) if single and not known else self.take
        self.bags = self.fused.kernels.bags_of(
            self.edge_N1, output.bags, *of_slots, self.sizes, take
        )
        if take is not self.take:
            known[shape] = self.edge_N1, self.bags, self.state.comm.side.mark_current()

    def _search(self, *, trains: bool) -> None:
        """Find the rows of dynamic tables. Until then their entries have positions in the place of
        rows, and strips in the place of keys.

        Args:
            trains: Whether the batch is trained.
        """
        for g in self.fused.searched:
            row_P = self.entries.row_P[self.regions[g].here]
            key_P = self.entries.key_P[self.regions[g].here]
            slot_P = self.state.stores[g].locate(row_P, key_P.to(torch.int16), trains)
            row_P.copy_(slot_P)
            key_P.copy_(slot_P + self.fused.home_keys[g])

    def _find_rows(self) -> None:
        """Find the distinct rows, and count them by piece."""
        state = self.state
        kernels = self.fused.kernels
        several = state.comm.world > 1
        self.distinct = kernels.distinct_rows(
            self.entries, self.groups, self.sizes, self.take, several
        )
        if several:
            kernels.count_requests(
                *(self.distinct, self.fused.piece_rows, self.groups, state.comm.world),
                *(self.message[: len(self.message) // 2], self.rows.rows_L, self.edge_N1),
                self.output.bags,
                *(self.report, self.count_K),
            )
        elif state.row_statistics:
            self._find_own_pieces(self.distinct, self.groups, self.sizes, self.count_K)

    def _link_home(self, source_P: Tensor | None = None, at_U: Tensor | None = None) -> None:
        """Link the bags of every group to its vectors.

        Args:
            source_P: The offset of each entry's vector in the message; None: bags read the store.
            at_U: The offset of each distinct row's vector in the message.
        """
        offset_M, at_M = self.bags
        weight_P = self.entries.weight_P
        for g, (asked, region) in enumerate(zip(self.asked, self.regions, strict=True)):
            if (source_P is None) is asked.local:
                bags = slice(region.bag, region.bag + region.bags)
                asked.combine_links = Links(
                    (self.entries.row_P if source_P is None else source_P)[region.here],
                    offset_M[bags.start : bags.stop + 1],
                    None if weight_P is None else weight_P[region.here],
                    at_M[bags],
                    region.bags,
                    longest=region.longest,
                )
            if self.distinct is not None:
                asked.gradient_links = region.links_of(g, self.distinct, at_U)

    def check(self, report: Sequence[int]) -> None:
        """Count changed ids, or keep the error of the first id that is one.

        Args:
            report: The report of the kernels.
        """
        first, *changed_F = report
        try:
            self.state.id_rules.count_changed(
                -1 if first == NOTHING else first,
                changed_F,
                self.rows.rows_L,
                [0, *accumulate(self.rows.per_F)],
            )
        except OutsideTable as error:
            self.failure = error

    def write(
        self, ids: Tensor, words: MessageLayout, vectors: MessageLayout, vector: torch.dtype
    ) -> None:
        """Write the message of ids, and link bags to the vectors of the message.

        Args:
            ids: The message of ids.
            words: Its offsets.
            vectors: The offsets of the message of vectors.
            vector: The type of these offsets.
        """
        fused = self.fused
        comm = self.state.comm
        if comm.world == 1:
            return
        at = places_of_pieces(
            fused.pieces, self.rows_K, self.state.widths_G, words, vectors, comm.rank
        )
        at_K, words_WG = self._on_device("requests", at, words.asked_WG1[:, :-1])
        at_U, source_P = fused.kernels.write_requests(
            *(self.distinct, fused.piece_rows, self.groups, at_K, fused.requests, words_WG),
            *(ids, self.sizes._replace(offset=vector), self.take),
        )
        self._link_home(source_P, at_U)

    def link(self, *, late: bool) -> None:
        """Do nothing: links are made where their arrays are."""

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
            weighting: The sample weights of the ranks, which change no mode here.
        """
        state = self.state
        served = [LinkedServed(state.backend, r, "unique", self.take) for r in state.routes]
        if self.fused.searched:  # only now, in the batch's own step
            self._search(trains=torch.is_grad_enabled())
            self._find_rows()
            self._link_home()
        if state.comm.world == 1:
            assert self.distinct is not None
            for s, asked, region in zip(served, self.asked, self.regions, strict=True):
                s.row_U = self.distinct.row_U[region.here]
                s.gradient_links = asked.gradient_links
            if state.row_statistics:
                self._cut_to_pieces(served, self.regions, self.rows_K)
            return list(served)
        places = places_of_requests(
            *(self.fused.store_keys, state.widths_G, in_WG3[..., 0], words, vectors)
        )
        regions = places.regions
        of_ranks, of_groups = self._on_device("served", places.of_slots, places.of_groups)
        last = regions[-1].here.stop
        key = offset_dtype(self.fused.store_keys[-1])
        sizes = self.sizes._replace(entries=block_behind(last), key=key, offset=vector)
        entries = self.fused.kernels.entries_of_requests(
            ids, of_ranks, of_groups, sizes, self._take_served
        )
        distinct = (
            self.fused.kernels.distinct_rows(entries, of_groups, sizes, self._take_served, False)
            if torch.is_grad_enabled()
            else None
        )
        for g, (s, region) in enumerate(zip(served, regions, strict=True)):
            here = region.here
            s.answer_links = Links(
                entries.row_P[here], None, None, entries.where_P[here], region.entries
            )
            if distinct is not None:
                s.row_U = distinct.row_U[here]
                s.gradient_links = region.links_of(g, distinct, None)
        if distinct is not None and state.row_statistics:
            count_K = torch.empty(len(self.fused.own_pieces), dtype=torch.int64, device=ids.device)
            self._find_own_pieces(distinct, of_groups, sizes, count_K)
            self._cut_to_pieces(served, regions, to_host(count_K).numpy())
        return list(served)

    def _find_own_pieces(
        self, distinct: DistinctRows, groups: Tensor, sizes: Sizes, count_K: Tensor
    ) -> None:
        """Find the pieces of distinct rows of this rank's stores, and count their rows."""
        fused = self.fused
        fused.kernels.count_rows(distinct, fused.own_piece_rows, groups, count_K)
        self.of_pieces = fused.kernels.find_pieces(
            distinct, fused.own_piece_rows, fused.own_requests, groups, sizes, self.take
        )

    def _cut_to_pieces(
        self, served: Sequence[ServedRequests], regions: Sequence[Region], rows_K: Counts
    ) -> None:
        """Keep the pieces of distinct rows. The host knows their number now, so links have no room
        for more.
        """
        statistics = self.state.row_statistics
        group_K = np.array([piece.group for piece in self.fused.own_pieces])
        for g in np.flatnonzero(statistics.means_G).tolist() if statistics else ():
            of_group_K = rows_K[group_K == g]
            rows = int(of_group_K.sum())
            s = served[g]
            assert s.gradient_links.offsets_M1 is not None
            ends = s.gradient_links.offsets_M1[: rows + 1]
            s.gradient_links = s.gradient_links._replace(offsets_M1=ends, bags=rows, used=None)
            s.row_U = s.row_U[:rows]
            first = regions[g].entry
            piece_U, nth_U = (x[first : first + rows] for x in self.of_pieces)
            self.pieces_G[g] = RowPieces(piece_U, nth_U, of_group_K)

    def _take_served(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the integers of served requests."""
        return self.take(f"served {name}", n, dtype)


def _keys(rows_G: Sequence[int]) -> list[int]:
    """Return the first key of each group, and the key behind all."""
    return [0, *accumulate(rows + 1 for rows in rows_G)]


def _rows_of_stores(state: EngineState) -> list[int]:
    """Return the rows of each group on the rank that has most of them, or the most slots of a store
    that finds rows.
    """
    searched = _searched(state)
    return [
        MOST_SLOTS if g in searched else max(group.rows_W)
        for g, group in enumerate(state.layout.groups)
    ]


def _searched(state: EngineState) -> list[int]:
    """Return the groups of dynamic tables, whose stores find rows."""
    return [g for g, r in enumerate(state.routes) if r.dynamic]


def _numbers_of_slots(state: EngineState) -> list[SlotNumbers]:
    """Return the constants of the slots, group by group. Where this rank has all rows of a group,
    keys are rows of the store; where a search finds the rows, the key of a slot is its strip.
    """
    layout = state.layout
    order_of = dict(zip((t.name for t in layout.tables), layout.orders, strict=True))
    lookups_before = set[int]()
    numbers = []
    for r in state.routes:
        first_I = starts(r.rows_I).tolist()
        local = state.comm.world == 1 or r.mode == "replicated"
        base_I = r.base_K[r.piece_I1[:-1]].tolist() if local else first_I
        for f, strip in zip(r.lookups, r.strip_S.tolist(), strict=True):
            x = layout.lookups[f]
            order = order_of[x.table.name]
            key = base_I[strip] if state.comm.world == 1 else first_I[strip]
            key = strip if r.dynamic else key
            numbers.append(
                SlotNumbers(
                    *(f, RULE_NUMBERS[rule_of(x)], x.table.num_embeddings, x.table.min_key),
                    *((order.multiplier, order.shift, order.rows) if order else (1, 0, 0)),
                    *(base_I[strip], key, not x.columns, x.pooling is PoolingType.MEAN),
                    *(f not in lookups_before, x.hotness or 1, x.dim if x.hotness else 0),
                )
            )
            lookups_before.add(f)
    return numbers


def _numbers_of_pieces(state: EngineState) -> list[PieceNumbers]:
    """Return the constants of the pieces, group by group; a search needs none."""
    numbers = []
    for g, r in enumerate(state.routes):
        if r.dynamic:
            continue
        first_I = starts(r.rows_I).tolist()
        edge_I1 = r.piece_I1.tolist()
        start_K = r.start_K.tolist()
        base_K = r.base_K.tolist()
        rank_K = [-1] * len(base_K) if r.mode == "replicated" else r.rank_K.tolist()
        for strip, (k, end) in enumerate(pairwise(edge_I1)):
            keys = [first_I[strip] + start for start in start_K[k:end]]
            for key, key_end, base, rank in zip(
                keys,
                [*keys[1:], first_I[strip + 1]],
                base_K[k:end],
                rank_K[k:end],
                strict=True,
            ):
                numbers.append(PieceNumbers(g, key, key_end, base, rank))
    return numbers


def _numbers_of_own_pieces(state: EngineState) -> list[PieceNumbers]:
    """Return the pieces of this rank's stores whose strips exchange row statistics."""
    statistics = state.row_statistics
    return [
        PieceNumbers(g, piece.base, piece.base + len(piece.rows), piece.base, state.comm.rank)
        for g in range(len(state.routes))
        if statistics and statistics.means_G[g]
        for piece in state.layout.pieces_of(state.comm.rank, g)
    ]


def _numbers_of_tables(state: EngineState) -> tuple[Counts, Counts]:
    """Return the number of each slot's table, where each group numbers its tables behind those of
    the groups before, and the first number of each group.
    """
    tables = len(state.layout.tables)
    number = {t.name: n for n, t in enumerate(state.layout.tables)}
    table_F = [number[x.table.name] for x in state.layout.lookups]
    of_slots = [g * tables + table_F[f] for g, r in enumerate(state.routes) for f in r.lookups]
    known_T, table_S = np.unique(of_slots, return_inverse=True)
    return table_S, np.searchsorted(known_T, np.arange(len(state.routes)) * tables)


def _groups_of_pieces(state: EngineState, pieces: Sequence[PieceNumbers]) -> Tensor:
    """Return the pieces of each group, int64 [G x `GroupRequests`]."""
    edge_G1 = np.searchsorted([p.group for p in pieces], range(len(state.routes) + 1))
    groups = [
        GroupRequests(*edge, r.width, r.mode == "replicated")
        for edge, r in zip(pairwise(edge_G1.tolist()), state.routes, strict=True)
    ]
    return to_device(np.array(groups, np.int64), state.comm.device)


def _places(fused: FusedIntegers, output: BatchOutput) -> Places:
    """Return the places of slots and groups in a batch."""
    outputs = fused.state.outputs
    lookup_S = fused.lookup_S
    per_F = np.array(output.per_F, np.int64)
    id_S = (per_F.cumsum() - per_F)[lookup_S]
    vector_S = output.first_F[lookup_S] + fused.column_S
    members = zip(outputs.lookups, outputs.member_F, strict=True)
    step_F = np.array([outputs.width(m) if x.columns else x.dim for x, m in members], np.int64)
    sizes_S2 = np.stack([per_F[lookup_S], output.count_F[lookup_S]], 1)
    per_T = np.zeros(fused.table_S.max() + 1, np.int64)
    np.add.at(per_T, fused.table_S, per_F[lookup_S])
    longest_G = np.maximum.reduceat(per_T, fused.table_G)
    places = id_S, vector_S, step_F[lookup_S]
    return in_regions(*places, sizes_S2, fused.slot_G1, fused.home_keys, longest_G)
