"""`recapp.plan calibrate`: time this machine and a short run, and write its hardware file."""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from recapp import console
from recapp.benchmarks.calibrate import with_overhead
from recapp.cli.command import recipe_under
from recapp.cli.job import Job, run_on_ranks, run_recipe
from recapp.errors import ConfigError
from recapp.processes.launch import rank_count
from recapp.processes.rank_environment import external_rank
from recapp.reporting.run_record import (
    PERFORMANCE_FILE,
    PREDICTED_FILE,
    Performance,
    PlanReport,
    read_record,
)
from recapp.run.recipe import OnPaper, Train
from recapp.settings.records import to_plain

PATH = "hardware.yaml"  # where the settings name no file
# samples per rank in the run that measures the overhead of a step
RUN_BATCH = 512
# steps of that run
RUN_STEPS = 60


def calibrate(recipe: OnPaper, job: Job) -> None:
    """Time this machine, and write its hardware file."""
    ranks = rank_count(recipe.trainer.devices, recipe.trainer.accelerator)
    to_stderr = recipe.format == "json"
    path = file_of(recipe.path or PATH)
    with TemporaryDirectory(prefix="recapp_calibrate_") as folder:
        rows = run_on_ranks(
            to_plain(replace(recipe, path=str(path)))
            | {"command": "plan", "measure": "recapp.benchmarks.calibrate.calibrate"},
            replace(job, directory=Path(folder)),
            "recapp.benchmarks.session",
            ranks,
            recipe.launch,
            to_stderr=to_stderr,
        )["rows"]
        if external_rank() is None:  # ranks that were started from outside can train only once
            run = Path(folder) / "run"
            run.mkdir()
            run_recipe(
                short_run(recipe, ranks, str(path), Path(folder) / "logs"),
                replace(job, directory=run),
                "recapp.train",
            )
            measured = read_record(Performance, run / PERFORMANCE_FILE)
            predicted = read_record(PlanReport, run / PREDICTED_FILE)
            assert measured is not None and predicted is not None
            rows.append(with_overhead(path, measured, predicted))
    columns = [
        console.Column("name", "what"),
        console.Column("us", "µs", ",.1f"),
        console.Column("items_per_second", "M items\n/ s", ",.1f", 1e6),
        console.Column("gb_per_s", "GB/s", ",.2f"),
        console.Column("gflop_per_s", "GFLOP/s", ",.1f"),
        console.Column("share", "share", ".2f"),
        console.Column("error", "error", ".0%"),
    ]
    title = f"What this machine's steps cost, written to {console.short_path(path)}"
    console.emit(rows, recipe.format, columns, title=title)
    if recipe.format == "text":
        print(f"\nPlan with it: topology.hardware={console.short_path(path)}")


def file_of(path: str) -> Path:
    """Return the absolute path of the hardware file, checked before anything is measured.

    Args:
        path: The path in the settings.

    Raises:
        ConfigError: The file cannot be written.
    """
    file = Path(path).expanduser().absolute()
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "is a directory" if file.is_dir() else "cannot be written"
        raise ConfigError(
            f"path={path}: {why}: name a file in a directory that exists, such as path={PATH}"
        )
    return file


def short_run(recipe: OnPaper, ranks: int, hardware: str, data: Path) -> Train:
    """Return the recipe of a short run on generated data.

    Args:
        recipe: The recipe of `recapp.plan`.
        ranks: The number of ranks.
        hardware: The hardware file for the cost estimates of the run.
        data: The directory of the data.
    """
    asked = {
        "dataset.path": data,
        "dataset.batch_size": RUN_BATCH * ranks,
        "trainer.max_steps": RUN_STEPS,
        "dataset.generate.rows": RUN_BATCH * ranks * RUN_STEPS * 5 // 4,
        "trainer.limit_val_batches": 1,
        "callbacks": "none",
        "logger": "none",
        "trainer.enable_progress_bar": "false",
        "trainer.log_every_n_steps": RUN_STEPS,
        "+plan": "row_wise",
        "format": "json",
    }
    train: Train = recipe_under("train", [f"{key}={value}" for key, value in asked.items()])
    trainer = recipe.trainer
    engine = recipe.engine
    return replace(
        train,
        trainer=replace(train.trainer, devices=trainer.devices, accelerator=trainer.accelerator),
        engine=replace(
            train.engine,
            transport=engine.transport,
            backend=engine.backend,
            keep_freed_memory=engine.keep_freed_memory,
        ),
        launch=recipe.launch,
        topology=replace(train.topology, hardware=str(Path(hardware).absolute())),
    )
