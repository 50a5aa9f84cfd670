"""`python -m recapp.predict ckpt_path=DIR input=GLOB output=FILE.parquet`: score raw rows, on any
number of ranks, under any plan.

    the command   DIR/manifest.json (settings), command line -> recipe, checked -> ranks
    each rank     `run`: recipe -> data, model, strategy, trainer -> FILE.parquet.parts/*.arrow
    rank 0        FILE.parquet, JOB/metrics.json

Columns, transforms and id rules are those of training. They come from the checkpoint, so neither
training data nor labels are needed. Scores are in the order of the input, and are the same on any
number of ranks. The file gets its name when it is whole; a command that was ended starts again.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early

    start_early()  # before the imports below, which take a while

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recapp.cli.job import Job, emit_json, leave_ranks, prepare_process, run_recipe
from recapp.errors import ConfigError
from recapp.processes.rank_environment import is_first
from recapp.processes.rank_process import leave
from recapp.run.recipe import Predict, recipe_of

MUST_BE_GIVEN = {
    "ckpt_path": "ckpt_path=DIR, a checkpoint that recapp.train has named, or an artefact",
    "input": "input=FILES, a directory, a glob or Parquet files whose rows are to be scored",
    "output": "output=FILE.parquet, where the scores are written",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    from recapp.cli import command  # imports Hydra

    return command.run("predict", predict, argv=argv)


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
    metrics = run_recipe(recipe, job, "recapp.predict")
    emit_json(metrics, recipe)
    return metrics.get("mean_score")


# ---- each rank


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Score rows. Rank 0 writes `metrics.json` into the job directory and prints the summary.

    Args:
        settings: The settings, composed and resolved, with absolute paths.
        job_dir: The directory in which the run writes.

    Raises:
        RecappError: An error that the user can fix.
    """
    recipe: Predict = recipe_of(settings, "predict")
    prepare_process(recipe)
    from recapp.reporting.summary import report_prediction

    if measured := score(recipe):
        report_prediction(measured, recipe.built_task.outputs, job_dir, recipe.format)
    leave_ranks()


def score(recipe: Predict) -> dict[str, Any]:
    """Score the rows of the input, and write the scores.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks.
    """
    from recapp.run.run_checks import check_scoring
    from recapp.run.trained_model import open_trained
    from recapp.run.training import build_data, in_one_line
    from recapp.trainer.datamodule import ScoreWriter

    recipe, opened = open_trained(recipe)
    manifest = opened.stored.manifest
    if is_first():
        check_scoring(recipe, manifest)
    assert recipe.output is not None
    data = build_data(recipe, scoring=recipe)
    model = opened.on_ranks(recipe)
    writer = ScoreWriter(
        recipe.output,
        overwrite=recipe.overwrite,
        progress=recipe.trainer.enable_progress_bar,
    )
    trainer = model.trainer(recipe, [writer])

    with in_one_line():
        trainer.predict(
            model.module, datamodule=data, ckpt_path=model.ckpt_path, return_predictions=False
        )

    if not trainer.is_global_zero:
        return {}
    rows = data.prediction_input.rows
    return {
        **writer.joined,
        "rows_scored": rows,
        "seconds": writer.seconds,
        "rows_per_second": rows / writer.seconds,
        "rows_read": data.rows_measured("input"),
        "output": recipe.output,
        "checkpoint": recipe.ckpt_path,
        **model.facts(),
    }


if __name__ == "__main__":
    leave(main)
