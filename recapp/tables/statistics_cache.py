"""Id statistics are kept beside the data they were measured on: measuring again costs seconds, and
nothing has changed.

    <data set>/.recapp_statistics.json
        {"looked": [{"key": ..., "samples": 8192, "tables": {name: statistics}}, ...]}

The key is a hash of the data files' names, sizes and times of change, and of what decides how ids
become rows: the tables' names, rows and id rules, and the features of their lookups. Other files,
tables or lookups have another key, so nothing stale is ever read. The name begins with a dot:
readers of data sets skip it. A directory that cannot be written is no error; the next run measures
again.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup, lookups_of
from recapp.tables.statistics import TableStatistics

FILE = ".recapp_statistics.json"
KEPT = 8  # the measurements kept for a data set, so that each job of a sweep finds its own


def read_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    samples: int = 1,
    lookups: Sequence[TableLookup] | None = None,
) -> dict[str, TableStatistics] | None:
    """Return what was measured before on exactly these files for exactly these tables.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        samples: The least number of samples that must have been measured.
        lookups: What reads the tables; None takes the lookups that the tables declare.

    Returns:
        Statistics by table; None where nothing was measured, or too few samples.
    """
    key = _key(files, tables, lookups)
    for entry in _read(_path(files)) if key else []:
        if entry.get("key") == key and entry.get("samples", 0) >= samples:
            with suppress(
                ConfigError, KeyError, AttributeError
            ):  # an entry of another version, or an edited one
                return {t.name: TableStatistics.from_dict(entry["tables"][t.name]) for t in tables}
    return None


def write_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    statistics: Mapping[str, TableStatistics],
    samples: int,
    lookups: Sequence[TableLookup] | None = None,
) -> Path | None:
    """Keep what was measured beside the data.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        statistics: The statistics of each table.
        samples: The number of samples that were measured.
        lookups: What reads the tables; None takes the lookups that the tables declare.

    Returns:
        The file; None where the data set's directory cannot be written.
    """
    key = _key(files, tables, lookups)
    path = _path(files)
    if not key:
        return None
    entry = {
        "key": key,
        "samples": samples,
        "tables": {t.name: statistics[t.name].to_dict() for t in tables},
    }
    kept = [entry, *(old for old in _read(path) if old.get("key") != key)][:KEPT]
    unfinished = path.with_name(f"{FILE}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps({"looked": kept}) + "\n")
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return None
    return path


def _path(files: Sequence[str | Path]) -> Path:
    """Return the path of the file with the statistics of a data set."""
    return Path(files[0]).resolve().parent / FILE if files else Path(FILE)


def _key(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None,
) -> str:
    """Return the key of a measurement; an empty text where a data file is not there."""
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
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest() if files else ""


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the measurements of a file, none where it cannot be read."""
    try:
        entries = json.loads(path.read_text())["looked"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
