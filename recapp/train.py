"""`python -m recapp.train`: trains a recommender with sharded tables, on as many ranks as there are
devices.

    settings -> JOB/resolved.yaml.tmp -> ranks (`recapp.worker`, each reads it)
             -> JOB/resolved.yaml, JOB/metrics.json

This process only composes the settings, starts the ranks and waits; with `-m` it does so once for
each job and compares the jobs so far after each; the last one is followed by the sweep's report.
Under torchrun or srun the ranks are there already: then each of them runs this, and the worker's
body in place.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # what follows takes its time to import

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recapp import console
from recapp.app.check_data import as_trained, check_data
from recapp.app.command import Job, run, run_on_ranks
from recapp.app.compose import compose_over, with_absolute_paths
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.reporting import comparison
from recapp.settings.check_settings import check_share

LENGTH = ("max_epochs", "max_steps")
# whoever stops a sweep does not wait for its report: python -m recapp.report makes it
FIRST_CODE_OF_SIGNALS = 128
OBJECTIVE = "val_auc"  # of a sweeper that looks for the best settings


def main(argv: Sequence[str] | None = None, *, worker: str = "recapp.worker") -> int:
    """Runs the command and answers its exit code.

    Args:
        argv: The arguments, by default those of the process.
        worker: The module that the ranks run.
    """
    format = "text"
    compared: list[dict[str, Any]] = []
    jobs: list[Path] = []  # of this sweep: an earlier one in the same directory may have had more
    sweep: Path | None = None

    def task(config: dict[str, Any], job: Job) -> float | None:
        nonlocal format
        format = config["format"]
        if job.sweep is not None:
            jobs.append(job.directory)
            keep_comparison(comparison.compare(job.sweep, jobs, running=True), job.sweep)
        settings = settings_of(config, job)
        check_data(settings)
        tell_of_no_validation(settings)
        metrics = run_on_ranks(settings, job, worker)
        if format == "json" and job.sweep is None and not external_rank():
            console.emit([metrics], format)
        return metrics.get(OBJECTIVE)

    def after(job: Job) -> None:
        nonlocal sweep
        sweep = job.sweep
        if job.sweep is not None:
            if job.directory not in jobs:  # its settings were refused before it began
                jobs.append(job.directory)
            compared[:] = comparison.compare(job.sweep, jobs)
            keep_comparison(compared, job.sweep)
            if format == "text":
                print_comparison(compared, job.sweep)

    code = run("train", task, after=after, argv=argv)
    if sweep is not None and code < FIRST_CODE_OF_SIGNALS:
        report_of(sweep)
    if compared and format == "json":
        console.emit(compared, format)
    return code


def settings_of(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """The settings of a run: those of the command line; with `ckpt_path` those of the checkpoint
    and what the command line replaces.

    How long to train is one decision: who says one of trainer.max_epochs and trainer.max_steps
    lifts the checkpoint's other one. Paths are absolute, so that a checkpoint can be evaluated from
    anywhere.
    """
    config = with_absolute_paths(config)
    if not config["ckpt_path"]:
        return config
    from recapp.checkpoints.directory import read_manifest

    manifest = read_manifest(Path(config["ckpt_path"]))
    settings = with_absolute_paths(
        compose_over(manifest.config, "train", job.overrides, job.folders)
    )
    settings = as_trained(settings, manifest)
    said = {override.lstrip("+").partition("=")[0] for override in job.overrides}
    for one, other in (LENGTH, LENGTH[::-1]):
        if (
            f"trainer.{one}" in said
            and f"trainer.{other}" not in said
            and settings["trainer"][one] is not None
        ):
            settings["trainer"][other] = None
    return settings


def tell_of_no_validation(settings: dict[str, Any]) -> None:
    """Says so where no row validates: a run then has no metrics, and no checkpoint is the best."""
    dataset = settings["dataset"]
    limit = settings["trainer"]["limit_val_batches"]
    named = (
        f"dataset.val_share={dataset['val_share']}"
        if limit != 0
        else f"trainer.limit_val_batches={limit}"
    )
    nothing = limit == 0 or (dataset["val_path"] is None and check_share(dataset["val_share"]) == 0)
    if nothing and not external_rank():
        console.note(
            f"{named}: no row validates, so there are no metrics, and last.ckpt is the only "
            "checkpoint"
        )


def keep_comparison(compared: Sequence[dict[str, Any]], sweep: Path) -> None:
    """Writes the table of the jobs so far into the sweep's directory; a full disk is a remark."""
    path = sweep / comparison.COMPARISON_FILE
    try:
        comparison.write_csv(compared, path)
    except OSError as error:
        console.note(f"no {console.short_path(path)}: {error.strerror}")


def report_of(sweep: Path) -> None:
    """Writes the sweep's report beside its comparison, which does not depend on it: a full disk is
    a remark.
    """
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
    """Prints the jobs of a sweep so far. Why one failed was said when it did, and stands in
    `comparison.csv`.
    """
    print()
    console.print_table(
        comparison.lines_of_table(compared),
        comparison.TABLE,
        title=console.short_path(sweep / comparison.COMPARISON_FILE),
    )
    sys.stdout.flush()


if __name__ == "__main__":
    leave(main())
