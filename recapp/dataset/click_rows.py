"""Open the files of a run, split their rows into training and validation rows, and measure their
ids.

    settings, columns -> open_rows -> ClickRows -> streams of batches
                                                -> sizes of tables, statistics of ids
                                   -> rows_read    what a run says of its rows
                                   -> first_outside, place_of    ids without a row

This needs no Lightning, so a plan on paper reads the same rows as the ranks of a run.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from recapp.dataset.collate import Collate
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.decode import BadValue, decode_finite, decode_labels
from recapp.dataset.files import left_out
from recapp.dataset.formats import formats_of
from recapp.dataset.parquet import of_row_group
from recapp.dataset.schema import NO_LABEL, Schema
from recapp.dataset.sequential_rows import fitted, ids_by_feature
from recapp.dataset.source import Segment, Source, arrow_chunks, open_source, split
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError, DataError, IdError
from recapp.settings.values import Paths
from recapp.tables.config import EmbeddingConfig, TableLookup
from recapp.tables.statistics import TableStatistics, measured_statistics, read_cached, write_cached

# rows for id statistics: they take a fraction of a second and cover the batches of several ranks
STATISTICS_SAMPLES = 32_768


@dataclass(frozen=True)
class ClickRows:
    """The training rows and the validation rows.

    Args:
        settings: The settings of files, columns and order.
        schema: The columns.
        seed: The seed of the order.
        train: The training rows.
        val: The validation rows.
    """

    settings: DataSettings
    schema: Schema
    seed: int
    train: Source
    val: Source

    def test(self) -> Source:
        """Open the test rows.

        Raises:
            ConfigError: `dataset.test_path` is not set.
        """
        if self.settings.test_path is None:
            raise ConfigError(
                "dataset.test_path is not set: split=test needs it (a directory, a glob, a "
                "_file_list.txt or a list of them)"
            )
        return open_source(self.settings.test_path, self.schema, setting="dataset.test_path")

    def of(self, split: str) -> Source:
        """Return the rows of a split, `train`, `val` or `test`.

        Raises:
            ConfigError: `dataset.test_path` is not set.
        """
        return self.test() if split == "test" else {"train": self.train, "val": self.val}[split]

    def stream(
        self,
        source: Source,
        rank: int = 0,
        world: int = 1,
        *,
        training: bool = False,
        numbered: bool = False,
    ) -> BatchStream:
        """Return the stream of a rank's part of each global batch: of training batches, which are
        shuffled; or of a source whose rows are measured, each row once, in file order.

        Args:
            source: The rows.
            rank: The number of the rank.
            world: The number of ranks.
            training: Whether a model trains on the batches.
            numbered: Whether batches have the numbers of their rows.
        """
        settings = self.settings
        size = settings.batch_size
        return BatchStream(
            source,
            self.schema,
            batch_size=size if training else settings.val_batch_size or size,
            lanes=settings.lanes,
            shuffle_rows=settings.shuffle_rows if training else 0,
            seed=self.seed,
            rank=rank,
            world=world,
            training=training,
            whole=settings.follow,
            dense_transform=settings.dense_transform,
            numbered=numbered,
        )

    def training_stream(self, rank: int = 0, world: int = 1) -> BatchStream:
        """Return the stream of a rank's part of each global training batch."""
        return self.stream(self.train, rank, world, training=True)

    def fitted(self) -> "ClickRows":
        """Return the same rows with derived columns that are fitted on the training rows."""
        return replace(self, schema=fitted(self.schema, self.train))

    def statistics(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup] | None = None,
    ) -> dict[str, TableStatistics]:
        """Return id statistics of the tables, by table, from the first training rows of the first
        epoch.

        The statistics do not depend on the number of ranks. The user's cache keeps them
        (`recapp/tables/statistics.py`), so the rows are read only once.

        Args:
            tables: The tables to count ids for.
            lookups: The lookups that read the tables; None takes the lookups that tables declare.
        """
        files = [file.path for file in self.train.files]
        least = min(STATISTICS_SAMPLES, self.train.rows // 2)
        rules = self.schema.id_encoding()
        if known := read_cached(files, tables, least, lookups, rules):
            return known
        count = max(1, STATISTICS_SAMPLES // self.settings.batch_size)
        batches = list(islice(self.training_stream(), count))
        try:
            statistics = measured_statistics(tables, [b.sparse for b in batches], lookups)
        except IdError:
            return {}  # training will raise the error, with its rank
        write_cached(files, tables, statistics, sum(b.rows for b in batches), lookups, rules)
        return statistics


def open_rows(
    settings: DataSettings, schema: Schema, seed: int = 1, *, trains: bool = True
) -> ClickRows:
    """Open the files, and split their rows into training and validation rows.

    Args:
        settings: The settings of files and of their split.
        schema: The columns.
        seed: The seed of the order.
        trains: Whether a model trains on the rows: the training files then say which features have
            bags, unless the schema does.

    Raises:
        ConfigError: The rows have no labels, so that they allow only predictions; or `val_share` is
            invalid.
        DataError: A file is missing, or in no known format.
    """
    if not schema.labels:
        raise ConfigError(NO_LABEL)
    train = open_source(settings.path, schema)
    if schema.lists is None and trains:
        schema = replace(schema, lists=train.bags)
    if settings.val_path is None:
        train, val = split(train, settings.share_that_validates, settings.val_share)
    else:
        val = open_source(settings.val_path, schema, setting="dataset.val_path")
    return ClickRows(settings, schema, seed, train, val)


LABEL_ROWS = 2**20
NAMED = 3  # the most names of what is left out, for each reason


def rows_read(
    sources: Mapping[str, Source], schema: Schema, paths: Mapping[str, Paths | None]
) -> dict[str, Any]:
    """Return what a run reads. This opens each file, and reads labels of at most a million rows of
    each split.

    Args:
        sources: The rows of each split.
        schema: The columns.
        paths: The values of the settings that name them, by setting.
    """
    splits = {name: _split_read(source, schema) for name, source in sources.items() if source.rows}
    rest: dict[str, list[str]] = {}
    formats = formats_of(schema.files)
    for setting, value in paths.items():
        found = left_out(value, setting=setting, formats=formats) if value else {}
        for why, names in found.items():
            rest.setdefault(why, []).extend(names)
    files = {file.path: file for source in sources.values() for file in source.files}
    bad = [f"{os.path.basename(path)}: {row}" for path, file in files.items() for row in file.bad]
    if bad:
        rest["bad rows"] = bad
    out = [{"why": w, "count": len(names), "names": names[:NAMED]} for w, names in rest.items()]
    return {"splits": splits, "left_out": out}


def rows_of(settings: DataSettings, rows: ClickRows, splits: Sequence[str]) -> dict[str, Any]:
    """Return what a training, or an evaluation, reads.

    Args:
        settings: The settings of the data set.
        rows: Its rows.
        splits: `train`, `val` or `test`.
    """
    apart = {"test"} if settings.val_path is None else {"val", "test"}
    setting_names = [f"{split}_path" if split in apart else "path" for split in splits]
    paths = {f"dataset.{name}": getattr(settings, name) for name in setting_names}
    return rows_read({split: rows.of(split) for split in splits}, rows.schema, paths)


def _split_read(source: Source, schema: Schema) -> dict[str, Any]:
    numbers = sorted({segment.file for segment in source.segments})
    first, last = (os.path.abspath(source.files[numbers[end]].path) for end in (0, -1))
    labels = [name for name in schema.labels if name not in schema.real_labels]
    some = source.slice(0, LABEL_ROWS)
    sums = dict.fromkeys(labels, 0.0)
    try:
        for file, _, chunk in arrow_chunks(some.only(labels)) if labels else ():
            for name in labels:
                column = chunk.column(file.columns[name])
                if name in schema.soft_labels:
                    values = decode_finite(column, "label", 0, 1)
                else:
                    values = decode_labels(column, schema.label_from)
                sums[name] += float(values.sum(dtype=np.float64))
    except (DataError, BadValue):
        sums = {}
    return {
        "files": len(numbers),
        "first": first,
        "last": last,
        "rows": source.rows,
        "positives": {name: value / some.rows for name, value in sums.items()},
        "positives_of": some.rows,
    }


# ---- ids outside of their tables: in the footers of files, and in rows after an error


def first_outside(
    source: Source, schema: Schema, limits: Mapping[str, range]
) -> tuple[str, int] | None:
    """Return a feature and an id of it that its table has no row for; None if the footers of the
    files show none. No value is read.

    Args:
        source: The rows.
        schema: The columns of the rows.
        limits: The ids of each feature that its table has a row for.
    """
    for segment in source.segments:
        for feature, ids in limits.items():
            for number in _range(source, schema, segment, feature) or ():
                if number not in ids:
                    return feature, number
    return None


def place_of(
    source: Source,
    schema: Schema,
    feature: str,
    *,
    number: int | None = None,
    length: int | None = None,
) -> str:
    """Return the first row of a source that has an id, or whose bag has so many ids, and its file,
    as part of a line; empty if there is none.

    Args:
        source: The rows.
        schema: The columns of the rows.
        feature: The feature.
        number: The id.
        length: The number of ids.
    """
    if number is not None:
        ends = [_range(source, schema, segment, feature) for segment in source.segments]
        segments = zip(source.segments, ends, strict=True)
        some = tuple(each for each, end in segments if end is None or end[0] <= number <= end[1])
        source = Source(source.files, some, source.bags)
    for path, first, begins, ids in _bags(source, schema, feature):
        rows = np.flatnonzero(np.diff(begins) == length)
        if number is not None:
            rows = np.searchsorted(begins, np.flatnonzero(ids == number), side="right") - 1
        if len(rows):
            return f"row {first + int(rows[0])} of {path}"
    return ""


def _bags(
    source: Source, schema: Schema, feature: str
) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yield for each chunk of rows its file, its first row there, the offsets of the bags of a
    feature, and the ids; nothing for a feature that is computed.
    """
    if feature not in schema.sparse or feature in {column.name for column in schema.derived}:
        return
    some = schema.unlabelled().only_raw((), (feature,))
    narrowed = source.only([feature])
    collate = Collate(some, narrowed.bags, "none")
    for file, first, chunk in arrow_chunks(narrowed):
        rows = collate.rows(chunk, file.columns, file.path, first + np.arange(chunk.num_rows))
        (ids,) = ids_by_feature(rows, some, narrowed.bags).values()
        bags = [bag.offsets_N1 for bag in rows.bags]
        begins = bags[0] if bags else np.arange(len(ids) + 1)
        yield file.path, first, begins, ids


def _range(
    source: Source, schema: Schema, segment: Segment, feature: str
) -> tuple[int, int] | None:
    """Return the least and the greatest id of a feature in a row group; None if the footer does not
    tell, or the ids are not all numbers of the column: those that pad lists are no ids.
    """
    file = source.files[segment.file]
    column = of_row_group(file, file.columns.get(feature, ""), segment.row_group)
    known = column and column.statistics
    if known is None or not known.has_min_max or type(known.min) is not int:
        return None
    computed = feature not in schema.sparse or feature in {column.name for column in schema.derived}
    padding = schema.padding
    padded = feature in padding if isinstance(padding, Mapping) else padding is not None
    # 32 bits with a sign may be those of a hexadecimal number
    if computed or padded or (feature in schema.hex and known.min < 0):
        return None
    return known.min, known.max
