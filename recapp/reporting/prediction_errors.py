"""Compare predictions with runs: by phase, memory and ranks, and by the order of plans.

Runs that repeat one plan (a sweep over seeds and plans takes turns) count as one: their median,
with the least and the most of them: two plans whose ranges overlap count as equal on that machine.
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
    """Return the records of every plan, as of one run: medians over its repeats, `least` and `most`
    measured, and how many `runs` there were.

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
    """Count the pairs of plans whose measured ranges do not overlap, and how many of them come in
    the predicted order.
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
    """Return the records of one run: the step, each phase (the mean of the ranks) and the bytes of
    the fullest rank.

    Args:
        name: The name of the run.
        predicted: Its `predicted.json`, an explained plan.
        measured: Its `performance.json`.
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
    """Return how step and traffic grow with the ranks: a record for each run with its plan, batch
    and ranks, and the step and the bytes sent by a rank beside their prediction.

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
    """Return how far two lists have one order: 1 for one order, -1 for opposite orders (Kendall's
    tau-b, 1945: of equal numbers none comes first).

    None where a list orders nothing: fewer than two numbers, or all equal.
    """
    pairs = list(combinations(range(len(predicted)), 2))
    signs = [
        (_sign(predicted[i] - predicted[j]), _sign(measured[i] - measured[j])) for i, j in pairs
    ]
    ordered = sqrt(sum(a * a for a, _ in signs) * sum(b * b for _, b in signs))
    return sum(a * b for a, b in signs) / ordered if ordered else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
