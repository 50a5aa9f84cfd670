"""Lookup where a single rank holds all rows and nothing is learned: no requests, no messages.

    ids -> rows -> the store's rows, in the order of the ids -> vectors

With several ranks, or where the batch will be trained, equal rows have to meet first, so that each
is sent and updated once (`recapp/engine/requests.py`). Here each id reads its row: vectors are the
same bits, as every bag sums the same rows in the same order, and a batch of one sample costs a
third (measured).
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from recapp.engine.outputs import BatchOutput
from recapp.engine.state import EngineState
from recapp.kernels.links import Bags, Counts, Links
from recapp.kernels.ragged import runs, starts
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import to_device
from recapp.tables.ids import OutsideTable, Rows


class LocalLookup:
    """Reads the rows of batches.

    Args:
        state: Of the tables, on a single rank.
    """

    def __init__(self, state: EngineState) -> None:
        assert state.comm.world == 1
        self._state = state
        self._strip_of_slot_G = [r.strip_S.cpu().numpy() for r in state.routes]
        # all pieces of a strip are here, one behind the other
        first_G = [r.piece_I1[:-1] for r in state.routes]
        self._base_of_strip_G = [
            r.base_K[first_I].cpu().numpy() if len(r.base_K) else np.zeros(0, np.int64)
            for r, first_I in zip(state.routes, first_G, strict=True)
        ]

    def read(
        self, features: KeyedJaggedTensor, taken: Sequence[bool]
    ) -> tuple[Rows, BatchOutput, list[Tensor]]:
        """Return the rows of a batch, the form of its output, and the vectors of all collections
        (`Outputs.parts`).

        Args:
            features: Raw ids.
            taken: Whether each collection that shares the tables looks up this batch.

        Raises:
            IdError: An id is outside its table.
            ConfigError: Ids that are not integers, or lack weights.
        """
        state = self._state
        rows = self._rows(features, taken)
        output = state.outputs.of(rows, taken)
        state.observer.ends("route")
        flat = torch.empty(output.numel, dtype=state.dtype, device=state.comm.device)
        bags_G = state.bags(rows, output)
        for group, (store, bags) in enumerate(zip(state.stores, bags_G, strict=True)):
            store.pool(self._links(group, bags), flat, in_lines=state.in_lines_G[group])
        state.observer.ends("combine")
        return rows, output, state.outputs.parts(flat, output)

    def _rows(self, features: KeyedJaggedTensor, taken: Sequence[bool]) -> Rows:
        state = self._state
        try:
            wanted_F = [taken[m] for m in state.outputs.member_F]
            rows, check = state.id_rules.begin(features, wanted_F)
            check()
        except OutsideTable as error:
            raise state.id_rules.error(error.lookup, error.number, "") from error
        if rows.weights_L is not None:
            rows.weights_L = rows.weights_L.to(state.dtype)
        return rows

    def _links(self, group: int, bags: Bags) -> Links:
        """Return the matrix from a group's rows to its bags."""
        state = self._state
        routes = state.routes[group]
        count_S = bags.last_S - bags.first_S
        total = int(count_S.sum())
        row_P = _of_slots(bags.rows_L, bags.first_S, count_S, total)
        strip_S = self._strip_of_slot_G[group]
        device = row_P.device
        if routes.dynamic:
            strip_P = to_device(np.repeat(strip_S, count_S).astype(np.int16), device)
            index_P = state.stores[group].locate(row_P, strip_P)
        else:
            base_S = self._base_of_strip_G[group][strip_S]
            base_P = to_device(np.repeat(base_S, count_S), device)
            index_P = state.stores[group].locate(row_P + base_P, None).to(routes.row_dtype)
        lengths_M = bags.lengths_M
        weights_P = None
        if bags.scale_M is not None:
            weights_P = torch.repeat_interleave(bags.scale_M, lengths_M, output_size=total)
            if bags.weights_L is not None:
                weights_P *= _of_slots(bags.weights_L, bags.first_S, count_S, total)
        offsets_M1 = starts(lengths_M).int()
        return Links(index_P, offsets_M1, weights_P, bags.where_M, len(bags.where_M))


def _of_slots(values_L: Tensor, first_S: Counts, count_S: Counts, total: int) -> Tensor:
    """Return the values of a group's slots, slot by slot: a view where they follow each other."""
    begins = first_S[0] if len(first_S) else 0
    behind = np.array([*accumulate(count_S[:-1].tolist(), initial=begins)])
    if np.array_equal(first_S, behind[: len(first_S)]):
        return values_L[begins : begins + total]
    first_S2, count_S2 = to_device(np.stack([first_S, count_S]), values_L.device)
    return values_L[runs(first_S2, count_S2, total)]
