"""`python -m recapp.export ckpt_path=DIR output=DIR quantize=int8`: export a checkpoint as an
artefact, to score and serve it without the trainer.

    DIR (checkpoint) -> tables in fewer bits, dense part, an example with its scores -> DIR

Model and data come from the checkpoint. `recapp.load_model`, `recapp.predict` and `recapp.serve`
read the artefact. `recapp/stored/artefact_manifest.py` describes its files.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence

from recapp import console
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.run.commands import ExportCommand
from recapp.settings.check_settings import override_names

MUST_BE_GIVEN = {
    "ckpt_path": "a checkpoint that recapp.train has named",
    "output": "the directory of the artefact",
}

WITHOUT_EFFECT = (
    *("plan", "planner", "topology", "trainer", "engine", "launch", "optimizer", "metrics"),
    *("logger", "callbacks", "seed"),
)
"""Settings of training that have no effect on an artefact."""


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
    from recapp.cli.export_report import print_report
    from recapp.cli.model_export import export_model

    assert recipe.ckpt_path is not None and recipe.output is not None
    report = export_model(recipe.ckpt_path, recipe.output, recipe, recipe)
    if recipe.format == "json":
        console.emit_document(report)
        return
    print_report(report, recipe.built_task)
    size = f"{report['bytes'] / 1e6:,.1f} MB"
    print(f"artefact  {console.short_path(recipe.output)}  ({size})")


if __name__ == "__main__":
    leave(main)
