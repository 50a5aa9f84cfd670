"""The lines of a table of results: all seeds of one model and size on one log.

PATH/*/*/seed_1/result.json -> lines

Only runs of the very same settings, on one number of threads, of one version of recapp and of all
packages below it, make a mean. Where a directory has other runs, too, a line has those that are
like the latest run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from recapp.reporting.about import VERSION
from recapp.reporting.record import read_document

RESULT_FILES = "**/result.json"


@dataclass(frozen=True)
class Line:
    """The results of one model and size on one log.

    Args:
        log: The log.
        model: The model.
        size: The factor of the size; empty for the model as its file has it.
        runs: The results, one for each seed.
        others: The seeds of results that the line leaves out, by how these differ: `of other
            settings`.
    """

    log: str
    model: str
    size: str
    runs: tuple[Mapping[str, Any], ...]
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """Return a number of each run that has it."""
        return [run[name] for run in self.runs if run.get(name) is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over the runs; None if no run has it."""
        found = self.values(name)
        return mean(found) if found else None

    @cached_property
    def auc(self) -> float:
        """The mean AUC, by which lines are ordered; 0 where it is not defined."""
        return self.mean("val_auc") or 0.0

    def spread(self, name: str) -> str:
        """Return mean and range of a number below 1, as `.7588 .7570-.7603`; one number alone."""
        found = self.values(name)
        if not found:
            return "-"
        if len(found) == 1:
            return share(found[0])
        return f"{share(mean(found))} {share(min(found))}-{share(max(found))}"


def read_results(folder: Path) -> list[Line]:
    """Return the lines of all results of a directory, by log and then the best first."""
    kept: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(RESULT_FILES)):
        found = read_document(path)
        if found and {"log", "model", "seed"} <= found.keys():  # of this command
            key = (str(found["log"]), str(found["model"]), str(found.get("size", "")))
            kept.setdefault(key, []).append(found)
    lines = [_line(key, runs) for key, runs in kept.items()]
    return sorted(lines, key=lambda line: (line.log, line.size != "", -line.auc))


def _line(key: tuple[str, str, str], runs: Sequence[Mapping[str, Any]]) -> Line:
    """Return the line of the runs that have the settings of the latest one."""
    latest = _in_common(max(runs, key=lambda run: str(run.get("date", ""))))
    same = []
    others: dict[str, tuple[int, ...]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        own = _in_common(run)
        differs = [words for words in {**own, **latest} if own.get(words) != latest.get(words)]
        if differs:
            others[differs[0]] = (*others.get(differs[0], ()), run["seed"])
        else:
            same.append(run)
    return Line(*key, tuple(same), others)


def _in_common(run: Mapping[str, Any]) -> dict[str, object]:
    """Return what the runs of a mean have in common, by words for a run that differs in it."""
    versions = {key.removeprefix(VERSION): run[key] for key in run if key.startswith(VERSION)}
    return {
        "of other settings": [o for o in run.get("overrides", ()) if not o.startswith("seed=")],
        "in another form": run.get("form"),
        "on another number of threads": run.get("threads"),
        **{f"of another version of {name}": text for name, text in versions.items()},
    }


def share(value: float) -> str:
    """Return a number below 1 as `.7588`."""
    return f"{value:.4f}".removeprefix("0")
