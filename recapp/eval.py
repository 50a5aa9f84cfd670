"""`python -m recapp.eval ckpt_path=DIR`: measure a stored model, on any number of ranks, under any
plan.

    the command   DIR/manifest.json (settings, plan), command line -> recipe, checked -> ranks
    each rank     `run`: recipe -> data, model, strategy, trainer -> validate or test
    rank 0        JOB/metrics.json

Model, tables, data and split come from the stored model, a checkpoint or an artefact. The command
line replaces only the settings that it names (`+plan=row_wise`, `trainer.devices=4`, `split=test`).
On its validation data, a checkpoint reproduces the metrics that it was saved with, and an artefact
is measured with the scores that it serves.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early

    start_early()  # before the imports below, which take a while

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recapp.cli.job import Job, emit_json, leave_ranks, prepare_process, run_recipe, wants_bar
from recapp.cli.stored_recipe import check_generated
from recapp.errors import ConfigError
from recapp.processes.rank_environment import is_first
from recapp.processes.rank_process import leave
from recapp.reporting.run_record import DETAILS_FILE
from recapp.reporting.summary import intervals, report_end, write_details
from recapp.run.recipe import Eval, recipe_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    from recapp.cli import command  # imports Hydra

    return command.run("eval", evaluate, argv=argv)


def evaluate(recipe: Eval, job: Job) -> float | None:
    """Measure the stored model of one job on its ranks, and return the best metric of its task.

    Args:
        recipe: The stored model's recipe, changed by the command line.
        job: The job. The metrics are written into its directory.

    Raises:
        ConfigError: No stored model is named, or there are no rows to measure.
    """
    if not recipe.ckpt_path:
        raise ConfigError(
            "ckpt_path must be given: ckpt_path=DIR, a checkpoint that recapp.train has named, or "
            "an artefact"
        )
    if recipe.split == "test" and recipe.dataset.test_path is None:
        raise ConfigError(
            "dataset.test_path is not set: split=test needs it (a directory, a glob, a "
            "_file_list.txt or a list of those)"
        )
    if recipe.split == "val":
        if named := recipe.without_validation:
            raise ConfigError(
                f"{named}: no row validates: set it otherwise, name rows by dataset.val_path=..., "
                "or measure those of dataset.test_path by split=test"
            )
        check_generated(recipe, job.overrides)
    metrics = run_recipe(recipe, job, "recapp.eval")
    emit_json(metrics, recipe)
    return metrics.get(f"{recipe.split}_{recipe.built_task.best}")


# ---- each rank


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Measure a stored model. Rank 0 writes `metrics.json` into the job directory and prints the
    summary.

    Args:
        settings: The settings, composed and resolved, with absolute paths.
        job_dir: The directory in which the run writes.

    Raises:
        RecappError: An error that the user can fix.
    """
    recipe: Eval = recipe_of(settings, "eval")
    prepare_process(recipe)
    if measured := measure(recipe, job_dir):
        report_end(measured, recipe.built_task, job_dir, recipe.format)
    leave_ranks()


def measure(recipe: Eval, job_dir: Path, step: int = 0) -> dict[str, Any]:
    """Measure a stored model. Rank 0 writes details into the job directory.

    Args:
        recipe: The settings.
        job_dir: The directory in which the run writes.
        step: The step of training whose details these are; 0 for an evaluation by itself.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks.
    """
    from recapp.run.run_checks import check_data, check_scoring
    from recapp.run.trained_model import open_trained
    from recapp.run.training import build_data, in_one_line

    recipe, opened = open_trained(recipe)
    if is_first() and not step:
        check_scoring(recipe, opened.stored.manifest)
        check_data(recipe, test=recipe.split == "test")
    data = build_data(recipe)
    model = opened.on_ranks(recipe)
    trainer = model.trainer(recipe, [], bar=wants_bar(recipe))

    loop = trainer.validate if recipe.split == "val" else trainer.test
    with in_one_line():
        results = loop(model.module, datamodule=data, ckpt_path=model.ckpt_path, verbose=False)

    if not trainer.is_global_zero:
        return {}
    details = getattr(model.module, "details", {})
    (job_dir / DETAILS_FILE).unlink(missing_ok=True)
    if details:
        write_details(details, job_dir, step)
    return {
        **{name: float(value) for name, value in results[0].items()},
        **intervals(details, recipe.split),
        "rows_read": data.rows_measured(recipe.split),
        "checkpoint": recipe.ckpt_path,
        "split": recipe.split,
        **model.facts(),
    }


if __name__ == "__main__":
    leave(main)
