"""input_dist of one batch: who needs which rows. It reads no weights, so it may run before the batch's turn has come.

Two messages: the counts, with a header per rank, and the ids. An error on one rank (an id outside its table) rides in the header, so all
ranks raise it, with the guilty rank's name, before anything else is sent.
"""

from dataclasses import replace

import numpy as np
import torch

from recapp.distributed.comm import Comm
from recapp.distributed.message import Buffers, Header, Mail, swap_counts
from recapp.errors import ConfigError, RankError
from recapp.sharding.layout import Layout
from recapp.sharding.modes import Routes, ask, own
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.ids import IdRules, OutsideTable, Rows

OK, OUTSIDE, FAILED = range(3)                                  # status in the header
NO_IDS, UNWEIGHTED, WEIGHTED, LEARNED_WEIGHTS = range(4)        # sample weights in the header


class Requests:
    """The exchange of one batch: what this rank asked, what it was asked, and where the vectors will stand.

    It belongs to its batch, not to a module: several may be in flight.

    Args:
        features: the batch's raw ids.
        layout: where rows live.
        routes: of each group.
        rules: that make rows of ids.
        comm: the ranks.
        header: what this rank wants; filled with what all ranks said.
        buffers: message memory.
        dtype: compute dtype of the collection.

    Weights that need a gradient are pooled at home even where the mode is `pooled`.

    Raises:
        IdError: an id outside its table on any rank.
        ConfigError: sample weights on some ranks only.
        RankError: another rank could not read its batch.
    """

    def __init__(self, features: KeyedJaggedTensor, layout: Layout, routes: list[Routes], rules: IdRules, comm: Comm, header: Header,
                 buffers: Buffers, dtype: torch.dtype) -> None:
        groups, widths = layout.groups, np.array([g.width for g in layout.groups])
        rows, status, failure = _rows(features, rules, dtype)
        weighting = _weighting(rows)
        asked_modes = _modes(routes, weighting)
        self.B, self.per_F, self.lengths_FB = rows.lengths_FB.shape[1], rows.per_F, rows.lengths_FB
        self.weights_L = rows.weights_L
        plain = rows if rows.weights_L is None else replace(rows, weights_L=rows.weights_L.detach())
        self.asked = [ask(r, plain, comm.world, mode) for r, mode in zip(routes, asked_modes, strict=True)]
        out_WG3 = np.stack([a.counts_W3.numpy() for a in self.asked], 1).astype(np.int64)
        heads, in_WG3 = swap_counts(comm, [status[0], self.B, header.wanted, weighting, *status[1:]], out_WG3)
        header.rows_W, header.wanted_W = heads[:, 1].tolist(), heads[:, 2].tolist()
        _raise_together(heads, rules, comm.rank, failure)
        self.modes = _modes(routes, _agree_on_weights(heads[:, 3].tolist()))        # a rank without ids serves those that have some
        answered = sum(g.mode != "replicated" for g in groups)
        self.vectors = Mail(out_WG3[..., 1] * widths, in_WG3[..., 1] * widths, comm.rank, answered)
        words = Mail(out_WG3[..., 2], in_WG3[..., 2], comm.rank, answered)
        row_dtype = torch.int64 if any(r.row_dtype == torch.int64 for r in routes) else torch.int32
        ids = buffers.take(words.numel, row_dtype, comm.device)
        for g, a in enumerate(self.asked):
            for place, part in zip(words.asked(ids, g), a.ids_W, strict=True):
                place.copy_(part)
        comm.swap(ids, *words.requests())()
        self.owned = [own(mode, words.served(ids, g), torch.from_numpy(in_WG3[:, g]), dtype, comm.rank)
                      for g, mode in enumerate(self.modes)]
        buffers.give_back(ids)
        self.everywhere = [m == "replicated" for m in self.modes]
        self.spent = False


def _rows(features: KeyedJaggedTensor, rules: IdRules, dtype: torch.dtype) -> tuple[Rows, tuple[int, int, int], Exception | None]:
    """The batch's rows, or none of them and what is wrong."""
    try:
        rows = rules(features)
        if rows.weights_L is not None:
            rows.weights_L = rows.weights_L.to(dtype)
        return rows, (OK, 0, 0), None
    except Exception as e:
        lengths = torch.zeros(len(rules.pairs), 0, dtype=torch.int64, device=features.values().device)
        empty = Rows(torch.zeros(0, dtype=torch.int64, device=lengths.device), lengths, None, [0] * len(rules.pairs))
        return empty, (OUTSIDE, e.pair, e.number) if isinstance(e, OutsideTable) else (FAILED, 0, 0), e


def _weighting(rows: Rows) -> int:
    if not len(rows.rows_L):
        return NO_IDS
    if rows.weights_L is None:
        return UNWEIGHTED
    return LEARNED_WEIGHTS if rows.weights_L.requires_grad and torch.is_grad_enabled() else WEIGHTED


def _modes(routes: list[Routes], weighting: int) -> list[str]:
    return ["unique" if weighting == LEARNED_WEIGHTS and r.mode == "pooled" else r.mode for r in routes]


def _agree_on_weights(weighting_W: list[int]) -> int:
    """How the ids of all ranks are weighted."""
    names = ["no ids", "no sample weights", "sample weights", "sample weights that need a gradient"]
    most = max(weighting_W)
    for rank, weighting in enumerate(weighting_W):
        if weighting not in (NO_IDS, most):
            raise ConfigError(f"rank {rank} has a batch with {names[weighting]}, rank {weighting_W.index(most)} one with {names[most]}: "
                              "give the batches of all ranks the same (weights of ones change nothing)")
    return most


def _raise_together(heads: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", rules: IdRules, me: int, failure: Exception | None) -> None:
    for rank, (status, _, _, _, pair, number) in enumerate(heads.tolist()):
        if status == OUTSIDE:
            error = rules.error(pair, number, f" on rank {rank}" if len(heads) > 1 else "")
            error.secondhand = failure is None
            raise error from failure
        if status == FAILED:
            if failure is not None and rank == me:
                raise failure
            raise RankError(f"rank {rank} could not look up its batch; its own message says why")

