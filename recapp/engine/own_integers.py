"""The integers of a batch on a GPU that holds all rows: the rows that each bag sums, and the
gradients that each row learns from, for all groups at once (`recapp/kernels/triton_integers.py`).

    KeyedJaggedTensor -> raw ids of the lookups -> arrays of all groups -> links of each group

The host knows the number of ids of each lookup, and so the place of every slot and group in the
arrays. The places reach the device in one copy, which has room for the report of the kernels: the
first id that is an error, and the number of changed ids of each lookup. The read of the report is
the only wait.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from recapp.engine.exchange_modes import OwnRequests
from recapp.engine.state import BatchOutput, EngineState
from recapp.kernels.batch_arrays import (
    BLOCK,
    NOTHING,
    BatchArrays,
    BatchSizes,
    GroupPlace,
    SlotNumbers,
    SlotPlace,
)
from recapp.kernels.links import Links, Scratch, offset_dtype, starts
from recapp.sparse.transfer import to_device, to_host
from recapp.tables.config import IdRule, PoolingType
from recapp.tables.ids import RULE_NUMBERS, LookupRows, PendingCheck


class LinkedRequests(OwnRequests):
    """The lookups of a group on a single rank, whose links were made for all groups at once.

    Args:
        state: The engine state of the tables.
        group: The number of the group.
        take: The memory of this batch.
        region: The place of the group's entries and bags.
        arrays: The integers of all groups.
    """

    def __init__(
        self, state: EngineState, group: int, take: Scratch, region: "Region", arrays: BatchArrays
    ) -> None:
        super().__init__(state.backend, state.routes[group], 1, take)
        here = slice(region.entry, region.entry + region.entries)
        begins = slice(here.start, here.stop + 1)
        bags = slice(region.bag, region.bag + region.bags)
        a = arrays
        weight_P, gradient_weight_P = (
            None if w is None else w[here] for w in (a.weight_P, a.gradient_weight_P)
        )
        offset_M1 = a.offset_M[bags.start : bags.stop + 1]
        self.combine_links = Links(a.index_P[here], offset_M1, weight_P, a.at_M[bags], region.bags)
        self.row_U = a.row_U[here]
        self.gradient_links = Links(
            *(a.gradient_P[here], a.start_U[begins], gradient_weight_P, None, region.entries),
            used=a.count_G[group : group + 1],
        )

    @override
    def link(self, *arguments: Any) -> None:
        """Do nothing: the links were made with those of all groups."""


class Region(NamedTuple):
    """The place of a group in the arrays of a batch.

    Args:
        entry: Its first entry.
        entries: The number of its entries.
        bag: Its first bag.
        bags: The number of its bags.
    """

    entry: int
    entries: int
    bag: int
    bags: int


class OwnIntegers:
    """Make the links of batches on a single rank.

    Args:
        state: The engine state of the tables.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._slots = to_device(np.array(_numbers_of_slots(state), np.int64), state.comm.device)
        rows_G = [store.rows for store in state.stores]
        self._key_G1 = [0, *accumulate(rows + 1 for rows in rows_G)]

    @staticmethod
    def takes(state: EngineState) -> bool:
        """Return whether the kernels know these tables: all rows are on this rank, no table is
        dynamic, drops ids or is concatenated, and no row is cut where its rule needs it whole.
        """
        return (
            state.comm.world == 1
            and state.backend.integers_of_batch is not None
            and state.row_statistics is None
            and not any(store.finds_rows for store in state.stores)
            and all(
                x.table.dynamic is None
                and x.table.id_rule is not IdRule.DROP
                and x.hotness is None
                and x.table.num_embeddings < 2**31  # products of mixed rows have 64 bits
                for x in state.layout.lookups
            )
        )

    def begin(
        self, ids: LookupRows, output: BatchOutput, take: Scratch
    ) -> tuple[list[LinkedRequests], PendingCheck]:
        """Return the linked requests of each group, and the check of the ids.

        Args:
            ids: The raw ids of the lookups.
            output: The output of the batch.
            take: The memory of the batch.
        """
        state = self._state
        places, groups, regions = self._places(ids, output)
        report = [NOTHING, *(0 for _ in ids.per_F)]
        header = [number for record in (*places, *groups, report) for number in record]
        ends = regions[-1]
        sizes = BatchSizes(
            _behind(ends.entry + ends.entries),
            _behind(ends.bag + ends.bags),
            len(places),
            len(groups),
            output.bags,
            state.routes[0].row_dtype,
            offset_dtype(self._key_G1[-1]),
            offset_dtype(output.numel),
        )
        weights_L = None if ids.weights_L is None else ids.weights_L.detach()
        arrays = state.backend.integers_of_batch(
            ids.rows_L,
            starts(ids.lengths_FB.reshape(-1).long()),
            weights_L,
            self._slots,
            to_device(np.array(header, np.int64), state.comm.device),
            sizes,
            state.dtype if state.any_mean or weights_L is not None else None,
            take,
        )

        def check() -> None:
            first, *changed_F = to_host(arrays.report).tolist()
            first = -1 if first == NOTHING else first
            edge = [0, *accumulate(ids.per_F)]
            state.id_rules.count_changed(first, changed_F, ids.rows_L, edge)

        linked = [
            LinkedRequests(state, group, take, region, arrays)
            for group, region in enumerate(regions)
        ]
        return linked, check

    def _places(
        self, ids: LookupRows, output: BatchOutput
    ) -> tuple[list[SlotPlace], list[GroupPlace], list[Region]]:
        """Return the places of slots and groups in a batch."""
        outputs = self._state.outputs
        edge_F1 = [0, *accumulate(ids.per_F)]
        count_F = output.count_F.tolist()
        first_F = output.first_F.tolist()
        places: list[SlotPlace] = []
        groups = []
        regions = []
        entry = bag = 0
        for r, key, behind_keys in zip(
            self._state.routes, self._key_G1, self._key_G1[1:], strict=False
        ):
            slot = len(places)
            first_entry = entry
            first_bag = bag
            for f, column in zip(r.lookups, r.column_S.tolist(), strict=True):
                x = outputs.lookups[f]
                step = outputs.width(outputs.member_F[f]) if x.columns else x.dim
                places.append(SlotPlace(edge_F1[f], entry, bag, first_F[f] + column, step))
                entry += ids.per_F[f]
                bag += count_F[f]
            groups.append(
                GroupPlace(
                    *(slot, len(places), first_entry // BLOCK, entry, first_bag // BLOCK, bag),
                    *(key, behind_keys - 1),
                )
            )
            regions.append(Region(first_entry, entry - first_entry, first_bag, bag - first_bag))
            entry = _behind(entry)
            bag = _behind(bag)
        return places, groups, regions


def _behind(end: int) -> int:
    """Return the end of the block that has room for one more entry."""
    return (end // BLOCK + 1) * BLOCK


def _numbers_of_slots(state: EngineState) -> list[SlotNumbers]:
    """Return the constants of the slots, group by group."""
    layout = state.layout
    order_of = dict(zip((t.name for t in layout.tables), layout.orders, strict=True))
    lookups_before = set[int]()
    numbers = []
    for r in state.routes:
        base_I: Sequence[int] = r.base_K[r.piece_I1[:-1]].tolist()
        for f, strip in zip(r.lookups, r.strip_S.tolist(), strict=True):
            x = layout.lookups[f]
            order = order_of[x.table.name]
            numbers.append(
                SlotNumbers(
                    *(f, RULE_NUMBERS[x.table.id_rule], x.table.num_embeddings, x.table.min_key),
                    *((order.multiplier, order.shift, order.rows) if order else (1, 0, 0)),
                    *(base_I[strip], not x.columns, x.pooling is PoolingType.MEAN),
                    f not in lookups_before,
                )
            )
            lookups_before.add(f)
    return numbers
