"""Lookup without training on a single rank, which holds all rows: no requests, no messages.

    ids -> rows -> the store's rows, in the order of the ids -> vectors

With several ranks, or in training, equal rows are grouped first, so that each row is sent and
updated once (`recapp/engine/requests.py`). Here each id reads its own row. The vectors are the same
bit for bit, because every bag sums the same rows in the same order. A batch of one sample takes a
third of the time (measured).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

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

SAMPLES_KEPT = 256  # of batches whose form is cached: for larger batches a form costs little
FORMS_KEPT = 64


class GroupForm(NamedTuple):
    """The links from the ids of a batch to the bags of a group, without the rows.

    Args:
        ids: The ids of the batch that the slots of the group look up, slot by slot.
        strip_P: The strip of each id, where rows are positions of keys; else None.
        base_P: The first row of each id's table in the store, where rows have numbers; else None.
        offsets_M1: The offsets at which the ids of each bag begin and end.
        scale_P: The factor of each id's row; None where all factors are 1.
        where_M: The offset of each bag in the output.
    """

    ids: slice | Tensor
    strip_P: Tensor | None
    base_P: Tensor | None
    offsets_M1: Tensor
    scale_P: Tensor | None
    where_M: Tensor


class BatchForm(NamedTuple):
    """The parts of a lookup that depend only on the number of ids in each bag of a batch."""

    output: BatchOutput
    groups: list[GroupForm]


class LocalLookup:
    """Read the rows of batches.

    Args:
        state: The engine state of the tables, on a single rank.
    """

    def __init__(self, state: EngineState) -> None:
        assert state.comm.world == 1
        self._state = state
        self._forms: dict[tuple[int, ...], BatchForm] = {}
        self._strip_of_slot_G = [r.strip_S.cpu().numpy() for r in state.routes]
        # this rank has all pieces of a strip, one behind the other
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
            ConfigError: The ids are not integers, or sample weights are missing.
        """
        state = self._state
        try:
            rows, check = state.rows_of(features, taken)
            check()
        except OutsideTable as error:
            raise state.id_rules.error(error.lookup, error.number, "") from error
        output, forms = self._form(rows, taken)
        state.observer.ends("route")
        flat = torch.empty(output.numel, dtype=state.dtype, device=state.comm.device)
        rows_L = state.mixed.positions_of(rows)
        for group, (store, form) in enumerate(zip(state.stores, forms, strict=True)):
            links = self._links(group, form, rows_L, rows.weights_L)
            store.pool(links, flat, in_lines=state.in_lines_G[group])
        state.observer.ends("combine")
        return rows, output, state.outputs.parts(flat, output)

    def _form(self, rows: Rows, taken: Sequence[bool]) -> BatchForm:
        """Return the form of a batch. Where every feature of every sample has one id, reuse the
        form of an earlier batch with the same number of samples. For a small batch the form costs
        more time than the rows (measured).
        """
        samples = rows.lengths_FB.shape[1]
        alike = (
            samples <= SAMPLES_KEPT
            and rows.weights_L is None
            and len(rows.rows_L) == rows.lengths_FB.numel()
            and bool((rows.lengths_FB == 1).all())
        )
        if not alike:
            return self._new_form(rows, taken)
        key = (samples, *taken, *self._state.outputs.room)
        if key not in self._forms:
            if len(self._forms) == FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = self._new_form(rows, taken)
        return self._forms[key]

    def _new_form(self, rows: Rows, taken: Sequence[bool]) -> BatchForm:
        state = self._state
        output = state.outputs.of(rows, taken)
        bags_G = state.bags(rows, output)
        return BatchForm(output, [self._group_form(g, bags) for g, bags in enumerate(bags_G)])

    def _group_form(self, group: int, bags: Bags) -> GroupForm:
        count_S = bags.last_S - bags.first_S
        total = int(count_S.sum())
        device = bags.where_M.device
        strip_S = self._strip_of_slot_G[group]
        base_S = self._base_of_strip_G[group]
        dynamic = self._state.routes[group].dynamic
        number_P = to_device(np.repeat(strip_S if dynamic else base_S[strip_S], count_S), device)
        lengths_M = bags.lengths_M
        scale_P = None
        if bags.scale_M is not None:
            scale_P = torch.repeat_interleave(bags.scale_M, lengths_M, output_size=total)
        return GroupForm(
            _ids_of_slots(bags.first_S, count_S, total, device),
            number_P.to(torch.int16) if dynamic else None,
            None if dynamic else number_P,
            starts(lengths_M).int(),
            scale_P,
            bags.where_M,
        )

    def _links(
        self, group: int, form: GroupForm, rows_L: Tensor, weights_L: Tensor | None
    ) -> Links:
        """Return the matrix from the rows of a group to its bags."""
        store = self._state.stores[group]
        row_P = rows_L[form.ids]
        if form.base_P is None:
            index_P = store.locate(row_P, form.strip_P)
        else:
            row_dtype = self._state.routes[group].row_dtype
            index_P = store.locate(row_P + form.base_P, None).to(row_dtype)
        weights_P = form.scale_P
        if weights_P is not None and weights_L is not None:
            weights_P = weights_P * weights_L[form.ids]
        return Links(index_P, form.offsets_M1, weights_P, form.where_M, len(form.where_M))


def _ids_of_slots(
    first_S: Counts, count_S: Counts, total: int, device: torch.device
) -> slice | Tensor:
    """Return the ids that the slots of a group look up: a slice where they follow each other."""
    begins = int(first_S[0]) if len(first_S) else 0
    behind = np.array([*accumulate(count_S[:-1].tolist(), initial=begins)])
    if np.array_equal(first_S, behind[: len(first_S)]):
        return slice(begins, begins + total)
    first_S2, count_S2 = to_device(np.stack([first_S, count_S]), device)
    return runs(first_S2, count_S2, total)
