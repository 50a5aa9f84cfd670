"""The output of a sweep while its jobs run: `comparison.csv`, a table, the report at the end."""

import sys
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill

from recapp import console
from recapp.cli.job import Job
from recapp.reporting import runs


class SweepProgress:
    """The jobs of a sweep so far. For a single run there are none, and nothing is written."""

    def __init__(self) -> None:
        self.format = "text"
        self.directory: Path | None = None
        # only jobs of this sweep: an earlier sweep in the same directory may have had more
        self.jobs: list[Path] = []
        self.compared: list[runs.Run] = []

    def job_begins(self, job: Job, format: str) -> None:
        """List a job as running."""
        self.format = format
        if job.sweep is not None:
            self.jobs.append(job.directory)
            self._compare(job.sweep, running=True)

    def job_ended(self, job: Job) -> None:
        """Write how a job ended, and print the comparison of the jobs so far. The error of a failed
        job was printed when it failed.
        """
        self.directory = job.sweep
        if job.sweep is None:
            return
        if job.directory not in self.jobs:  # its settings were refused before it began
            self.jobs.append(job.directory)
        self._compare(job.sweep)
        if self.format == "text":
            print()
            console.print_table(
                [run.flat() | {"what": run.name} for run in self.compared],
                runs.columns_of(self.compared[0].measures),
                title=console.short_path(job.sweep / runs.COMPARISON_FILE),
            )
            sys.stdout.flush()

    def _compare(self, sweep: Path, *, running: bool = False) -> None:
        """Write the table of the jobs so far into the sweep's directory; if that fails, print
        why.
        """
        self.compared = runs.compare(sweep, self.jobs, running=running)
        path = sweep / runs.COMPARISON_FILE
        try:
            runs.write_csv(self.compared, path)
        except OSError as error:
            console.note(f"no {console.short_path(path)}: {error.strerror}")

    def end(self) -> None:
        """Print the best and the fastest run, and write the report of the sweep. All jobs have
        ended.
        """
        if self.directory is None:
            return
        if self.format == "text":
            _print_verdicts(self.directory)
        from recapp.reporting.run_page import REPORT_FILE, write_report

        try:
            write_report(self.directory)
            console.note(f"report {console.short_path(self.directory / REPORT_FILE)}")
        except OSError as error:
            console.note(
                f"no report: {error.filename}: {error.strerror}; python -m recapp.report "
                f"path={console.short_path(self.directory)} makes it"
            )

    def emit(self) -> None:
        """Print the records of all jobs if the format is JSON."""
        if self.compared and self.format == "json":
            console.emit([run.flat() for run in self.compared], self.format)


def _print_verdicts(sweep: Path) -> None:
    """Print the first sentences of the sweep's report, if there are two runs to compare."""
    from recapp.reporting.sweep_page import verdicts

    good = [run for run in runs.read_runs(sweep) if run.ended_well]
    if len(good) > 1:
        width = get_terminal_size((80, 24)).columns
        print()
        print(console.readable("\n".join(fill(said, width) for said in verdicts(good))), flush=True)
