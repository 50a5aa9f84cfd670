"""The output of a sweep while its jobs run: `comparison.csv`, a table, the report at the end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp import console
from recapp.app.job import Job
from recapp.reporting import comparison
from recapp.reporting.record import read_measures


class SweepProgress:
    """The jobs of a sweep so far. For a single run there are none, and nothing is written."""

    def __init__(self) -> None:
        self.format = "text"
        self.directory: Path | None = None
        # only jobs of this sweep: an earlier sweep in the same directory may have had more
        self.jobs: list[Path] = []
        self.compared: list[dict[str, Any]] = []

    def job_begins(self, job: Job, format: str) -> None:
        """List a job as running."""
        self.format = format
        if job.sweep is not None:
            self.jobs.append(job.directory)
            write_comparison(comparison.compare(job.sweep, self.jobs, running=True), job.sweep)

    def job_ended(self, job: Job) -> None:
        """Write how a job ended, and print the comparison of the jobs so far."""
        self.directory = job.sweep
        if job.sweep is None:
            return
        if job.directory not in self.jobs:  # its settings were refused before it began
            self.jobs.append(job.directory)
        self.compared = comparison.compare(job.sweep, self.jobs)
        write_comparison(self.compared, job.sweep)
        if self.format == "text":
            print_comparison(self.compared, job.sweep)

    def report(self) -> None:
        """Print the best and the fastest run, and write the report of the sweep."""
        if self.directory is not None:
            if self.format == "text":
                print_verdicts(self.directory)
            write_report_of(self.directory)

    def emit(self) -> None:
        """Print the records of all jobs if the format is JSON."""
        if self.compared and self.format == "json":
            console.emit(self.compared, self.format)


def write_comparison(compared: Sequence[dict[str, Any]], sweep: Path) -> None:
    """Write the table of the jobs so far into the sweep's directory; if that fails, print why."""
    path = sweep / comparison.COMPARISON_FILE
    try:
        comparison.write_csv(compared, path)
    except OSError as error:
        console.note(f"no {console.short_path(path)}: {error.strerror}")


def print_verdicts(sweep: Path) -> None:
    """Print the first sentences of the sweep's report, if there are two runs to compare.

    Args:
        sweep: The directory of a sweep. All its jobs have ended.
    """
    from recapp.reporting.sweep_page import verdicts
    from recapp.reporting.variants import read_runs

    good = [run for run in read_runs(sweep) if run.ended_well]
    if len(good) > 1:
        width = get_terminal_size((80, 24)).columns
        print()
        print(console.readable("\n".join(fill(said, width) for said in verdicts(good))), flush=True)


def write_report_of(sweep: Path) -> None:
    """Write the sweep's report next to its comparison; if that fails, print why."""
    from recapp.reporting.sweep_report import REPORT_FILE, write_report

    try:
        write_report(sweep)
        console.note(f"report {console.short_path(sweep / REPORT_FILE)}")
    except OSError as error:
        console.note(
            f"no report: {error.filename}: {error.strerror}; python -m recapp.report "
            f"path={console.short_path(sweep)} makes it"
        )


def print_comparison(compared: Sequence[dict[str, Any]], sweep: Path) -> None:
    """Print the jobs of a sweep so far.

    The error of a failed job was printed when it failed, and is in `comparison.csv`.
    """
    print()
    console.print_table(
        comparison.lines_of_table(compared),
        comparison.columns_of(read_measures(*comparison.jobs_of(sweep))),
        title=console.short_path(sweep / comparison.COMPARISON_FILE),
    )
    sys.stdout.flush()
