"""Id statistics are kept beside the data they were measured on: looking again costs seconds, and
nothing has changed.

    <data set>/.recapp_statistics.json
        {"looked": [{"key": ..., "samples": 8192, "tables": {name: statistics}}, ...]}

The key is a hash of the data files' names, sizes and times of change, and of what decides how ids
become rows: the tables' names, rows, features and id rules. Other files or tables: another key, so
nothing stale is ever read. The name begins with a dot: readers of data sets skip it. A directory
that cannot be written is no error, the next run looks again.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics

FILE = ".recapp_statistics.json"
KEPT = 8  # measurements of one data set: a sweep over tables keeps finding its own


def read_cached(
    files: Sequence[str | Path], tables: Sequence[EmbeddingBagConfig], samples: int = 1
) -> dict[str, TableStatistics] | None:
    """What was measured before on exactly these files for exactly these tables; None where nothing
    was, or on fewer samples.

    Args:
        files: of the data set.
        tables: of the model.
        samples: that were looked at, at least.
    """
    key = _key(files, tables)
    for entry in _read(_place(files)) if key else []:
        if entry.get("key") == key and entry.get("samples", 0) >= samples:
            with suppress(ConfigError, KeyError, AttributeError):  # of another version, or edited
                return {t.name: TableStatistics.from_dict(entry["tables"][t.name]) for t in tables}
    return None


def write_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingBagConfig],
    statistics: Mapping[str, TableStatistics],
    samples: int,
) -> Path | None:
    """Keep what was measured; None where the data set's directory cannot be written.

    Args:
        files: of the data set.
        tables: of the model.
        statistics: of each table.
        samples: that were looked at.
    """
    key = _key(files, tables)
    place = _place(files)
    if not key:
        return None
    entry = {
        "key": key,
        "samples": samples,
        "tables": {t.name: statistics[t.name].to_dict() for t in tables},
    }
    kept = [entry, *(old for old in _read(place) if old.get("key") != key)][:KEPT]
    unfinished = place.with_name(f"{FILE}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps({"looked": kept}) + "\n")
        unfinished.replace(place)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return None
    return place


def _place(files: Sequence[str | Path]) -> Path:
    return Path(files[0]).resolve().parent / FILE if files else Path(FILE)


def _key(files: Sequence[str | Path], tables: Sequence[EmbeddingBagConfig]) -> str:
    """Empty where a file is not there."""
    told: list[Any] = []
    try:
        for file in files:
            found = os.stat(file)
            told.append([str(Path(file).resolve()), found.st_size, found.st_mtime_ns])
    except OSError:
        return ""
    told.append(
        [[t.name, t.num_embeddings, list(t.feature_names), t.id_rule.value] for t in tables]
    )
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if files else ""


def _read(place: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(place.read_text())["looked"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
