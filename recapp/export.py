"""`python -m recapp.export ckpt_path=DIR output=DIR quantize=int8`: export a checkpoint as an
artefact, to score and serve it without the trainer.

    DIR (checkpoint) -> tables in fewer bits, dense part, an example with its scores -> DIR

Model and data come from the checkpoint. `recapp.load_model`, `recapp.predict` and `recapp.serve`
read the artefact. `recapp/stored/manifest.py` describes its files.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Mapping, Sequence
from typing import Any

from recapp import console
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.recipe import ExportCommand
from recapp.settings.records import override_names
from recapp.tasks.task import Task

MUST_BE_GIVEN = {
    "ckpt_path": "a checkpoint that recapp.train has named",
    "output": "the directory of the artefact",
}

# settings of training that have no effect on an artefact
WITHOUT_EFFECT = (
    *("plan", "planner", "topology", "trainer", "engine", "launch", "optimizer", "metrics"),
    *("logger", "callbacks", "seed"),
)
TABLE_COLUMNS = (
    console.Column("table", "table"),
    console.Column("rows", "rows", ","),
    console.Column("dim", "dim"),
    console.Column("trained", "trained"),
    console.Column("bytes_before", "MB", ",.2f", 1e6),
    console.Column("stored", "stored"),
    console.Column("bytes_after", "MB", ",.2f", 1e6),
)
LONG_TITLE = 12  # letters; longer ones stand in two lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("export", export, writes=False, argv=argv)


def export(recipe: ExportCommand, job: Job) -> None:
    """Write the artefact of one job, and print its report.

    Args:
        recipe: The checkpoint's recipe, changed by the command line.
        job: The job.

    Raises:
        ConfigError: No checkpoint or no output is named, or an option is wrong.
        CheckpointError: The checkpoint is damaged.
        ArtefactError: The artefact cannot be written.
    """
    for key, what in MUST_BE_GIVEN.items():
        if not getattr(recipe, key):
            raise ConfigError(f"{key} must be given: {key}=DIR, {what}")
    for name, override in zip(override_names(job.overrides), job.overrides, strict=True):
        if name.partition(".")[0].partition("/")[0] in WITHOUT_EFFECT:
            raise ConfigError(
                f"{override}: has no effect on an artefact, which has the tables and the dense "
                f"part of its checkpoint: leave {name} out"
            )
    from recapp.model_export import export_model

    assert recipe.ckpt_path is not None and recipe.output is not None
    report = export_model(recipe.ckpt_path, recipe.output, recipe, recipe)
    if recipe.format == "json":
        console.emit_document(report)
        return
    _print_report(report, recipe.built_task)
    size = f"{report['bytes'] / 1e6:,.1f} MB"
    print(f"artefact  {console.short_path(recipe.output)}  ({size})")


def _width_columns(task: Task) -> tuple[console.Column, ...]:
    """Return the columns of the table of widths: bytes, the metrics of a task, and changes."""
    from recapp.model_export import change_of  # imports torch

    measures = task.storage_measures
    return (
        console.Column("quantize", "quantize"),
        console.Column("bytes", "tables,\nMB", ",.1f", 1e6),
        *(
            console.Column(
                one.name,
                one.title.replace(" ", "\n", int(len(one.title) > LONG_TITLE)),
                ".5f" if one.better == "max" else ".6f",
            )
            for one in measures
        ),
        console.Column(change_of(measures[-1].name), "change\nof it", "+.6f"),
        console.Column("largest_change", "largest change\nof a score", ".6f"),
    )


def _print_report(report: Mapping[str, Any], task: Task) -> None:
    console.print_table(
        *(report["tables"], TABLE_COLUMNS),
        title="Tables",
        most=console.MANY_ROWS,
        rest=": report, tables in manifest.json",
    )
    before = sum(t["bytes_before"] for t in report["tables"])
    after = sum(t["bytes_after"] for t in report["tables"])
    print(f"\nall tables: {before / 1e6:,.1f} MB trained, {after / 1e6:,.1f} MB stored\n")
    if report["widths"]:
        title = f"On {report['validation_rows']:,} validation rows"
        console.print_table(report["widths"], _width_columns(task), title=title)
        print()


if __name__ == "__main__":
    leave(main)
