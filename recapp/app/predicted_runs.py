"""The verbs of `recapp.plan` that compare predictions with runs: `check` and `scale`."""

from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp import console
from recapp.app.job import Job
from recapp.app.paper_plans import BEST
from recapp.errors import ConfigError, suggest
from recapp.planner.constraints import MODES
from recapp.planner.hardware import default_hardware
from recapp.planner.topology import hardware_of
from recapp.recipe.commands import OnPaper
from recapp.recipe.own_sharding_types import register_own_types
from recapp.reporting.prediction_errors import (
    STEP,
    compared,
    compared_by_ranks,
    order_of_plans,
    separated_pairs,
)
from recapp.reporting.record import (
    PERFORMANCE_FILE,
    PREDICTED_FILE,
    read_document,
    read_performance,
)
from recapp.reporting.scaling import scaled
from recapp.settings.records import to_plain
from recapp.settings.values import shown
from recapp.sharding.sharding_types import SHARDING_TYPES

Settings = dict[str, Any]


def check(recipe: OnPaper, job: Job) -> None:
    """Print predictions for runs next to their measurements."""
    if recipe.path is None:
        raise ConfigError(
            "path must be given: a run or a sweep of recapp.train, path=outputs/first"
        )
    rows = compared(measured_runs(recipe.path))
    tau = order_of_plans(rows)
    steps = [row for row in rows if row["what"] == STEP]
    apart, right = separated_pairs(rows)
    if recipe.format == "json":
        console.emit_document(
            {"rows": rows, "kendall_tau": tau, "pairs_told_apart": apart, "pairs_in_order": right}
        )
        return
    columns = [
        console.Column("run", "run"),
        console.Column("plan", "plan"),
        console.Column("what", "what"),
        console.Column("predicted", "predicted", ",.3f"),
        console.Column("measured", "measured", ",.3f"),
        console.Column("error", "error", "+.1%"),
    ]
    if any(row["runs"] > 1 for row in rows):
        columns[5:5] = [
            console.Column("least", "least", ",.3f"),
            console.Column("most", "most", ",.3f"),
        ]
    console.print_table(rows, columns, title="Predicted and measured")
    if tau is not None:
        print(
            f"\nKendall's tau of {len(steps)} plans' step times: {tau:.2f} (1: the order of plans "
            "is right, -1: it is reversed)"
        )
        if any(row["runs"] > 1 for row in steps):
            pairs = len(steps) * (len(steps) - 1) // 2
            print(
                f"Pairs of plans whose runs do not overlap: {apart} of {pairs}; in the predicted "
                f"order: {right}"
            )


def measured_runs(path: str) -> list[tuple[str, Settings, Settings]]:
    """Return name, prediction and measurement of every run below a directory.

    Raises:
        ConfigError: The directory does not exist, or no run has both.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"path={path}: there is no such directory")
    found = [
        (str(d.relative_to(path)) if d != Path(path) else d.name, prediction, measured)
        for d in sorted({f.parent for f in Path(path).rglob(PERFORMANCE_FILE)})
        if (prediction := read_document(d / PREDICTED_FILE)) is not None
        and (measured := read_performance(d)) is not None
    ]
    if not found:
        raise ConfigError(
            f"path={path}: no run there has {PERFORMANCE_FILE} and {PREDICTED_FILE}: name a run "
            "or a sweep of python -m recapp.train"
        )
    return found


def scale(recipe: OnPaper, job: Job) -> None:
    """Print step time, memory and bytes for growing numbers of ranks."""
    register_own_types(recipe)
    known = [BEST, *SHARDING_TYPES]
    if not recipe.ranks:
        raise ConfigError("ranks=[]: must be a list of numbers of ranks, such as ranks=[8,16,32]")
    chosen = [recipe.plans] if isinstance(recipe.plans, str) else list(recipe.plans)
    for name in chosen:
        if name not in known:
            said = shown(to_plain(recipe.plans))
            raise ConfigError(f"plans={said}: {name}: {suggest(name, known)}")
    checked = compared_by_ranks(measured_runs(recipe.path)) if recipe.path is not None else []
    hardware = hardware_of(recipe.topology.hardware) or default_hardware("cpu")
    sizes = 2 * len(MODES) * len(recipe.ranks) * len(chosen)
    with console.progress("planning, sizes", sizes) as advance:
        rows = scaled(
            sorted(recipe.ranks),
            chosen,
            hardware,
            recipe.rules,
            recipe.weak_batch,
            advance,
        )
    if recipe.format == "json":
        console.emit_document({"rows": rows, "checked": checked})
        return
    columns = [
        console.Column("growth", "growth"),
        console.Column("plan", "plan"),
        console.Column("mode", "mode"),
        console.Column("ranks", "ranks"),
        console.Column("step_ms", "step\nms", ",.2f"),
        console.Column("efficiency", "effi-\nciency", ".0%"),
        console.Column("bytes_per_rank", "GB a\nrank", ",.1f", 1e9),
        console.Column("sent_per_rank", "MB sent\na rank", ",.1f", 1e6),
        console.Column("least_sent_per_rank", "at\nleast", ",.1f", 1e6),
    ]
    console.print_table(rows, columns, title=f"MLPerf's tables on {hardware.name}; -: no room")
    _print_checked(checked, hardware.name)
    if recipe.out:
        from recapp.reporting.scaling import draw_scale

        for path in draw_scale(rows, Path(recipe.out)):
            console.note(f"written {console.short_path(path)}")


def _print_checked(rows: list[Settings], hardware: str) -> None:
    if not rows:
        print("\nNot checked: recapp.train -m trainer.devices=1,2,4, then path=SWEEP here")
        return
    columns = [
        console.Column("plan", "plan"),
        console.Column("ranks", "ranks"),
        console.Column("batch_per_rank", "batch a\nrank", ","),
        console.Column("step_ms", "step\nms", ",.2f"),
        console.Column("predicted_step_ms", "pre-\ndicted", ",.2f"),
        console.Column("step_error", "error", "+.0%"),
        console.Column("sent_per_rank", "MB sent\na rank", ",.3f", 1e6),
        console.Column("predicted_sent_per_rank", "pre-\ndicted", ",.3f", 1e6),
        console.Column("sent_error", "error", "+.1%"),
    ]
    print()
    console.print_table(rows, columns, title="Checked against runs: measured and predicted")
    others = sorted({r["hardware"] for r in rows} - {hardware})
    if others:
        print(
            fill(
                f"The runs' predictions are priced for {', '.join(others)}; "
                "topology.hardware=FILE in training takes what growth is priced with.",
                get_terminal_size((80, 24)).columns,
            )
        )
