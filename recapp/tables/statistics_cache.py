"""A cache of id statistics in the user's cache directory: measuring takes seconds, and the data set
is usually the same.

    ~/.cache/recapp/statistics/<hash of the data set's directory>.json
        {"looked": [{"key": ..., "samples": 8192, "tables": {name: statistics}}, ...]}

The key is a hash of two parts: the names, sizes and modification times of the data files; and all
that turns ids into rows, which is the names, rows and id rules of tables and the features of their
lookups. Other files, tables or lookups have another key, so a stale entry is never read. The cache
writes no file into the data set. If the cache cannot be written, that is no error; the next run
measures again.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup, lookups_of
from recapp.tables.statistics import TableStatistics

KEPT = 8  # measurements kept for a data set, so that each job of a sweep finds its own
KEPT_DATA_SETS = 100  # data sets kept: those used last


def read_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    samples: int = 1,
    lookups: Sequence[TableLookup] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> dict[str, TableStatistics] | None:
    """Return the cached measurement for exactly these files and tables.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        samples: The least number of measured samples.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
        rules: The rules that make ids of values, as plain values.

    Returns:
        Statistics by table; None if there is no measurement, or one with too few samples.
    """
    key = _key(files, tables, lookups, rules)
    path = _path(files)
    for entry in _read(path) if key and path else []:
        if entry.get("key") == key and entry.get("samples", 0) >= samples:
            with suppress(ConfigError, KeyError, AttributeError):  # from another version, or edited
                return {t.name: TableStatistics.from_dict(entry["tables"][t.name]) for t in tables}
    return None


def write_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    statistics: Mapping[str, TableStatistics],
    samples: int,
    lookups: Sequence[TableLookup] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write a measurement to the user's cache.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        statistics: The statistics of each table.
        samples: The number of measured samples.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
        rules: The rules that make ids of values, as plain values.

    Returns:
        The path of the file; None if the cache cannot be written.
    """
    key = _key(files, tables, lookups, rules)
    path = _path(files)
    if not key or path is None:
        return None
    entry = {
        "key": key,
        "samples": samples,
        "tables": {t.name: statistics[t.name].to_dict() for t in tables},
    }
    kept = [entry, *(old for old in _read(path) if old.get("key") != key)][:KEPT]
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"looked": kept}) + "\n")
        unfinished.replace(path)
        _forget_old(path.parent)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return None
    return path


def _path(files: Sequence[str | Path]) -> Path | None:
    """Return the path of the file with the statistics of a data set; None if the user has no
    cache.
    """
    cache = _user_cache()
    if cache is None or not files:
        return None
    folder = str(Path(files[0]).resolve().parent)
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return cache / "recapp" / "statistics" / f"{name}.json"


# by platform: the variable that names the directory of a user's caches, and the default below the
# home
_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}


def _user_cache() -> Path | None:
    """Return the directory of this user's caches, which numba and others use too."""
    named, usual = _CACHES.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    if given := os.environ.get(named):
        return Path(given)
    try:
        return Path.home() / usual
    except RuntimeError:  # a user without a home
        return None


def _forget_old(folder: Path) -> None:
    """Delete the statistics of all data sets except those used last."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in found[:-KEPT_DATA_SETS]:
        path.unlink(missing_ok=True)


def _key(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None,
    rules: Mapping[str, Any] | None,
) -> str:
    """Return the key of a measurement; an empty text if a data file is absent."""
    identity: list[Any] = []
    try:
        for file in files:
            found = os.stat(file)
            identity.append([str(Path(file).resolve()), found.st_size, found.st_mtime_ns])
    except OSError:
        return ""
    features: dict[str, list[str]] = {t.name: [] for t in tables}
    for lookup in lookups_of(tables) if lookups is None else lookups:
        features[lookup.table.name].append(lookup.feature)
    identity.append(
        [
            [
                t.name,
                t.num_embeddings,
                *(["dynamic"] * (t.dynamic is not None)),
                features[t.name],
                t.id_rule.value,
                *([t.min_key] * (t.min_key != 0)),
            ]
            for t in tables
        ]
    )
    if rules:
        identity.append(dict(rules))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest() if files else ""


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the measurements in a file; an empty list if the file cannot be read."""
    try:
        entries = json.loads(path.read_text())["looked"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
