"""Check the settings of a benchmark before any measurement, and fill in open values."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from recapp.benchmarks.bench_settings import BenchSettings
from recapp.benchmarks.rivals import check_python
from recapp.benchmarks.workloads import LOOKUPS, MODELS, SERVED, WORKLOADS
from recapp.errors import ConfigError, suggest
from recapp.inference.storage import QUANTIZE
from recapp.kernels.backend import backend as make_backend
from recapp.run.commands import Bench
from recapp.settings.records import to_plain
from recapp.settings.values import shown
from recapp.stored.directories import is_artefact
from recapp.tables.config import PoolingType
from recapp.tables.table_settings import ListedTables
from recapp.transport.choose_transport import TRANSPORTS

PROTOCOLS = ("rows", "json", "binary")
STRATEGY_BATCHES = (32, 4096)
ONE_PROCESS = ("kernels", "quantised", "memory", "inference", "serve")
"""The verbs that measure one process."""
ON_SEVERAL_THREADS = ("kernels", "quantised", "inference")
"""The verbs that take a list of threads."""
LISTED_TABLES = ("strategies", "memory")
"""The verbs that need tables in the form of a list (`ListedTables`)."""
ONE_TRANSPORT = ("strategies", "data", "dynamic")
"""The verbs that measure ranks through one transport."""
LOOKUP_BATCHES = (1, 64, 4096)
DEFAULTS: dict[str, dict[str, object]] = {
    "quantised": {"batch_size": LOOKUP_BATCHES},
    "train": {"model": tuple(MODELS), "batch_size": (512, 4096)},
    "dynamic": {"workload": "W1", "model": "hugectr_d64", "batch_size": 100_000},
    "inference": {"model": "large", "batch_size": LOOKUP_BATCHES, "compile": True},
    "serve": {"batch_size": (1, 64)},
}
"""The defaults of a verb that differ from those of other verbs."""


def checked(
    given: Bench,
    verb: str,
    plans: dict[str, dict[str, Any]],
    recipes: dict[str, dict[str, Any]] | None = None,
) -> BenchSettings:
    """Return the settings of a measurement, with every value filled in.

    Args:
        given: The settings of the command, each in its range.
        verb: The measurement.
        plans: The settings of each measured plan, by its name.
        recipes: The settings of a training run with each measured model of `conf/model`.

    Raises:
        ConfigError: An unknown name, a list where one value is needed, a backend that is not
            installed, or a Python without TorchRec.
    """
    several = verb in ON_SEVERAL_THREADS
    if isinstance(given.threads, tuple) and not several:
        raise ConfigError(
            f"threads={_shown(given.threads)}: only {', '.join(ON_SEVERAL_THREADS)} take a list; "
            f"give {verb} one number of threads for each rank"
        )
    ranks = 1 if verb in ONE_PROCESS else given.ranks
    of_a_rank = 1 if verb == "serve" else max(1, len(os.sched_getaffinity(0)) // ranks)
    defaults: dict[str, Any] = {
        "threads": (1, 2) if several else of_a_rank,
        "batch_size": STRATEGY_BATCHES,
        "compile": False,
        **DEFAULTS.get(verb, {}),
    }

    def chosen(setting: str, value: Any) -> Any:
        return defaults.get(setting) if value is None else value

    transport = check_names("transport", given.transport, TRANSPORTS)
    make_backend(given.backend, torch.device("cpu"))  # refuses a backend that is not installed
    if verb in ONE_TRANSPORT and len(transport) > 1:
        raise ConfigError(
            f"transport={_shown(given.transport)}: {verb} takes one transport; step and train "
            "compare several"
        )
    if verb in LISTED_TABLES and not isinstance(given.tables, ListedTables):
        raise ConfigError(
            f"tables: {verb} needs listed tables, as in conf/tables/sample.yaml: set tables=sample"
        )
    if verb == "inference":
        _check_artefact(given)
    if verb == "serve" and given.artefact is None:
        raise ConfigError(
            "artefact must be given: artefact=DIR, an artefact of recapp.export or a checkpoint"
        )
    check_python(given.bench.torchrec_python)
    model = chosen("model", given.bench.model)
    known = [*(SERVED if verb == "inference" else MODELS), *(recipes or ())]
    quantize: Any = check_names("quantize", given.quantize, list(QUANTIZE))
    return BenchSettings(
        verb=verb,
        plans=plans,
        workload=check_names("workload", chosen("workload", given.workload), _workloads(verb)),
        model=check_names("model", model, known),
        recipes=recipes or {},
        transport=transport,
        backend=given.backend,
        keep_freed_memory=given.keep_freed_memory,
        ranks=ranks,
        threads=_several("threads", chosen("threads", given.threads)),
        rounds=given.rounds,
        round_seconds=given.round_seconds,
        batch_size=_several("batch_size", chosen("batch_size", given.batch_size)),
        ids=check_names("ids", given.ids, ("uniform", "zipf")),
        bag=given.bag,
        keys=given.keys,
        compile=chosen("compile", given.compile),
        quantize=quantize,
        artefact=given.artefact,
        protocol=check_names("protocol", given.protocol, PROTOCOLS),
        load=given.load,
        torchrec_python=given.bench.torchrec_python,
        tables=given.tables,
        dataset=given.dataset,
    )


def check_dense_parts(given: Bench, recipes: Iterable[str]) -> None:
    """Check that a measurement of nothing but dense parts is given no setting of whole steps.

    Args:
        given: The settings of the command.
        recipes: The measured models of `conf/model`.

    Raises:
        ConfigError: A setting would change nothing.
    """
    if {*_names(given.bench.model)} - {*recipes}:
        return  # whole steps are measured, too
    usual = Bench.__dataclass_fields__
    for name in ("compile", "threads", "transport"):
        if (value := getattr(given, name)) not in (usual[name].default, False):
            raise _of_whole_steps(name, value)
    if given.bench.plan is not None:
        raise _of_whole_steps("plan", given.bench.plan)


def _of_whole_steps(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{name}={_shown(value)}: the dense part of a model of conf/model is measured alone, on "
        f"one thread: leave {name} out, or measure whole steps, model={next(iter(MODELS))}"
    )


def _names(given: object) -> tuple[object, ...]:
    return given if isinstance(given, tuple) else (given,)


def check_names(setting: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a setting chooses, without repeats.

    Args:
        setting: The name of the setting, for errors.
        given: A name, several names, or None for all.
        known: The allowed names.

    Raises:
        ConfigError: A name is unknown, or the list is empty.
    """
    names = known if given is None else _names(given)
    for name in names:
        if name not in known:
            raise ConfigError(f"{setting}={name}: {suggest(str(name), known)}")
    if not names:
        raise ConfigError(f"{setting}=[]: name at least one of {', '.join(known)}")
    return tuple(dict.fromkeys(map(str, names)))


def _shown(value: Any) -> str:
    return shown(to_plain(value))


def _several(setting: str, given: Any) -> tuple[int, ...]:
    """Return the numbers of a setting that takes one number or several."""
    if given == ():
        raise ConfigError(f"{setting}=[]: give at least one value")
    return given if isinstance(given, tuple) else (given,)


def _workloads(verb: str) -> list[str]:
    """Return the workloads of a verb; those of `kernels` have summed bags."""
    if verb == "quantised":
        return list(LOOKUPS)
    return [
        name for name, w in WORKLOADS.items() if verb != "kernels" or w.pooling is PoolingType.SUM
    ]


def _check_artefact(given: Bench) -> None:
    """Check that the user's checkpoint or artefact exists, and that `quantize` fits it.

    Raises:
        ConfigError: There is no such directory, the settings also name a generated model, or they
            ask to quantise an artefact again.
    """
    path = given.artefact
    if path is None:
        return
    if given.bench.model is not None:
        raise ConfigError(
            f"artefact={path} bench.model={_shown(given.bench.model)}: name only one of the two"
        )
    if not Path(path).is_dir():
        raise ConfigError(f"artefact={path}: there is no such checkpoint or artefact")
    if given.quantize is not None and is_artefact(path):
        raise ConfigError(
            f"quantize={_shown(given.quantize)}: artefact={path} is an artefact, whose tables "
            "have their data type already: leave quantize out, or name its checkpoint"
        )
