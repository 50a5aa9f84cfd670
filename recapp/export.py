"""`python -m recapp.export ckpt_path=DIR output=DIR quantize=int8`: make an artefact of a
checkpoint, which is scored and served without the trainer.

    DIR (checkpoint) -> tables in fewer bits, dense part, an example with its scores -> DIR

Model and data come from the checkpoint alone. `recapp.load_model`, `recapp.predict` and
`recapp.serve` take what it writes (`recapp/stored/artefact.py` says what that is).
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence
from typing import Any

from recapp import console
from recapp.app.command import Job, run
from recapp.app.compose import compose_over, with_absolute_paths
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave

MUST_BE_GIVEN = {
    "ckpt_path": "a checkpoint that recapp.train has named",
    "output": "the directory of the artefact",
}

WITHOUT_EFFECT = (
    *("plan", "planner", "topology", "trainer", "engine", "launch", "optimizer", "metrics"),
    *("logger", "callbacks", "seed"),
)
"""Settings of training that mean nothing here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """
    return run("export", export, writes=False, argv=argv)


def export(config: dict[str, Any], job: Job) -> None:
    """Write the artefact of one job, and print its report.

    Raises:
        ConfigError: An option is wrong.
        CheckpointError: The checkpoint is damaged.
        ArtefactError: The artefact cannot be written.
    """
    from recapp.app.export_model import Export, export_model
    from recapp.app.export_report import print_report

    console.check_format(config["format"])
    settings = settings_of(config, job)
    given = {key: settings[key] for key in Export.__dataclass_fields__}
    options = Export(**{**given, "quantize_tables": given["quantize_tables"] or {}})
    report = export_model(settings["ckpt_path"], settings["output"], options, settings)
    if config["format"] == "json":
        console.emit_document(report)
        return
    print_report(report)
    size = f"{report['bytes'] / 1e6:,.1f} MB"
    print(f"artefact  {console.short_path(settings['output'])}  ({size})")


def settings_of(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the checkpoint's settings, with what the command line sets replaced.

    Raises:
        ConfigError: No checkpoint or no output is named.
        CheckpointError: The checkpoint does not exist or is incomplete.
    """
    from recapp.app.check_data import match_checkpoint
    from recapp.stored.checkpoint import read_manifest

    for key, what in MUST_BE_GIVEN.items():
        if not config[key]:
            raise ConfigError(f"{key} must be given: {key}=DIR, {what}")
    for override in job.overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name.partition(".")[0].partition("/")[0] in WITHOUT_EFFECT:
            raise ConfigError(
                f"{override}: it would change nothing of an artefact, which has the tables and the "
                "dense part of its checkpoint: leave it out"
            )
    path = with_absolute_paths(config)["ckpt_path"]
    manifest = read_manifest(path)
    composed = compose_over(manifest.config, "export", job.overrides, job.folders)
    return match_checkpoint(with_absolute_paths(composed), manifest) | {"ckpt_path": path}


if __name__ == "__main__":
    leave(main())
