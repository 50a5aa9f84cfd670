"""`python -m recapp.report path=DIR`: write the report of a sweep, a training run or an evaluation,
from the files in its directory.

    DIR -> DIR/report.html

A sweep of `recapp.train` writes its report at the end. This command writes it again, or writes the
report of a single run. It measures nothing and starts no rank. The page needs neither network nor
scripts.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence
from pathlib import Path

from recapp import console
from recapp.cli.command import default_settings, run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.commands import Report

COLUMNS = (console.Column("what", "what"), console.Column("file", "file"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("report", report, writes=False, argv=argv)


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
