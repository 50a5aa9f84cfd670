"""A configuration for tests of commands and launching: the real files that matter to them, and
groups small enough to read.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from recapp.processes.launch import LaunchSettings
from recapp.run import recipe as commands
from recapp.run.recipe import Command
from recapp.settings.records import absent
from recapp.tasks.task import ClickTask, Task
from recapp.trainer.trainer_settings import TrainerSettings

REAL = Path(__file__).resolve().parents[1] / "conf"

DATA = (
    "naming: criteo\nlabel: label\nval_share: 1/7\nval_path: null\ntest_path: null\n"
    "generate: {}\nlanes: 16\nbatch_size: 32\nshuffle_rows: 0"
)

FILES = {
    "train.yaml": """
        defaults:
          [command, dataset: generated, model: dlrm, trainer: default, launch: local, _self_,
           experiment: null]
        seed: 1
        checkpoints: null
        ckpt_path: null
        callbacks: {}
        metrics: {names: [auc]}
        optimizer: {schedule: null}
        tables: {source: list}
    """,
    "show.yaml": "defaults: [command, trainer: default, _self_]\nsubject: ???\nseed: 1",
    "dataset/generated.yaml": f"path: data/generated\n{DATA}",
    "dataset/other.yaml": f"path: [a, b/*.parquet]\nsplit: 1/7\n{DATA}",
    "model/dlrm.yaml": "ranks: [fine, fine]\ndim: 16",
    "model/deep.yaml": "ranks: [fine, fine]\ndepth: 2\nseed_of_model: ${seed}",
    "trainer/default.yaml": (
        "devices: 2\naccelerator: cpu\nmax_steps: null\nmax_epochs: null\n"
        "limit_train_batches: null\nlimit_val_batches: null"
    ),
    "plan/mixed.yaml": "name: mixed\ntables: {}",
    "plan/row_wise.yaml": "name: row_wise\ntables: {}",
    "experiment/wide.yaml": """
        # @package _global_
        defaults: [override /model: deep]
        seed: 7
        trainer: {max_steps: 100}
    """,
}


@dataclass(frozen=True, kw_only=True)
class Settings(Command):
    """What its commands know; groups may hold anything."""

    seed: Any = 1
    ckpt_path: str | None = None
    subject: Any = absent()
    dataset: dict[str, Any] = absent()
    model: dict[str, Any] = absent()
    trainer: dict[str, Any] = absent()
    launch: dict[str, Any] = absent()
    plan: dict[str, Any] = absent()
    callbacks: dict[str, Any] = absent()
    metrics: dict[str, Any] = absent()
    optimizer: dict[str, Any] = absent()
    tables: dict[str, Any] = absent()


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """What starts ranks."""

    trainer: TrainerSettings = absent()
    launch: LaunchSettings = absent()
    checkpoints: str | None = None
    checkpoints_in = commands.Train.checkpoints_in
    without_validation: ClassVar[str | None] = None
    built_task: ClassVar[Task] = ClickTask()


COMMANDS = {"train": TrainSettings, "show": Settings}


def install(put):
    """Makes them the commands, and leaves out checks of data and models, of which they have none.

    Args:
        put: `setattr`, or what undoes it after a test.
    """
    commands.COMMANDS.update(COMMANDS)


def write(folder: Path) -> Path:
    """Writes the configuration into `folder` and answers it."""
    shutil.copy(REAL / "command.yaml", folder)
    shutil.copytree(REAL / "launch", folder / "launch")
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        file.write_text("\n".join(line[indent:] for line in lines).rstrip() + "\n")
    return folder
