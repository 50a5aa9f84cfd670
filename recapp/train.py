"""`python -m recapp.train`: train a recommender with sharded tables, on as many ranks as there are
devices.

    the command   settings -> recipe, checked -> JOB/resolved.yaml.tmp -> ranks
    each rank     `run`: recipe -> data, model, strategy, callbacks, trainer -> fit
    rank 0        JOB/resolved.yaml, JOB/checkpoints/*.ckpt (or where
                  `checkpoints` says), JOB/metrics.json, JOB/csv

The command only composes the settings, starts the ranks and waits; rank 0 checks what the records
of settings cannot know before the ranks meet. With `-m` it does so for each
job, compares the jobs so far after each one, and writes the sweep's report at the end. Under
torchrun or srun the ranks exist already: each rank runs the command, which calls `run` in the same
process. Ranks get plain values and import no Hydra, and the command imports no torch.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early

    start_early()  # before the imports below, which take a while

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from recapp import console
from recapp.cli.job import Job, emit_json, leave_ranks, prepare_process, run_recipe, wants_bar
from recapp.cli.stored_recipe import check_generated
from recapp.errors import RecappError
from recapp.processes.rank_environment import external_rank, is_first
from recapp.processes.rank_process import leave
from recapp.processes.stopping import Stopped
from recapp.reporting import runs
from recapp.reporting.run_record import update_settings
from recapp.run.recipe import Eval, Train, recipe_of
from recapp.settings.records import to_plain
from recapp.settings.values import typed
from recapp.stored.operations import LAST, MANIFEST
from recapp.stored.store import entry_of

if TYPE_CHECKING:
    from recapp.run.resume import Resumed

# a signal ends a sweep at once, without its report: python -m recapp.report writes it
FIRST_CODE_OF_SIGNALS = 128


def main(argv: Sequence[str] | None = None, *, worker: str = "recapp.train") -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
        worker: The module that the ranks run.
    """
    from recapp.cli import command  # imports Hydra

    sweep = SweepProgress()
    train = partial(train_job, worker=worker, sweep=sweep)
    code = command.run("train", train, after=sweep.job_ended, argv=argv)
    if code < FIRST_CODE_OF_SIGNALS:
        sweep.end()
    sweep.emit()
    return code


def train_job(recipe: Train, job: Job, *, worker: str, sweep: "SweepProgress") -> float | None:
    """Train one job on its ranks, and return the sweeper's objective.

    Args:
        recipe: The recipe of the job.
        job: The job.
        worker: The module that the ranks run.
        sweep: The jobs of the sweep so far.
    """
    sweep.job_begins(job, recipe.format)
    if recipe.checkpoints and job.number is not None:
        recipe = replace(recipe, checkpoints=f"{recipe.checkpoints}/{job.number}")
    if recipe.ckpt_path:
        check_generated(recipe, job.overrides)
    with note_how_to_go_on(recipe, job.directory):
        metrics = run_recipe(recipe, job, worker)
    if job.sweep is None:
        emit_json(metrics, recipe)
    return metrics.get(recipe.built_task.measures.objective)


@dataclass
class SweepProgress:
    """The jobs of a sweep so far. For a single run there are none, and nothing is written."""

    format: str = "text"
    directory: Path | None = None
    # only jobs of this sweep: an earlier sweep in the same directory may have had more
    jobs: list[Path] = field(default_factory=list)
    compared: list[runs.Run] = field(default_factory=list)

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
        from recapp.reporting.report_pages import REPORT_FILE, write_report

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
    from recapp.reporting.report_pages import verdicts

    good = [run for run in runs.read_runs(sweep) if run.ended_well]
    if len(good) > 1:
        width = get_terminal_size((80, 24)).columns
        print()
        print(
            console.readable("\n".join(fill(sentence, width) for sentence in verdicts(good))),
            flush=True,
        )


@contextmanager
def note_how_to_go_on(recipe: Train, job_dir: Path) -> Iterator[None]:
    """Print the command that goes on, if an error ends a run after it has saved a checkpoint: a
    validation or a user's own code may be wrong, and the steps before it are not lost.

    Args:
        recipe: The recipe of the run.
        job_dir: The directory of the run.
    """
    last = recipe.checkpoints_in(job_dir) / LAST
    before = entry_of(last / MANIFEST)
    try:
        yield
    except Exception:
        if not external_rank() and entry_of(last / MANIFEST) not in (None, before):
            path = console.short_path(last)
            console.note(
                f"{path} has the steps before the error; to go on: {to_go_on(recipe, path)}"
            )
        raise


def to_go_on(recipe: Train, last: str) -> str:
    """Return the command that goes on from the last checkpoint of a run."""
    where = f" {typed('checkpoints', recipe.checkpoints)}" if recipe.checkpoints else ""
    return f"python -m recapp.train {typed('ckpt_path', last)}{where}"


# ---- each rank


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train one model. Rank 0 writes `metrics.json` into the job directory and prints the summary.

    Args:
        settings: The settings, composed and resolved, with absolute paths.
        job_dir: The directory in which the run writes.

    Raises:
        RecappError: An error that the user can fix.
        Stopped: A signal has ended training. Its checkpoint and metrics are written.
    """
    recipe: Train = recipe_of(settings, "train")
    prepare_process(recipe)
    from recapp.dataset.followed_files import first_files
    from recapp.reporting.summary import report_end
    from recapp.run.resume import resumed_run
    from recapp.run.run_checks import check_run

    resumed = resumed_run(recipe)
    recipe = resumed.recipe if resumed else recipe
    if recipe.dataset.follow:
        first_files(recipe.dataset, noted=is_first())  # on all ranks, before they meet
    if is_first():
        check_run(recipe, resumed.manifest if resumed else None)
    measured, stopped = fit(recipe, job_dir, resumed)
    if measured:
        report_end(measured, recipe.built_task, job_dir, recipe.format)
    if measured and stopped:
        last = console.short_path(measured["last_checkpoint"])
        console.note(f"to go on: {to_go_on(recipe, last)}")
    leave_ranks(stopped)


def fit(
    recipe: Train, job_dir: Path, resumed: "Resumed | None"
) -> tuple[dict[str, Any], Stopped | None]:
    """Train one model.

    Args:
        recipe: The recipe of the run.
        job_dir: The directory in which the run writes.
        resumed: The run if it resumes from a checkpoint, else None.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks; and the signal that
        has ended training early, or None.
    """
    from recapp.run import training
    from recapp.run.model import build_model
    from recapp.run.resume import RunCallbacks, metrics_of_run, write_prediction
    from recapp.run.training import build_strategy
    from recapp.trainer.keep_checkpoints import validate_first

    if resumed and resumed.limit and not resumed.lacks_validation:
        return _over(recipe, resumed, job_dir), None

    manifest = resumed.manifest if resumed else None
    data = training.build_data(recipe, partial(_write_sizes, recipe, job_dir), trains=True)
    sized = training.sized_by(recipe, data)
    module = training.build_module(recipe, lambda: build_model(sized()))
    strategy = build_strategy(recipe, training=True, resumed=manifest, sized=sized)

    callbacks = RunCallbacks(
        recipe,
        job_dir,
        resumed,
        data.schema,
        bar=wants_bar(recipe),
        logging=bool(recipe.logger),
        settings=lambda: to_plain(sized()),
    )
    # a logger may begin a run of a service: last, after all that can be refused
    loggers = training.build_loggers(recipe, job_dir, manifest)
    trainer = training.build_trainer(recipe, strategy, callbacks.in_order, loggers)

    if resumed and resumed.lacks_validation:  # a signal has cut it off
        validate_first(trainer, over=resumed.limit is not None)
    try:
        with training.in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=recipe.ckpt_path)
    except Stopped as stopped:
        if callbacks.end.reason is None:  # before the first step, or without the other ranks
            raise
        callbacks.clock.on_train_end(trainer, module)
        measured = metrics_of_run(sized(), trainer, callbacks, callbacks.end.reason)
        how = {"status": "stopped", "last_checkpoint": str(callbacks.last.path)}
        return measured and measured | how, stopped

    write_prediction(sized(), strategy, data.rows[1], job_dir)
    measured = metrics_of_run(sized(), trainer, callbacks, callbacks.early_stop.reason)
    snapshots = callbacks.snapshots.kept if callbacks.snapshots else []
    return with_snapshots(sized(), snapshots, job_dir, measured), None


def _over(recipe: Train, resumed: "Resumed", job_dir: Path) -> dict[str, Any]:
    """Return the metrics of a run that has nothing left to train. Its last models are joined if it
    was killed before that.
    """
    from recapp.run.training import meet

    measured = resumed.metrics()
    if resumed.joined or recipe.snapshots < 2:
        return measured
    meet(recipe)
    return with_snapshots(recipe, resumed.snapshots(), job_dir, measured)


def with_snapshots(
    recipe: Train, snapshots: list[Path], job_dir: Path, measured: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics of a run: those of the mean of its last models, if they are kept.

    A run whose models cannot be joined has trained all the same: a note says why, and its metrics
    are those of its own checkpoint.

    Args:
        recipe: The recipe of the run.
        snapshots: The checkpoints of its last epochs.
        job_dir: The directory of the run.
        measured: The content of `metrics.json` on rank 0, an empty dict on other ranks.
    """
    if recipe.snapshots < 2:
        return measured
    reason: object = f"{len(snapshots) or 'no'} model of a whole epoch is kept, and it takes two"
    if len(snapshots) > 1:
        try:
            joined = measure_joined(recipe, snapshots, job_dir)
            if measured and len(snapshots) < recipe.snapshots:
                console.note(
                    f"snapshots={recipe.snapshots}: {len(snapshots)} models are joined, because "
                    f"training ended after {len(snapshots)} whole epochs"
                )
            return measured and measured | joined | _better_epoch(recipe, measured, joined)
        except RecappError as error:
            reason = error
    if measured:
        console.note(f"snapshots={recipe.snapshots}: no models are joined: {reason}")
    return measured


def _better_epoch(
    recipe: Train, measured: Mapping[str, Any], joined: Mapping[str, Any]
) -> dict[str, str]:
    """Return a line for the summary if the best epoch is better than the joined models."""
    measures = recipe.built_task.measures
    best = measures.get(measures.best)
    alone = measured.get(measures.objective)
    together = joined.get(measures.objective)
    if best is None or alone is None or together is None:
        return {}
    if not (alone > together if measures.mode == "max" else alone < together):
        return {}
    where = console.short_path(measured["checkpoint"])
    return {"better_epoch": f"{best.title} {alone:.5f} of {where}, which export and eval take, too"}


def measure_joined(recipe: Train, snapshots: list[Path], job_dir: Path) -> dict[str, Any]:
    """Join the models of the last epochs, and validate the mean of their outputs.

    Args:
        recipe: The recipe of the run.
        snapshots: The checkpoints of the epochs.
        job_dir: The directory of the run.

    Returns:
        What differs in `metrics.json` on rank 0, an empty dict on other ranks.
    """
    from recapp.eval import measure
    from recapp.stored.checkpoint import join_together, name_metrics
    from recapp.stored.stored_model import read_manifest
    from recapp.trainer.keep_checkpoints import JOINED_FILE

    path = recipe.checkpoints_in(job_dir) / JOINED_FILE
    members = join_together(snapshots, path)
    step = read_manifest(path).step
    where = {"checkpoint": str(path), "checkpoint_step": step}
    if recipe.without_validation is not None:
        return where
    of_stored = {each.name: getattr(recipe, each.name) for each in fields(Train)}
    changes = {"ckpt_path": str(path), "ensemble": members, "logger": {}, "callbacks": {}}
    if recipe.plan is not None and recipe.plan.path:  # a whole plan, of one model's tables
        changes["plan"] = None
    measured = measure(Eval(**of_stored | changes), job_dir, step)
    metrics = {name: value for name, value in measured.items() if name.startswith("val_")}
    if measured:
        name_metrics(path, metrics)
    return measured and metrics | where


def _write_sizes(recipe: Train, job_dir: Path, table_rows: list[int]) -> None:
    """Write the sizes of tables that were found in the data into the settings of the run."""
    if not external_rank():
        update_settings(to_plain(recipe.sized(table_rows)), job_dir)


if __name__ == "__main__":
    leave(main)
