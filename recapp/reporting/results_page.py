"""The page of `recapp.results`: a table for each log, and the figure of quality by size.

    lines: mean and range over the seeds -> results.md, pictures/*.svg

The page is written by recapp alone, so that it can be written again after further runs.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from recapp.errors import ConfigError
from recapp.reporting.about import VERSION
from recapp.reporting.record import write_whole
from recapp.reporting.result_lines import Line
from recapp.reporting.size_figure import quality_by_size

WIDTH = 100
HEAD = ("model", "AUC", "log loss", "k / CPU s", "MB", "dense", "tables")
"""The titles of the table of a log."""
RUN_KEYS = ("seed", "model", "dataset", "dataset.path")
"""Settings that differ between the runs of a page by its purpose."""
ABOUT = """\
Models on real logs, trained and measured by `python -m recapp.results`, which wrote this page.

AUC and log loss are those of the last rows of each log, in the order of its files, which no run
trained on or chose anything by: the mean over seeds, and the range from the least to the largest.
K / CPU s is thousands of samples that training takes in a second of CPU time, of all
threads of its process, without its start and its validation: runs share a machine, so that seconds
of a clock would count other programs, too. MB is the largest memory of the process. Both are means.
Dense and tables are numbers of trained parameters."""

TREES = """\
The lines of lightgbm are of another program beside them: boosted trees over the numbers and, for
each column of ids, the past share of positives and the past number of rows of its id; lists of ids
are left out. Leaves and rounds were chosen on the last tenth of the training rows."""

FUXICTR = """\
The lines of fuxictr are FuxiCTR's forms of these models, put together from the layers of its
package and trained by its training step (Adam at 1e-3 over all parameters) for one epoch on one
thread: the same batches in the same order, the same ids, the same numbers scaled to 0 to 1, and
widths of the same settings. Its rows lie in memory; recapp reads and decodes its own meanwhile,
which its CPU time holds."""


def table(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a flat record for each line."""
    measured = ("samples_per_cpu_second", "peak_bytes", "dense_parameters", "table_parameters")
    return [
        {
            "log": line.log,
            "model": f"{line.model} x{line.size}" if line.size else line.model,
            "seeds": len(line.runs),
            **{name: line.mean(f"val_{name}") for name in ("auc", "log_loss")},
            **{name: line.mean(name) for name in measured},
        }
        for line in lines
    ]


def check_page(page: Path) -> None:
    """Make the directory of the page, and check that files can be written there.

    Args:
        page: The page.

    Raises:
        ConfigError: They cannot, or the page is a directory.
    """
    if page.is_dir():
        raise ConfigError(f"page={page}: is a directory: name a file, page={page}/results.md")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=page.parent):
            pass
    except OSError as error:
        raise _unwritable(page, error) from error


def write_page(lines: Sequence[Line], page: Path) -> list[Path]:
    """Write the page and its figures, and return their paths.

    Args:
        lines: The results.
        page: The page. Figures lie in the directory `pictures` beside it.

    Raises:
        ConfigError: A file cannot be written.
    """
    figures: list[Path] = []
    pictures = [
        picture
        for log in dict.fromkeys(line.log for line in lines)
        if (picture := quality_by_size(log, [x for x in lines if x.log == log and x.size]))
    ]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        if pictures:
            (page.parent / "pictures").mkdir(exist_ok=True)
        for picture in pictures:
            figures.append(picture.write(page.parent / "pictures"))
        names = {picture.name: (picture.alt, picture.caption) for picture in pictures}
        write_whole(page, "\n".join(page_lines(lines, names)) + "\n")
    except OSError as error:
        raise _unwritable(page, error) from error
    return [page, *figures]


def _unwritable(page: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"page={page}: cannot be written ({error.strerror}): name a file in another directory"
    )


def page_lines(lines: Sequence[Line], figures: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        lines: The results.
        figures: The description and the caption of each figure, by its name.
    """
    yield "# Results"
    yield ""
    yield from ABOUT.split("\n")
    if any(line.model == "lightgbm" for line in lines):
        yield ""
        yield from TREES.split("\n")
    if any(line.model.startswith("fuxictr_") for line in lines):
        yield ""
        yield from FUXICTR.split("\n")
    for log in dict.fromkeys(line.log for line in lines):
        here = [line for line in lines if line.log == log]
        yield ""
        yield f"## {log}"
        yield ""
        yield from _about_log(here)
        if plain := [line for line in here if not line.size]:
            yield ""
            yield from _table(plain)
            yield from _fewer_seeds(plain)
            yield from _further_settings(plain, here)
        if name := next((name for name in figures if name == f"quality_by_size_{log}"), None):
            alt, caption = figures[name]
            yield ""
            yield from _wrapped(caption)
            yield ""
            yield from _wrapped(f"![{alt}](pictures/{name}.svg)")
    yield ""
    yield "## How it was measured"
    yield ""
    yield from _facts(lines)


def _about_log(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the rows of a log, and the settings that all of its runs have."""
    runs = [run for line in lines for run in line.runs]
    rows = dict.fromkeys((run["rows_train"], run["rows_val"]) for run in runs)
    said = "; ".join(f"{a:,} rows to train on, {b:,} to measure on" for a, b in rows)
    shown = " ".join(f"`{setting}`" for setting in _common_settings(lines))
    yield from _wrapped(f"{said}. Settings: {shown}.")


def _settings(run: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run as its command line has them, the last one of each name."""
    found = {override.partition("=")[0]: override for override in run["overrides"]}
    return [setting for name, setting in found.items() if name not in RUN_KEYS]


def _common_settings(lines: Sequence[Line]) -> list[str]:
    """Return the settings that all runs have, but for those of trees if there are others."""
    runs = [run for line in lines for run in line.runs]
    runs = [run for run in runs if "chosen" not in run] or runs
    every = [_settings(run) for run in runs]
    return [setting for setting in every[0] if all(setting in other for other in every)]


def _further_settings(lines: Sequence[Line], here: Sequence[Line]) -> Iterator[str]:
    """Yield a sentence about the settings that only some of the lines have.

    Args:
        lines: The lines of the table.
        here: All lines of the log.
    """
    common = _common_settings(here)
    having: dict[str, list[str]] = {}
    for line in lines:
        for setting in dict.fromkeys(text for run in line.runs for text in _settings(run)):
            if setting not in common:
                having.setdefault(setting, []).append(line.model)
    said = []
    for setting, models in having.items():
        others = [line.model for line in lines if line.model not in models]
        few = 2 * len(others) < len(models)
        who = f"all but {', '.join(others)}" if others and few else ", ".join(models)
        said.append(f"{who if others else 'all'} `{setting}`")
    if said:
        yield ""
        yield from _wrapped(f"Further settings: {'; '.join(said)}.")


def _table(lines: Sequence[Line]) -> Iterator[str]:
    cells = [HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEAD))]
    right = [k > 2 for k in range(len(HEAD))]

    def row_of(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(texts, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    yield row_of(HEAD)
    rules = [
        "-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)
    ]
    yield f"|{'|'.join(rules)}|"
    for cell in cells[1:]:
        yield row_of(cell)


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


def _fewer_seeds(lines: Sequence[Line]) -> Iterator[str]:
    """Yield sentences about lines that have fewer seeds than others, or leave runs out."""
    most = max(len(line.runs) for line in lines)
    fewer = [f"{line.model} {len(line.runs)}" for line in lines if len(line.runs) < most]
    yield ""
    said = f" Fewer: {', '.join(fewer)}." if fewer else ""
    for line in lines:
        if line.others:
            others = (f"{', '.join(map(str, of))} {words}" for words, of in line.others.items())
            said += f" Left out of {line.model}: seeds {'; '.join(others)}."
    yield from _wrapped(f"Seeds: {most}.{said}")


def _facts(lines: Sequence[Line]) -> Iterator[str]:
    """Yield versions, machines and dates."""
    runs = [run for line in lines for run in line.runs]
    packages = dict.fromkeys(key for run in runs for key in run if key.startswith(VERSION))
    for key in packages:
        values = dict.fromkeys(str(run[key]) for run in runs if run.get(key) is not None)
        if values:
            yield f"- {key.removeprefix(VERSION)} {', '.join(values)}"
    chosen = dict.fromkeys(f"{run['log']}: {run['chosen']}" for run in runs if "chosen" in run)
    if chosen:
        yield from _wrapped(f"- lightgbm, {'; '.join(chosen)}")
    hosts = dict.fromkeys(f"{run['processor']}, {run['cores']} cores" for run in runs)
    ranks = sorted({run["ranks"] for run in runs if run.get("ranks")})
    of_ranks = " or ".join("one rank" if n == 1 else f"{n} ranks" for n in ranks)
    threads = sorted({run["threads"] for run in runs if run.get("threads")})
    of_threads = " or ".join("one thread" if n == 1 else f"{n} threads" for n in threads)
    said = [*hosts, " of ".join(filter(None, (of_ranks, of_threads)))]
    yield f"- {'; '.join(filter(None, said))}"
    days = sorted(str(run["date"])[:10] for run in runs if run.get("date"))
    if days:
        yield f"- {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _count(value: float | None) -> str:
    """Return a number of parameters in three digits, such as `1.20 M`; no parameters are `0`."""
    if value is None:
        return "-"
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"
