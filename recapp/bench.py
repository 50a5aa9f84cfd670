"""`python -m recapp.bench VERB`: measure recapp and other systems in the same rounds.

    settings, checked -> JOB/resolved.yaml -> ranks (`recapp.benchmarks.bench_worker`)
                      -> JOB/metrics.json -> a table

| verb         | measures                                         | against                        |
|--------------|--------------------------------------------------|--------------------------------|
| `kernels`    | lookup, backward and update in one process       | FBGEMM, plain torch, bandwidth |
| `quantised`  | lookups of rows in 8 and 4 bits, in one process  | FBGEMM, torch, bandwidth       |
| `memory`     | memory of a backward and its update, besides the | `nn.EmbeddingBag`              |
|              | table                                            |                                |
| `step`       | the embedding step on several ranks, under plans | TorchRec, the best plan        |
|              | and transports                                   |                                |
| `train`      | a whole training step of a DLRM; the dense part  | its matrix products, TorchRec  |
|              | of any model of `conf/model`                     |                                |
| `strategies` | sharding strategies: latency, memory, bytes      | each other                     |
|              | exchanged                                        |                                |
| `data`       | reading Parquet, and training from it            | training from memory           |
| `dynamic`    | dynamic tables, which grow                       | static tables, Python's dict   |
| `inference`  | latency of a trained model: p50, p99, rows a     | `nn.EmbeddingBag`, TorchRec    |
|              | second; eager, compiled and in C++               |                                |
| `serve`      | a server under a rising load, in each protocol   | JSON rows, its own model       |
| `start`      | commands from the command line to the first step | another recapp                 |

Wrong settings are refused here, before the measurement starts.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recapp import console
from recapp.benchmarks.bench_settings import BenchSettings
from recapp.cli.command import run
from recapp.cli.job import Job, run_on_ranks
from recapp.cli.recipe_of_job import recipe_under
from recapp.dataset.data_settings import DataSettings
from recapp.errors import ConfigError
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.run.commands import VERBS, Bench
from recapp.settings.option_files import options
from recapp.settings.records import to_plain

ROWS_FILE = "rows.json"
SHORT = ("plan", "model")  # also the names of groups, in which Hydra would look for an option
PLANS: dict[str, Sequence[str]] = {  # plans of each verb without plan=...
    "step": (
        "table_wise",
        "row_wise",
        "column_wise",
        "data_parallel",
        "mixed",
        "hugectr_mixed",
        "torchrec_mixed",
    ),
    "train": ("table_wise",),
    "strategies": ("table_wise", "row_wise", "column_wise", "mixed", "data_parallel"),
    "data": ("table_wise",),
    "dynamic": ("table_wise",),
}
_HISTORY = ("tables.sequences=[C26]", "tables.shared={C26: C25}")
_FIELD_AWARE = (f"tables.dim={4 * (13 + 26)}",)
TABLES = {"din": _HISTORY, "bst": _HISTORY, "ffm": _FIELD_AWARE, "onn": _FIELD_AWARE}
"""The settings of the tables of `train model=NAME`, where a model cannot take the usual ones."""
ALONE = {
    "start": "runs whole commands",
    "inference": "measures one process",
}
"""The verbs that must not run under torchrun or srun, with the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    arguments = [_in_full(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    return run("bench", measure, verbs=VERBS["bench"], argv=arguments)


def measure(given: Bench, job: Job) -> None:
    """Run the measurement of the job's verb, and print its records.

    Args:
        given: The settings of the command.
        job: The job: its verb, directory and overrides.
    """
    settings = settings_of(given, job)
    with TemporaryDirectory(prefix="recapp_bench_") as folder:
        found = _measured(replace(settings, folder=folder), given, job)
    if found:  # empty on ranks other than 0
        _report(found, job.verb, given.format)


def _in_full(argument: str) -> str:
    name = argument.lstrip("+").partition("=")[0]
    return f"bench.{argument.lstrip('+')}" if name in SHORT and "=" in argument else argument


# ---- the settings


def settings_of(given: Bench, job: Job) -> BenchSettings:
    """Return the checked, complete settings of the measurement, with the rules of each plan.

    Args:
        given: The settings of the command.
        job: The job: its verb and the folders of its options.

    Raises:
        ConfigError: A name is unknown, a backend is not installed, a Python has no TorchRec, or
            torchrun or srun started a verb that runs alone.
    """
    verb = job.verb
    if verb in ALONE and external_rank() is not None:
        raise ConfigError(f"bench {verb} {ALONE[verb]}: start it without torchrun or srun")
    own = given.bench
    if verb == "start":  # needs neither plans nor torch
        caches = given.cache if isinstance(given.cache, tuple) else (given.cache,)
        return BenchSettings(
            verb=verb,
            rounds=given.rounds,
            cache=tuple(dict.fromkeys(caches)),
            baseline=_absolute(own.baseline),
        )
    from recapp.benchmarks.checks import check_dense_parts, check_names, checked

    names = PLANS.get(verb, ())
    if own.plan is not None:
        names = check_names("plan", own.plan, [*options("plan", job.folders), *own.plans])
    plans = {
        name: own.plans.get(name) or to_plain(recipe_under("plan", [f"+plan={name}"]).plan)
        for name in names
    }
    own = replace(own, torchrec_python=_absolute(own.torchrec_python))
    given = replace(given, artefact=_absolute(given.artefact), bench=own)
    recipes = _recipes(own.model, job) if verb == "train" else {}
    if recipes:
        check_dense_parts(given, recipes)
    settings = checked(given, verb, plans, recipes)
    if verb == "data":
        _write_logs(given.dataset)
    return settings


def _recipes(model: object, job: Job) -> dict[str, dict[str, Any]]:
    """Return the settings of a training run with each of the named models of `conf/model`.

    Raises:
        ConfigError: A name is unknown.
    """
    from recapp.benchmarks.checks import check_names
    from recapp.benchmarks.workloads import MODELS

    known = options("model", job.folders)
    names = () if model is None else check_names("model", model, [*MODELS, *known])
    return {
        name: to_plain(
            recipe_under("train", [f"model={name}", "dataset=generated", *TABLES.get(name, ())])
        )
        for name in names
        if name not in MODELS
    }


def _absolute(path: str | None) -> str | None:
    """Return an absolute path without resolving links.

    The Python of a virtual environment is a link. Its target is a Python without the environment.
    """
    return None if path is None else str(Path(path).expanduser().absolute())


def _write_logs(dataset: DataSettings) -> None:
    """Write the generated logs, unless they exist."""
    if dataset.naming != "criteo":
        raise ConfigError(
            f"dataset.naming={dataset.naming}: data trains DLRMs over Criteo's columns; use "
            "dataset=generated or dataset=criteo_kaggle dataset.path=DIR"
        )
    if dataset.generate is not None:
        from recapp.run.run_rows import write_generated

        write_generated(dataset)


# ---- the measurement


def _measured(settings: BenchSettings, given: Bench, job: Job) -> dict[str, Any]:
    """Run a measurement and return its records by the names of their tables, and its `pictures`."""
    if job.verb == "start":
        return _commands_timed(settings, job)
    worker = "recapp.benchmarks.bench_worker"
    if job.verb == "inference":
        worker = "recapp.inference_bench"
        settings = replace(settings, served=_served(settings, job))
    return run_on_ranks(
        to_plain(settings),
        job,
        worker,
        0 if external_rank() is not None else settings.ranks,
        given.launch,
        to_stderr=given.format == "json",
        preload=f"torch {worker}",
    )


def _commands_timed(settings: BenchSettings, job: Job) -> dict[str, Any]:
    """Time commands in processes of their own, and write the records into the job's directory.

    Raises:
        ConfigError: `bench.baseline` names no recapp.
        LaunchError: A command failed.
    """
    from recapp.benchmarks.start_times import can_drop_caches, measure

    if "cold" in settings.cache and not can_drop_caches():
        console.note(
            "cache=cold: only root may empty the page cache: these measurements are left out"
        )
    with console.progress("start, rounds", settings.rounds) as advance:
        found = measure(settings, Path(settings.folder), advance)
    (job.directory / ROWS_FILE).write_text(json.dumps(found, indent=1) + "\n")
    return {**found, "pictures": []}


def _served(settings: BenchSettings, job: Job) -> dict[str, str]:
    """Return the checkpoint or artefact of each model. Generated models are trained first."""
    if settings.artefact is not None:
        return {Path(settings.artefact).name.partition(".")[0]: settings.artefact}
    from recapp.benchmarks.workloads import SERVED
    from recapp.inference_bench import train_generated

    folder = Path(settings.folder)
    return {
        name: str(train_generated(SERVED[name], folder / f"{name}_trained", job))
        for name in settings.model
    }


# ---- the report


def _report(found: dict[str, Any], verb: str, format: str) -> None:
    """Print records, and the paths of pictures."""
    from recapp.benchmarks import columns

    pictures = found.pop("pictures")
    if format == "json":
        console.emit_document({k: v for k, v in found.items() if isinstance(v, list)})
    else:
        for name, rows in found.items():
            kind = verb if name == "rows" else name
            if rows and kind in columns.COLUMNS:
                console.emit(columns.shown(kind, rows), format, columns.COLUMNS[kind])
    if verb == "inference":
        from recapp.benchmarks.scoring_speed import goal_lines  # imports torch

        for line in goal_lines(found["rows"]):
            console.note(line)
    for path in pictures:
        console.note(f"picture {console.short_path(path)}")


if __name__ == "__main__":
    leave(main)
