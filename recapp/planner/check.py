"""What was predicted of runs against what they measured: by phase, memory and ranks, and whether the order of plans is right."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from recapp.planner.cost import PHASES

HELD = ("weights", "state", "buffers")


def compared(name: str, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of one run: the step, each phase (the mean of the ranks) and the bytes of the fullest rank.

    Args:
        name: of the run.
        predicted: `predicted.json`: an explained plan.
        measured: `performance.json`.
    """
    def mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
        return sum(float(r[key]) for r in records) / len(records)

    rows = [_row(name, predicted["name"], "step, ms", predicted["step_ms"], measured["step_ms"])]
    rows += [_row(name, predicted["name"], f"{p}, ms", mean(predicted["ranks"], f"{p}_ms"), mean(measured["phases_ms"], p)) for p in PHASES]
    for key in (*HELD, "bytes"):
        ours = [r["weights"] + r["state"] + r["buffers"] if key == "bytes" else r[key] for r in predicted["ranks"]]
        theirs = [sum(r[k] for k in HELD) if key == "bytes" else r[key] for r in measured["memory"]]
        rows.append(_row(name, predicted["name"], "tables, MB" if key == "bytes" else f"{key}, MB", max(ours) / 1e6, max(theirs) / 1e6))
    return rows


def compared_by_ranks(runs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Growth as it was measured: a record for each run by plan, batch and ranks, step and bytes sent by a rank beside their prediction.

    Args:
        runs: name, `predicted.json` and `performance.json` of each.
    """
    rows = []
    for name, predicted, measured in runs:
        ranks, sent = measured["ranks"], measured["sent_bytes"]
        said, seen = sum(b["bytes"] for b in predicted["between_ranks"]) / ranks, sum(sent) / ranks
        rows.append({"run": name, "plan": predicted["name"], "ranks": ranks, "batch_per_rank": measured["batch_per_rank"],
                     "hardware": predicted["hardware"], "step_ms": measured["step_ms"], "predicted_step_ms": predicted["step_ms"],
                     "step_error": predicted["step_ms"] / measured["step_ms"] - 1, "sent_per_rank": seen, "predicted_sent_per_rank": said,
                     "sent_error": said / seen - 1 if seen else None})
    return sorted(rows, key=lambda r: (r["plan"], r["ranks"], r["batch_per_rank"], r["run"]))


def _row(run: str, plan: str, what: str, predicted: float, measured: float) -> dict[str, Any]:
    return {"run": run, "plan": plan, "what": what, "predicted": predicted, "measured": measured,
            "error": predicted / measured - 1 if measured else None}


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Whether two lists have one order: 1 the same, -1 the opposite (Kendall's tau-a, 1938). None for fewer than two."""
    pairs = list(combinations(range(len(predicted)), 2))
    if not pairs:
        return None
    agree = sum(_sign(predicted[i] - predicted[j]) * _sign(measured[i] - measured[j]) for i, j in pairs)
    return agree / len(pairs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
