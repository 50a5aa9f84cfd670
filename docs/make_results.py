"""Train all models on some logs, and write docs/results.md from what their runs leave.

    python docs/make_results.py train RUNS criteo_kaggle=DIR avazu=DIR    RUNS/LOG/MODEL/seed_1, ...
    python docs/make_results.py sizes RUNS criteo_kaggle=DIR --models fcn RUNS/LOG/fcn_x16/seed_1
    python docs/make_results.py page RUNS docs/results.md                 and pictures/*.svg beside

Each run is `python -m recapp.train` of one thread, in a directory of its own. A run that has
metrics of the same settings is not run again, so the same command goes on where one was stopped.
`docs/parquet_of_logs.py` writes three of the logs. `--fuxictr PYTHON` and `--lightgbm PYTHON` train
models of FuxiCTR and boosted trees on the same rows (tests/speed).
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from recapp.reporting.drawing import COLUMN, SERIES_COLORS, Picture, legend_below, sheet
from recapp.settings.option_files import options, read_json

ROOT = Path(__file__).parent.parent
WIDTH = 100
SETTINGS = ("trainer.devices=1", "callbacks=none", "logger=none")
"""Of all runs: one rank, and no callback that chooses a checkpoint by the rows that measure."""


@dataclass(frozen=True)
class Log:
    """A log.

    Args:
        settings: The settings of its runs.
        fields: Its numbers and features: FFM and ONN have vectors of 4 columns for each.
        numbers: Whether it has numbers; those that are missing are flagged for trees.
        history: The column of a user's earlier items, if it has one, and that of the items.
    """

    settings: tuple[str, ...]
    fields: int
    numbers: bool = False
    history: tuple[str, str] | None = None


RARE = "dataset.min_frequency=2"
LOGS = {
    "avazu": Log(("dataset.buckets=null", RARE, "dataset.batch_size=128"), 22),
    "criteo_kaggle": Log(("dataset.buckets=log", RARE), 52, numbers=True),
    "movielens_1m": Log(
        ("dataset.buckets=null", "dataset.min_frequency=null"), 3, history=("history", "item")
    ),
    "open_bandit": Log(("dataset.buckets=log", RARE, "dataset.batch_size=128"), 15, True),
}
SEQUENCES = ("din", "bst")
FIELD_AWARE = ("ffm", "onn")
OF_FUXICTR = ("dlrm", "deepfm", "xdeepfm", "dcn", "dcnv2")
TREES = "lightgbm"
SIZES = {  # by about the factor of the dense parameters on Criteo's columns
    "dlrm": {
        1: ("model.bottom_layers=[64,16]", "model.top_layers=[64,1]"),
        4: ("model.bottom_layers=[128,16]", "model.top_layers=[256,64,1]"),
        16: ("model.bottom_layers=[256,16]", "model.top_layers=[1024,128,1]"),
        64: ("model.bottom_layers=[512,256,16]", "model.top_layers=[2048,1024,1]"),
    },
    "fcn": {
        1: ("tables.dim=4", "model.exponential_layers=1", "model.linear_layers=1"),
        4: ("tables.dim=4", "model.exponential_layers=4", "model.linear_layers=4"),
        16: ("tables.dim=8", "model.exponential_layers=4", "model.linear_layers=4"),
        64: ("tables.dim=16", "model.exponential_layers=4", "model.linear_layers=4"),
    },
    "rankmixer": {
        1: ("model.width=24",),
        4: ("model.width=56",),
        16: ("model.width=120",),
        64: ("model.width=248",),
    },
}


# ---- runs


def of_log(log: str, path: str) -> list[str]:
    """Return the settings of all runs on a log."""
    return [
        f"dataset={log}",
        f"dataset.path={Path(path).absolute()}",
        *SETTINGS,
        *LOGS[log].settings,
    ]


def overrides_of(log: str, path: str, model: str) -> list[str] | None:
    """Return the command line of a model on a log, without a seed; None if the log has no history
    and the model needs one.
    """
    overrides = [*of_log(log, path), f"model={model}"]
    history = LOGS[log].history
    if model in SEQUENCES and not history:
        return None
    if history and model != "logistic":
        overrides.append("tables.shared={{{}: {}}}".format(*history))
    if history and model in SEQUENCES:
        overrides.append(f"tables.sequences=[{history[0]}]")
    if model in FIELD_AWARE:
        overrides.append(f"tables.dim={4 * LOGS[log].fields}")
    return overrides


def runs(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the name, the program and the overrides of each run, the first seed of all first."""
    here = [sys.executable, "-m"]
    recapp = [*here, "recapp.train", "hydra.run.dir=."]
    paths = dict(pair.split("=", 1) for pair in arguments.logs)
    sizes = arguments.verb == "sizes"
    for seed in range(1, arguments.seeds + 1):
        for log, path in paths.items():
            for model in arguments.models or (SIZES if sizes else options("model")):
                overrides = overrides_of(log, path, model)
                if overrides is None:
                    continue
                for factor, more in SIZES[model].items() if sizes else ():
                    name = f"{log}/{model}_x{factor}/seed_{seed}"
                    yield name, recapp, [*overrides, *more, f"seed={seed}"]
                if sizes:
                    continue
                overrides.append(f"seed={seed}")
                yield f"{log}/{model}/seed_{seed}", recapp, overrides
                if arguments.fuxictr and model in OF_FUXICTR:
                    program = [*here, "tests.speed.fuxictr_beside", arguments.fuxictr]
                    yield f"{log}/fuxictr_{model}/seed_{seed}", program, overrides
            if arguments.lightgbm and not sizes:
                program = [*here, "tests.speed.boosted_trees", arguments.lightgbm]
                overrides = of_log(log, path)
                overrides += ["dataset.missing_flags=true"] if LOGS[log].numbers else []
                yield f"{log}/{TREES}/seed_{seed}", program, [*overrides, f"seed={seed}"]


def train(arguments: argparse.Namespace) -> int:
    """Train what has no metrics yet, and return the number of runs that failed."""
    failed = []
    for name, program, overrides in runs(arguments):
        directory = arguments.runs.absolute() / name
        if (found := read_run(directory)) and found["overrides"] == overrides:
            continue
        print(name, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with (directory / "log.txt").open("w") as log:
            done = subprocess.run(
                [*program, *overrides],
                stdout=log,
                stderr=log,
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        if done.returncode:
            failed.append(name)
    for name in failed:
        print(f"failed: {arguments.runs / name}/log.txt", file=sys.stderr)
    return len(failed)


# ---- results


def read_run(directory: Path) -> dict[str, Any] | None:
    """Return the metrics of a run with its settings and its largest memory; None if it has not
    ended well.
    """
    try:
        metrics = read_json(directory / "metrics.json")
        if metrics.get("status", "ok") not in ("ok", "undefined"):
            return None
        if "overrides" not in metrics:  # of recapp, whose metrics are for all uses
            metrics["overrides"] = yaml.safe_load((directory / ".hydra/overrides.yaml").read_text())
            memory = read_json(directory / "performance.json")["memory"]
            metrics["peak_bytes"] = max(rank["rss_peak"] for rank in memory)
    except (OSError, ValueError):
        return None
    return metrics


@dataclass(frozen=True)
class Line:
    """The runs of one model on one log, of all seeds."""

    log: str
    model: str
    runs: tuple[dict[str, Any], ...]

    def values(self, name: str) -> list[float]:
        """Return a number of each run that has it."""
        return [run[name] for run in self.runs if run.get(name) is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over the runs; None if no run has it."""
        values = self.values(name)
        return mean(values) if values else None

    @cached_property
    def settings(self) -> list[str]:
        """The settings of the runs, but for those that name model, seed and log."""
        named = ("seed", "model", "dataset", "dataset.path")
        return [o for o in self.runs[0]["overrides"] if o.partition("=")[0] not in named]

    def spread(self, name: str) -> str:
        """Return mean and range of a number below 1, as `.7588 .7570-.7603`."""
        values = self.values(name)
        if not values:
            return "-"
        low, high = share(min(values)), share(max(values))
        return share(mean(values)) + (f" {low}-{high}" if len(values) > 1 else "")


def share(value: float) -> str:
    """Return a number below 1 as `.7588`."""
    return f"{value:.4f}".removeprefix("0")


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of a directory of runs, by log and then the best first."""
    lines = []
    for directory in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        every = [read_run(seed) for seed in sorted(directory.glob("seed_*"))]
        if kept := tuple(run for run in every if run):
            lines.append(Line(directory.parent.name, directory.name, kept))
    return sorted(lines, key=lambda line: (line.log, -(line.mean("val_auc") or 0)))


# ---- the page

ABOUT = """\
Models on real logs. `docs/make_results.py` has trained them and written this page; it says how to
do so again.

AUC and log loss are those of the last rows of each log, in the order of its files, which no run
trained on or chose anything by: the mean over seeds, and the range from the least to the largest.
K / CPU s is thousands of samples that training takes in a second of CPU time, of all
threads of its process, without its start and its validation: runs share a machine, so that seconds
of a clock would count other programs, too. MB is the largest memory of the process. Both are means.
Dense and tables are numbers of trained parameters.

The lines of lightgbm are of another program beside them: boosted trees over the numbers and, for
each column of ids, the past share of positives and the past number of rows of its id; lists of ids
are left out. Leaves and rounds were chosen on the last tenth of the training rows.

The lines of fuxictr are FuxiCTR's forms of these models, put together from the layers of its
package and trained by its training step (Adam at 1e-3 over all parameters) for one epoch on one
thread: the same batches in the same order, the same ids, the same numbers scaled to 0 to 1, and
widths of the same settings. Its rows lie in memory; recapp reads and decodes its own meanwhile,
which its CPU time holds."""
HEAD = ("model", "AUC", "log loss", "k / CPU s", "MB", "dense", "tables")


def page_lines(lines: Sequence[Line], figures: dict[str, Picture]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Results", "", *ABOUT.split("\n"))
    for log in dict.fromkeys(line.log for line in lines):
        every = [line for line in lines if line.log == log]
        plain = [line for line in every if "_x" not in line.model]
        models = [line for line in plain if line.model != TREES] or plain
        common = [s for s in models[0].settings if all(s in other.settings for other in models)]
        rows = every[0].runs[0]
        yield from ("", f"## {log}", "")
        yield from _wrapped(
            f"{rows['rows_train']:,} rows to train on, {rows['rows_val']:,} to measure on. "
            f"Settings: {' '.join(f'`{setting}`' for setting in common)}."
        )
        yield from ("", *_table(plain), "", *_wrapped(_seeds(plain)))
        if further := _further(plain, common):
            yield from ("", *_wrapped(f"Further settings: {further}."))
        if figure := figures.get(log):
            yield from ("", *_wrapped(figure.caption), "")
            yield from _wrapped(f"![{figure.alt}](pictures/{figure.name}.svg)")
    yield from ("", "## How it was measured", "", *_facts(lines))


def _table(lines: Sequence[Line]) -> Iterator[str]:
    cells = [HEAD, *(_cells(line) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rules = [f"{'-' * (w + 1)}{':' if k > 2 else '-'}" for k, w in enumerate(widths)]
    for number, row in enumerate(cells):
        texts = [
            text.rjust(width) if k > 2 else text.ljust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(texts)} |"
        if not number:
            yield f"|{'|'.join(rules)}|"


def _cells(line: Line) -> tuple[str, ...]:
    rate = line.mean("samples_per_cpu_second")
    peak = line.mean("peak_bytes")
    return (
        line.model,
        line.spread("val_auc"),
        line.spread("val_log_loss"),
        f"{rate / 1e3:,.1f}" if rate else "-",
        f"{peak / 1e6:,.0f}" if peak else "-",
        _count(line.mean("dense_parameters")),
        _count(line.mean("table_parameters")),
    )


def _count(value: float | None) -> str:
    """Return a number of parameters in three digits, such as `1.20 M`; no parameters are `0`."""
    if value is None:
        return "-"
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"


def _seeds(lines: Sequence[Line]) -> str:
    most = max(len(line.runs) for line in lines)
    fewer = [f"{line.model} {len(line.runs)}" for line in lines if len(line.runs) < most]
    return f"Seeds: {most}." + (f" Fewer: {', '.join(fewer)}." if fewer else "")


def _further(lines: Sequence[Line], common: Sequence[str]) -> str:
    """Return which lines have which settings that not all lines have."""
    having: dict[str, list[str]] = {}
    for line in lines:
        for setting in line.settings:
            if setting not in common:
                having.setdefault(setting, []).append(line.model)
    texts = []
    for setting, models in having.items():
        others = [line.model for line in lines if line.model not in models]
        few = 2 * len(others) < len(models)
        of = f"all but {', '.join(others)}" if few and others else ", ".join(models)
        texts.append(f"{of if others else 'all'} `{setting}`")
    return "; ".join(texts)


def _facts(lines: Sequence[Line]) -> Iterator[str]:
    """Yield versions, this machine and dates."""
    every = [run for line in lines for run in line.runs]
    for key in dict.fromkeys(key for run in every for key in run if key.startswith("version_")):
        values = dict.fromkeys(str(run[key]) for run in every if key in run)
        yield f"- {key.removeprefix('version_')} {', '.join(values)}"
    trees = [f"{line.log}: {line.runs[0]['chosen']}" for line in lines if line.model == TREES]
    if trees:
        yield from _wrapped(f"- lightgbm, {'; '.join(trees)}")
    yield f"- {platform.processor() or platform.machine()}; one rank of one thread"
    days = sorted(str(run["date"])[:10] for run in every)
    yield f"- {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def quality_by_size(log: str, lines: Sequence[Line]) -> Picture | None:
    """Draw the mean AUC of each model and size against its dense parameters, with the range over
    seeds; None without sizes.
    """
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for line in lines:
        weights, auc = line.mean("dense_parameters"), line.values("val_auc")
        if "_x" in line.model and weights and auc:
            model = line.model.rpartition("_x")[0]
            points.setdefault(model, []).append((weights, mean(auc), min(auc), max(auc)))
    if not points:
        return None
    with sheet(COLUMN, 3.6) as drawn:
        texts = []
        for (model, of_one), color in zip(sorted(points.items()), SERIES_COLORS, strict=False):
            x, y, low, high = zip(*sorted(of_one), strict=True)
            drawn.axes[0].plot(x, y, "o-", color=color, label=model, linewidth=1.4, markersize=4)
            drawn.axes[0].vlines(x, low, high, color=color, linewidth=1.1)
            texts.append(
                f"{model} {y[0]:.4f} with {x[0]:,.0f} parameters to {y[-1]:.4f} with {x[-1]:,.0f}"
            )
        _set_scale(drawn.axes[0])
        drawn.axes[0].grid(True, axis="y")
        drawn.axes[0].set(xlabel="parameters of the dense part", ylabel="AUC")
        legend_below(drawn.figure, drawn.axes[0])
        return drawn.finish(
            f"quality_by_size_{log}",
            f"Quality by size, {log}",
            f"Mean AUC on {log}: {'; '.join(texts)}.",
            f"Mean AUC over {max(len(line.runs) for line in lines)} seeds against the parameters "
            "of the dense part, by wider and deeper layers; a line shows the range over seeds.",
        )


def _set_scale(chart: Any) -> None:
    """Make the axis of parameters logarithmic, with ticks in words: matplotlib's own are formulas,
    which a figure has as they are typed.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    chart.set_xscale("log")
    chart.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chart.xaxis.set_major_formatter(EngFormatter())
    chart.xaxis.set_minor_locator(NullLocator())


def write_page(folder: Path, page: Path) -> None:
    """Write the page of a directory of runs, and its figures."""
    lines = read_lines(folder)
    figures = {
        log: figure
        for log in dict.fromkeys(line.log for line in lines)
        if (figure := quality_by_size(log, [line for line in lines if line.log == log]))
    }
    (page.parent / "pictures").mkdir(parents=True, exist_ok=True)
    for figure in figures.values():
        figure.write(page.parent / "pictures")
    page.write_text("\n".join(page_lines(lines, figures)) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("train", "sizes"):
        of_runs = verbs.add_parser(verb)
        of_runs.add_argument("runs", type=Path, help="the directory of the runs")
        of_runs.add_argument("logs", nargs="+", help=f"LOG=DIR, of {', '.join(LOGS)}")
        of_runs.add_argument("--models", nargs="+", default=(), help="default: all")
        of_runs.add_argument("--seeds", type=int, default=3)
        of_runs.add_argument("--fuxictr", help="the Python of an environment with FuxiCTR")
        of_runs.add_argument("--lightgbm", help="the Python of an environment with LightGBM")
    of_page = verbs.add_parser("page")
    of_page.add_argument("runs", type=Path)
    of_page.add_argument("page", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.verb == "page":
        write_page(arguments.runs, arguments.page)
        return 0
    return min(train(arguments), 1)


if __name__ == "__main__":
    sys.exit(main())
