"""`python -m recapp.reproduce name=NAME data=DIR`: train a published experiment again, and say
whether its AUC is reached.

    conf/reproduce/NAME.yaml, DIR/*.csv -> md5, Parquet -> a run for each seed -> verdict

| verdict          | means                                                               |
|------------------|---------------------------------------------------------------------|
| `reproduced`     | the mean AUC is within the tolerance of the published one           |
| `not reproduced` | it is not                                                           |
| `shape only`     | the data were made up: columns and settings run, nothing is compared |
| `other settings` | the command line has changed settings: it is another experiment      |

Each run is one of `recapp.train` in a directory of its own. The same command goes on where an
earlier one has ended: a run that is complete is not run again, and one that was stopped goes on
from its last checkpoint.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # imports the ranks' modules meanwhile

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp import console
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.commands import Reproduce
from recapp.settings.values import in_quotes

if TYPE_CHECKING:
    from recapp.run.published import Published

COLUMNS = (console.Column("what", "what"), console.Column("value", "value"))
DATA = "data"
CHOSEN = {
    "validation": "validation rows",
    "test": "test rows, so the published value is too high",
    "none": "none: the last step counts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("reproduce", reproduce, writes=False, argv=argv)


def reproduce(settings: Reproduce, job: Job) -> None:
    """Train the seeds of an experiment that have no result yet, and print the verdict.

    Args:
        settings: The settings of the command.
        job: The job of the command.

    Raises:
        ConfigError: A setting is wrong.
        DataError: A published file is missing or another one.
        LaunchError: Some runs failed.
    """
    from recapp.cli.kept_runs import train_missing
    from recapp.processes.lock import locked
    from recapp.run.published import read_published

    published = read_published(settings.name, job.folders)
    _check(settings)
    folder = Path(settings.path or f"reproduced/{settings.name}").expanduser().absolute()
    with locked(folder, "path"):
        runs = _runs(published, settings, folder)
        results = train_missing(runs, folder, job)
    whole = settings.data is not None
    rows = table(published, results, whole=whole, changed=settings.settings)
    console.emit(rows, settings.format, COLUMNS)


def _check(settings: Reproduce) -> None:
    """Check the settings that say which runs there are.

    Raises:
        ConfigError: The directory of the files has no name, or a seed is there twice.
    """
    if settings.data is not None and not settings.data.strip():
        raise ConfigError("data='': names no directory: leave it out to run on made-up data")
    seeds = settings.seeds or ()
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ConfigError(f"seeds={list(seeds)}: {twice[0]} is there twice: name each seed once")


def _runs(published: "Published", settings: Reproduce, folder: Path) -> list[Any]:
    """Write the data, and return the run of each seed."""
    from recapp.cli.kept_runs import KeptRun

    given = Path(settings.data).expanduser() if settings.data else None
    kind = "published" if given else "shape"
    overrides = [f"trainer.devices={settings.devices}"]
    if published.data is not None:
        files = folder / DATA / kind
        if given:
            published.data.convert(given, files)
        else:
            published.data.make_up(files)
        overrides += published.data.overrides(files)
    elif given:
        raise ConfigError(
            f"data={settings.data}: this experiment has no published files: its data are generated"
        )
    else:
        overrides.append(f"dataset.path={in_quotes(folder / DATA)}")
    overrides += published.overrides
    overrides += () if given else published.shape
    overrides += settings.settings
    return [
        KeptRun(
            f"{kind}/seed_{seed}",
            (*overrides, f"seed={seed}"),
            {"seed": seed},
            tests=published.measured_on == "test",
            resumes=True,
        )
        for seed in settings.seeds or published.seeds
    ]


def table(
    published: "Published",
    results: Sequence[dict[str, Any]],
    *,
    whole: bool,
    changed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the lines of the table: what was published, what was measured, and the verdict.

    Args:
        published: The experiment.
        results: The results of its runs.
        whole: Whether the runs read the published files.
        changed: The settings that the command line has changed.
    """
    lines: list[tuple[str, Any]] = [("published AUC", _text(published.published.auc))]
    lines += [("published log loss", _text(published.published.log_loss))]
    lines += [("source", published.published.source)]
    if again := published.again:
        lines += [("again by others, AUC", _text(again.auc))]
        lines += [("again by others, source", again.source)]
    lines += [
        ("split", published.split),
        ("the epoch was chosen by", CHOSEN[published.chosen_by]),
        *(("not as published", text) for text in published.differs),
        ("data", "the published files, by md5" if whole else "made up, of the same columns"),
        ("rows measured", published.measured_on),
        ("seeds", ", ".join(str(result["seed"]) for result in results)),
        ("seeds of the record", ", ".join(map(str, published.seeds))),
        *(("changed by this command", text) for text in changed),
    ]
    for name in ("auc", "log_loss"):
        title = "AUC" if name == "auc" else "log loss"
        for result in results if len(results) > 1 else ():
            value = _text(result.get(f"{published.measured_on}_{name}"), "not measured")
            lines.append((f"{title}, seed {result['seed']}", value))
        lines.append((f"{title}, mean", _text(published.measured(results, name), "not measured")))
    measured = published.measured(results)
    if whole and measured is not None and published.published.auc is not None:
        difference = measured - published.published.auc
        lines.append(("difference of AUC", f"{difference:+.6f}, tolerance {published.tolerance}"))
    lines.append(("verdict", published.verdict(results, whole=whole, changed=bool(changed))))
    return [{"what": what, "value": value} for what, value in lines]


def _text(value: float | None, absent: str = "not published") -> str:
    return absent if value is None else f"{value:.6f}"


if __name__ == "__main__":
    leave(main)
