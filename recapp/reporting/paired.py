"""Two evaluations of the same rows: whether their metrics differ by more than noise.

    a/details.json, b/details.json -> value of b minus value of a, for each sample of the rows
                                   -> the interval of the difference

The bootstrap gives a row the same weight in both evaluations (`recapp/tasks/bootstrap.py`), so what
makes the rows hard for both models cancels (a paired bootstrap; Efron and Tibshirani 1993, "An
Introduction to the Bootstrap").
"""

from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.reporting.details import interval, read_details
from recapp.reporting.drawing import BAR, COLUMN, QUIET, Picture, sheet
from recapp.reporting.record import read_document, read_measures

LINE = 0.42  # inches of a metric


def differences(a: Path, b: Path) -> list[dict[str, Any]]:
    """Return a record for each metric that both evaluations have: its `title`, the values `a` and
    `b`, the `difference` b - a, the ends `low` and `high` of its 95 % interval, and the `verdict`.

    Args:
        a: The directory of an evaluation with `metrics.bootstrap`.
        b: The directory of the other one.

    Raises:
        ConfigError: One does not exist or has no bootstrap, or they were measured on different
            rows.
    """
    first = _bootstrap("a", a)
    second = _bootstrap("b", b)
    if any(first.get(each) != second.get(each) for each in ("drawn", "rows")):
        raise ConfigError(
            f"a={a} b={b}: were measured on other rows or labels, with another metrics.bootstrap "
            "or by an older recapp: evaluate both on the same data"
        )
    measures = read_measures(a, b)
    values = [_values(one) for one in (a, b)]
    rows = []
    for name, of_a in first["metrics"].items():
        of_b = second["metrics"].get(name)
        ends = None if of_b is None else _ends(of_a, of_b)
        if ends is None or name not in values[0] or name not in values[1]:
            continue
        low, high = ends
        measure = measures.get(name)
        better = measure.better if measure else None
        rows.append(
            {
                "title": measure.title if measure else name,
                "a": values[0][name],
                "b": values[1][name],
                "difference": values[1][name] - values[0][name],
                "low": low,
                "high": high,
                "verdict": _verdict(low, high, better),
            }
        )
    if not rows:
        raise ConfigError(f"a={a} b={b}: have no metric with intervals in common")
    return rows


def _bootstrap(side: str, directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConfigError(f"{side}={directory}: no such directory")
    found: dict[str, Any] | None = read_details(directory).get("bootstrap")
    if not found:
        raise ConfigError(
            f"{side}={directory}: has no bootstrap: python -m recapp.eval ckpt_path=... "
            "metrics.bootstrap=200 hydra.run.dir=DIR writes one"
        )
    return found


def _values(directory: Path) -> dict[str, float]:
    """Return the metrics of an evaluation by name."""
    metrics = read_document(directory / "metrics.json") or {}
    split = f"{metrics.get('split', 'val')}_"
    return {
        name.removeprefix(split): value
        for name, value in metrics.items()
        if name.startswith(split) and isinstance(value, float)
    }


def _ends(of_a: list[float], of_b: list[float]) -> tuple[float, float] | None:
    if None in (*of_a, *of_b):
        return None
    return interval([y - x for x, y in zip(of_a, of_b, strict=True)])


def _verdict(low: float, high: float, better: str | None) -> str:
    if low <= 0 <= high:
        return "noise"
    if better is None:
        return "differs"
    return "b is better" if (low > 0) == (better == "max") else "a is better"


def picture(rows: list[dict[str, Any]]) -> Picture:
    """Draw the difference of each metric with its interval.

    Args:
        rows: The records of `differences`.
    """
    with sheet(COLUMN, 1.0 + LINE * len(rows)) as s:
        axes = s.axes[0]
        for place, row in enumerate(rows):
            axes.plot([row["low"], row["high"]], [place, place], color=BAR, linewidth=2)
            axes.plot(row["difference"], place, "o", color=BAR, markersize=6)
        axes.axvline(0, color=QUIET, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=6)
        axes.set(xlabel="b - a")
        axes.grid(True, axis="x")
        read = "; ".join(f"{r['title']} {r['difference']:+.5f}, {r['verdict']}" for r in rows)
        caption = "Dots are differences, lines 95 % intervals; one that crosses 0 may be noise."
        return s.finish("difference", "Difference of two evaluations", f"Dots: {read}.", caption)
