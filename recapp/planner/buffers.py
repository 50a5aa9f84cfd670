"""Predict the bytes that the exchange keeps from batch to batch, beside the tables.

    messages     one of vectors (for answers and gradients), one of ids for each batch in
                 flight
    integers     for each batch in flight: offsets of ids, bags and rows (kernels' scratch)
    offsets      of each bag in the output, for each batch size

Batches in flight are the training batch, the batches of the look-ahead, and a validation batch,
which may be the largest. Every buffer keeps the size of the largest batch so far.

The reserve is the memory of a rank that tables leave free. On a CPU it is fixed, because batches
are small beside the memory. On a GPU a step allocates its memory after the tables, so the reserve
must cover a step, with its messages.
"""

from dataclasses import replace

import numpy as np

from recapp.planner.cost import ID_BYTES, Floats, by_rank
from recapp.planner.pricing import work_of
from recapp.planner.problem import NUMBER_BYTES, PlanningProblem
from recapp.planner.topology import RESERVE_BYTES
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.collections import compute_dtype

BUFFER_SLACK = 1.2  # buffers grow by more than the request, to grow less often
HOME_INTEGERS = {"unique": 9, "replicated": 9, "pooled": 3}  # for each id at its home, by mode
ANSWER_INTEGERS = 2  # for each row that a rank requests from its owner
UPDATE_INTEGERS = 5  # in addition, for the update of such a row
ID_TYPE_BYTES = 8  # ids of a batch are int64
DENSE_COPIES = 5  # weights, gradients, all-reduce buckets, two states of the optimiser
# The CUDA context, kernels and libraries' work spaces (about .5 GB), NCCL's channels (.5 to 1 GB at
# 8 ranks) and the allocator's fragmentation. Assumed, not measured.
RUNTIME_BYTES = 1_500_000_000


def buffer_bytes(plan: ShardingPlan, problem: PlanningProblem) -> Floats:
    """Predict the bytes that each rank keeps for its exchange, [W]; 0 for a single rank.

    Args:
        plan: Any plan of the problem's tables.
        problem: Tables, batch sizes of training and validation, look-ahead and id statistics.
    """
    world = problem.topology.world_size
    if world == 1 or not problem.tables:
        return np.zeros(world)
    vectors, in_flight, offsets = _of_batch(
        plan, problem, problem.batch_per_rank, updates=problem.rule is not None
    )
    in_flight = (1 + problem.look_ahead) * in_flight
    if problem.val_batch_per_rank:
        val = _of_batch(plan, problem, problem.val_batch_per_rank, updates=False)
        vectors = np.maximum(vectors, val[0])
        in_flight = in_flight + val[1]
        offsets += val[2] if problem.val_batch_per_rank != problem.batch_per_rank else 0.0
    bytes_W: Floats = BUFFER_SLACK * (vectors + in_flight) + offsets
    return bytes_W


def _of_batch(
    plan: ShardingPlan, problem: PlanningProblem, batch: int, *, updates: bool
) -> tuple[Floats, Floats, float]:
    """Return the bytes of one batch on each rank, [W]: of the message of vectors, which also
    carries gradients; of the message of ids and the kernels' integers, for each batch in flight;
    and of the bags' offsets in the output, equal on all ranks.
    """
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
    return vectors, _message(asked_3W[0], float(everywhere[0])) + integers, offsets


def _message(asked_W: Floats, each: float) -> Floats:
    """Return the bytes of a buffer for both directions, [W]: the requests of the others to a rank,
    and its own requests to all.
    """
    world = len(asked_W)
    bytes_W: Floats = asked_W * (world - 1) + asked_W.sum() + each * (2 * world - 1)
    return bytes_W


def reserve_of(problem: PlanningProblem) -> dict[str, int]:
    """Return the bytes that tables leave free on each rank, by purpose.

    No plan is known yet, so messages are those of all tables cut evenly by rows: the average over
    the ranks of any plan.

    Args:
        problem: Tables, ranks, batches, ids and the dense part of the model.

    Returns:
        On a GPU `messages`, `outputs` (vectors and their gradients), `batches`, `activations`,
        `dense part` and `runtime`; on a CPU `fixed`.
    """
    if problem.topology.compute_device != "cuda":
        return {"fixed": RESERVE_BYTES}
    batch = max(problem.batch_per_rank, problem.val_batch_per_rank)
    tables = problem.tables
    numbers = sum(problem.vectors_per_sample(t) * t.embedding_dim for t in tables)
    number_bytes = compute_dtype(tables).itemsize if tables else NUMBER_BYTES
    ids = sum(problem.statistics_of(t).ids_per_sample for t in tables)
    in_flight = 1 + problem.look_ahead + bool(problem.val_batch_per_rank)
    ranks = CandidateRanks(list(range(problem.topology.world_size)), problem.topology.host_ranks())
    cut = {t.name: tile(t, "row_wise", ranks, "unique") for t in tables}
    even = ShardingPlan(cut, problem.topology.world_size, "row_wise")
    bytes_by_purpose = {
        "messages": float(buffer_bytes(even, problem).max()),
        "outputs": 2 * batch * numbers * number_bytes,
        "batches": in_flight * batch * ids * ID_TYPE_BYTES,
        "activations": batch * problem.dense.activation_bytes,
        "dense part": DENSE_COPIES * problem.dense.bytes,
        "runtime": RUNTIME_BYTES,
    }
    return {name: round(n) for name, n in bytes_by_purpose.items()}


def with_reserve(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with its computed reserve."""
    reserve = reserve_of(problem)
    topology = replace(problem.topology, reserve_bytes=sum(reserve.values()))
    return replace(problem, topology=topology, reserve=reserve)
