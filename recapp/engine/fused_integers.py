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

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.engine.batch_places import (
    Places,
    Region,
    block_behind,
    heads_of_requests,
    in_regions,
    places_of_pieces,
    places_of_requests,
)
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.exchange_modes import (
    HomeRequests,
    ServedRequests,
    weight_words,
    weights_on_wire,
)
from recapp.engine.integers import TRAINED_WEIGHTS, WEIGHTED, modes_of, weighting
from recapp.engine.row_statistics import RowPieces
from recapp.engine.state import BatchOutput, EngineState
from recapp.engine.table_numbers import (
    numbers_of_own_pieces,
    numbers_of_pieces,
    numbers_of_slots,
    numbers_of_tables,
    pieces_on_device,
    rows_of_stores,
    rows_of_strips,
    searched,
)
from recapp.kernels.batch_arrays import (
    NOTHING,
    DistinctRows,
    Entries,
    GroupPlace,
    Sizes,
)
from recapp.kernels.links import Counts, Links, Scratch, offset_dtype, starts
from recapp.sparse.transfer import to_device, to_host
from recapp.tables.ids import LookupRows, OutsideTable
from recapp.tables.positions import STRETCHES
from recapp.transport.step_messages import HEADER, MessageLayout


class FusedIntegers:
    """Make the integers of batches for all groups at once.

    Args:
        state: The engine state of the tables.
        weighting: The sample weights of the batches.
    """

    def __init__(self, state: EngineState, weighting: int = WEIGHTED) -> None:
        self.state = state
        device = state.comm.device
        self.kernels = state.backend.fused_integers
        self.exchange = state.backend.fused_requests
        modes = modes_of(state.routes, weighting)
        self.pooled_G = np.array([m == "pooled" and state.comm.world > 1 for m in modes])
        self.pooled = np.flatnonzero(self.pooled_G).tolist()
        pieces = numbers_of_pieces(state, self.pooled)
        self.pieces = np.array(pieces, np.int64)
        self.slots = to_device(np.array(numbers_of_slots(state), np.int64), device)
        several = state.comm.world > 1
        self.strips_G = np.array([len(r.rows_I) * (r.dynamic and several) for r in state.routes])
        self.own_pieces = numbers_of_own_pieces(state)
        self.of_own_pieces = pieces_on_device(
            state, self.own_pieces, modes_of(state.routes, TRAINED_WEIGHTS)
        )
        self.of_pieces = pieces_on_device(state, pieces, modes)
        self.owners = (
            pieces_on_device(state, numbers_of_pieces(state), modes)
            if self.pooled
            else (None, None)
        )
        self.counted = len(pieces if several else self.own_pieces)
        self.store_rows_G = np.array(rows_of_stores(state), np.int64)
        self.rows_G = (
            np.array([int(rows_of_strips(r).sum()) for r in state.routes])
            if several
            else self.store_rows_G
        )
        self.wire = weights_on_wire(state.dtype, state.routes[0].row_dtype)
        # the integers of a sample weight in the requests
        self.words = self.wire.itemsize // state.routes[0].row_dtype.itemsize if self.pooled else 0
        self.most_rows = int(self.store_rows_G[self.pooled_G].max(initial=0))
        self.lookup_S = np.array([f for r in state.routes for f in r.lookups], np.int64)
        self.column_S = np.concatenate([r.column_S for r in state.routes])
        features = Counter(state.layout.lookups[f].feature for f in self.lookup_S)
        self.most_slots = max(features.values())  # of a feature
        self.slot_G1 = np.array([0, *accumulate(len(r.lookups) for r in state.routes)], np.int64)
        self.table_S, self.table_G = numbers_of_tables(state)
        self.shape: Hashable = None  # of the last batch
        self._places: Places | None = None
        # the edges of ids, the bags and the mark of their kernels, for batches of single ids
        self.known_bags: dict[
            Hashable, tuple[Tensor, tuple[Tensor, Tensor, Tensor | None], object]
        ] = {}
        self.ends = to_device(np.array(state.id_rules.ends_F2, np.int64), device)
        self.searched = searched(state)
        self.copied = [g for g in self.searched if state.routes[g].mode == "replicated"]
        self._most = {
            t.name: t.dynamic.max_rows
            for t in state.layout.tables
            if t.dynamic and t.dynamic.max_rows is not None
        }

    @cached_property
    def with_trained_weights(self) -> "FusedIntegers":
        """The integers of batches whose sample weights need a gradient, which homes apply."""
        return FusedIntegers(self.state, TRAINED_WEIGHTS) if self.pooled else self

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
        """Return whether the kernels know these tables: dynamic ones that need no statistics over
        rows that are cut into column strips.
        """
        return (
            state.backend.fused_integers is not None
            and all(
                s.finds_rows == r.dynamic for s, r in zip(state.stores, state.routes, strict=True)
            )
            and not (state.row_statistics and searched(state))
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
    """

    def __init__(
        self,
        fused: FusedIntegers,
        ids: LookupRows,
        output: BatchOutput,
        take: Scratch,
    ) -> None:
        trained = weighting(ids) == TRAINED_WEIGHTS
        self.fused = fused = fused.with_trained_weights if trained else fused
        self.state = state = fused.state
        self.rows = ids
        self.output = output
        self.take = take
        self.failure: Exception | None = None
        self.distinct: DistinctRows | None = None
        self.kept_L: Tensor | None = None  # the ids that count; None: all of them
        world = state.comm.world
        self.counts_WG3 = np.zeros((world, len(state.routes), 3), np.int64)
        self.asked = [HomeRequests(state.backend, r, world, take) for r in state.routes]

    def send(self, header: Sequence[int]) -> Callable[[], tuple[Counts, Counts]]:
        """Find the rows of the batch, and start to send the counts. Return a function that waits
        for the headers and the counts of the other ranks, and reads the report.

        Args:
            header: The header of this rank, if no id is an error.
        """
        self._make_header(header)
        self._find_entries(self.rows, self.output)
        if self.state.comm.world > 1 or not self.fused.searched:
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
        self._search(self.fused.searched, self.entries, self.home, self.groups, trains=False)
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
        self.home = places
        self.regions = places.regions
        world = self.state.comm.world
        numbers = len(header) + 3 * len(self.regions)
        ends = 2 * world * numbers, 2 * world * numbers + 1 + len(self.rows.per_F)
        read = np.zeros(ends[1] + self.fused.counted, np.int64)
        sent = read[: world * numbers].reshape(world, numbers)
        sent[:, : len(header)] = header
        sent[:, len(header) + 2 :: 3] = self.fused.strips_G
        read[ends[0]] = NOTHING
        first_F1 = np.array([0, *accumulate(self.rows.per_F)], np.int64)
        self.places, self.groups, self.first_F1, self._read = self._on_device(
            "header", places.of_slots, places.of_groups, first_F1, read
        )
        self.message, self.report, self.count_K = self._read.tensor_split(ends)

    def _find_entries(self, ids: LookupRows, output: BatchOutput) -> None:
        """Find the rows of all entries."""
        state = self.state
        weights_L = None if ids.weights_L is None else ids.weights_L.detach()
        scale = state.dtype if state.any_mean or weights_L is not None else None
        self.words = 0 if weights_L is None else self.fused.words
        last = self.regions[-1]
        self.sizes = Sizes(
            block_behind(last.here.stop),
            block_behind(last.bag + last.bags),
            len(self.regions),
            state.routes[0].row_dtype,
            offset_dtype(self.fused.places(output).keys),
            offset_dtype(max(output.numel, self.fused.most_rows)),
        )
        of_slots = (self.fused.slots, self.places, self.groups)
        self._find_bags(ids, output, of_slots, scale if self.fused.pooled else None)
        self.entries: Entries = self.fused.kernels.entries_of_ids(
            *(ids.rows_L, self.edge_N1, self.kept_L, weights_L, output.bags),
            *(*of_slots, self.fused.owners),
            *(self.report, state.stopped, scale, self.sizes, self.take),
        )

    def _find_bags(
        self,
        ids: LookupRows,
        output: BatchOutput,
        of_slots: tuple[Tensor, Tensor, Tensor],
        scale: torch.dtype | None,
    ) -> None:
        """Find where the ids of each bag begin, where its entries begin, and where its vector lies;
        and its factor, in the type `scale`, where owners sum bags. Find which ids count.

        A batch whose lengths are one number, expanded, has bags of equal sizes, and if there are as
        many ids as bags, the sizes are 1. Then all this follows from the shape: that of the first
        such batch is kept for others of its shape.
        """
        state = self.state
        known = self.fused.known_bags
        leaves_out = state.leaves_out(ids)
        single = (
            not leaves_out and ids.lengths_FB.stride() == (0, 0) and {*ids.per_F} == {output.bags}
        )
        shape = (self.fused.shape, scale) if single else None
        if shape in known:
            self.edge_N1, self.bags, end = known[shape]
            state.comm.side.wait_for(end)
            return
        self.edge_N1 = starts(ids.lengths_FB.reshape(-1).long())
        if leaves_out:
            self.edge_N1, self.kept_L = state.backend.fused_places.kept_ids(
                *(ids.rows_L, self.first_F1, self.edge_N1, output.bags),
                *(self.fused.ends, self.report, self.take),
            )
        if state.counts_ids or leaves_out:
            state.backend.fused_places.place_entries(self.edge_N1, output.bags, *of_slots)
        take = Scratch(state.comm.device) if single and not known else self.take
        self.bags = self.fused.kernels.bags_of(
            self.edge_N1, output.bags, *of_slots, scale, self.sizes, take
        )
        if take is not self.take:
            known[shape] = self.edge_N1, self.bags, state.comm.side.mark_current()

    def _search(
        self,
        groups: Sequence[int],
        entries: Entries,
        places: Places,
        of_groups: Tensor,
        trains: bool,
        stretches: int = 0,
    ) -> None:
        """Find the rows of dynamic tables. Until then their entries have positions in the place of
        rows, and strips or stretches in the place of keys.

        Args:
            groups: The groups of the tables.
            entries: The entries.
            places: The places of the groups.
            of_groups: The same on the device.
            trains: Whether the batch is trained.
            stretches: The stretches of a strip; 0: keys are strips.
        """
        for g in groups:
            store = self.state.stores[g]
            row_P = entries.row_P[places.regions[g].here]
            key_P = entries.key_P[places.regions[g].here]
            if (
                trains
                and not stretches
                and isinstance(store, DynamicStore)
                and store.adds_unread
                and (self.state.records or store.slots.has_room(len(row_P)))
            ):
                if not self.state.records:
                    store.expect(len(row_P))
                group = of_groups[g * len(GroupPlace._fields) :]
                store.add(row_P, key_P, group, places.regions[g].entry, self.state.stopped)
                continue
            goes_on = self.state.stopped is None or not to_host(self.state.stopped)[0]
            first_key = int(places.of_groups[g, -2])
            strip_P = (key_P - first_key) // stretches if stretches else key_P
            slot_P = store.locate(row_P, strip_P.to(torch.int16), trains and goes_on)
            row_P.copy_(slot_P)
            key_P.copy_(slot_P + first_key)

    def expect(self) -> None:
        """Make room for the new keys of the batch, ahead of a recorded step that adds them."""
        for g in self.fused.searched:
            store: Any = self.state.stores[g]
            store.expect(self.home.regions[g].entries)

    def _find_rows(self) -> None:
        """Find the distinct rows, and count them by piece."""
        state = self.state
        kernels = self.fused.kernels
        several = state.comm.world > 1
        position_P = None
        if self.fused.strips_G.any():  # the others are in the order of the batch
            position_P = torch.zeros_like(self.entries.row_P)
            for g in self.fused.searched:
                here = self.regions[g].here
                position_P[here] = self.entries.row_P[here]
        self.distinct = kernels.distinct_rows(
            self.entries, self.groups, self.sizes, self.take, several, position_P
        )
        if several:
            self.fused.exchange.count_requests(
                *(self.distinct, *self.fused.of_pieces, self.groups),
                *(state.comm.world, self.words, self.message[: len(self.message) // 2]),
                *(self.rows.rows_L, self.first_F1, self.report, self.count_K),
            )
        elif state.row_statistics:
            self._find_own_pieces(self.distinct, self.groups, self.sizes, self.count_K)

    def _link_home(self, source_P: Tensor | None = None, at_U: Tensor | None = None) -> None:
        """Link the bags of every group to its vectors.

        Args:
            source_P: The offset of each entry's vector in the message; None: bags read the store.
            at_U: The offset of each distinct row's vector in the message.
        """
        offset_M, at_M, _ = self.bags
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
        first_WG = words.asked_WG1[:, :-1]
        rows_WG = first_WG + fused.strips_G
        at = places_of_pieces(
            *(fused.pieces, self.rows_K, self.counts_WG3, self.state.widths_G),
            *(rows_WG, vectors, comm.rank),
        )
        heads = heads_of_requests(fused.pieces, fused.strips_G, first_WG, self.rows_K)
        at_K, words_WG, at_N, rows_N = self._on_device("requests", at, rows_WG, *heads)
        if fused.searched:
            ids[at_N] = rows_N
        assert self.distinct is not None
        pieces, requests = fused.of_pieces
        _, at_M, scale_M = self.bags
        weights_P = weight_words(self.distinct.weight_P if self.words else None, ids.dtype)
        sizes = self.sizes._replace(offset=torch.promote_types(vector, self.sizes.offset))
        at_U, source_P, use_V = fused.exchange.write_requests(
            *(self.distinct, pieces, self.groups, at_K, requests, words_WG),
            *(at_M, scale_M, weights_P, self.words, ids),
            *(sizes, self.take),
        )
        self._link_home(source_P, at_U)
        if fused.pooled:
            of_sums = self.distinct, self.groups, at_K, requests, sizes, self.take
            self._link_sums(fused.exchange.first_sums(*of_sums), at_U, source_P, use_V)

    def _link_sums(
        self, offset_M: Tensor, at_V: Tensor, where_V: Tensor, use_V: Tensor | None
    ) -> None:
        """Link the bags of the groups whose owners sum bags to these sums.

        Args:
            offset_M: Where the sums of each bag begin.
            at_V: The offset of each sum in the message.
            where_V: The offset of its gradient in the output's.
            use_V: Its factor.
        """
        for g in self.fused.pooled:
            asked = self.asked[g]
            region = self.regions[g]
            sums = int(self.counts_WG3[:, g, 1].sum())
            here = slice(region.entry, region.entry + sums)
            use = None if use_V is None else use_V[here]
            asked.combine_links = asked.combine_links._replace(
                index_N=at_V[here],
                offsets_M1=offset_M[region.bag : region.bag + region.bags + 1],
                weights_N=use,
                longest=self.state.comm.world,
            )
            asked.gradient_links = Links(where_V[here], None, use, at_V[here], sums)

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
        trains = torch.is_grad_enabled()  # dynamic rows are found in the batch's own step
        served = [ServedRequests(state.backend, r, "unique", self.take) for r in state.routes]
        if state.comm.world == 1:
            if self.fused.searched:
                self._search(self.fused.searched, self.entries, self.home, self.groups, trains)
                self._find_rows()
                self._link_home()
            assert self.distinct is not None
            for s, asked, region in zip(served, self.asked, self.regions, strict=True):
                s.row_U = self.distinct.row_U[region.here]
                s.gradient_links = asked.gradient_links
            if state.row_statistics:
                self._cut_to_pieces(served, self.regions, self.rows_K)
            return served
        pooled_G = np.array([m == "pooled" for m in modes_of(state.routes, weighting)])
        places = places_of_requests(
            *(self.fused.store_rows_G, state.widths_G, self.fused.strips_G, in_WG3),
            *(pooled_G, words, vectors),
        )
        of_ranks, of_groups = self._on_device("served", places.of_slots, places.of_groups)
        last = places.regions[-1]
        sizes = Sizes(
            *(block_behind(last.here.stop), block_behind(last.bag + last.bags), len(served)),
            *(state.routes[0].row_dtype, offset_dtype(places.keys), vector),
        )
        weighted = weighting == WEIGHTED and pooled_G.any()
        entries, offset_V, at_V = self.fused.exchange.entries_of_requests(
            *(ids, of_ranks, of_groups, self.fused.wire if weighted else None),
            *(state.dtype, sizes, self._take_served),
        )
        self._search(self.fused.searched, entries, places, of_groups, trains)
        self._search(self.fused.copied, self.entries, self.home, self.groups, trains, STRETCHES)
        distinct = (
            self.fused.kernels.distinct_rows(entries, of_groups, sizes, self._take_served, False)
            if trains
            else None
        )
        for g, (s, region) in enumerate(zip(served, places.regions, strict=True)):
            here = region.here
            bags = slice(region.bag, region.bag + region.bags)
            s.answer_links = Links(
                entries.row_P[here], None, None, entries.where_P[here], region.entries
            )
            if pooled_G[g]:
                s.answer_links = Links(
                    *(entries.row_P[here], offset_V[bags.start : bags.stop + 1]),
                    *(None if entries.weight_P is None else entries.weight_P[here], at_V[bags]),
                    region.bags,
                    longest=region.entries - region.bags + 1,  # no sum is empty
                )
            if distinct is not None:
                s.row_U = distinct.row_U[here]
                s.gradient_links = region.links_of(g, distinct, None, bool(pooled_G[g]))
        if distinct is not None and state.row_statistics:
            count_K = torch.empty(len(self.fused.own_pieces), dtype=torch.int64, device=ids.device)
            self._find_own_pieces(distinct, of_groups, sizes, count_K)
            self._cut_to_pieces(served, places.regions, to_host(count_K).numpy())
        return served

    def _find_own_pieces(
        self, distinct: DistinctRows, groups: Tensor, sizes: Sizes, count_K: Tensor
    ) -> None:
        """Find the pieces of distinct rows of this rank's stores, and count their rows."""
        fused = self.fused
        self.of_pieces = fused.exchange.find_pieces(
            *(distinct, *fused.of_own_pieces, groups, count_K, sizes, self.take)
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
            s.pieces = RowPieces(piece_U, nth_U, of_group_K)

    def _take_served(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return memory for the integers of served requests."""
        return self.take(f"served {name}", n, dtype)


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
    bags_G = np.add.reduceat(sizes_S2[:, 1], fused.slot_G1[:-1])
    rows_G = np.where(fused.pooled_G, fused.state.comm.world * bags_G, fused.rows_G)
    return in_regions(*places, sizes_S2, fused.slot_G1, rows_G, fused.strips_G, longest_G)
