"""`python -m recapp.eval ckpt_path=DIR`: measure a checkpoint, on any number of ranks, under any
plan.

    DIR/manifest.json (settings, plan) + command line -> ranks (`recapp.worker`) -> JOB/metrics.json

Model, tables, data and split come from the checkpoint alone; exactly what the command line sets
replaces them (`+plan=row_wise`, `trainer.devices=4`, `split=test`). On the data it was validated on
a checkpoint reproduces the metrics it was saved with.
"""

if __name__ == "__main__":
    from recapp.processes.fork_server import start_early
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while
    start_early()  # what ranks need is imported meanwhile

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recapp import console
from recapp.app.check_checkpoint import check_fits_checkpoint
from recapp.app.check_data import check_data, check_generated, match_checkpoint, note_scale
from recapp.app.command import Job, run, run_on_ranks
from recapp.app.compose import compose_over, with_absolute_paths
from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave

SPLITS = ("val", "test")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """
    return run("eval", evaluate, argv=argv)


def evaluate(config: dict[str, Any], job: Job) -> float | None:
    """Measure the checkpoint of one job on its ranks, and return the AUC."""
    settings = settings_of(config, job)
    check_data(settings)
    if settings["split"] != "test":
        check_generated(settings, job.overrides)
    check_fits_checkpoint(settings, job.overrides)
    note_scale(settings)
    metrics = run_on_ranks(settings, job, "recapp.worker")
    if config["format"] == "json" and not external_rank():
        console.emit([metrics], "json")
    return metrics.get(f"{settings['split']}_auc")


def settings_of(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the checkpoint's settings, with what the command line sets replaced.

    Raises:
        ConfigError: No checkpoint is named, the split is unknown, or there are no test data.
        CheckpointError: The checkpoint does not exist or is incomplete.
    """
    from recapp.stored.checkpoint import read_manifest

    if not config["ckpt_path"]:
        raise ConfigError(
            "ckpt_path must be given: ckpt_path=DIR, a checkpoint that recapp.train has named"
        )
    path = Path(with_absolute_paths(config)["ckpt_path"])
    manifest = read_manifest(path)
    settings = with_absolute_paths(
        compose_over(manifest.config, "eval", job.overrides, job.folders)
    )
    settings = match_checkpoint(settings, manifest)
    if settings["split"] not in SPLITS:
        raise ConfigError(f"split={settings['split']}: {suggest(str(settings['split']), SPLITS)}")
    if settings["split"] == "test" and settings["dataset"]["test_path"] is None:
        raise ConfigError(
            "dataset.test_path is not set: split=test needs it (a directory, a glob, a "
            "_file_list.txt or a list of those)"
        )
    return settings | {"ckpt_path": str(path)}


if __name__ == "__main__":
    leave(main())
