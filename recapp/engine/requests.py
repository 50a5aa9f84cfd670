"""input_dist of one batch: the exchange of row requests between ranks. It reads no weights, so it
may run ahead of the batch's step.

    made        ids become rows, equal rows are grouped, counts leave    (with a header per rank)
    advance()   counts have arrived: ids are written and leave; links are made while they travel
    finish()    ids have arrived: the requests to this rank are served

There are two messages: the counts, with a header per rank, and the ids. An error on one rank (an id
outside its table) travels in the header. So all ranks raise it, with the number of the faulty rank,
before they send anything else.

On a GPU the exchange runs on the side stream, where the host waits for three sizes: the number of
distinct rows, the size of the requests of other ranks, and the number of distinct rows to update on
this rank. For the third, `finish` already groups the requested rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import HomeRequests
from recapp.engine.fused_integers import FusedBatch, FusedIntegers
from recapp.engine.fused_update import RowGradients
from recapp.engine.integers import (
    NO_IDS,
    GroupIntegers,
    no_rows,
    weighting,
)
from recapp.engine.state import EngineState
from recapp.errors import ConfigError, RankError
from recapp.kernels.links import Counts, offset_dtype, one_by_one
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.bags_of_samples import samples_of
from recapp.tables.ids import IdRules, OutsideTable
from recapp.transport.communicator import Sent
from recapp.transport.step_messages import MessageLayout

OK, OUTSIDE, FAILED = range(3)  # status in the header


class Requests:
    """The exchange of one batch: the requests of this rank, the requests to this rank, and the
    offsets of the vectors.

    The exchange belongs to its batch, not to a module: several may be in flight. It leases scratch
    memory until `release`.

    Args:
        features: The raw ids of the batch, or the error because of which this rank has none.
        state: The engine state of the tables.
        taken: For each collection that shares the exchange, whether it looks up this batch; None:
            all do.
        fused: The integers of all groups at once; None: groups are routed one by one.

    `called_by` has the numbers of the collections that got their vectors. `rows` has the rows of
    the batch, or its raw ids in their place, `output` the output of the batch, and `asked` the
    requests of this rank, by group.

    Sample weights that need a gradient are applied at home, even in the mode `pooled`.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor | Exception,
        state: EngineState,
        taken: Sequence[bool] | None = None,
        fused: FusedIntegers | None = None,
    ) -> None:
        self.state = state
        self.taken = [True] * len(state.outputs.members) if taken is None else list(taken)
        self.called_by: set[int] = set()
        state.observer.begins()
        self.trains = torch.is_grad_enabled()
        self.lease = state.lease(self.trains)
        side = state.comm.side
        side.follow()
        with side.beside():
            status, self.failure, self.integers = self._begin(features, fused)
            self.rows = self.integers.rows
            self.output = self.integers.output
            self.asked: Sequence[HomeRequests] = self.integers.asked
            samples = 0 if self.failure or isinstance(features, Exception) else samples_of(features)
            weights = weighting(self.rows)
            self.weights_L = self.rows.weights_L
            header = [status[0], samples, state.header.wanted, weights, *status[1:]]
            self._counts = state.waits.sent(self.integers.send(header))
        state.observer.ends("route")
        self._sent_ids: Sent[None] | None = None
        self.ids: Tensor | None = None
        self.headers_W: Counts = np.zeros((0, 0), np.int64)
        self.row_gradients_G: list[RowGradients] = []
        self.spent = False

    def _begin(
        self, features: KeyedJaggedTensor | Exception, fused: FusedIntegers | None
    ) -> tuple[tuple[int, int, int], Exception | None, GroupIntegers | FusedBatch]:
        """Find the rows to request of each rank. After an error, request nothing.

        On a GPU the host learns of ids outside their tables together with the sizes of the distinct
        rows. So ids are routed before the result of their check is read.

        Returns:
            The numbers of the header that describe the error, the error, and the integers.
        """
        state = self.state
        try:
            if isinstance(features, Exception):
                raise features
            if fused is not None:
                ids = state.ids_of(features, self.taken)
                if fused.has_room(ids):
                    output = state.outputs.of(ids, self.taken)
                    return (OK, 0, 0), None, FusedBatch(fused, ids, output, self.lease[0])
            rows, check = state.rows_of(features, self.taken)
            integers = GroupIntegers(state, rows, self.taken, self.lease)
            check()
            self._check_room(integers.asked)
        except Exception as e:
            status = (
                (OUTSIDE, e.lookup, e.number) if isinstance(e, OutsideTable) else (FAILED, 0, 0)
            )
            return status, e, GroupIntegers(state, no_rows(state), self.taken, self.lease)
        return (OK, 0, 0), None, integers

    def _check_room(self, asked: Sequence[HomeRequests]) -> None:
        """Check that `max_rows` of each dynamic table allows the rows of a training batch. Tables
        that admit keys only after several steps are not checked, because most keys of a batch may
        need no row.

        Raises:
            ConfigError: A table does not allow them.
        """
        for a, store, tables in zip(
            asked, self.state.stores, self.state.dynamic_tables_G, strict=True
        ):
            for table, rows in zip(tables, a.rows_I.tolist() if tables else (), strict=True):
                known = table.dynamic
                most = known.max_rows if known and known.seen == 1 else None
                trains = self.trains and getattr(store, "trains", False)
                if trains and most is not None and rows > most:
                    raise ConfigError(
                        f"table {table.name}: dynamic.max_rows={most}: a batch has {rows:,} "
                        "distinct ids of this table, and each of them needs a row: raise "
                        "max_rows (64 stretches of keys share it, and a stretch may fill up "
                        "early), or lower dataset.batch_size"
                    )

    def advance(self) -> None:
        """Wait for the counts, and send the ids. Every rank calls it at the same point of its
        program.

        `finish`, in the batch's own step, raises an error of the headers.
        """
        if not len(self.headers_W):
            with self.state.comm.side.beside():
                self._advance()

    def _advance(self) -> None:
        state = self.state
        comm = state.comm
        self.headers_W, self.in_WG3 = state.wait("counts", self._counts)
        out_WG3 = self.integers.counts_WG3
        self.failure = self.failure or self.integers.failure
        weighting_W = self.headers_W[:, 3]
        differ = ((weighting_W != NO_IDS) & (weighting_W != weighting_W.max())).any()
        if self.headers_W[:, 0].any() or differ:
            return
        self.words = MessageLayout(out_WG3[..., 2], self.in_WG3[..., 2], comm.rank, state.answered)
        self.vectors = MessageLayout(
            out_WG3[..., 1] * state.widths_G,
            self.in_WG3[..., 1] * state.widths_G,
            comm.rank,
            state.answered,
        )
        self.offset_dtype = offset_dtype(self.vectors.numel)
        self.ids = ids = state.messages.take(
            self.words.numel, state.routes[0].row_dtype, comm.device
        )
        self.integers.write(ids, self.words, self.vectors, self.offset_dtype)
        state.observer.ends("place")
        self._sent_ids = state.waits.sent(comm.swap(ids, *self.words.requests()))
        if isinstance(self.integers, GroupIntegers):
            self.integers.link(late=False)
        state.observer.ends("link")

    def finish(self) -> None:
        """Wait for the requests of the other ranks, and serve them.

        Raises:
            IdError: An id is outside its table, on any rank.
            ConfigError: Only some ranks have sample weights.
            RankError: Another rank could not read or look up its batch.
        """
        self.advance()
        state = self.state
        side = state.comm.side
        _raise_together(self.headers_W, state.id_rules, state.comm.rank, self.failure)
        with side.beside():
            self._finish()
        side.hand_over(self._made())

    def _finish(self) -> None:
        state = self.state
        assert self._sent_ids is not None and self.ids is not None
        state.wait("ids", self._sent_ids)
        self.served = self.integers.serve(
            *(self.ids, self.words, self.vectors, self.offset_dtype, self.in_WG3),
            max(self.headers_W[:, 3].tolist()),
        )
        state.messages.give_back(self.ids)
        self.ids = None
        state.observer.ends("serve")
        if state.comm.side.overlaps and torch.is_grad_enabled():
            self.group()
            state.observer.ends("group")

    def _made(self) -> Iterator[Any]:
        """Yield the objects whose tensors lookup and update read. Leased memory is recorded once,
        because it is given back before others may use it.
        """
        yield from (scratch.take_new() for scratch in self.lease)
        if self.weights_L is not None:  # whose gradients follow from these
            yield self.rows, self.output
        if isinstance(self.integers, FusedBatch):  # the rest of it is read beside
            return
        yield self.rows
        yield from map(vars, self.asked)
        yield from map(vars, self.served)
        yield self.row_gradients_G

    def group(self) -> None:
        """Group equal rows among the requests to this rank. The first call makes `row_gradients_G`,
        which the update reads; later calls do nothing.
        """
        if self.row_gradients_G:
            return
        state = self.state
        learning = state.layout.learning
        statistics = state.row_statistics
        for g, (served, store) in enumerate(zip(self.served, state.stores, strict=True)):
            if g in learning:
                served.group(store)
                row_U = served.row_U
                links = served.gradient_links
            else:  # no row of a frozen table has a gradient
                row_U = torch.empty(0, dtype=torch.int64, device=store.group.device)
                links = one_by_one(0, store.width, row_U.device)
            pieces = served.pieces or (
                statistics.find(g, store.piece_keys(row_U)) if statistics else None
            )
            self.row_gradients_G.append(RowGradients(row_U, links, pieces))

    def abandon(self) -> None:
        """End an exchange whose batch will not run. Wait for its messages, so that their memory can
        be reused.
        """
        self.advance()
        side = self.state.comm.side
        if self._sent_ids is not None and self.ids is not None:
            with side.beside():
                self._sent_ids.arrive()
            self.state.messages.give_back(self.ids)
            self.ids = None
        side.hand_over(())  # the memory of the batch may be reused
        self.release()

    def release(self) -> None:
        """Give the scratch memory back, once, after the last use of this exchange."""
        self.state.give_back(self.lease, self.trains)

    def check_called(self) -> None:
        """Check that every collection that looks up this batch was called with the ids of the
        batch.

        Raises:
            ConfigError: A collection was not called: its rows would train with gradients of zero.
        """
        members = self.state.outputs.members
        for i in (i for i, taken in enumerate(self.taken) if taken and i not in self.called_by):
            names = ", ".join(x.feature for x in members[i].lookups)
            raise ConfigError(
                f"the ids of a batch have the features {names}, but the collection of these "
                "features was not called with them: call all collections of a model with the "
                "same KeyedJaggedTensor, or each with its own features alone (features.permute)"
            )

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory that this exchange holds until it is released."""
        for scratch in self.lease:
            yield from scratch.tensors()
        if self.ids is not None:
            yield self.ids


def _raise_together(
    headers_W: Counts, rules: IdRules, own_rank: int, failure: Exception | None
) -> None:
    """Raise on all ranks the error that a header reports."""
    for rank, (status, _, _, _, pair, number) in enumerate(headers_W.tolist()):
        if status == OUTSIDE:
            error = rules.error(pair, number, f" on rank {rank}" if len(headers_W) > 1 else "")
            error.secondhand = failure is None
            raise error from failure
        if status == FAILED:
            if failure is not None and rank == own_rank:
                raise failure
            raise RankError(
                f"rank {rank} could not look up its batch; its own message has the reason"
            )
    names = ["no ids", "no sample weights", "sample weights", "sample weights that need a gradient"]
    weighting_W = headers_W[:, 3].tolist()
    most = max(weighting_W)
    for rank, of_rank in enumerate(weighting_W):
        if of_rank not in (NO_IDS, most):
            raise ConfigError(
                f"rank {rank} has a batch with {names[of_rank]}, rank "
                f"{weighting_W.index(most)} one with {names[most]}: give the batches of all "
                "ranks the same kind of weights (weights of 1 change nothing)"
            )
