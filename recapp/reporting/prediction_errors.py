"""Compares predictions with runs: by phase, memory and ranks, and by the order of plans.

Runs that repeat one plan count as one: the median, with the least and the greatest value. (A sweep
over seeds and plans alternates the plans.) Two plans whose ranges overlap count as equal on the
machine.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import sqrt
from statistics import median
from typing import Any

from recapp.planner.cost import PHASES

HELD = ("weights", "state", "buffers")
STEP = "step, ms"
Run = tuple[str, Mapping[str, Any], Mapping[str, Any]]  # name, `predicted.json`, `performance.json`


def compared(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the records of every plan: medians over its runs, the `least` and the `most` measured
    value, and the number of `runs`.

    Args:
        runs: Name, `predicted.json` and `performance.json` of each run.
    """
    repeats: dict[Any, list[list[dict[str, Any]]]] = {}
    for name, predicted, measured in runs:
        held = tuple(r["weights"] for r in predicted["ranks"])
        key = predicted["name"], held, measured.get("batch_per_rank"), predicted.get("hardware")
        repeats.setdefault(key, []).append(_of_run(name, predicted, measured))
    return [_merged(rows) for plan in repeats.values() for rows in zip(*plan, strict=True)]


def _merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seen = [r["measured"] for r in rows]
    merged = _row(
        ", ".join(r["run"] for r in rows),
        rows[0]["plan"],
        rows[0]["what"],
        median(r["predicted"] for r in rows),
        median(seen),
    )
    return merged | {"least": min(seen), "most": max(seen), "runs": len(rows)}


def order_of_plans(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return Kendall's tau of the plans' predicted and measured step times.

    Args:
        rows: The records that `compared` returns.
    """
    steps = [r for r in rows if r["what"] == STEP]
    return kendall_tau([r["predicted"] for r in steps], [r["measured"] for r in steps])


def separated_pairs(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the number of pairs of plans whose measured ranges do not overlap, and the number of
    these pairs that have the predicted order.
    """
    steps = [r for r in rows if r["what"] == STEP]
    pairs = [
        (a, b)
        for a, b in combinations(sorted(steps, key=lambda r: r["measured"]), 2)
        if a["most"] < b["least"]
    ]
    return len(pairs), sum(a["predicted"] < b["predicted"] for a, b in pairs)


def _of_run(
    name: str, predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the records of one run: the step, each phase (as the mean over the ranks) and the
    bytes of the fullest rank.

    Args:
        name: The name of the run.
        predicted: The run's `predicted.json`, an explained plan.
        measured: The run's `performance.json`.
    """

    def mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
        return sum(float(r[key]) for r in records) / len(records)

    rows = [_row(name, predicted["name"], STEP, predicted["step_ms"], measured["step_ms"])]
    rows += [
        _row(
            name,
            predicted["name"],
            f"{p}, ms",
            mean(predicted["ranks"], f"{p}_ms"),
            mean(measured["phases_ms"], p),
        )
        for p in PHASES
    ]
    for key in (*HELD, "bytes"):
        ours = [
            r["weights"] + r["state"] + r["buffers"] if key == "bytes" else r[key]
            for r in predicted["ranks"]
        ]
        theirs = [sum(r[k] for k in HELD) if key == "bytes" else r[key] for r in measured["memory"]]
        rows.append(
            _row(
                name,
                predicted["name"],
                "tables, MB" if key == "bytes" else f"{key}, MB",
                max(ours) / 1e6,
                max(theirs) / 1e6,
            )
        )
    return rows


def compared_by_ranks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the growth of step and traffic with the ranks: a record for each run with plan, batch,
    ranks, and measured and predicted step and bytes sent by a rank.

    Args:
        runs: Name, `predicted.json` and `performance.json` of each run.
    """
    rows = []
    for name, predicted, measured in runs:
        ranks = measured["ranks"]
        sent = measured["sent_bytes"]
        predicted_bytes = sum(b["bytes"] for b in predicted["between_ranks"]) / ranks
        seen = sum(sent) / ranks
        rows.append(
            {
                "run": name,
                "plan": predicted["name"],
                "ranks": ranks,
                "batch_per_rank": measured["batch_per_rank"],
                "hardware": predicted["hardware"],
                "step_ms": measured["step_ms"],
                "predicted_step_ms": predicted["step_ms"],
                "step_error": predicted["step_ms"] / measured["step_ms"] - 1,
                "sent_per_rank": seen,
                "predicted_sent_per_rank": predicted_bytes,
                "sent_error": predicted_bytes / seen - 1 if seen else None,
            }
        )
    return sorted(rows, key=lambda r: (r["plan"], r["ranks"], r["batch_per_rank"], r["run"]))


def _row(run: str, plan: str, what: str, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "run": run,
        "plan": plan,
        "what": what,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1 if measured else None,
    }


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return Kendall's tau-b (1945) of two lists: 1 for the same order, -1 for opposite orders.
    Equal numbers have no order.

    Return None if a list has no order: fewer than two numbers, or all equal.
    """
    pairs = list(combinations(range(len(predicted)), 2))
    signs = [
        (_sign(predicted[i] - predicted[j]), _sign(measured[i] - measured[j])) for i, j in pairs
    ]
    ordered = sqrt(sum(a * a for a, _ in signs) * sum(b * b for _, b in signs))
    return sum(a * b for a, b in signs) / ordered if ordered else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
