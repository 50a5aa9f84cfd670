"""`python -m recapp.report path=DIR`: write the report of a sweep, a training run or an evaluation,
from the files in its directory.

    DIR -> DIR/report.html

A sweep of `recapp.train` writes its report at the end. This command writes it again, or writes the
report of a single run. It measures nothing and starts no rank. The page needs neither network nor
scripts.

`python -m recapp.report compare a=DIR b=DIR` compares two evaluations of the same rows that have a
bootstrap (`metrics.bootstrap`).
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import sys
from collections.abc import Sequence
from pathlib import Path

from recapp import console
from recapp.cli.command import default_settings, run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.commands import VERBS, Report

COLUMNS = (console.Column("what", "what"), console.Column("file", "file"))
DIFFERENCE = (
    console.Column("title", "metric"),
    *(console.Column(name, name, ".5f") for name in ("a", "b")),
    console.Column("difference", "b - a", "+.5f"),
    *(console.Column(name, name, "+.5f") for name in ("low", "high")),
    console.Column("verdict", "verdict"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["compare"]:
        return run("report", compare, verbs=VERBS["report"], writes=False, argv=arguments)
    return run("report", report, writes=False, argv=arguments)


def compare(settings: Report, job: Job) -> None:
    """Print whether the metrics of two evaluations of the same rows differ by more than noise.

    Raises:
        ConfigError: An evaluation is missing or has no bootstrap, or they are of different rows.
    """
    if not settings.a or not settings.b:
        raise ConfigError("a and b must be given: compare a=DIR b=DIR, directories of recapp.eval")
    from recapp.reporting.details import differences

    rows = differences(Path(settings.a).expanduser(), Path(settings.b).expanduser())
    console.emit(rows, settings.format, DIFFERENCE)


def report(settings: Report, job: Job) -> None:
    """Write the report of a directory, and print the report's files.

    Raises:
        ConfigError: There is no run, or a file cannot be written.
    """
    if not settings.path:
        raise ConfigError("path must be given: path=...")
    from recapp.reporting.report_pages import write_report

    try:
        rows = write_report(Path(settings.path).expanduser(), default_settings)
    except OSError as error:
        raise ConfigError(
            f"path={settings.path}: {error.filename} cannot be written ({error.strerror})"
        ) from error
    if settings.format == "text":
        # a column of reasons, mostly empty, would leave too little room for names of files
        rows = [
            row | {"file": console.short_path(row["file"])}
            if row["file"]
            else row | {"file": f"left out: {row['left_out']}"}
            for row in rows
        ]
    console.emit(rows, settings.format, COLUMNS)


if __name__ == "__main__":
    leave(main)
