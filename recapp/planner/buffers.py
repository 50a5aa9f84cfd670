"""Predict the bytes that the exchange keeps from batch to batch, beside the tables.

    messages     one of vectors (for answers and gradients), one of ids for each batch in
                 flight
    integers     for each batch in flight: offsets of ids, bags and rows (kernels' scratch)
    offsets      of each bag in the output, for each batch size

Batches in flight are the training batch, the batches of the look-ahead, and a validation batch,
which may be the largest. Every buffer keeps the size of the largest batch so far.
"""

from dataclasses import dataclass, replace

import numpy as np

from recapp.planner.cost import ID_BYTES, Floats, by_rank
from recapp.planner.pricing import work_of
from recapp.planner.problem import NUMBER_BYTES, PlanningProblem
from recapp.sharding.sharding_plan import ShardingPlan

BUFFER_SLACK = 1.2  # buffers grow by more than the request, to grow less often
HOME_INTEGERS = {"unique": 9, "replicated": 9, "pooled": 3}  # for each id at its home, by mode
ANSWER_INTEGERS = 2  # for each row that a rank requests from its owner
UPDATE_INTEGERS = 5  # in addition, for the update of such a row


@dataclass(frozen=True)
class _Batch:
    """Bytes of one batch on each rank, [W].

    Args:
        vectors: Bytes of the message of vectors, which also carries gradients.
        in_flight: Bytes of the message of ids and of the kernels' integers, for each batch in
            flight.
        offsets: Bytes of the bags' offsets in the output, equal on all ranks.
    """

    vectors: Floats
    in_flight: Floats
    offsets: float


def buffer_bytes(plan: ShardingPlan, problem: PlanningProblem) -> Floats:
    """Predict the bytes that each rank keeps for its exchange, [W]; 0 for a single rank.

    Args:
        plan: Any plan of the problem's tables.
        problem: Tables, batch sizes of training and validation, look-ahead and id statistics.
    """
    world = problem.topology.world_size
    if world == 1 or not problem.tables:
        return np.zeros(world)
    train = _of_batch(plan, problem, problem.batch_per_rank, updates=problem.rule is not None)
    vectors = train.vectors
    in_flight = (1 + problem.look_ahead) * train.in_flight
    offsets = train.offsets
    if problem.val_batch_per_rank:
        val = _of_batch(plan, problem, problem.val_batch_per_rank, updates=False)
        vectors = np.maximum(vectors, val.vectors)
        in_flight = in_flight + val.in_flight
        offsets += val.offsets if problem.val_batch_per_rank != problem.batch_per_rank else 0.0
    found: Floats = BUFFER_SLACK * (vectors + in_flight) + offsets
    return found


def _of_batch(plan: ShardingPlan, problem: PlanningProblem, batch: int, *, updates: bool) -> _Batch:
    world = problem.topology.world_size
    tables = problem.tables
    problem = replace(problem, batch_per_rank=batch)
    works = [work_of(t, plan.tables[t.name], problem) for t in tables]
    asked_3W = by_rank(
        np.concatenate([w.rank_M for w in works]), [w.asked_3M for w in works], world
    )
    everywhere = np.sum([w.everywhere for w in works], 0)
    strips_T = [len({s.cols.start for s in plan.tables[t.name].cells(t, world)}) for t in tables]
    at_home = sum(
        HOME_INTEGERS[w.mode] * n * problem.statistics_of(t).ids_per_sample
        for t, n, w in zip(tables, strips_T, works, strict=True)
    )
    bags = sum(n * problem.vectors_per_sample(t) for t, n in zip(tables, strips_T, strict=True))
    served_W = (asked_3W[0] + everywhere[0]) * (world / ID_BYTES)
    of_row = ANSWER_INTEGERS + (UPDATE_INTEGERS if updates else 0)
    integers = NUMBER_BYTES * (batch * at_home + of_row * served_W)
    vectors = _message(asked_3W[1:].max(0), float(everywhere[1:].max()))
    offsets = float(NUMBER_BYTES * batch * bags)
    return _Batch(vectors, _message(asked_3W[0], float(everywhere[0])) + integers, offsets)


def _message(asked_W: Floats, each: float) -> Floats:
    """Return the bytes of a buffer for both directions, [W]: the requests of the others to a rank,
    and its own requests to all.
    """
    world = len(asked_W)
    held: Floats = asked_W * (world - 1) + asked_W.sum() + each * (2 * world - 1)
    return held
