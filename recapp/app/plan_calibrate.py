"""`recapp.plan calibrate`: time this machine and a short run, and write its hardware file."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recapp import console
from recapp.app.chosen_options import command_settings
from recapp.app.command import Job, run_on_ranks
from recapp.app.compose import with_absolute_paths
from recapp.benchmarks.calibrate import settings_for, with_overhead
from recapp.processes.launch import rank_count
from recapp.processes.rank_environment import external_rank
from recapp.reporting.performance import PREDICTED_FILE, read_document, read_performance

Settings = dict[str, Any]
RUN_BATCH = 512
"""Samples of a rank in the run by which a step's overhead is measured."""
RUN_STEPS = 60
"""Steps of that run."""


def calibrate(settings: Settings, job: Job) -> None:
    """Time this machine, and write its hardware file."""
    timing = settings_for(settings, settings["path"])
    path = Path(timing["path"])
    with TemporaryDirectory(prefix="recapp_calibrate_") as folder:
        rows = run_on_ranks(
            timing, replace(job, directory=Path(folder)), "recapp.benchmarks.bench_worker"
        )["rows"]
        if external_rank() is None:  # ranks that others have started train once
            run = Path(folder) / "run"
            run.mkdir()
            run_on_ranks(
                short_run(settings, str(path), Path(folder) / "logs"),
                replace(job, directory=run),
                "recapp.worker",
            )
            measured = read_performance(run)
            predicted = read_document(run / PREDICTED_FILE)
            assert measured is not None and predicted is not None
            rows.append(with_overhead(path, measured, predicted))
    if settings["format"] == "json":
        console.emit(rows, "json")
        return
    columns = [
        console.Column("name", "what"),
        console.Column("us", "µs", ",.1f"),
        console.Column("items_per_second", "M items\n/ s", ",.1f", 1e6),
        console.Column("gb_per_s", "GB/s", ",.2f"),
        console.Column("gflop_per_s", "GFLOP/s", ",.1f"),
        console.Column("share", "share", ".2f"),
        console.Column("error", "error", ".0%"),
    ]
    console.print_table(
        rows,
        columns,
        title=f"What this machine's steps cost, written to {console.short_path(path)}",
    )
    print(f"\nPlan with it: topology.hardware={console.short_path(path)}")


def short_run(settings: Settings, hardware: str, data: Path) -> Settings:
    """Return the settings of a short run of recapp.train on data generated for it.

    Args:
        settings: Those of `recapp.plan`.
        hardware: The hardware file that the run is priced with.
        data: Where the data are written.
    """
    ranks = rank_count(settings["trainer"]["devices"], settings["trainer"]["accelerator"])
    asked = {
        "dataset.path": data,
        "dataset.batch_size": RUN_BATCH * ranks,
        "trainer.max_steps": RUN_STEPS,
        "dataset.generate.rows": RUN_BATCH * ranks * RUN_STEPS * 5 // 4,
        "trainer.limit_val_batches": 1,
        "callbacks": "none",
        "logger": "none",
        "trainer.enable_progress_bar": False,
        "trainer.log_every_n_steps": RUN_STEPS,
        "+plan": "row_wise",
    }
    overrides = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in asked.items()
    ]
    train = command_settings("train", overrides) | {"choices": {}, "format": "json"}
    for group, kept in (
        ("trainer", ("devices", "accelerator")),
        ("engine", ("transport", "backend", "keep_freed_memory")),
        ("launch", settings["launch"]),
    ):
        train[group] |= {key: settings[group][key] for key in kept}
    train["topology"]["hardware"] = hardware
    return with_absolute_paths(train)
