"""Compares predictions with runs: by phase, memory and ranks, and by the order of plans.

Runs that repeat one plan count as one: the median, with the least and the greatest value. (A sweep
over seeds and plans alternates the plans.) Two plans whose ranges overlap count as equal on the
machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median
from typing import Any

from recapp.reporting.phases import PHASES
from recapp.reporting.run_record import Performance, PlanReport

STEP = "step, ms"
KINDS = ("weights", "state", "buffers")
MeasuredRun = tuple[str, PlanReport, Performance]  # with the name of the run


@dataclass(frozen=True)
class Prediction:
    """A number of a plan: as predicted, and as measured in `runs` runs.

    Args:
        run: The names of the runs.
        plan: The name of the plan.
        what: The number: the step, a phase, or the bytes of the fullest rank.
        predicted: The median prediction.
        measured: The median of the measurements.
        error: The relative error of the prediction; None if nothing was measured.
        least: The least measurement.
        most: The greatest measurement.
        runs: The number of runs.
    """

    run: str
    plan: str
    what: str
    predicted: float
    measured: float
    error: float | None
    least: float
    most: float
    runs: int


def compared(runs: Sequence[MeasuredRun]) -> list[Prediction]:
    """Return the numbers of every plan."""
    plans: dict[Any, list[MeasuredRun]] = {}
    for run in runs:
        _, report, measured = run
        weights = tuple(rank.weights for rank in report.ranks)
        key = report.name, weights, measured.batch_per_rank, report.hardware
        plans.setdefault(key, []).append(run)
    return [row for repeats in plans.values() for row in _rows(repeats)]


def _rows(repeats: Sequence[MeasuredRun]) -> Iterator[Prediction]:
    numbers = [dict(_numbers(report, measured)) for _, report, measured in repeats]
    for what in numbers[0]:
        predicted = median(of_run[what][0] for of_run in numbers)
        values = [of_run[what][1] for of_run in numbers]
        measured = median(values)
        yield Prediction(
            run=", ".join(name for name, _, _ in repeats),
            plan=repeats[0][1].name,
            what=what,
            predicted=predicted,
            measured=measured,
            error=predicted / measured - 1 if measured else None,
            least=min(values),
            most=max(values),
            runs=len(values),
        )


def _numbers(
    report: PlanReport, measured: Performance
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield each number of a run, as predicted and as measured: the step, each phase as the mean
    over the ranks, and the bytes of the fullest rank.
    """
    yield STEP, (report.step_ms, measured.step_ms)
    phases = measured.mean_phases()
    yield from ((f"{phase}, ms", (report.mean_ms(phase), phases[phase])) for phase in PHASES)
    for kind in KINDS:
        both = [max(getattr(rank, kind) for rank in x) for x in (report.ranks, measured.memory)]
        yield f"{kind}, MB", (both[0] / 1e6, both[1] / 1e6)
    planned = max(sum(getattr(rank, kind) for kind in KINDS) for rank in report.ranks)
    yield "tables, MB", (planned / 1e6, max(rank.tables for rank in measured.memory) / 1e6)


def order_of_plans(rows: Sequence[Prediction]) -> float | None:
    """Return Kendall's tau of the plans' predicted and measured step times."""
    steps = [row for row in rows if row.what == STEP]
    return kendall_tau([row.predicted for row in steps], [row.measured for row in steps])


def separated_pairs(rows: Sequence[Prediction]) -> tuple[int, int]:
    """Return the number of pairs of plans whose measured ranges do not overlap, and the number of
    these pairs that have the predicted order.
    """
    steps = sorted((row for row in rows if row.what == STEP), key=lambda row: row.measured)
    pairs = [(a, b) for a, b in combinations(steps, 2) if a.most < b.least]
    return len(pairs), sum(a.predicted < b.predicted for a, b in pairs)


def compared_by_ranks(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Return the growth of step and traffic with the ranks: a record for each run with plan, batch,
    ranks, and measured and predicted step and bytes sent by a rank.
    """
    rows = []
    for name, report, measured in runs:
        predicted_bytes = report.sent_bytes / measured.ranks
        sent = sum(measured.sent_bytes) / measured.ranks
        rows.append(
            {
                "run": name,
                "plan": report.name,
                "ranks": measured.ranks,
                "batch_per_rank": measured.batch_per_rank,
                "hardware": report.hardware,
                "step_ms": measured.step_ms,
                "predicted_step_ms": report.step_ms,
                "step_error": report.step_ms / measured.step_ms - 1,
                "sent_per_rank": sent,
                "predicted_sent_per_rank": predicted_bytes,
                "sent_error": predicted_bytes / sent - 1 if sent else None,
            }
        )
    keys = ("plan", "ranks", "batch_per_rank", "run")
    return sorted(rows, key=lambda row: [row[key] for key in keys])


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return Kendall's tau-b (1945) of two lists: 1 for the same order, -1 for opposite orders.
    Equal numbers have no order.

    Return None if a list has no order: fewer than two numbers, or all equal.
    """

    def sign(number: float) -> int:
        return (number > 0) - (number < 0)

    signs = [
        (sign(predicted[i] - predicted[j]), sign(measured[i] - measured[j]))
        for i, j in combinations(range(len(predicted)), 2)
    ]
    ordered = sqrt(sum(a * a for a, _ in signs) * sum(b * b for _, b in signs))
    return sum(a * b for a, b in signs) / ordered if ordered else None
