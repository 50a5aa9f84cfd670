"""The settings of a benchmark, checked before anything is measured, the open ones filled in."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recapp.benchmarks.models import MODELS, SERVED
from recapp.benchmarks.rivals import check_python
from recapp.benchmarks.setup import check_backend, check_names, check_transports
from recapp.benchmarks.workloads import LOOKUPS, WORKLOADS
from recapp.errors import ConfigError
from recapp.inference.storage import QUANTIZE
from recapp.stored.artefact import is_artefact
from recapp.tables.config import PoolingType

IDS = ("uniform", "zipf")
PROTOCOLS = ("rows", "json", "binary", "arrow")
STRATEGY_BATCHES = [32, 4096]
ONE_PROCESS = ("kernels", "quantised", "memory", "inference", "serve")
"""The verbs that measure one process."""
ON_SEVERAL_THREADS = ("kernels", "quantised", "inference")
"""The verbs that take a list of threads."""
LOOKUP_BATCHES = [1, 64, 4096]
BATCHES = {"serve": [1, 64], "quantised": LOOKUP_BATCHES}
OF_VERB: dict[str, tuple[str | None, str, object]] = {
    "dynamic": ("W1", "hugectr_d64", 100_000),
    "inference": (None, "large", LOOKUP_BATCHES),
}
"""The workload, the model and the batch (of `dynamic` the new keys of a step) that are measured by
default, where that is not all.
"""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every name a list of known names and no open value left.

    Args:
        settings: The settings of the command, with `verb` and `plans`.

    Raises:
        ConfigError: An unknown name, a number out of range, a backend that is not installed, or a
            Python without TorchRec.
    """
    verb = settings["verb"]
    cores = len(os.sched_getaffinity(0))
    ranks = 1 if verb in ONE_PROCESS else _number("ranks", settings["ranks"])
    several = verb in ON_SEVERAL_THREADS
    own = [1, 2] if several else 1 if verb == "serve" else max(1, cores // ranks)
    threads = _or(settings["threads"], own)
    if isinstance(threads, list) and not several:
        raise ConfigError(
            f"threads={threads}: a list is for {', '.join(ON_SEVERAL_THREADS)}; a rank of "
            f"{verb} has one number of threads"
        )
    batches = BATCHES.get(verb, STRATEGY_BATCHES)
    workload, model, batch_size = OF_VERB.get(verb, (None, None, batches))
    found: dict[str, Any] = {
        "workload": check_names("workload", _or(settings["workload"], workload), _workloads(verb)),
        "model": check_names("model", _or(settings["model"], model), _models(verb)),
        "ids": check_names("ids", settings["ids"], IDS),
        "transport": check_transports(settings["transport"]),
        "backend": check_backend(settings["backend"]),
        "threads": _numbers("threads", threads),
        "batch_size": _numbers("batch_size", _or(settings["batch_size"], batch_size)),
        "ranks": ranks,
        "rounds": _number("rounds", settings["rounds"]),
        "bag": _number("bag", settings["bag"]),
        "keys": _number("keys", settings["keys"]),
        "protocol": check_names("protocol", settings["protocol"], PROTOCOLS),
        "round_seconds": _seconds(settings["round_seconds"]),
    }
    if verb in ("strategies", "data", "dynamic") and len(found["transport"]) > 1:
        raise ConfigError(
            f"transport={settings['transport']}: {verb} takes one; step and train compare several"
        )
    if verb in ("strategies", "memory") and settings["tables"]["source"] != "list":
        raise ConfigError(
            f"tables: {verb} needs tables written out, as in conf/tables/sample.yaml: tables=sample"
        )
    found["compile"] = _or(settings["compile"], verb == "inference")
    if not isinstance(found["compile"], bool):
        raise ConfigError(f"compile={settings['compile']}: must be true or false")
    found["quantize"] = check_names("quantize", settings["quantize"], list(QUANTIZE))
    if verb == "inference":
        _check_artefact(settings)
    if verb == "serve" and settings["artefact"] is None:
        raise ConfigError(
            "artefact must be given: artefact=DIR, an artefact of recapp.export or a checkpoint"
        )
    check_python(settings["torchrec_python"])
    return dict(settings) | found


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


def _models(verb: str) -> list[str]:
    """Return the models that a verb measures."""
    return list(SERVED if verb == "inference" else MODELS)


def _or(value: object, default: object) -> object:
    return default if value is None else value


def _number(setting: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{setting}={value}: must be a whole number of at least 1")
    return value


def _numbers(setting: str, value: object) -> list[int]:
    return [_number(setting, v) for v in (value if isinstance(value, list) and value else [value])]


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"round_seconds={value}: must be a number above 0")
    return float(value)
