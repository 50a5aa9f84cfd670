"""input_dist of one batch: who needs which rows. It reads no weights, so it may run before the
batch's turn has come.

    made        ids become rows, equal rows meet, counts leave           (with a header per rank)
    advance()   counts have arrived: ids are placed and leave; links are made while they travel
    finish()    ids have arrived: what is asked of this rank

Two messages: the counts, with a header per rank, and the ids. An error on one rank (an id outside
its table) rides in the header, so all ranks raise it, with the guilty rank's name, before anything
else is sent.

On a GPU all of it runs on a stream of its own, and the host waits there for sizes: of distinct
rows, of what others ask, and of the distinct rows that learn here, which therefore meet in `finish`
already.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recapp.engine.exchange_modes import BagRequests, RowRequests, Served
from recapp.engine.row_statistics import Pieces
from recapp.errors import ConfigError, RankError
from recapp.kernels.links import Counts, Links, Routes, place_type
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.ids import IdRules, OutsideTable, PendingCheck, Rows, nothing_pending
from recapp.transport.message_layout import Mail, swap_counts
from recapp.transport.waits import Sent

if TYPE_CHECKING:
    from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection

OK, OUTSIDE, FAILED = range(3)  # status in the header
NO_IDS, UNWEIGHTED, WEIGHTED, LEARNED_WEIGHTS = range(4)  # sample weights in the header


class Lesson(NamedTuple):
    """Touched rows of a group's store, and what each learns from; their pieces where strips of a
    row have to agree.
    """

    row_U: Tensor
    links: Links
    pieces: Pieces | None = None


class Requests:
    """The exchange of one batch: what this rank asked, what it was asked, and where the vectors
    will stand.

    It belongs to its batch, not to a module: several may be in flight. It leases the collection's
    scratch memory until `release`.

    Args:
        features: the batch's raw ids, or why this rank has none.
        collection: whose tables they mean.

    Weights that need a gradient are pooled at home even where the mode is `pooled`.
    """

    def __init__(
        self, features: KeyedJaggedTensor | Exception, collection: "ShardedEmbeddingBagCollection"
    ) -> None:
        c = self.collection = collection
        self.learns = torch.is_grad_enabled()
        self.lease = c.lease(self.learns)
        c.comm.side.follow()
        with c.comm.side.beside():
            status, self.failure = self._route(features)
            self.B = self.rows.lengths_FB.shape[1]
            self.weights_L = self.rows.weights_L
            weighting = _weighting(self.rows)
            told = [status[0], self.B, c.header.wanted, weighting, *status[1:]]
            self._counts = c.waits.sent(swap_counts(c.comm, told, self.counts_WG3))
        self._ids: Sent[None] | None = None
        self.heads: Counts = np.zeros((0, 0), np.int64)
        self.lessons: list[Lesson] = []
        self.finished = self.spent = self.released = False

    def _route(
        self, features: KeyedJaggedTensor | Exception
    ) -> tuple[tuple[int, int, int], Exception | None]:
        """What is asked of whom; nothing where something is wrong. Returns the header's part of it,
        and what it is.

        On a GPU ids outside their tables are known with the sizes of the distinct rows, so they are
        routed before they are told of.
        """
        rows, check, status, failure = _rows(features, self.collection)
        self._route_rows(rows)
        try:
            check()
        except OutsideTable as e:
            status = (OUTSIDE, e.lookup, e.number)
            failure = e
            self._route_rows(_no_rows(self.collection))
        self.collection.mark("route")
        return status, failure

    def _route_rows(self, rows: Rows) -> None:
        c = self.collection
        self.rows = rows
        plain = rows if rows.weights_L is None else replace(rows, weights_L=rows.weights_L.detach())
        self.asked = [
            _asker(mode, c.comm.world)(c.backend, r, c.comm.world, c.comm.rank, take)
            for mode, r, take in zip(
                _modes(c.routes, _weighting(rows)), c.routes, self.lease, strict=False
            )
        ]
        self.counts_WG3 = np.stack(
            [a.route(b) for a, b in zip(self.asked, c.bags(plain), strict=True)], 1
        )

    def advance(self) -> None:
        """Go on as soon as the counts are there; every rank calls it at the same point of its
        program.

        An error that the headers tell is kept for `finish`, which belongs to the batch's own turn.
        """
        if not len(self.heads):
            with self.collection.comm.side.beside():
                self._advance()

    def _advance(self) -> None:
        c = self.collection
        out_WG3 = self.counts_WG3
        self.heads, self.in_WG3 = c.wait("counts", self._counts)
        if self.heads[:, 0].any() or _weights_differ(self.heads[:, 3].tolist()):
            return
        words = self.words = Mail(out_WG3[..., 2], self.in_WG3[..., 2], c.comm.rank, c.answered)
        self.vectors = Mail(
            out_WG3[..., 1] * c.widths_G, self.in_WG3[..., 1] * c.widths_G, c.comm.rank, c.answered
        )
        self.place = place_type(self.vectors.numel)
        self.ids = c.messages.take(words.numel, c.routes[0].row_dtype, c.comm.device)
        for g, a in enumerate(self.asked):
            a.place(self.ids, words.asked_WG1[:, g], self.vectors.asked_WG1[:, g], self.place)
        c.mark("place")
        self._ids = c.waits.sent(c.comm.swap(self.ids, *words.requests()))
        for a in self.asked:
            a.link(c.dtype)
        c.mark("link")

    def finish(self) -> None:
        """Wait for what the others ask.

        Raises:
            IdError: an id outside its table on any rank.
            ConfigError: sample weights on some ranks only.
            RankError: another rank could not read its batch.
        """
        if self.finished:
            return
        self.advance()
        c = self.collection
        _raise_together(self.heads, c.id_rules, c.comm.rank, self.failure)
        with c.comm.side.beside():
            self._finish()
        c.comm.side.hand_over(self._made())
        self.finished = True

    def _finish(self) -> None:
        c = self.collection
        # a rank without ids serves those that have some
        modes = _modes(c.routes, max(self.heads[:, 3].tolist()))
        assert self._ids is not None
        c.wait("ids", self._ids)
        self.served = [
            Served(c.backend, r, mode, take)
            for r, mode, take in zip(c.routes, modes, self.lease, strict=False)
        ]
        if c.comm.world > 1:
            for g, s in enumerate(self.served):
                s.serve(
                    self.ids,
                    self.words.served_WG1[:, g],
                    self.vectors.served_WG1[:, g],
                    self.in_WG3[:, g],
                    c.dtype,
                    self.place,
                )
        c.messages.give_back(self.ids)
        del self.ids
        c.mark("serve")
        if c.comm.side.overlaps and torch.is_grad_enabled():
            self.group()
            c.mark("group")

    def _made(self) -> Iterator[Any]:
        """What lookup and update read."""
        yield self.rows
        yield from map(vars, self.asked)
        yield from map(vars, self.served)
        yield self.lessons

    def group(self) -> None:
        """Bring together equal rows that were asked of this rank: `lessons`, by which the update
        goes. Once, whoever asks first.
        """
        if self.lessons:
            return
        c = self.collection
        if c.comm.world == 1:  # a row learns from the output's gradient, no vector between
            lessons = [Lesson(a.found.row_U, a.learn) for a in self.asked]
        else:
            for g, s in enumerate(self.served):
                s.group(c.store(g).rows)
            lessons = [Lesson(s.row_U, s.learn) for s in self.served]
        agree = c.agree
        self.lessons = (
            [x._replace(pieces=agree.find(g, x.row_U)) for g, x in enumerate(lessons)]
            if agree
            else lessons
        )

    def abandon(self) -> None:
        """End an exchange whose batch will not come: what is under way has to arrive before its
        memory is used again.
        """
        self.advance()
        if self._ids is not None and not self.finished:
            with self.collection.comm.side.beside():
                self._ids.arrive()
            self.collection.messages.give_back(self.ids)
        self.collection.comm.side.hand_over(())  # its batch's memory may be used again
        self.release()

    def release(self) -> None:
        """Give the scratch memory back: nothing of this exchange is used any more."""
        if not self.released:
            self.released = True
            self.collection.give_back(self.lease, self.learns)


def _asker(mode: str, world: int) -> type[RowRequests | BagRequests]:
    return BagRequests if mode == "pooled" and world > 1 else RowRequests


def _rows(
    features: KeyedJaggedTensor | Exception, c: "ShardedEmbeddingBagCollection"
) -> tuple[Rows, PendingCheck, tuple[int, int, int], Exception | None]:
    """The batch's rows, or none of them and what is wrong."""
    try:
        if isinstance(features, Exception):
            raise features
        rows, check = c.id_rules.begin(features)
        if rows.weights_L is not None:
            rows.weights_L = rows.weights_L.to(c.dtype)
        return rows, check, (OK, 0, 0), None
    except Exception as e:
        return (
            _no_rows(c),
            nothing_pending,
            (OUTSIDE, e.lookup, e.number) if isinstance(e, OutsideTable) else (FAILED, 0, 0),
            e,
        )


def _no_rows(c: "ShardedEmbeddingBagCollection") -> Rows:
    lengths = torch.zeros(len(c.lookups), 0, dtype=torch.int64, device=c.comm.device)
    return Rows(
        torch.zeros(0, dtype=torch.int64, device=lengths.device), lengths, None, [0] * len(lengths)
    )


def _weighting(rows: Rows) -> int:
    if not len(rows.rows_L):
        return NO_IDS
    if rows.weights_L is None:
        return UNWEIGHTED
    return LEARNED_WEIGHTS if rows.weights_L.requires_grad and torch.is_grad_enabled() else WEIGHTED


def _modes(routes: list[Routes], weighting: int) -> list[str]:
    return [
        "unique" if weighting == LEARNED_WEIGHTS and r.mode == "pooled" else r.mode for r in routes
    ]


def _weights_differ(weighting_W: list[int]) -> bool:
    return any(weighting not in (NO_IDS, max(weighting_W)) for weighting in weighting_W)


def _raise_together(heads: Counts, rules: IdRules, me: int, failure: Exception | None) -> None:
    for rank, (status, _, _, _, pair, number) in enumerate(heads.tolist()):
        if status == OUTSIDE:
            error = rules.error(pair, number, f" on rank {rank}" if len(heads) > 1 else "")
            error.secondhand = failure is None
            raise error from failure
        if status == FAILED:
            if failure is not None and rank == me:
                raise failure
            raise RankError(f"rank {rank} could not look up its batch; its own message says why")
    names = ["no ids", "no sample weights", "sample weights", "sample weights that need a gradient"]
    weighting_W = heads[:, 3].tolist()
    most = max(weighting_W)
    for rank, weighting in enumerate(weighting_W):
        if weighting not in (NO_IDS, most):
            raise ConfigError(
                f"rank {rank} has a batch with {names[weighting]}, rank {weighting_W.index(most)} "
                f"one with {names[most]}: "
                "give the batches of all ranks the same (weights of ones change nothing)"
            )
