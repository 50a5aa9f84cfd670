"""Data sets that were published as CSV files: their check, their Parquet, and made-up rows of the
same shape.

    train.csv, valid.csv, test.csv, md5 -> train.parquet, valid.parquet, test.parquet
    columns, cardinalities, rows / 1000 -> train.parquet, valid.parquet, test.parquet

Parquet that is complete is not written again. In made-up rows an id is frequent where its number is
small, and the label depends on the ids.

Shapes: N rows of a file, L ids of all bags.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from recapp.dataset.derive import bucket_ids, log_edges
from recapp.dataset.rows import Int64Array
from recapp.errors import ConfigError, DataError
from recapp.settings.records import to_plain
from recapp.settings.small_files import read_json
from recapp.settings.values import in_quotes

PARTS = ("train", "valid", "test")
WRITTEN = "_published.json"
SCALE = 1000
MOST_ROWS = 50_000
"""The most made-up rows of a part: a thousandth of some published sets is still too many."""
WHOLE_CARDINALITY = 1000
"""Columns with no more ids keep their cardinality in made-up rows."""
READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PublishedFiles:
    """A published data set.

    Args:
        files: The md5 of each file; empty if the files are not CSV, and rows can only be made up.
        rows: The number of rows of each part: train, valid, test.
        label: The column of the label.
        dense: The columns of numbers.
        ids: The number of distinct ids of each column.
        bags: The number of ids of each row, of columns with more than one.
        splits: The separator of each column whose text is a list of ids.
        buckets: The columns of numbers that become ids, those of `dataset.buckets=log`.
    """

    files: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    label: str = "label"
    dense: tuple[str, ...] = ()
    ids: dict[str, int] = field(default_factory=dict)
    bags: dict[str, int] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    buckets: tuple[str, ...] = ()

    def overrides(self, folder: Path) -> list[str]:
        """Return the settings that read the Parquet files of a directory."""
        parts = dict(zip(("path", "val_path", "test_path"), self.parts, strict=False))
        return [
            "dataset=custom",
            f"dataset.label={self.label}",
            f"dataset.dense=[{','.join(self.dense)}]",
            f"dataset.sparse=[{','.join(self.ids)}]",
            *(
                f"dataset.{key}={in_quotes(folder / f'{part}.parquet')}"
                for key, part in parts.items()
            ),
        ]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the set has: a set without validation rows is validated on test rows."""
        there = tuple(part for part in PARTS if part in self.rows)
        return there if "valid" in there else ("train", "test", "test")

    def convert(self, source: Path, folder: Path) -> None:
        """Check the published files, and write them as Parquet.

        Args:
            source: The directory of the published files.
            folder: The directory of the Parquet files.

        Raises:
            ConfigError: The files of this set cannot be read.
            DataError: A file is missing, or is not the published one.
        """
        if not self.files:
            raise ConfigError(
                f"data={source}: the published files are not CSV, and are not read: leave out data"
            )
        for name in self.files:
            if not (source / name).is_file():
                raise DataError(f"data={source}: {name} is missing: {', '.join(self.files)}")
        written = to_plain(self)
        if _is_written(folder, written):
            return
        for name, published in self.files.items():
            found = md5_of(source / name)
            if found != published:
                raise DataError(
                    f"{source / name}: its md5 is {found}, that of the published file {published}: "
                    "download it again"
                )
        for name in self.files:
            self._convert(source / name, folder / f"{Path(name).stem}.parquet")
        _note_written(folder, written)

    def _convert(self, path: Path, target: Path) -> None:
        """Write a CSV file as Parquet, block by block: ids stay text, numbers are numbers."""
        kinds = {name: pa.string() for name in self.ids}
        kinds |= {name: pa.float64() for name in (*self.dense, *self.buckets, self.label)}
        reader = csv.open_csv(
            path,
            convert_options=csv.ConvertOptions(column_types=kinds, include_columns=list(kinds)),
        )
        unfinished = target.with_suffix(".tmp")
        writer: pq.ParquetWriter | None = None
        for batch in reader:
            table = self._converted(pa.Table.from_batches([batch]))
            writer = writer or pq.ParquetWriter(unfinished, table.schema)
            writer.write_table(table)
        if writer is None:
            raise DataError(f"{path}: has no rows")
        writer.close()
        os.replace(unfinished, target)

    def _converted(self, table: pa.Table) -> pa.Table:
        for name, separator in self.splits.items():
            lists = pc.split_pattern(pc.fill_null(table[name], ""), separator)
            table = table.set_column(table.column_names.index(name), name, lists)
        for name in self.buckets:
            numbers = pc.fill_null(table[name], 0.0).to_numpy().astype(np.float32)
            at = table.column_names.index(name)
            table = table.set_column(at, name, pa.array(bucket_ids(numbers, log_edges())))
        return table

    def make_up(self, folder: Path, seed: int = 1) -> None:
        """Write made-up rows of the same columns, a thousandth as many and with a thousandth of the
        distinct ids.

        Args:
            folder: The directory of the Parquet files.
            seed: The seed of the rows.
        """
        made = {"made_up": to_plain(self), "seed": seed}
        if _is_written(folder, made):
            return
        draw = np.random.default_rng(seed)
        weights = {
            name: draw.normal(size=of_table) / max(len(self.ids), 1) ** 0.5
            for name, of_table in self.shape_of_ids().items()
        }
        for part, published in self.rows.items():
            rows = min(max(published // SCALE, 1), MOST_ROWS)
            logits = np.full(rows, -1.0)
            columns: dict[str, pa.Array] = {}
            for name, of_ids in weights.items():
                bag = self.bags.get(name, 1)
                ids = (len(of_ids) * draw.random(rows * bag) ** 3).astype(np.int64)
                logits += of_ids[ids].reshape(rows, bag).mean(1)
                columns[name] = _bags(ids, bag) if bag > 1 else pa.array(ids)
            columns |= {name: pa.array(draw.random(rows)) for name in self.dense}
            clicks = draw.random(rows) < 1 / (1 + np.exp(-logits))
            columns[self.label] = pa.array(clicks.astype(np.int8))
            pq.write_table(pa.table(columns), folder / f"{part}.parquet")
        _note_written(folder, made)

    def shape_of_ids(self) -> dict[str, int]:
        """Return the number of distinct ids of each column of made-up rows."""
        return {name: min(n, max(WHOLE_CARDINALITY, n // SCALE)) for name, n in self.ids.items()}


def md5_of(path: Path) -> str:
    """Return the md5 of a file."""
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            found.update(block)
    return found.hexdigest()


def _bags(ids_L: Int64Array, bag: int) -> pa.Array:
    offsets = pa.array(np.arange(0, len(ids_L) + 1, bag, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(ids_L))


def _is_written(folder: Path, what: object) -> bool:
    try:
        return bool(read_json(folder / WRITTEN) == json.loads(json.dumps(what)))
    except (OSError, ValueError):
        folder.mkdir(parents=True, exist_ok=True)
        return False


def _note_written(folder: Path, what: object) -> None:
    (folder / WRITTEN).write_text(json.dumps(what) + "\n")
