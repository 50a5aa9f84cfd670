"""Compute the reserve, the memory of a rank that tables leave free, from the planning problem.

On a CPU the reserve is fixed, because batches are small beside the memory. On a GPU a step
allocates its memory after the tables, so the reserve must cover a step.
"""

from dataclasses import replace

from recapp.planner.buffers import buffer_bytes
from recapp.planner.problem import NUMBER_BYTES, PlanningProblem
from recapp.planner.topology import RESERVE_BYTES
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sharding.tilings import tile
from recapp.tables.collections import compute_dtype

ID_TYPE_BYTES = 8  # ids of a batch are int64
DENSE_COPIES = 5  # weights, gradients, all-reduce buckets, two states of the optimiser
# The CUDA context, kernels and libraries' work spaces (about .5 GB), NCCL's channels (.5 to 1 GB at
# 8 ranks) and the allocator's fragmentation. Assumed, not measured.
RUNTIME_BYTES = 1_500_000_000


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
    found = {
        "messages": _messages(problem),
        "outputs": 2 * batch * numbers * number_bytes,
        "batches": in_flight * batch * ids * ID_TYPE_BYTES,
        "activations": batch * problem.dense.activation_bytes,
        "dense part": DENSE_COPIES * problem.dense.bytes,
        "runtime": RUNTIME_BYTES,
    }
    return {name: round(n) for name, n in found.items()}


def with_reserve(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with its computed reserve."""
    reserve = reserve_of(problem)
    topology = replace(problem.topology, reserve_bytes=sum(reserve.values()))
    return replace(problem, topology=topology, reserve=reserve)


def _messages(problem: PlanningProblem) -> float:
    ranks = CandidateRanks(list(range(problem.topology.world_size)), problem.topology.host_ranks())
    cut = {t.name: tile(t, "row_wise", ranks, "unique") for t in problem.tables}
    plan = ShardingPlan(cut, problem.topology.world_size, "row_wise")
    return float(buffer_bytes(plan, problem).max())
