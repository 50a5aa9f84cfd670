"""`python -m recapp.eval ckpt_path=DIR`: measure a checkpoint, on any number of ranks, under any
plan.

    DIR/manifest.json (settings, plan) + command line -> ranks (`recapp.worker`) -> JOB/metrics.json

Model, tables, data and split come from the checkpoint. The command line replaces only the settings
that it names (`+plan=row_wise`, `trainer.devices=4`, `split=test`). On its validation data, a
checkpoint reproduces the metrics that it was saved with.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # imports the ranks' modules meanwhile

from collections.abc import Sequence

from recapp import console
from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.check_data import check_data, check_generated, note_scale
from recapp.app.command import Job, run, run_recipe
from recapp.errors import ConfigError
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.recipe.commands import Eval


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("eval", evaluate, argv=argv)


def evaluate(recipe: Eval, job: Job) -> float | None:
    """Measure the checkpoint of one job on its ranks, and return the best metric of its task.

    Args:
        recipe: The checkpoint's recipe, changed by the command line.
        job: The job. The metrics are written into its directory.

    Raises:
        ConfigError: No checkpoint is named, or there are no test data.
    """
    if not recipe.ckpt_path:
        raise ConfigError(
            "ckpt_path must be given: ckpt_path=DIR, a checkpoint that recapp.train has named"
        )
    test = recipe.split == "test"
    if test and recipe.dataset.test_path is None:
        raise ConfigError(
            "dataset.test_path is not set: split=test needs it (a directory, a glob, a "
            "_file_list.txt or a list of those)"
        )
    check_data(recipe, test=test)
    if not test:
        check_generated(recipe, job.overrides)
    check_fits_checkpoint(recipe, job.overrides)
    note_scale(recipe)
    metrics = run_recipe(recipe, job)
    if recipe.format == "json" and not external_rank():
        console.emit([metrics], "json")
    return metrics.get(f"{recipe.split}_{recipe.built_task.best}")


if __name__ == "__main__":
    leave(main())
