"""Answer, combine and backward: the only autograd function of the engine.

    out = A . exchange(S . rows)                  answers: one collective (counts and ids went
                                                  before, in `Requests`)
    update(S^T . exchange(A^T . grad))            gradients: one collective; no gradient tensor of
                                                  a table ever exists

A rank sums the gradient of a row over its own batch in sample order. Owners add the sums of the
ranks in rank order, and update the row once. So weights are equal bit for bit under every plan.
`backward` ends with the update of the stores. While a message travels, the rank does local work: it
sums bags of local rows and groups requested rows.

Lookup without training on a single rank, which holds all rows, needs no requests and no messages
(`LocalLookup`):

    ids -> rows -> the store's rows, in the order of the ids -> vectors

With several ranks, or in training, equal rows are grouped first, so that each row is sent and
updated once (`recapp/engine/requests.py`). There each id reads its own row. The vectors are the
same bit for bit, because every bag sums the same rows in the same order. A batch of one sample
takes a third of the time (measured).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recapp.engine.fused_integers import FusedBatch, FusedIntegers
from recapp.engine.fused_update import FusedUpdate
from recapp.engine.requests import Requests
from recapp.engine.row_store import RowStore
from recapp.engine.state import BatchOutput, EngineState
from recapp.errors import ConfigError
from recapp.kernels.links import Bags, Counts, Links, Scratch, gather, ranges, starts
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import to_device
from recapp.tables.ids import LookupRows, OutsideTable

SAMPLES_KEPT = 256  # of batches whose form is cached: for larger batches a form costs little
FORMS_KEPT = 64


class Lookup(torch.autograd.Function):
    """The vectors of a batch after the exchange of its requests, cut by `Outputs.parts`.

    Inputs: an anchor, the sample weights (which may need a gradient), the requests of the batch,
    the update of the rows, and a function that advances the exchanges of later batches; `backward`
    calls it. The anchor requires a gradient. Without it autograd would never call `backward`, and
    the tables would silently not train.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights_L: Tensor | None,
        requests: Requests,
        update: FusedUpdate,
        advance_ahead: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Answer the requests, swap vectors, combine."""
        ctx.set_materialize_grads(False)
        ctx.requests = requests
        ctx.update = update
        ctx.advance_ahead = advance_ahead
        ctx.settled_G = [store.settled for store in requests.state.stores]
        keep = weights_L is not None and weights_L.requires_grad
        flat, ctx.vectors_G = answer_and_combine(requests.state, requests, keep)
        return tuple(requests.state.outputs.parts(flat, requests.output))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Send the gradients of the requested vectors to the owners, which update the rows."""
        requests = ctx.requests
        state = requests.state
        if requests.spent:
            raise RuntimeError(
                "the lookup was already differentiated: its rows were updated in that backward "
                "and would be updated twice"
            )
        requests.check_called()
        if ctx.settled_G != [store.settled for store in state.stores]:
            raise ConfigError(
                "backward of a lookup of an earlier step: dynamic tables may have evicted its "
                "rows since then, and other rows are in their place: call backward before the "
                "lookups of the next step"
            )
        requests.spent = True
        gradient = _flat(gradients, state, requests)
        state.observer.ends("autograd")
        weight_grad = (
            weights_gradient(state, requests, gradient, ctx.vectors_G)
            if ctx.needs_input_grad[1]
            else None
        )
        ctx.advance_ahead()
        if state.comm.world == 1:
            requests.group()
            ctx.update.take(requests, gradient, requests.row_gradients_G)
        else:
            message = send_back(state, requests, gradient)
            ctx.update.take(requests, message, requests.row_gradients_G)
            state.messages.give_back(message)
        requests.release()
        state.observer.ends("update")
        return None, weight_grad, None, None, None


def answer_and_combine(
    state: EngineState, requests: Requests, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """Pool rows for the other ranks, swap vectors and sum bags (output_dist).

    Args:
        state: The engine state of the collection.
        requests: The finished requests of the batch.
        keep: Whether to return the vector of each (slot, id) pair, too.

    Returns:
        The flat buffer of all vectors, and, if kept, the vectors of the pairs by group.
    """
    message = state.messages.take(requests.vectors.numel, state.payload, state.comm.device)
    for g in range(requests.vectors.answered):
        state.stores[g].pool(requests.served[g].answer_links, message)
    state.observer.ends("answer")
    sent = state.waits.sent(state.comm.swap(message, *requests.vectors.answers()))
    flat = torch.empty(requests.output.numel, dtype=state.dtype, device=state.comm.device)
    vectors_of_group: dict[int, Tensor] = {}
    for local in (True, False):
        if not local:
            state.wait("vectors", sent)
        for g, asked in enumerate(requests.asked):
            if asked.local is local:
                source = state.stores[g] if local else message
                vectors_PD = _combine(state, source, asked.combine_links, g, flat, keep)
                if vectors_PD is not None:
                    vectors_of_group[g] = vectors_PD
        state.observer.ends("combine")
    state.messages.give_back(message)
    return flat, [vectors_of_group[g] for g in sorted(vectors_of_group)]


def _flat(gradients: Sequence[Tensor | None], state: EngineState, requests: Requests) -> Tensor:
    """Return the gradients of all parts of the output in one flat buffer, with zeros for parts
    without influence on the loss.
    """
    if len(gradients) == 1 and gradients[0] is not None:
        return gradients[0].to(state.dtype).contiguous().view(-1)
    flat = torch.empty(requests.output.numel, dtype=state.dtype, device=state.comm.device)
    for part, gradient in zip(state.outputs.parts(flat, requests.output), gradients, strict=True):
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient)
    return flat


def _combine(
    state: EngineState, source: RowStore | Tensor, links: Links, g: int, flat: Tensor, keep: bool
) -> Tensor | None:
    """Sum the bags of group g from its store or from the message of vectors. If `keep`, return the
    single vectors of the sums.
    """
    width = state.stores[g].width
    pool = (
        source.pool
        if isinstance(source, RowStore)
        else partial(state.backend.pool, source, 1, width, dtype=state.dtype)
    )
    pool(links, flat, in_lines=state.in_lines_G[g])
    if not keep:
        return None
    entries = len(links.index_N)
    vectors_PD = torch.empty(entries, width, dtype=state.dtype, device=flat.device)
    pool(Links(links.index_N, None, None, None, entries), vectors_PD.view(-1))
    return vectors_PD


def send_back(state: EngineState, requests: Requests, gradient: Tensor) -> Tensor:
    """Send the gradients of the requested vectors to the owners.

    Each rank divides its gradients by the number of ranks before it sends them, as DDP does with
    dense gradients.

    Args:
        state: The engine state of the collection.
        requests: The requests of the batch.
        gradient: The gradient of the output, flat.

    Returns:
        The message with the gradients for this rank's rows.
    """
    comm = state.comm
    vectors = requests.vectors
    message = state.messages.take(vectors.numel, state.payload, comm.device)
    learning = state.layout.learning
    for g in learning:
        asked = requests.asked[g]
        width = state.stores[g].width
        links = asked.gradient_links
        state.backend.pool(gradient, 1, width, links, message, state.dtype, 1 / comm.world)
        if asked.everywhere:
            spans = vectors.asked_WG1[:, g : g + 2].tolist()
            part = message[slice(*spans[comm.rank])]
            for rank, (first, last) in enumerate(spans):
                if rank != comm.rank:
                    message[first:last] = part
    state.observer.ends("spread")
    sent = state.waits.sent(comm.swap(message, *vectors.gradients(learning)))
    requests.group()
    state.observer.ends("group")
    state.wait("gradients", sent)
    return message


def weights_gradient(
    state: EngineState, requests: Requests, gradient: Tensor, vectors_G: list[Tensor]
) -> Tensor:
    """Return the gradient of the sample weights: the gradient of a weight's bag times the vector
    that the weight scaled, summed over the strips of its table.
    """
    rows = requests.rows
    scale_N = state.scales(rows, requests.output)
    assert scale_N is not None
    lengths_N = requests.output.lengths_N
    scale_L = torch.repeat_interleave(scale_N, lengths_N, output_size=len(rows.rows_L))
    scale_F = torch.split(scale_L, rows.per_F)
    total_L = torch.zeros_like(scale_L)
    total_F = torch.split(total_L, rows.per_F)
    for routes, asked, vectors_PD in zip(state.routes, requests.asked, vectors_G, strict=True):
        links = asked.combine_links
        assert links.offsets_M1 is not None and links.at_M is not None
        at_P = torch.repeat_interleave(
            links.at_M, links.offsets_M1.diff().long(), output_size=len(vectors_PD)
        )
        dot_P = (gather(gradient, 1, routes.width, at_P, state.dtype) * vectors_PD).sum(1)
        dots = torch.split(dot_P, [rows.per_F[f] for f in routes.lookups])
        for f, dot in zip(routes.lookups, dots, strict=True):
            total_F[f].add_(dot * scale_F[f])
    return total_L


# The links from the ids of a batch to the bags of a group, with the first row of each id's table in
# the store in the place of its row (its strip, where rows are positions of keys); and the ids of
# the batch that the slots of the group look up, slot by slot.
GroupForm = tuple[Links, slice | Tensor]
# The parts of a lookup that depend only on the number of ids in each bag of a batch.
BatchForm = tuple[BatchOutput, list[GroupForm]]


class LocalLookup:
    """Read the rows of batches.

    Args:
        state: The engine state of the tables, on a single rank.
        fused: The integers of all groups at once; None: groups are linked one by one.
    """

    def __init__(self, state: EngineState, fused: FusedIntegers | None = None) -> None:
        assert state.comm.world == 1
        self._state = state
        self._fused = fused
        self._forms: dict[tuple[int, ...], BatchForm] = {}
        # this rank has all pieces of a strip, one behind the other
        self._first_of_slot_G = [
            r.strip_S.short() if r.dynamic else r.base_K[r.piece_I1[r.strip_S]]
            for r in state.routes
        ]

    def read(
        self, features: KeyedJaggedTensor, taken: Sequence[bool]
    ) -> tuple[LookupRows, BatchOutput, list[Tensor]]:
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
        lease = state.lease(trains=False)
        try:
            rows, output, links_G = (
                self._linked(features, taken)
                if self._fused is None
                else self._linked_at_once(self._fused, features, taken, lease[0])
            )
        except OutsideTable as error:
            raise state.id_rules.error(error.lookup, error.number, "") from error
        state.observer.ends("route")
        flat = torch.empty(output.numel, dtype=state.dtype, device=state.comm.device)
        for links, store, in_lines in zip(links_G, state.stores, state.in_lines_G, strict=True):
            store.pool(links, flat, in_lines=in_lines)
        state.give_back(lease, trains=False)
        state.observer.ends("combine")
        return rows, output, state.outputs.parts(flat, output)

    def _linked_at_once(
        self,
        fused: FusedIntegers,
        features: KeyedJaggedTensor,
        taken: Sequence[bool],
        take: Scratch,
    ) -> tuple[LookupRows, BatchOutput, list[Links]]:
        """Return the ids of a batch, the form of its output, and the links of each group."""
        ids = self._state.ids_of(features, taken)
        output = self._state.outputs.of(ids, taken)
        batch = FusedBatch(fused, ids, output, take)
        batch.read_here()
        return ids, output, [asked.combine_links for asked in batch.asked]

    def _linked(
        self, features: KeyedJaggedTensor, taken: Sequence[bool]
    ) -> tuple[LookupRows, BatchOutput, Iterator[Links]]:
        """Return the rows of a batch, the form of its output, and the links of each group."""
        rows, check = self._state.rows_of(features, taken)
        check()
        output, forms = self._form(rows, taken)
        rows_L = self._state.mixed.positions_of(rows)
        links_G = (self._links(g, form, rows_L, rows.weights_L) for g, form in enumerate(forms))
        return rows, output, links_G

    def _form(self, rows: LookupRows, taken: Sequence[bool]) -> BatchForm:
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
        state = self._state
        key = (samples, *taken, *state.outputs.room)
        if alike and key in self._forms:
            return self._forms[key]
        output = state.outputs.of(rows, taken)
        bags_G = state.bags(rows, output)
        form = output, [self._group_form(g, bags) for g, bags in enumerate(bags_G)]
        if alike:
            if len(self._forms) == FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = form
        return form

    def _group_form(self, group: int, bags: Bags) -> GroupForm:
        count_S = bags.last_S - bags.first_S
        total = bags.pairs
        lengths_M = bags.lengths_M
        counts = to_device(count_S, lengths_M.device)
        first_P = torch.repeat_interleave(self._first_of_slot_G[group], counts, output_size=total)
        scale_P = None
        if bags.scale_M is not None:
            scale_P = torch.repeat_interleave(bags.scale_M, lengths_M, output_size=total)
        where_M = bags.where_M
        links = Links(first_P, starts(lengths_M).int(), scale_P, where_M, len(where_M))
        return links, _ids_of_slots(bags.first_S, count_S, total, lengths_M.device)

    def _links(
        self, group: int, form: GroupForm, rows_L: Tensor, weights_L: Tensor | None
    ) -> Links:
        """Return the matrix from the rows of a group to its bags."""
        links, ids = form
        store = self._state.stores[group]
        row_P = rows_L[ids]
        routes = self._state.routes[group]
        if routes.dynamic:
            index_P = store.locate(row_P, links.index_N)
        else:
            index_P = store.locate(row_P + links.index_N).to(routes.row_dtype)
        weights_P = links.weights_N
        if weights_P is not None and weights_L is not None:
            weights_P = weights_P * weights_L[ids]
        return links._replace(index_N=index_P, weights_N=weights_P)


def _ids_of_slots(
    first_S: Counts, count_S: Counts, total: int, device: torch.device
) -> slice | Tensor:
    """Return the ids that the slots of a group look up: a slice where they follow each other."""
    begins = int(first_S[0]) if len(first_S) else 0
    behind = np.array([*accumulate(count_S[:-1].tolist(), initial=begins)])
    if np.array_equal(first_S, behind[: len(first_S)]):
        return slice(begins, begins + total)
    first_S2, count_S2 = to_device(np.stack([first_S, count_S]), device)
    return ranges(first_S2, count_S2, total)
