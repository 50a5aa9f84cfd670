"""`python -m recapp.results "logs={criteo_kaggle: DIR}"`: train all models on some logs, each with
several seeds, and write a page with a table for each log.

    settings -> runs, checked -> PATH/LOG/MODEL/seed_1/result.json, ... -> PATH/results.md

Each run is one of `recapp.train` in a directory of its own. The same command goes on where an
earlier one has ended; a run that is complete is not run again. The page holds all results of the
directory, also those of earlier commands. `python -m recapp.results sizes "logs={...}"` trains
models of several sizes, and draws their quality against the parameters of their dense part.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # imports the ranks' modules meanwhile

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recapp import console
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.processes.rank_process import leave
from recapp.run.commands import VERBS, Results

MAPPINGS = ("settings_of", "histories", "sizes")
"""The settings that take keys of the user beside those of `conf/results.yaml`."""
COLUMNS = (
    console.Column("model", "model"),
    console.Column("seeds", "seeds", ","),
    console.Column("auc", "AUC", ".4f"),
    console.Column("log_loss", "log\nloss", ".4f"),
    console.Column("samples_per_cpu_second", "k samples\n/ CPU s", ",.1f", 1e3),
    console.Column("peak_bytes", "memory,\nMB", ",.0f", 1e6),
    console.Column("dense_parameters", "dense\nparams, M", ",.3f", 1e6),
    console.Column("table_parameters", "table\nparams, M", ",.3f", 1e6),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    arguments = [with_keys(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    verbs = VERBS["results"] if arguments[:1] and arguments[0] in VERBS["results"] else ()
    return run("results", measure, verbs=verbs, writes=False, argv=arguments)


def with_keys(argument: str) -> str:
    """Return an argument that may add keys to a mapping with the two pluses that Hydra wants.

    Args:
        argument: The argument, as it was typed.
    """
    name, equals, _ = argument.partition("=")
    return f"++{argument}" if equals and name.partition(".")[0] in MAPPINGS else argument


def measure(settings: Results, job: Job) -> None:
    """Train what has no result yet, write the page, and print the table.

    Args:
        settings: The settings of the command.
        job: The job: its verb and the folders of its options.

    Raises:
        ConfigError: A setting is wrong, or the page cannot be written.
        LaunchError: Some runs failed. The page is written without them.
    """
    from recapp.benchmarks import boosted_trees, fuxictr_beside
    from recapp.cli.kept_runs import train_missing
    from recapp.cli.result_runs import runs_of
    from recapp.cli.tree_runs import missing_trees, train_trees
    from recapp.processes.lock import locked
    from recapp.reporting.result_lines import read_results
    from recapp.reporting.results_page import check_page, table, write_page

    folder = Path(settings.path).expanduser().absolute()
    page = Path(settings.page).expanduser() if settings.page else folder / "results.md"
    with locked(folder, "path"):
        check_page(page)
        try:
            lightgbm = boosted_trees.check_python(settings.lightgbm_python)
            fuxictr = fuxictr_beside.check_python(settings.fuxictr_python)
            runs = runs_of(settings, job, fuxictr)
            trees = [] if job.verb else missing_trees(settings, folder, lightgbm)
            train_missing(runs, folder, job, partial(train_trees, settings, folder, trees))
        finally:  # also after a signal: the page shows what is there
            results = read_results(folder)
            written = write_page(results, page) if results else []
    if settings.format == "json":
        console.emit(table(results), "json")
    else:
        for log in dict.fromkeys(line.log for line in results):
            own = [line for line in results if line.log == log]
            console.emit(table(own), "text", COLUMNS, title=log)
        for path in written:
            print(f"{path.suffix.lstrip('.'):8}{console.short_path(path)}")


if __name__ == "__main__":
    leave(main)
