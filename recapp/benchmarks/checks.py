"""The settings of a benchmark, checked before anything is measured, the open ones filled in."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recapp.benchmarks.models import MODELS, SERVED
from recapp.benchmarks.rivals import check_python
from recapp.benchmarks.workloads import LOOKUPS, WORKLOADS
from recapp.errors import ConfigError, suggest
from recapp.inference.storage import QUANTIZE
from recapp.kernels.backend import backend as make_backend
from recapp.stored.directories import is_artefact
from recapp.tables.config import PoolingType
from recapp.transport.choose_transport import TRANSPORTS

PROTOCOLS = ("rows", "json", "binary", "arrow")
STRATEGY_BATCHES = [32, 4096]
ONE_PROCESS = ("kernels", "quantised", "memory", "inference", "serve")
"""The verbs that measure one process."""
ON_SEVERAL_THREADS = ("kernels", "quantised", "inference")
"""The verbs that take a list of threads."""
LISTED_TABLES = ("strategies", "memory")
"""The verbs that shard tables which are written out."""
ONE_TRANSPORT = ("strategies", "data", "dynamic")
"""The verbs that measure ranks through one transport."""
LOOKUP_BATCHES = [1, 64, 4096]
DEFAULTS: dict[str, dict[str, object]] = {
    "quantised": {"batch_size": LOOKUP_BATCHES},
    "dynamic": {"workload": "W1", "model": "hugectr_d64", "batch_size": 100_000},
    "inference": {"model": "large", "batch_size": LOOKUP_BATCHES, "compile": True},
    "serve": {"batch_size": [1, 64]},
}
"""The values that open settings have in a verb, where these are not those of the other verbs."""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with lists of known names and of numbers, and no open value left.

    Args:
        settings: The settings of the command, each in its range, with `verb` and `plans`.

    Raises:
        ConfigError: An unknown name, a list where one value is needed, a backend that is not
            installed, or a Python without TorchRec.
    """
    verb = settings["verb"]
    several = verb in ON_SEVERAL_THREADS
    if isinstance(settings["threads"], list) and not several:
        raise ConfigError(
            f"threads={settings['threads']}: a list is for {', '.join(ON_SEVERAL_THREADS)}; a rank "
            f"of {verb} has one number of threads"
        )
    ranks = 1 if verb in ONE_PROCESS else settings["ranks"]
    of_a_rank = 1 if verb == "serve" else max(1, len(os.sched_getaffinity(0)) // ranks)
    found: dict[str, Any] = {
        "threads": [1, 2] if several else of_a_rank,
        "batch_size": STRATEGY_BATCHES,
        "compile": False,
        **DEFAULTS.get(verb, {}),
    }
    found |= {key: value for key, value in settings.items() if value is not None}
    names = {
        "workload": _workloads(verb),
        "model": list(SERVED if verb == "inference" else MODELS),
        "transport": TRANSPORTS,
        "ids": ("uniform", "zipf"),
        "protocol": PROTOCOLS,
        "quantize": list(QUANTIZE),
    }
    found |= {key: check_names(key, found.get(key), known) for key, known in names.items()}
    found |= {key: _list(key, found[key]) for key in ("threads", "batch_size")}
    make_backend(settings["backend"], torch.device("cpu"))  # refuses what is not installed
    if verb in ONE_TRANSPORT and len(found["transport"]) > 1:
        raise ConfigError(
            f"transport={settings['transport']}: {verb} takes one; step and train compare several"
        )
    if verb in LISTED_TABLES and settings["tables"]["source"] != "list":
        raise ConfigError(
            f"tables: {verb} needs tables written out, as in conf/tables/sample.yaml: tables=sample"
        )
    if verb == "inference":
        _check_artefact(settings)
    if verb == "serve" and settings["artefact"] is None:
        raise ConfigError(
            "artefact must be given: artefact=DIR, an artefact of recapp.export or a checkpoint"
        )
    check_python(settings["torchrec_python"])
    return dict(settings) | found | {"ranks": ranks}


def check_names(setting: str, given: object, known: Sequence[str]) -> list[str]:
    """Return the names that a setting chooses, without repeats.

    Args:
        setting: The name of the setting, for errors.
        given: A name, a list of names, or None for all.
        known: The names there are.

    Raises:
        ConfigError: An unknown name, or none.
    """
    names = list(known) if given is None else given if isinstance(given, list) else [given]
    for name in names:
        if name not in known:
            raise ConfigError(f"{setting}={name}: {suggest(str(name), known)}")
    if not names:
        raise ConfigError(f"{setting}=[]: name at least one of {', '.join(known)}")
    return list(dict.fromkeys(map(str, names)))


def _list(setting: str, given: Any) -> list[Any]:
    """Return the values of a setting that takes one or several."""
    if given == []:
        raise ConfigError(f"{setting}=[]: give at least one value")
    return given if isinstance(given, list) else [given]


def _workloads(verb: str) -> list[str]:
    """Return the workloads that a verb measures: `kernels` those whose bags are summed."""
    if verb == "quantised":
        return list(LOOKUPS)
    return [
        name for name, w in WORKLOADS.items() if verb != "kernels" or w.pooling is PoolingType.SUM
    ]


def _check_artefact(settings: Mapping[str, Any]) -> None:
    """Check that a model of one's own is there and may be stored as asked.

    Raises:
        ConfigError: There is none, a generated one is named as well, or an artefact is to be stored
            otherwise.
    """
    path = settings["artefact"]
    if path is None:
        return
    if settings["model"] is not None:
        raise ConfigError(f"artefact={path} bench.model={settings['model']}: measure one of them")
    if not Path(path).is_dir():
        raise ConfigError(f"artefact={path}: there is no such checkpoint or artefact")
    if settings["quantize"] is not None and is_artefact(path):
        raise ConfigError(
            f"quantize={settings['quantize']}: artefact={path} is an artefact, whose tables are "
            "stored already: leave quantize out, or name its checkpoint"
        )
