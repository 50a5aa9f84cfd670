"""Decide by counted bytes which tables request distinct rows and which request pooled bags.

    unique   a vector per distinct row of the batch     one-hot features, small tables, ids that
                                                        repeat
    pooled   a vector per non-empty (bag, owner) pair   long bags of rarely repeated ids

Both counts use the same batches, so the mode follows from data and plan, never from a clock: two
identical runs stay identical. One-hot features always get `unique`, because they have at least as
many bags as distinct rows.

The initial plan of a run is made on rank 0 and broadcast to every rank:

    make -> modes of a checkpoint -> modes counted on batches -> broadcast -> all ranks
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from recapp.errors import RecappError
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import Mode, ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.ids import IdRules

ID_BYTES = 4
LENGTH_BYTES = 4
NUMBER_BYTES = 4
# of one rank: enough so that no single batch decides a mode, few enough for a fast start
SAMPLE_BATCHES = 4


def exchanged_bytes(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    features: KeyedJaggedTensor,
    lookups: Sequence[TableLookup] | None = None,
) -> dict[str, dict[Mode, int]]:
    """Return the bytes, in both directions and for either mode, that one batch of a rank exchanges
    for each table that is not replicated.

    Args:
        tables: The tables of the plan.
        plan: The plan; its open modes count as `unique`. Modes change no rectangle.
        features: Raw ids of the batch.
        lookups: The lookups that read the tables; None takes those that the tables declare.
    """
    layout = make_layout(tables, plan.with_modes(dict.fromkeys(plan.undecided, "unique")), lookups)
    rows = IdRules(layout.lookups)(features)
    parts = torch.split(rows.rows_L.long(), rows.per_F)
    pieces = {strip: list(group) for strip, group in groupby(layout.pieces, key=lambda p: p.strip)}
    bytes_by_table: dict[str, dict[Mode, int]] = {}
    lookups_by_table: dict[str, list[int]] = {t.name: [] for t in tables}
    for i, lookup in enumerate(layout.lookups):
        lookups_by_table[lookup.table.name].append(i)
    for number, table in enumerate(tables):
        if plan.tables[table.name].mode == "replicated":
            continue
        row_N = torch.cat([parts[i] for i in lookups_by_table[table.name]])
        order = layout.orders[number]
        row_N = row_N if order is None else order.positions_of(row_N)
        lengths_M = rows.lengths_FB[lookups_by_table[table.name]].flatten()
        bytes_by_table[table.name] = {"unique": 0, "pooled": 0}
        for i, strip in enumerate(layout.strips):
            if strip.table == number:
                vector = 2 * NUMBER_BYTES * len(strip.cols)  # the answer and its gradient
                pairs = _pairs(
                    row_N,
                    lengths_M,
                    torch.tensor([p.rows.start for p in pieces[i]]),
                    torch.tensor([p.rank for p in pieces[i]]),
                )
                bytes_by_table[table.name]["unique"] += len(torch.unique(row_N)) * (
                    vector + ID_BYTES
                )
                bytes_by_table[table.name]["pooled"] += (
                    pairs * (vector + LENGTH_BYTES) + len(row_N) * ID_BYTES
                )
    return bytes_by_table


def _pairs(row_N: Tensor, lengths_M: Tensor, start_K: Tensor, rank_K: Tensor) -> int:
    """Count the non-empty (bag, owner) pairs.

    Args:
        row_N: The row of each id.
        lengths_M: The number of ids of each bag.
        start_K: First row of each piece of the strip, ascending.
        rank_K: Owner of each piece.
    """
    bag_N = torch.repeat_interleave(torch.arange(len(lengths_M)), lengths_M, output_size=len(row_N))
    owner_N = rank_K[torch.bucketize(row_N, start_K, right=True) - 1]
    return len(torch.unique(bag_N * (int(rank_K.max()) + 1) + owner_N))


def decide_modes(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    batches: Iterable[KeyedJaggedTensor],
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Decide every open mode of a plan: `pooled` if that moves fewer bytes over all batches, else
    `unique`. A table with a lookup that does not sum gets `unique`.

    Args:
        tables: The tables of the plan.
        plan: A plan, with or without open modes.
        batches: Batches of one rank, with raw ids.
        lookups: The lookups that read the tables; None takes those that the tables declare.

    Returns:
        The plan with every mode decided.
    """
    all_lookups = lookups_of(tables) if lookups is None else lookups
    unsummed = {x.table.name for x in all_lookups if not x.may_be_pooled}
    plan = plan.with_modes({name: "unique" for name in plan.undecided if name in unsummed})
    if not plan.undecided:
        return plan
    total: dict[str, dict[Mode, int]] = {
        name: {"unique": 0, "pooled": 0} for name in plan.undecided
    }
    for features in batches:
        for name, bytes_by_mode in exchanged_bytes(tables, plan, features, lookups).items():
            for mode, n in bytes_by_mode.items() if name in total else ():
                total[name][mode] += n
    return plan.with_modes(
        {name: "pooled" if n["pooled"] < n["unique"] else "unique" for name, n in total.items()}
    )


T = TypeVar("T")


class Ranks(Protocol):
    """The view of a rank: its number, the number of ranks, and a broadcast."""

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; every rank calls this."""


def from_rank_0(make: Callable[[], T], rank: int, broadcast: Callable[[Any], Any]) -> T:
    """Call `make` on rank 0 only, and return its result on every rank.

    Args:
        make: Makes the value.
        rank: The number of this rank.
        broadcast: Returns rank 0's value on every rank; every rank calls it once.

    Raises:
        RecappError: `make` raised it on rank 0; every rank raises it.
    """
    outcome: Any = None
    failed: RecappError | None = None
    if rank == 0:
        try:
            outcome = make()
        except RecappError as error:
            outcome = failed = error
    outcome = broadcast(outcome)
    if isinstance(outcome, RecappError):
        outcome.secondhand = rank > 0
        raise failed or outcome  # rank 0's own says where it was raised
    value: T = outcome
    return value


def initial_plan(
    make: Callable[[], ShardingPlan],
    ranks: Ranks,
    *,
    modes: Mapping[str, Mode] | None = None,
    count: Callable[[ShardingPlan], ShardingPlan] | None = None,
) -> ShardingPlan:
    """Return the plan of a run with every mode decided, the same on all ranks. Every rank calls
    this.

    Args:
        make: Makes the plan; called on rank 0 only.
        ranks: The ranks that receive it.
        modes: Modes for tables with an open mode, by table.
        count: Decides the modes that are still open by counted bytes; called on rank 0 only, if
            there are several ranks. None takes `unique`.

    Raises:
        RecappError: Rank 0 raised it; every rank raises it.
    """

    def decided() -> ShardingPlan:
        plan = make()
        mode_by_table = modes or {}
        plan = plan.with_modes(
            {name: mode_by_table[name] for name in plan.undecided if name in mode_by_table}
        )
        if plan.undecided and count is not None and ranks.world > 1:
            plan = count(plan)
        return plan.with_modes(dict.fromkeys(plan.undecided, "unique"))

    return from_rank_0(decided, ranks.rank, ranks.broadcast)
