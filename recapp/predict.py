"""`python -m recapp.predict ckpt_path=DIR input=GLOB output=FILE.parquet`: score raw rows, on any
number of ranks, under any plan.

    DIR/manifest.json (settings) + command line -> ranks (`recapp.worker`)
        -> FILE.parquet.parts/part-*.parquet -> FILE.parquet, JOB/metrics.json

Columns, transforms and id rules are those of training. They come from the checkpoint, so neither
training data nor labels are needed. Scores are in the order of the input, and are the same on any
number of ranks. If the command was ended, the same command continues its work.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # imports the ranks' modules meanwhile

from collections.abc import Sequence

from recapp import console
from recapp.app.check_prediction import check_prediction
from recapp.app.command import Job, run, run_recipe
from recapp.errors import ConfigError
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.processes.stopping import Stopped
from recapp.recipe.commands import Predict

MUST_BE_GIVEN = {
    "ckpt_path": "ckpt_path=DIR, a checkpoint that recapp.train has named",
    "input": "input=FILES, a directory, a glob or Parquet files whose rows are to be scored",
    "output": "output=FILE.parquet, where the scores are written",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("predict", predict, argv=argv)


def predict(recipe: Predict, job: Job) -> float | None:
    """Score the input of one job on its ranks, and return the mean score.

    Args:
        recipe: The stored model's recipe, changed by the command line.
        job: The job. The metrics are written into its directory.

    Raises:
        ConfigError: No checkpoint, input or output is named.
    """
    for name, words in MUST_BE_GIVEN.items():
        if not getattr(recipe, name):
            raise ConfigError(f"{name} must be given: {words}")
    check_prediction(recipe)
    try:
        metrics = run_recipe(recipe, job)
    except Stopped:
        if not external_rank():
            console.note("finished parts are kept: the same command goes on")
        raise
    if recipe.format == "json" and not external_rank():
        console.emit([metrics], "json")
    return metrics.get("mean_score")


if __name__ == "__main__":
    leave(main())
