"""`python -m recapp.bench VERB`: measures recapp, and what it is compared with, in the same rounds.

    settings, checked -> JOB/resolved.yaml -> ranks (`recapp.benchmarks.bench_worker`)
                      -> JOB/metrics.json -> a table

| verb         | measures                                         | against                        |
|--------------|--------------------------------------------------|--------------------------------|
| `kernels`    | lookup, backward and update in one process       | FBGEMM, plain torch, bandwidth |
| `quantised`  | lookups of rows in 8 and 4 bits, one process     | FBGEMM, torch, bandwidth       |
| `memory`     | what a backward and its update need beside a     | `nn.EmbeddingBag`              |
|              | table                                            |                                |
| `step`       | the embedding step on several ranks, under plans | TorchRec, the best plan        |
|              | and transports                                   |                                |
| `train`      | a whole training step of a DLRM                  | its matrix products, TorchRec  |
| `strategies` | sharding strategies: latency, memory, bytes      | each other                     |
|              | exchanged                                        |                                |
| `data`       | reading Parquet, and training from it            | training from memory           |
| `dynamic`    | tables of any keys, which grow                   | static tables, Python's dict   |
| `serve`      | a server under a rising load, in each protocol   | JSON rows, its own model       |

A setting that cannot be is refused here, before anything is measured.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recapp import console
from recapp.app.chosen_options import option_settings
from recapp.app.command import Job, run, run_on_ranks
from recapp.app.compose import with_absolute_paths
from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.settings.option_files import options
from recapp.settings.primaries import VERBS

SHORT = ("plan", "model")  # groups have these names, and Hydra would look for an option there
PLANS = {  # that are measured without plan=...
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """
    arguments = [_in_full(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    return run("bench", measure, verbs=VERBS["bench"], argv=arguments)


def measure(config: dict[str, Any], job: Job) -> None:
    """Run the measurement of the job's verb on its ranks, and print the records.

    Args:
        config: The composed settings of the command.
        job: The job: its verb, directory and overrides.
    """
    settings = settings_of(config, job)
    with TemporaryDirectory(prefix="recapp_bench_") as folder:
        found = run_on_ranks(settings | {"folder": folder}, job, "recapp.benchmarks.bench_worker")
    if external_rank():
        return
    from recapp.benchmarks import columns

    rows = found["rows"]
    console.emit(
        rows if config["format"] == "json" else columns.shown(job.verb, rows),
        config["format"],
        columns.COLUMNS[job.verb],
    )
    for path in found["pictures"]:
        console.note(f"picture {console.short_path(path)}")


def _in_full(argument: str) -> str:
    name = argument.lstrip("+").partition("=")[0]
    return f"bench.{argument.lstrip('+')}" if name in SHORT and "=" in argument else argument


def settings_of(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the settings of the ranks: checked, with the rules of each plan and no open value.

    Args:
        config: The composed settings of the command.
        job: The job: its verb and the folders of its options.

    Raises:
        ConfigError: An unknown name, a number out of range, a backend that is not installed, or a
            Python without TorchRec.
    """
    from recapp.benchmarks.checks import checked

    bench = config["bench"]
    chosen = _names(
        bench["plan"], PLANS.get(job.verb, ()), [*options("plan", job.folders), *bench["plans"]]
    )
    plans = {
        name: bench["plans"].get(name) or option_settings("plan", name, job.folders)
        for name in chosen
    }
    settings = with_absolute_paths(config) | {
        "verb": job.verb,
        "plans": plans,
        "model": bench["model"],
        "artefact": _absolute(config["artefact"]),
        "torchrec_python": _absolute(bench["torchrec_python"]),
    }
    del settings["bench"]
    settings = checked(settings)
    if job.verb == "data":
        _write_logs(settings["dataset"])
    return settings | {"trainer": {"devices": settings["ranks"], "accelerator": "cpu"}}


def _absolute(path: str | None) -> str | None:
    """Return a path as an absolute one, with its links.

    The Python of an environment is a link; what it points to is a Python without the environment.
    """
    return None if path is None else str(Path(path).expanduser().absolute())


def _write_logs(dataset: dict[str, Any]) -> None:
    """Write the generated logs, unless they are there."""
    if dataset["naming"] != "criteo":
        raise ConfigError(
            f"dataset.naming={dataset['naming']}: data trains DLRMs over Criteo's columns; use "
            "dataset=generated or dataset=criteo_kaggle dataset.path=DIR"
        )
    if dataset["generate"] is not None:
        from recapp.app.build import write_generated

        write_generated(dataset)


def _names(given: object, default: Sequence[str], known: Sequence[str]) -> list[str]:
    names = list(default) if given is None else list(given) if isinstance(given, list) else [given]
    for name in names:
        if name not in known:
            raise ConfigError(f"plan={name}: {suggest(str(name), known)}")
    return list(dict.fromkeys(map(str, names)))


if __name__ == "__main__":
    leave(main())
