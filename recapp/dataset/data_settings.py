"""The settings of rows. The group `dataset` has files, columns, order and sizes of tables; a
prediction has the rows to score, and the sizes of batches and parts.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Literal

from recapp.errors import ConfigError
from recapp.settings.values import IdRule, Natural, Paths, Positive, Rows, Width, Within, shown

SCORE = "score"
"""The column of the scores."""
ROWS_PER_BATCH = 4096
Pieces = Annotated[int, Within(1, 1024)]
VectorWidth = Annotated[int, Within(1, 65_536)]
Period = Annotated[float, Within(1e-30, 1e30)]
TimeUnit = Literal["s", "ms", "us", "ns"]
TimeFeature = Literal["hour", "weekday", "day", "week"]
PaddingId = int | str
BucketRule = Literal["log"] | Annotated[int, Within(2, 65_536)]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """The settings `dataset.generate`: data that recapp generates.

    Args:
        kind: Criteo's columns, or the three tables of `tables=sample`.
        rows: The number of rows, training and validation together.
        seed: The seed of the generated values.
        separability: A factor on the effects of ids and numbers on labels; 0 gives noise.
        positives: The share of clicks.
    """

    kind: Literal["criteo", "sample"] = "criteo"
    rows: Positive = 200_000
    seed: Natural = 1
    separability: Annotated[float, Within(0)] = 1.0
    positives: Annotated[float, Within(above=0, below=1)] = 0.257


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The group `dataset`.

    Args:
        path: Training logs: a directory, a glob, a `_file_list.txt`, a file, or a list of these.
        val_path: Validation logs; None takes the end of `path`.
        test_path: Test logs; None without test logs.
        val_share: The share of `path` for validation, as a fraction such as "1/7".
        naming: Whether columns have Criteo's names, or the names of the settings that follow.
        label: The column of the label, or a list of several; None for rows without labels.
        weight: The column of the weights of rows, or the column for each label.
        dense: The columns of numbers.
        sparse: The columns of ids.
        hex: The sparse columns whose text is hexadecimal.
        padding: The id that fills lists up to a length, in all columns of lists or by column; it is
            left out.
        separator: What stands between the ids of a text, by column, which then has a list in each
            row.
        dense_transform: The function applied to dense columns.
        buckets: The rule, or a rule by dense column, by which numbers are also ids: `log`, or a
            number of quantiles.
        missing_flags: Whether to add a number that is 1 where a number is missing; or for which
            dense columns.
        piecewise: The number of pieces, or the number by dense column, between quantiles of the
            training rows; each piece is a further number.
        crosses: The columns of ids that are hashed together to a further id.
        min_frequency: The least frequency in the training rows of ids with a row of their own, for
            all features or by feature.
        times: The columns of timestamps, which are no features of their own, and the unit of their
            whole numbers since 1970 (UTC); timestamps of Arrow have a unit of their own.
        time_features: What is computed of each of them: `hour` and `weekday` are ids, `day` and
            `week` a sine and a cosine of the time of day and of the week.
        periodic: The period of dense columns that also give a sine and a cosine.
        vectors: The columns of lists of numbers, such as embeddings made elsewhere, and the length
            of their lists; each number is one more of the model, as it is.
        id_rule: The id rule of the tables.
        cardinality: The number of distinct ids of each sparse column.
        table_rows: The rows of the table of each sparse column.
        table_dims: The dimension of single tables, by column.
        batch_size: The rows of a GLOBAL training batch, a multiple of `lanes`.
        val_batch_size: The rows of a GLOBAL validation batch; None takes `batch_size`.
        lanes: V of the data order (`recapp/dataset/stream.py`); at least the number of ranks.
        shuffle_rows: The number of consecutive rows within which the order is shuffled.
        seed: The seed of the order of rows; None takes the seed of the run.
        num_workers: The reader processes of each rank; 0 reads in the rank's own process.
        scale: The fraction of the data set's size to use (`scaled`).
        generate: Data that recapp generates at `path`; None reads existing files.

    Raises:
        ConfigError: Two settings conflict, or a fraction is invalid.
    """

    path: Paths
    val_path: Paths | None = None
    test_path: Paths | None = None
    val_share: Annotated[float, Within(0)] | str = "1/7"
    naming: Literal["exact", "criteo"] = "exact"
    label: str | tuple[str, ...] | None = "label"
    weight: str | dict[str, str] | None = None
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    hex: tuple[str, ...] = ()
    padding: PaddingId | dict[str, PaddingId] | None = None
    separator: dict[str, str] | None = None
    dense_transform: Literal["log1p", "log3", "none"] = "log1p"
    buckets: BucketRule | dict[str, BucketRule] | None = None
    missing_flags: bool | tuple[str, ...] = False
    piecewise: Pieces | dict[str, Pieces] | None = None
    crosses: tuple[Annotated[tuple[str, ...], "; crosses are lists of lists, [[C1, C2]]"], ...] = ()
    min_frequency: Positive | dict[str, Positive] | None = None
    times: dict[str, TimeUnit] | None = None
    time_features: tuple[TimeFeature, ...] = ("hour", "weekday", "day", "week")
    periodic: dict[str, Period] | None = None
    vectors: dict[str, VectorWidth] | None = None
    id_rule: IdRule = "hash"
    cardinality: tuple[Rows, ...] | None = None
    table_rows: Annotated[
        tuple[Rows, ...] | None, "; it has a number for each of dataset.sparse, in that order"
    ] = None
    table_dims: dict[str, Width] | None = None
    batch_size: Positive = 1024
    val_batch_size: Positive | None = None
    lanes: Positive = 16
    shuffle_rows: Natural = 4096
    seed: Natural | None = None
    num_workers: Natural = 0
    scale: float | str = 1
    generate: Generate | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("dataset.path is empty: name a directory, a glob or Parquet files")
        for name in ("dense", "sparse") if self.naming == "criteo" else ():
            if columns := getattr(self, name):
                raise ConfigError(
                    f"dataset.{name}={shown(columns)}: dataset.naming=criteo reads all columns of "
                    "Criteo's logs; set dataset.naming=exact to name columns"
                )
        _ = self.share_that_validates
        size = self.val_batch_size
        whole = size is None or self.lanes < 1 or (size >= 1 and size % self.lanes == 0)
        if self.fraction == 1 and not whole:
            assert size is not None
            raise ConfigError(
                f"dataset.val_batch_size={size}: lanes share it equally, so a multiple of "
                f"dataset.lanes={self.lanes} "
                f"is allowed; set {max(size // self.lanes, 1) * self.lanes}"
            )

    @property
    def share_that_validates(self) -> Fraction:
        """Return `val_share` as a fraction.

        Raises:
            ConfigError: `val_share` is not a fraction, or leaves no training rows.
        """
        share = _fraction(self.val_share, "dataset.val_share", "1/7 or 0.1")
        if not 0 <= share < 1:
            raise ConfigError(
                f"dataset.val_share={self.val_share}: must be a share of the rows, from 0 to less "
                "than 1"
            )
        return share

    @property
    def fraction(self) -> Fraction:
        """Return `scale` as a fraction.

        Raises:
            ConfigError: `scale` is not a fraction above 0 and at most 1.
        """
        scale = _fraction(self.scale, "dataset.scale", "1/1000 or 0.1")
        if not 0 < scale <= 1:
            raise ConfigError(
                f"dataset.scale={self.scale}: must be above 0 and at most 1, such as 1/1000"
            )
        return scale

    @cached_property
    def scaled(self) -> "DataSettings":
        """Return the data set with its sizes multiplied by `scale`, and with scale 1. So a run made
        for large machines fits a small one.

            scale=1/1000   batch_size       65,536       -> 64, a multiple of lanes
                           val_batch_size   65,536       -> 64
                           generate.rows    41,250,000   -> 41,250, in a directory of their own

        Tables keep their sizes, and existing files are read to their end. Settings, checkpoints and
        `resolved.yaml` keep the original numbers, with the scale.
        """
        scale = self.fraction
        if scale == 1:
            return self
        sizes = {
            name: max(round(size * scale / self.lanes), 1) * self.lanes
            for name in ("batch_size", "val_batch_size")
            if (size := getattr(self, name)) is not None
        }
        small = replace(self, scale=1, **sizes)
        if (generate := self.generate) is None:
            return small
        return replace(
            small,
            generate=replace(generate, rows=max(round(generate.rows * scale), 1)),
            path=f"{self.path}_{scale.numerator}_{scale.denominator}",
        )


def _fraction(value: object, name: str, examples: str) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{name}={value}: must be a fraction such as {examples}") from None


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """The rows to score.

    Args:
        input: A directory, a glob, a file, or a list of these.
        columns: The columns of the input to keep beside the scores.
        rows_per_batch: The rows of a batch of one rank.

    Raises:
        ConfigError: A column cannot be kept.
    """

    input: Paths | None = None
    columns: tuple[str, ...] = ()
    rows_per_batch: Positive = ROWS_PER_BATCH

    def __post_init__(self) -> None:
        for name in self.columns:
            if list(self.columns).count(name) > 1:
                raise ConfigError(f"columns: {name} is named more than once; leave one of them")
