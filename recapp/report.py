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
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.recipe import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("report", report, writes=False, argv=argv)


def report(settings: Report, job: Job) -> None:
    """Write the report of a directory, and print the name of its file.

    Raises:
        ConfigError: There is no run, or a file cannot be written.
    """
    if not settings.path:
        raise ConfigError("path must be given: path=...")
    from recapp.reporting.report_pages import write_report

    try:
        file = write_report(Path(settings.path).expanduser())
    except OSError as error:
        raise ConfigError(
            f"path={settings.path}: {error.filename} cannot be written ({error.strerror})"
        ) from error
    console.emit([{"file": str(file)}], settings.format)


if __name__ == "__main__":
    leave(main)
