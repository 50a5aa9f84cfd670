"""Pictures of scaling: step time, efficiency and bytes by the number of ranks, with a line for each
plan and mode.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("scale.png", "scale.svg")
STYLES = {"unique": "-", "pooled": "--"}
PANELS = (
    ("step_ms", 1.0, "step, ms"),
    ("efficiency", 0.01, "efficiency, %"),
    ("sent_per_rank", 1e6, "sent by a rank in a step, MB"),
)


def draw_scale(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw step time, efficiency and bytes by the number of ranks.

    Args:
        rows: The records of `recapp.reporting.scaling.scaled`.
        folder: The directory for the pictures; made if it does not exist.

    Returns:
        The paths of the pictures.
    """
    from matplotlib.figure import Figure

    growths, plans = (list(dict.fromkeys(r[key] for r in rows)) for key in ("growth", "plan"))
    figure = Figure(figsize=(5 * len(PANELS), 4.2 * len(growths)), layout="constrained")
    all_axes = figure.subplots(len(growths), len(PANELS), squeeze=False)
    for growth, line in zip(growths, all_axes, strict=True):
        for (key, unit, label), axes in zip(PANELS, line, strict=True):
            for number, plan in enumerate(plans):
                for mode, style in STYLES.items():
                    points = [
                        (r["ranks"], r[key] / unit)
                        for r in rows
                        if (r["growth"], r["plan"], r["mode"]) == (growth, plan, mode)
                        and r[key] is not None
                    ]
                    if points:
                        axes.plot(
                            *zip(*points, strict=True),
                            style,
                            marker="o",
                            markersize=3,
                            color=f"C{number}",
                            label=f"{plan}, {mode}",
                        )
            if key == "sent_per_rank":
                least = {
                    r["ranks"]: r["least_sent_per_rank"] / unit
                    for r in rows
                    if r["growth"] == growth and r[key] is not None
                }
                axes.plot(
                    list(least),
                    list(least.values()),
                    ":",
                    color="black",
                    label="least, without replicas",
                )
            axes.set(
                xscale="log",
                yscale="linear" if key == "efficiency" else "log",
                xlabel="ranks",
                ylabel=label,
                title=(
                    f"{growth}: "
                    f"{'a batch for each rank' if growth == 'weak' else 'one batch for all ranks'}"
                ),
            )
            axes.set_xscale("log", base=2)
            axes.grid(True, which="both", alpha=0.25)
    figure.legend(
        *all_axes[0][-1].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in NAMES]
