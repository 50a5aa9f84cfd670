"""The facts that a person needs to repeat a run, or to doubt it.

    {"dataset": "/data/clicks", "rows_train": 5142, "rows_val": 858, "model": "DLRM", "tables": 26,
     "table_rows": 1008234, "batch_size": 1024, "precision": "32-true", "hosts": ["node7"],
     "device": "cpu", "version_recapp": "0.1.0", ..., "date": "2026-11-22T10:15:00+00:00"}

Rank 0 writes these entries into `metrics.json` when training ends. The foot of a
report shows them, with seed, ranks and plan.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from recapp.dataset.data_settings import DataSettings
from recapp.reporting.run_record import RunRecord
from recapp.reporting.summary import entries_of
from recapp.tables.config import EmbeddingConfig

VERSION = "version_"  # prefix of a package's name
PACKAGES = ("recapp", "torch", "lightning")


def about(
    dataset: DataSettings,
    model: str,
    precision: object,
    *,
    rows: tuple[int, int],
    rows_read: Mapping[str, Any],
    hosts: Sequence[str],
    tables: Sequence[EmbeddingConfig],
    device: str,
) -> dict[str, Any]:
    """Return the entries of a training run that has just ended.

    Args:
        dataset: The settings of the data set.
        model: The dotted class of the model.
        precision: The precision of the trainer.
        rows: The number of training rows and the number of validation rows.
        rows_read: The record of their files (`recapp/dataset/click_rows.py`), as plain values.
        hosts: The host of each rank.
        tables: The embedding tables of the model.
        device: The device of rank 0.
    """
    small = dataset.scaled
    return {
        "dataset": small.path if isinstance(small.path, str) else list(small.path),
        "rows_train": rows[0],
        "rows_val": rows[1],
        "rows_read": rows_read,
        "model": model.rpartition(".")[2],
        "tables": len(tables),
        "table_rows": sum(table.num_embeddings for table in tables),
        "table_parameters": sum(table.num_embeddings * table.embedding_dim for table in tables),
        "batch_size": small.batch_size,
        "precision": precision,
        "hosts": list(dict.fromkeys(hosts)),
        "device": str(device),
        **{f"{VERSION}{name}": text for name, text in versions().items()},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a run's results depend."""
    of_packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # imported from a directory, not installed
            of_packages[name] = version(name)
    return {**of_packages, "python": platform.python_version()}


def foot(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the facts about some runs as pairs of a name and a text. If the runs differ in a fact,
    the text lists all values.

    Args:
        runs: The results of the runs; those of a run that ended early have no facts.
    """
    known = [run for run in runs if run.date is not None]

    def each(text_of: Callable[[RunRecord], Any], between: str = "; ") -> str:
        return between.join(dict.fromkeys(str(text_of(run)) for run in known)) or "not recorded"

    reads = [entries_of(run.rows_read) for run in known if run.rows_read]
    names = dict.fromkeys(name for read in reads for name, text in read.items() if text)
    days = sorted(str(run.date) for run in known)
    dates = " to ".join(dict.fromkeys(_minute(day) for day in days[:1] + days[-1:]))
    ranks = dict.fromkeys(str(run.ranks) for run in runs if run.ranks)
    return [
        ("Data", each(lambda run: _path(run.dataset))),
        ("Rows", each(lambda r: f"{r.rows_train:,} to train on, {r.rows_val:,} to validate on")),
        ("Model", each(_model)),
        ("Plan", ", ".join(dict.fromkeys(run.plan for run in runs if run.plan)) or "not recorded"),
        ("Ranks", ", ".join(ranks) or "not recorded"),
        ("Batch", each(lambda run: f"{run.batch_size:,} samples, all ranks together")),
        *((n, "; ".join(dict.fromkeys(r[n] for r in reads if r.get(n)))) for n in names),
        ("Seed", each(lambda run: run.seed, ", ")),
        ("Versions", each(_versions)),
        ("Host", each(lambda run: f"{', '.join(run.hosts)} ({run.device})")),
        ("Date", dates or "not recorded"),
    ]


def _path(path: Any) -> str:
    return ", ".join(map(str, path)) if isinstance(path, list) else str(path)


def _model(run: RunRecord) -> str:
    s = "" if run.tables == 1 else "s"
    tables = f"{run.tables:,} table{s} of {run.table_rows:,} rows"
    return f"{run.model}, {tables}, {run.precision}"


def _versions(run: RunRecord) -> str:
    versions = {k.removeprefix(VERSION): v for k, v in run.more.items() if k.startswith(VERSION)}
    return ", ".join(f"{name} {text}" for name, text in versions.items())


def _minute(date: str) -> str:
    """Return an ISO date without its seconds: `2026-11-22 10:15 +00:00`."""
    moment = datetime.fromisoformat(date)
    return f"{moment:%Y-%m-%d %H:%M} {moment:%Z}".replace("UTC+", "+").strip()
