"""Draw the records of a measurement as pictures next to the records.

kernels      roofline.png              operations per byte against operations per second, under
                                       the roof of the copy bandwidth
step         phases.png                the milliseconds of a step's phases, plan by plan
strategies   latency.png, memory.png   a bar for each strategy
inference    answers.png              p50 of each way and batch size, with p99 above it
dynamic      pauses.png                the time of each step with new keys, as the table grew
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[dict[str, Any]]
DPI = 150
COLORS = [f"C{i}" for i in range(10)] + ["black", "gold", "navy", "lime", "crimson", "silver"]
LATENCY_TITLE = "Latency by Sharding Strategy"
MEMORY_TITLE = "Memory Usage by Sharding Strategy"


def draw(verb: str, rows: Records, folder: Path) -> list[str]:
    """Draw the pictures of a measurement and return their paths.

    Args:
        verb: The measurement.
        rows: Its records.
        folder: The directory of the pictures.
    """
    from matplotlib.figure import Figure

    paths = []
    for name, picture in PICTURES.get(verb, {}).items():
        figure = Figure(
            figsize=(9, 3 + 0.35 * max(7, len(rows) if picture is phases else 0)),
            layout="constrained",
        )
        picture(figure.add_subplot(), rows)
        figure.savefig(folder / name, dpi=DPI)
        paths.append(str(folder / name))
    return paths


def roofline(axes: "Axes", rows: Records) -> None:
    """Draw forward and backward of each workload as points, at the smallest number of threads.

    A point on the roof moves bytes as fast as a plain copy.
    """
    threads = min(row["threads"] for row in rows)
    shown = [row for row in rows if row["threads"] == threads]
    bandwidth = sum(row["copy_gb_per_s"] for row in shown) / len(shown)
    work = []
    for i, row in enumerate(shown):
        for part, marker in (("forward", "o"), ("backward", "s")):
            intensity = row[f"{part}_flops"] / row[f"{part}_bytes"]
            rate = row[f"{part}_flops"] / row[f"{part}_median_ms"] / 1e6
            axes.plot(
                intensity,
                rate,
                marker,
                color=f"C{i}",
                markersize=9,
                label=f"{row['workload']} {part}",
            )
            work.append(intensity)
    ends = [min(work) / 2, max(work) * 2]
    axes.plot(
        ends, [bandwidth * x for x in ends], "k--", label=f"copy bandwidth, {bandwidth:.1f} GB/s"
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must move",
        ylabel="GFLOP/s",
        title=f"Roofline of lookup and update, {threads} thread{'s' if threads > 1 else ''}",
    )
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.25)


def phases(axes: "Axes", rows: Records) -> None:
    """Draw the step of each plan as a bar of its phases."""
    names = list(dict.fromkeys(name for row in rows for name in _phases_of(row)))
    labels = [f"{row['workload']} {row['plan']}\n{row['transport']}" for row in rows]
    left = [0.0] * len(rows)
    for i, name in enumerate(names):
        spent = [row.get(f"phase_{name}_ms", 0.0) for row in rows]
        axes.barh(labels, spent, left=left, label=name, color=COLORS[i % len(COLORS)])
        left = [a + b for a, b in zip(left, spent, strict=True)]
    axes.invert_yaxis()
    axes.set(
        xlabel="ms (mean of the middle half of steps, mean of the ranks)",
        title="Phases of the embedding step",
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _phases_of(row: dict[str, Any]) -> list[str]:
    return [
        key.removeprefix("phase_").removesuffix("_ms") for key in row if key.startswith("phase_")
    ]


def latency(axes: "Axes", rows: Records) -> None:
    """Draw a bar for each strategy, batch size and pass, with quartiles."""

    def group(row: dict[str, Any]) -> str:
        return f"{row['step']}, batch {row['batch_size']:,}, {row['ids']}"

    _bars(axes, rows, group, "batch_time_ms")
    axes.set(yscale="log", ylabel="ms per batch (median and quartiles)", title=LATENCY_TITLE)


def memory(axes: "Axes", rows: Records) -> None:
    """Draw a bar for each strategy, at the largest batch: the memory in use, and its peak."""
    most = max(row["batch_size"] for row in rows)
    last = {row["strategy"]: row for row in rows if row["batch_size"] == most}
    names = list(last)
    axes.bar(
        names,
        [last[n]["memory_peak_gb"] for n in names],
        color="C0",
        alpha=0.4,
        label="peak during steps",
    )
    axes.bar(
        names,
        [last[n]["memory_gb"] for n in names],
        color="C0",
        label="tables, optimiser state and buffers",
    )
    axes.set(ylabel="GB of the rank that holds most", title=MEMORY_TITLE)
    axes.legend()


def pauses(axes: "Axes", rows: Records) -> None:
    """Draw the time of each step with new keys over the number of keys in the table."""
    (row,) = (row for row in rows if "batch_ms" in row)
    keys = [(i + 1) * row["batch_size"] / 1e6 for i in range(len(row["batch_ms"]))]
    axes.plot(keys, row["batch_ms"], ".", color="C0", label="dynamic table, new keys")
    axes.plot(keys, row["static_batch_ms"], ".", color="C1", label="static table")
    axes.axhline(row["median_ms"], color="C0", linewidth=0.8, label="its median")
    axes.set(
        ylim=(0, None),
        xlabel="millions of keys in the table",
        ylabel=f"ms per step of {row['batch_size']:,} keys",
        title="Steps of a growing table",
    )
    axes.legend(fontsize=8)


def answers(axes: "Axes", rows: Records) -> None:
    """Draw a bar for each contender and batch size: the p50 of a row, and its p99 above, on the
    smallest number of threads.
    """
    threads = min(row["threads"] for row in rows)
    shown = []
    for row in rows:
        if row["threads"] == threads:
            p50 = row["median_ms"] / row["batch_size"] * 1e3
            p99 = row["p99_ms"] / row["batch_size"] * 1e3
            name = f"{row['way']}\n{row['model']} {row['quantize']}"
            shown.append({**row, "strategy": name, "us": p50, "us_q1": p50, "us_q3": p99})
    _bars(axes, shown, lambda row: f"batch {row['batch_size']:,}", "us")
    axes.set(yscale="log", ylabel="µs a row (p50, and p99 above)", title="How fast a model answers")
    axes.tick_params(axis="x", labelsize=6, rotation=90)
    axes.legend(fontsize=8, loc="upper right")


def _bars(axes: "Axes", rows: Records, group: Callable[[dict[str, Any]], str], key: str) -> None:
    """Draw bars side by side: strategies along the axis, a colour for each group.

    Args:
        axes: The axes to draw on.
        rows: The records.
        group: Returns the label of a record's group.
        key: The entry for the height of a bar, with quartiles.
    """
    strategies, groups = (
        list(dict.fromkeys(values))
        for values in ([row["strategy"] for row in rows], [group(row) for row in rows])
    )
    width = 0.8 / len(groups)
    for i, name in enumerate(groups):
        own = {row["strategy"]: row for row in rows if group(row) == name}
        positions = [strategies.index(s) + (i + 0.5) * width - 0.4 for s in own]
        heights = [row[key] for row in own.values()]
        below = [max(0.0, row[key] - row[f"{key}_q1"]) for row in own.values()]
        above = [max(0.0, row[f"{key}_q3"] - row[key]) for row in own.values()]
        axes.bar(
            positions, heights, width, yerr=[below, above], label=name, error_kw={"linewidth": 0.8}
        )
    axes.set_xticks(range(len(strategies)), strategies)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.06))


PICTURES: dict[str, dict[str, Callable[["Axes", Records], None]]] = {
    "kernels": {"roofline.png": roofline},
    "step": {"phases.png": phases},
    "dynamic": {"pauses.png": pauses},
    "inference": {"answers.png": answers},
    "strategies": {"latency.png": latency, "memory.png": memory},
}
