"""`python -m recapp.train`: train a recommender with sharded tables, on as many ranks as there are
devices.

    settings -> JOB/resolved.yaml.tmp -> ranks (`recapp.worker`, each reads it)
             -> JOB/resolved.yaml, JOB/metrics.json

This process only composes the settings, starts the ranks and waits. With `-m` it does so for each
job, compares the jobs so far after each one, and writes the sweep's report at the end. Under
torchrun or srun the ranks exist already: each rank runs this module, which calls the worker's `run`
in the same process.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # imports the ranks' modules meanwhile

from collections.abc import Sequence
from functools import partial

from recapp import console
from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.check_data import check_data, check_generated, check_resumed, note_scale
from recapp.app.check_training import check_training
from recapp.app.command import Job, run, run_recipe
from recapp.app.sweep_progress import SweepProgress
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.recipe.recipe import Train

# a signal ends a sweep at once, without its report: python -m recapp.report writes it
FIRST_CODE_OF_SIGNALS = 128


def main(argv: Sequence[str] | None = None, *, worker: str = "recapp.worker") -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
        worker: The module that the ranks run.
    """
    sweep = SweepProgress()
    train = partial(train_job, worker=worker, sweep=sweep)
    code = run("train", train, after=sweep.job_ended, argv=argv)
    if code < FIRST_CODE_OF_SIGNALS:
        sweep.report()
    sweep.emit()
    return code


def train_job(recipe: Train, job: Job, *, worker: str, sweep: SweepProgress) -> float | None:
    """Train one job on its ranks, and return the sweeper's objective.

    Args:
        recipe: The recipe of the job.
        job: The job.
        worker: The module that the ranks run.
        sweep: The jobs of the sweep so far.
    """
    sweep.job_begins(job, recipe.format)
    check_data(recipe)
    check_training(recipe)
    if recipe.ckpt_path:
        check_generated(recipe, job.overrides)
        check_fits_checkpoint(recipe, job.overrides)
        check_resumed(recipe)
    note_scale(recipe)
    note_no_validation_rows(recipe)
    metrics = run_recipe(recipe, job, worker)
    if recipe.format == "json" and job.sweep is None and not external_rank():
        console.emit([metrics], "json")
    return metrics.get(recipe.built_task.measures.objective)


def note_no_validation_rows(recipe: Train) -> None:
    """Print if no row validates: the run then has no metrics and no best checkpoint."""
    named = recipe.without_validation
    if named and not external_rank():
        console.note(
            f"{named}: no row validates, so there are no metrics, and last.ckpt is the only "
            "checkpoint"
        )


if __name__ == "__main__":
    leave(main())
