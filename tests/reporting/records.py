"""Records as runs leave them, small and made by hand."""

from recapp.reporting.phases import PHASES
from recapp.reporting.run_record import (
    Performance,
    PlannedRank,
    PlannedTable,
    PlanReport,
    RankMemory,
    Traffic,
)

MEMORY = RankMemory(
    weights=4_000_000,
    state=1_000_000,
    buffers=5_000_000,
    rss=1 << 29,
    rss_peak=1 << 30,
    allocated=None,
    reserved=None,
    allocated_peak=None,
)
TIMES = {f"{phase}_ms": 1.0 for phase in PHASES}


def performance(*, ranks=2, step_ms=10.0, phase_ms=None, dense_ms=None, sent=6000):
    """Return what a training run measured."""
    spent = dict.fromkeys(PHASES, step_ms / 10 if phase_ms is None else phase_ms)
    spent["dense"] = phase_ms or (step_ms / 2 if dense_ms is None else dense_ms)
    return Performance(
        batch_per_rank=64,
        ranks=ranks,
        steps=30,
        step_ms=step_ms,
        phases_ms=(spent,) * ranks,
        parts_ms=({},) * ranks,
        memory=(MEMORY,) * ranks,
        sent_bytes=(sent,) * ranks,
    )


def plan_report(name="mixed", *, tables=1, ranks=2, hosts=1, step_ms=4.0, uses=()):
    """Return a plan in which a fourth of the tables each is whole, cut by columns, cut by rows, on
    all ranks; each rank sends 1 kB to each other.
    """
    return PlanReport(
        name=name,
        world_size=ranks,
        hosts=tuple(
            tuple(r for r in range(ranks) if r * hosts // ranks == h) for h in range(hosts)
        ),
        batch_per_rank=512,
        hardware="toy",
        step_ms=step_ms,
        lower_bound_ms=0.8 * step_ms,
        notes=(),
        reserve={"set": 0},
        rows=tuple(planned_table(i, ranks) for i in range(tables)),
        uses=tuple(uses),
        ranks=tuple(
            PlannedRank(
                **TIMES,
                predicted_ms=6.0 + r,
                rank=r,
                host=r * hosts // ranks,
                bytes=7 << 20,
                weights=4_000_000,
                state=1_000_000,
                buffers=0,
                capacity=None,
            )
            for r in range(ranks)
        ),
        between_ranks=tuple(
            Traffic(a, b, 1000) for a in range(ranks) for b in range(ranks) if a != b
        ),
    )


def planned_table(i, world):
    """Return the table number `i` of a plan."""
    n = 10 + 37 * i * i
    dim = (32, 64, 128)[i % 3]
    kind = ("table_wise", "column_wise", "row_wise", "data_parallel")[i % 4]
    halves = range(2)
    shards = {
        "table_wise": [(i % world, 0, n, 0, dim)],
        "column_wise": [((i + k) % world, 0, n, k * dim // 2, (k + 1) * dim // 2) for k in halves],
        "row_wise": [(r, n * r // world, n * (r + 1) // world, 0, dim) for r in range(world)],
        "data_parallel": [(r, 0, n, 0, dim) for r in range(world)],
    }[kind]
    return PlannedTable(
        **TIMES,
        predicted_ms=6.0,
        table=f"table_{i}",
        rows=n,
        plan_rows=n,
        dynamic=False,
        dim=dim,
        type=kind,
        mode="replicated" if kind == "data_parallel" else "unique",
        row_order="plain",
        ranks=tuple(sorted({shard[0] for shard in shards})),
        bytes=4 * n * dim,
        runner_up="row_wise",
        runner_up_ms=7.0,
        why="it moves <fewer> bytes & waits less",
        shards=tuple(shards),
    )
