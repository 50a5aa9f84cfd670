"""`recapp.data convert`: any readable logs to typed Parquet, split, with vocabularies.

    logs -> parts of 262,144 rows
    fit      types of text; cuts of a split by time; vocabularies of the training rows
    parts    OUT.parts/train/part-00000.parquet, OUT.parts/val/..          on all cores
             in the order of the files, or dealt and sorted (`orders.py`)
    publish  OUT.parts/recapp_dataset.json, then OUT.parts becomes OUT     whole, or not there

Memory holds a row group for each thread, and the distinct values of vocabularies. A conversion that
was ended goes on where it stopped, if the same command is given: its fit, and the parts that are
whole, stay in OUT.parts.

The manifest has the sources, the recipe, and rows, bytes and md5 of each file.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recapp import console
from recapp.console import Column
from recapp.dataset.arrow_types import is_list, is_number
from recapp.dataset.data_file import CONVERSION, Fingerprint, file_facts
from recapp.dataset.source import Source, open_raw
from recapp.errors import ConfigError, DataError, first_line, suggest
from recapp.logs.fitting import Fitted, OtherKindError, fitted
from recapp.logs.histories import (
    HISTORY,
    LIKED,
    NEGATIVES,
    liked_rows,
    lists_of,
    with_negatives,
    write_histories,
)
from recapp.logs.log_parts import Part, Workers, deal, parts_of
from recapp.logs.orders import GROUP_ROWS, KEY, bounds_of, in_order, with_keys
from recapp.logs.splits import SPLITS
from recapp.processes.rank_environment import LOCK_FILE, locked
from recapp.run.recipe import Convert
from recapp.settings.records import to_plain
from recapp.settings.whole_file import write_whole

STATE = "state"  # of a conversion that is not done
SPLIT = "the split"  # the number of each row's split, while rows are on their way
R = TypeVar("R")
COLUMNS = [
    Column("split", "split"),
    Column("rows", "rows"),
    Column("files", "files"),
    Column("bytes", "MB", ",.1f", 1e6),
]


def convert(settings: Convert) -> None:
    """Convert logs, and print the rows of each split.

    Raises:
        ConfigError: A setting is wrong, or the results cannot be written.
        DataError: The logs cannot be read, or a value is none of the type of its column.
    """
    if not settings.path or not settings.out:
        raise ConfigError("path and out must be given: python -m recapp.data convert PATH out=DIR")
    named = [one for one in (settings.time, settings.user, settings.item) if one]
    names = [*(settings.columns or ()), *named]
    source = open_raw(settings.path, settings.rules, setting="path", names=names)
    check(settings, source)
    out = Path(settings.out).expanduser()
    if out.exists() and not settings.overwrite:
        raise ConfigError(f"out={settings.out}: is there already: set overwrite=true, or another")
    work = out.with_name(f"{out.name}.parts")
    for folder in (out, work):  # what is replaced, and what is deleted before another recipe begins
        if folder.exists() and not _is_ours(folder):
            raise ConfigError(
                f"out={settings.out}: {folder} is there, and no conversion has made it: move it "
                "elsewhere, or choose another out"
            )
    try:
        with locked(work, "out"):
            rows = _converted(settings, source, work)
        if out.exists():
            shutil.rmtree(out)
        os.replace(work, out)
    except OSError as error:
        raise ConfigError(
            f"out={settings.out}: {error.filename or work} cannot be written ({error.strerror}); "
            "the same command goes on from what there is"
        ) from error
    title = f"Written to {console.short_path(out)}"
    console.emit(rows, settings.format, COLUMNS, title=title)


def _is_ours(folder: Path) -> bool:
    """Return whether a conversion has made a directory, or nobody has put anything into it."""
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {"a file"}
    return names <= {LOCK_FILE} or bool(names & {CONVERSION, STATE})


def check(settings: Convert, source: Source) -> None:
    """Check that settings name columns of the logs.

    Raises:
        ConfigError: A column is not there, or a split lacks its column.
    """
    present = source.types.names
    wanted = settings.columns or present
    for setting, names, there in (
        ("columns", wanted, present),
        ("types", settings.types or (), wanted),
        ("separator", settings.separator or (), wanted),
        ("vocabularies", settings.vocabularies or (), wanted),
        ("time", filter(None, [settings.time]), present),
        ("user", filter(None, [settings.user]), present),
        ("item", filter(None, [settings.item]), wanted),
        ("liked", settings.liked or (), wanted),
    ):
        for name in names:
            if name not in there:
                raise ConfigError(f"{setting}: {name} is no column; {suggest(name, there)}")
    for setting in ("time", "user", "item"):
        name = getattr(settings, setting)
        if name and (name in (settings.separator or ()) or is_list(source.types.field(name).type)):
            raise ConfigError(f"{setting}={name}: has lists, and one value a row is needed")


def _converted(settings: Convert, source: Source, work: Path) -> list[dict[str, Any]]:
    """Convert logs into a directory; return the rows of each split."""
    sources = file_facts(source.files)
    recipe = to_plain(settings)
    of_results = {name: recipe[name] for name in recipe if name not in _NOT_OF_RESULTS}
    identity = json.dumps([of_results, Fingerprint.of(sources).to_plain()], sort_keys=True)
    identity = hashlib.sha256(identity.encode()).hexdigest()
    try:
        _continue_or_begin(work, identity)
        found, files = _written(settings, source, work, in_all=False)
    except OtherKindError as error:
        console.note(f"types are found in all values, because {error}")
        shutil.rmtree(work / STATE)
        _continue_or_begin(work, identity)
        found, files = _written(settings, source, work, in_all=True)
    rows = [
        {
            "split": name,
            "rows": sum(file["rows"] for file in files if file["split"] == name),
            "files": sum(file["split"] == name for file in files),
            "bytes": sum(file["bytes"] for file in files if file["split"] == name),
        }
        for name in found.split.names
    ]
    manifest = {
        "format": 1,
        "id": identity[:16],
        "recipe": of_results,
        "kinds": found.kinds,
        "cuts": found.split.cuts,
        "vocabularies": {name: len(values) for name, values in found.vocabularies.items()},
        "splits": rows,
        "files": files,
        "sources": [facts._asdict() for facts in sources],
    }
    write_whole(work / CONVERSION, json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(work / STATE)
    return rows


def _counted(what: str, rows: Sequence[int], results: Iterable[R]) -> Iterator[R]:
    """Yield results, and show how many rows are done.

    Args:
        what: What is counted, for people.
        rows: The rows of each result.
        results: The results.
    """
    with console.progress(what, sum(rows)) as advance:
        for count, result in zip(rows, results, strict=True):
            advance(count)
            yield result


def _written(
    settings: Convert, source: Source, work: Path, *, in_all: bool
) -> tuple[Fitted, list[dict[str, Any]]]:
    """Write the files of all parts; return what was found in the rows, and the files."""
    parts = parts_of(source)
    workers = Workers(settings.num_threads or os.cpu_count() or 1)
    found = fitted(settings, parts, work, workers, in_all=in_all)
    write_histories(settings, found, parts, work / STATE, workers)
    rows = [part.source.rows for part in parts]
    if settings.order == "files":
        written = workers.each(
            parts,
            lambda part: _write(
                part.number,
                _rows_of(part, settings, found, work),
                work,
                beside=2 * len(parts) <= workers.threads,  # such as one compressed file
            ),
        )
        return found, [*chain.from_iterable(_counted("Rows", rows, written))]
    folder = work / STATE / "rows"
    folder.mkdir(exist_ok=True)
    bounds = bounds_of(settings, parts, workers)

    def deal_part(part: Part) -> None:
        file = folder / f"{part.number:05d}.arrow"
        if not file.exists():
            table = pa.concat_tables(_rows_of(part, settings, found, work))
            shard_N = np.searchsorted(bounds, table[KEY].to_numpy(), side="right")
            deal(file, table, shard_N, len(bounds) + 1)

    deque(_counted("Rows", rows, workers.each(parts, deal_part)), maxlen=0)
    files = sorted(folder.glob("*.arrow"))
    shards = range(len(bounds) + 1)
    written = workers.each(shards, lambda shard: _write(shard, in_order(files, shard), work))
    return found, [*chain.from_iterable(_counted("Sorted", [1] * len(shards), written))]


_NOT_OF_RESULTS = ("format", "path", "out", "overwrite", "num_threads")


def _continue_or_begin(work: Path, identity: str) -> None:
    """Keep what an ended conversion by the same recipe has left, and delete all else."""
    state = work / STATE
    mark = state / "identity"
    if mark.is_file() and mark.read_text() == identity:
        done = len(list(state.glob("part-*.json")))
        console.note(f"goes on after {done:,} part(s) of the conversion that was ended")
        return
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    state.mkdir()
    write_whole(mark, identity)


class _SplitWriter:
    """Write the rows of a part that are in one split, in row groups.

    Args:
        file: The file; it gets this name in `close`.
        schema: The columns.
        pool: A thread that writes while the next rows are read; None writes at once.
    """

    def __init__(self, file: Path, schema: pa.Schema, pool: Executor | None) -> None:
        self.file = file
        self._pool = pool
        self._last: Future[None] | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._unfinished = file.with_name(f"{file.name}.tmp")
        file.parent.mkdir(exist_ok=True)
        try:
            self._writer = pq.ParquetWriter(
                self._unfinished,
                schema,
                compression="zstd",
                write_page_checksum=True,
                # of texts they take long, and nobody skips rows by them
                write_statistics=[field.name for field in schema if is_number(field.type)],
            )
        except pa.ArrowException as error:
            problem = first_line(error)
            names = [field.name for field in schema if problem.endswith(str(field.type))]
            raise DataError(
                f"column {', '.join(names)}: Parquet has no such type ({problem}); name the other "
                "columns, columns=[...]"
            ) from error

    def add(self, rows: pa.Table) -> None:
        """Add some rows."""
        self._waiting.append(rows)
        self._rows += rows.num_rows
        if sum(table.num_rows for table in self._waiting) >= GROUP_ROWS:
            self._write()

    def close(self) -> dict[str, Any]:
        """Finish the file, and return what the manifest says of it."""
        self._write()
        if self._last:
            self._last.result()
        self._writer.close()
        with open(self._unfinished, "rb") as written:
            md5 = hashlib.file_digest(written, "md5").hexdigest()
        os.replace(self._unfinished, self.file)
        return {
            "split": self.file.parent.name,
            "name": self.file.name,
            "rows": self._rows,
            "bytes": self.file.stat().st_size,
            "md5": md5,
        }

    def _write(self) -> None:
        """Write the rows that wait, when those before them are written."""
        if self._last:
            self._last.result()
        if self._waiting:
            rows = pa.concat_tables(self._waiting)
            write = partial(self._writer.write_table, rows, row_group_size=rows.num_rows)
            self._last = self._pool.submit(write) if self._pool else write()
            self._waiting = []


def _write(
    number: int, tables: Iterator[pa.Table], work: Path, *, beside: bool = False
) -> list[dict[str, Any]]:
    """Write rows, each into its split, unless that was done before; return the files.

    Args:
        number: The number of the files.
        tables: The rows, with a column `SPLIT`.
        work: The directory of the conversion.
        beside: Whether another thread writes a row group while the next one is read.
    """
    done = work / STATE / f"part-{number:05d}.json"
    if done.is_file():
        known: list[dict[str, Any]] = json.loads(done.read_text())
        return known
    used: dict[int, _SplitWriter] = {}
    with ThreadPoolExecutor(1) as pool:
        for table in tables:
            split_N = table[SPLIT].to_numpy()
            rows = table.drop_columns([SPLIT])
            for split in (here := np.unique(split_N).tolist()):
                some = rows.filter(pa.array(split_N == split)) if len(here) > 1 else rows
                if split not in used:
                    file = work / SPLITS[split] / f"part-{number:05d}.parquet"
                    used[split] = _SplitWriter(file, rows.schema, pool if beside else None)
                used[split].add(some)
        files = [used[split].close() for split in sorted(used)]
    write_whole(done, json.dumps(files))
    return files


def _rows_of(part: Part, settings: Convert, found: Fitted, work: Path) -> Iterator[pa.Table]:
    """Yield the converted rows of a part, with their splits, and keys if they are to be sorted."""
    lists = lists_of(part, work / STATE) if settings.history or settings.negatives else pa.table({})
    for path, first, chunk in part.chunks():
        rows = found.table(chunk, path, first)
        rows = rows.append_column(SPLIT, pa.array(found.split.of(chunk, path, first)))
        if settings.order != "files":
            rows = with_keys(rows, chunk, path, first, settings)
        if settings.liked or settings.negatives:
            liked = liked_rows(chunk, path, first, settings, found).astype(np.int64)
            rows = rows.append_column(LIKED, pa.array(liked))
        here = lists.slice(first - part.first, chunk.num_rows)
        if settings.history:
            items = here[HISTORY].combine_chunks()
            rows = rows.append_column(HISTORY, found.with_ids(str(settings.item), items))
        if settings.negatives:
            others = found.with_ids(str(settings.item), here[NEGATIVES].combine_chunks())
            rows = with_negatives(rows, str(settings.item), others)
        yield rows
