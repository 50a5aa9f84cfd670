"""The settings of rows. The group `dataset` has files, columns, order and sizes of tables; a
prediction has the rows to score, and the sizes of batches.

Some settings of a data set compute columns from those of the logs. They are known by name before a
value is read:

    I1 (number)       --buckets-->     I1_bucket (id)     the settings dataset.buckets
    I1 (number)       --missing-->     I1_missing (number)        dataset.missing_flags
    I1 (number)       --piecewise-->   I1_piece1 .. (numbers)     dataset.piecewise
    C1, C2 (ids)      --cross-->       C1_x_C2 (id)               dataset.crosses
    C1 (id)           --vocabulary-->  C1 (id)                    dataset.min_frequency
    I1 (number)       --sine, cosine-> I1_sin, I1_cos (numbers)   dataset.periodic
    time (timestamp)  --hour-->        time_hour (id)             dataset.times
    time (timestamp)  --weekday-->     time_weekday (id)
    time (timestamp)  --sine, cosine-> time_day_sin .. (numbers)

Training, validation, prediction and servers compute them from decoded columns, in one place
(`recapp/dataset/rows.py`). Values that are fitted on the training rows
(`recapp/dataset/sequential_rows.py`) are stored with the model.

A vocabulary replaces the ids of a feature, also of a derived one. So it comes last.
"""

from codecs import lookup
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from recapp.errors import ConfigError, suggest
from recapp.settings.records import Constructor
from recapp.settings.values import IdRule, Natural, Paths, Positive, Rows, Width, Within, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The column of the scores.
SCORE = "score"
ROWS_PER_BATCH = 4096
Pieces = Annotated[int, Within(1, 1024)]
VectorWidth = Annotated[int, Within(1, 65_536)]
Period = Annotated[float, Within(1e-30, 1e30)]
TimeUnit = Literal["s", "ms", "us", "ns"]
ISO = "iso"  # the form of times in text, 2026-11-29T17:16:11Z
FormatName = Literal["parquet", "csv", "tsv", "json_lines", "arrow"]
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
class TextSettings:
    """The settings `dataset.text`: what makes rows and columns of text.

    Args:
        delimiter: What stands between columns; None finds it out.
        header: Whether the first line names the columns; None finds it out.
        columns: The names of the columns, for files without a header.
        quote: The character around values that hold delimiters or line ends; `none` without one.
        encoding: The encoding; None finds out UTF-8, UTF-16 or Latin-1.
        times: The columns whose text is a time (UTC), each with its form: `iso` for ISO 8601, or
            directives such as "%Y%m%d %H:%M".

    Raises:
        ConfigError: A setting is no delimiter, quote, encoding or form of times, or a column is
            named twice.
    """

    delimiter: str | None = None
    header: bool | None = None
    columns: tuple[str, ...] = ()
    quote: str = '"'
    encoding: str | None = None
    times: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name, form in (self.times or {}).items():
            if form != ISO and "%" not in form:
                raise ConfigError(f"times.{name}={form}: must be {ISO}, or have directives, %Y%m%d")
        if self.delimiter is not None and (not self.delimiter or {*"\r\n"} & {*self.delimiter}):
            raise ConfigError("delimiter: must be at least one sign, and no line end")
        if self.quote != "none" and (len(self.quote) > 1 or not self.quote.isascii()):
            raise ConfigError(f"quote={self.quote}: must be one ASCII character, or none")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ConfigError(f"columns: {twice[0]} is named more than once")
        try:
            lookup(self.encoding or "utf-8")
        except LookupError:
            raise ConfigError(
                f"encoding={self.encoding}: Python knows no such encoding; utf-8, utf-16, "
                "latin-1 and cp1252 are usual"
            ) from None


@dataclass(frozen=True)
class FileRules:
    """How files of logs are read.

    Args:
        format: The name of the format of all files, or the class of one; None finds it out for each
            file.
        text: What makes rows and columns of text.
        bad_rows: The most rows of text that do not fit and may be left out.
    """

    format: str | Constructor | None = None
    text: TextSettings = TextSettings()
    bad_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The group `dataset`.

    Args:
        path: Training logs: a directory, a glob, a `_file_list.txt`, a file, or a list of these.
        follow: Whether training goes on with the files that appear at `path`, each of which trains
            once.
        follow_time: The column whose first values order these files; None orders them by name.
        follow_seconds: The seconds between two looks at `path`, in which a whole file stays as it
            is.
        follow_idle: The seconds without a new file after which training ends; None: never.
        val_path: Validation logs; None takes the end of `path`.
        test_path: Test logs; None without test logs.
        format: The format of all files, by name, or a class derived from
            `recapp.dataset.data_file.Format`; None finds it out for each file.
        text: What makes rows and columns of text.
        bad_rows: Whether a row of text that does not fit its file is an error, or how many are
            left out, `skip:N`.
        val_share: The share of `path` for validation, as a fraction such as "1/7".
        naming: Whether columns have Criteo's names, or the names of the settings that follow.
        label: The column of the label, or a list of several; None for rows without labels.
        label_from: The least number that counts as a label of 1, such as 4 of 5 stars; None where
            labels are 0 and 1.
        weight: The column of the weights of rows, or the column for each label.
        dense: The columns of numbers.
        sparse: The columns of ids.
        hex: The sparse columns whose text is hexadecimal.
        padding: The id that fills lists up to a length, in all columns of lists or by column; it is
            left out.
        separator: What stands between the ids of a text, by column, which then has a list in each
            row.
        id_weights: The column of the weights of the ids of a sparse column, by that column: a
            number for each id, by which its vector is multiplied before its bag is pooled.
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
        num_threads: The threads of each rank that decode chunks ahead, beside one that makes
            batches; 0 reads between two steps. None takes half of the cores of each rank, at most
            6.
        scale: The fraction of the data set's size to use (`scaled`).
        generate: Data that recapp generates at `path`; None reads existing files.

    Raises:
        ConfigError: Two settings conflict, or a fraction is invalid.
    """

    path: Paths
    follow: bool = False
    follow_time: str | None = None
    follow_seconds: Annotated[float, Within(above=0)] = 10.0
    follow_idle: Annotated[float, Within(above=0)] | None = None
    val_path: Paths | None = None
    test_path: Paths | None = None
    format: FormatName | Constructor | None = None
    text: TextSettings = TextSettings()
    bad_rows: str = "error"
    val_share: Annotated[float, Within(0)] | str = "1/7"
    naming: Literal["exact", "criteo"] = "exact"
    label: str | tuple[str, ...] | None = "label"
    label_from: float | None = None
    weight: str | dict[str, str] | None = None
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    hex: tuple[str, ...] = ()
    padding: PaddingId | dict[str, PaddingId] | None = None
    separator: dict[str, str] | None = None
    id_weights: dict[str, str] | None = None
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
    num_threads: Natural | None = None
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
        _ = self.files
        for name in () if self.follow else ("follow_time", "follow_seconds", "follow_idle"):
            if (value := getattr(self, name)) != getattr(DataSettings, name):
                raise ConfigError(
                    f"dataset.{name}={shown(value)}: has no effect without dataset.follow=true"
                )
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
    def files(self) -> FileRules:
        """Return how files are read.

        Raises:
            ConfigError: `bad_rows` is neither `error` nor `skip:N`.
        """
        return file_rules(self.format, self.text, self.bad_rows, "dataset.bad_rows")

    @property
    def share_that_validates(self) -> Fraction:
        """Return `val_share` as a fraction; 0 where files are followed, since all of them train.

        Raises:
            ConfigError: `val_share` is not a fraction, or leaves no training rows.
        """
        share = _fraction(
            self.val_share,
            "dataset.val_share",
            "a share of the rows, from 0 to less than 1, such as 1/7 or 0.1",
            lambda share: 0 <= share < 1,
        )
        return Fraction(0) if self.follow else share

    @property
    def fraction(self) -> Fraction:
        """Return `scale` as a fraction.

        Raises:
            ConfigError: `scale` is not a fraction above 0 and at most 1.
        """
        return _fraction(
            self.scale,
            "dataset.scale",
            "a fraction above 0 and at most 1, such as 1/1000",
            lambda scale: 0 < scale <= 1,
        )

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


def file_rules(
    format: str | Constructor | None, text: TextSettings, bad_rows: str, setting: str
) -> FileRules:
    """Return how files are read, from settings.

    Raises:
        ConfigError: `bad_rows` is neither `error` nor `skip:N`; the error names the setting.
    """
    word, _, most = bad_rows.partition(":")
    if bad_rows != "error" and not (word == "skip" and most.isdecimal()):
        raise ConfigError(
            f"{setting}={bad_rows}: must be error, or skip:N to leave out up to N rows that do not "
            "fit their file"
        )
    return FileRules(format, text, int(most or 0))


def _fraction(value: object, name: str, allowed: str, fits: Callable[[Fraction], bool]) -> Fraction:
    with suppress(ValueError, ZeroDivisionError):
        if fits(fraction := Fraction(str(value))):
            return fraction
    raise ConfigError(f"{name}={value}: must be {allowed}")


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


# ---- the columns that are computed from others

LOG = "log"
# The number from which on down all share a bucket of the rule `log`.
LEAST_WHOLE = -8
# The largest floor(ln(x)^2) of the rule `log`, that of 2^63; larger numbers share its bucket.
LARGEST_LEVEL = 1906
LOG_EDGES = 2 - LEAST_WHOLE + LARGEST_LEVEL + 1
MOST_CROSSED = 3
DAY_SECONDS = 86_400
WEEK_SECONDS = 7 * DAY_SECONDS
# The settings that make derived columns, in words.
SETTINGS = (
    "dataset.buckets, dataset.missing_flags, dataset.piecewise, dataset.periodic, dataset.times, "
    "dataset.crosses and dataset.min_frequency"
)


class Derivation(StrEnum):
    """The kinds of derived columns.

    buckets     a number -> an id, the number of edges at or below it
    missing     a number -> 1 where it is missing, else 0
    piecewise   a number -> the part of the way from one value to the next that it has gone, 0 to 1
    cross       ids -> an id, their XXH64 hash
    vocabulary  an id -> its place among the ids that training rows often have
    hour        a time -> an id, 1 to 24: the hour of its day (UTC)
    weekday     a time -> an id, 1 (Monday) to 7
    sine        a number or a time -> the sine of its part of a period; 0 where it is missing
    cosine      the cosine alike
    """

    BUCKETS = "buckets"
    MISSING = "missing"
    PIECEWISE = "piecewise"
    CROSS = "cross"
    VOCABULARY = "vocabulary"
    HOUR = "hour"
    WEEKDAY = "weekday"
    SINE = "sine"
    COSINE = "cosine"


# The suffixes and kinds of the numbers that say where in a period a value is.
CIRCLE = (("sin", Derivation.SINE), ("cos", Derivation.COSINE))


@dataclass(frozen=True, slots=True)
class DerivedColumn:
    """A column that is computed from others.

    Args:
        name: Its name; a vocabulary has that of the feature whose ids it replaces.
        kind: How it is computed.
        reads: The columns that it is computed from; of a vocabulary the features whose ids it
            counts, which are all that read the table.
        setting: The parameter of its kind: `log` or a number of quantiles for buckets, such as
            "2 of 8" for pieces, the least frequency for a vocabulary, a period, the unit of times.
        values: The fitted values, ascending: the edges of buckets, the two ends of a piece, the
            period (float32), the ids of a vocabulary (int64); empty for kinds without. None before
            the fit.
    """

    name: str
    kind: Derivation
    reads: tuple[str, ...]
    setting: str | int = ""
    values: "npt.NDArray[np.generic] | None" = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """Return the key of the fitted values, which differs between the columns of a model."""
        return f"{self.name}.{self.kind}"

    @property
    def is_new_id(self) -> bool:
        """Return whether it is a feature of its own, with ids."""
        return self.kind in (
            Derivation.BUCKETS,
            Derivation.CROSS,
            Derivation.HOUR,
            Derivation.WEEKDAY,
        )

    @property
    def is_new_number(self) -> bool:
        """Return whether it is a dense column of its own."""
        return self.kind in (
            Derivation.MISSING,
            Derivation.PIECEWISE,
            Derivation.SINE,
            Derivation.COSINE,
        )

    @property
    def has_floats(self) -> bool:
        """Return whether its values are float32, else int64."""
        return self.kind in (
            Derivation.BUCKETS,
            Derivation.PIECEWISE,
            Derivation.SINE,
            Derivation.COSINE,
        )

    @property
    def rows(self) -> int | None:
        """Return the rows of a table for its ids, row 0 being that of missing ones; None if any
        integer may be an id, or if the ids are not fitted yet.
        """
        if self.kind is Derivation.BUCKETS:
            edges = LOG_EDGES if self.setting == LOG else int(self.setting)
            return (edges if self.values is None else len(self.values)) + 2
        if self.kind is Derivation.VOCABULARY and self.values is not None:
            return max(len(self.values), 1) + 1
        return {Derivation.HOUR: 25, Derivation.WEEKDAY: 8}.get(self.kind)

    @property
    def period(self) -> float:
        """Return the period of a sine or cosine: its number's, or a day or week in seconds."""
        words = str(self.setting)
        seconds = {"day": DAY_SECONDS, "week": WEEK_SECONDS}.get(words.partition(" of ")[0])
        return float(words) if seconds is None else seconds

    def plain(self) -> dict[str, Any]:
        """Return the column without its fitted values, as plain values for a manifest."""
        return {
            "name": self.name,
            "kind": str(self.kind),
            "reads": list(self.reads),
            "setting": self.setting,
        }

    def in_words(self) -> str:
        """Return the column as text for people."""
        setting = f" {self.setting}" if self.setting != "" else ""
        return f"{self.name} ({self.kind}{setting} of {', '.join(self.reads)})"


def columns_of(
    dataset: DataSettings,
    dense: Sequence[str],
    sparse: Sequence[str],
    shared: Iterable[Sequence[str]] = (),
) -> tuple[DerivedColumn, ...]:
    """Return the derived columns of the settings, in the order in which they are computed.

    Args:
        dataset: The group `dataset`.
        dense: The dense columns of the logs.
        sparse: The sparse columns of the logs.
        shared: The features of each table that several read.

    Raises:
        ConfigError: A setting names a column that does not exist, or makes a column twice.
    """
    buckets = _by_column("dataset.buckets", dataset.buckets, dense)
    pieces = _by_column("dataset.piecewise", dataset.piecewise, dense)
    periods = _by_column("dataset.periodic", dataset.periodic or {}, dense)
    flags = _by_column("dataset.missing_flags", dataset.missing_flags or {}, dense)
    columns = [
        *(
            DerivedColumn(f"{n}_bucket", Derivation.BUCKETS, (n,), rule)
            for n, rule in buckets.items()
        ),
        *(DerivedColumn(f"{n}_missing", Derivation.MISSING, (n,)) for n in flags),
        *(
            DerivedColumn(f"{n}_piece{i}", Derivation.PIECEWISE, (n,), f"{i} of {count}")
            for n, count in pieces.items()
            for i in range(1, count + 1)
        ),
        *(
            DerivedColumn(f"{n}_{suffix}", kind, (n,), repr(float(period)))
            for n, period in periods.items()
            for suffix, kind in CIRCLE
        ),
        *_times(dataset),
    ]
    new_ids = [column.name for column in columns if column.is_new_id]
    columns += _crosses(dataset, [*sparse, *new_ids])
    new_ids = [column.name for column in columns if column.is_new_id]
    labels = [dataset.label] if isinstance(dataset.label, str) else dataset.label or ()
    raw = [*dense, *sparse, *(dataset.times or ()), *(dataset.vectors or ()), *labels]
    _check_names(columns, raw)
    return (*columns, *_vocabularies(dataset, [*sparse, *new_ids], shared))


def derived_from(plain: Mapping[str, Any]) -> DerivedColumn:
    """Return the column of plain values that `DerivedColumn.plain` has made.

    Raises:
        TypeError, KeyError, ValueError: They are no column.
    """
    reads = tuple(str(name) for name in plain["reads"])
    return DerivedColumn(str(plain["name"]), Derivation(plain["kind"]), reads, plain["setting"])


def _by_column(setting: str, value: Any, dense: Sequence[str]) -> dict[str, Any]:
    """Return the value of a setting for each dense column that has one, in the order of columns.

    Args:
        setting: The setting's name, for error messages.
        value: Its value: one for all columns, one by column, or a list of columns; None for none.
        dense: The dense columns of the logs.

    Raises:
        ConfigError: A column does not exist, or there is none.
    """
    if value is None or value == {}:
        return {}
    if not dense:
        raise ConfigError(
            f"{setting}={shown(value)}: there are no dense columns: name some in dataset.dense, "
            f"or leave {setting} at its default"
        )
    if isinstance(value, tuple | list):
        value = dict.fromkeys(value, True)
    values = value if isinstance(value, Mapping) else dict.fromkeys(dense, value)
    _check_known(setting, values, dense, "dense column")
    return {name: values[name] for name in dense if name in values}


def _times(dataset: DataSettings) -> list[DerivedColumn]:
    features = dataset.time_features
    if not dataset.times:
        if features != DataSettings.time_features:
            raise ConfigError(
                f"dataset.time_features={shown(list(features))}: there is no column of times: name "
                "one in dataset.times, such as {time: s}"
            )
        return []
    if not features or len(set(features)) < len(features):
        raise ConfigError(
            f"dataset.time_features={shown(list(features))}: name what dataset.times gives, each "
            "once: hour, weekday, day, week"
        )
    columns = []
    for name, unit in dataset.times.items():
        for feature in features:
            if feature in ("hour", "weekday"):
                kinds = [("", Derivation(feature), str(unit))]
            else:
                kinds = [(f"_{end}", kind, f"{feature} of {unit}") for end, kind in CIRCLE]
            columns += [
                DerivedColumn(f"{name}_{feature}{end}", kind, (name,), setting)
                for end, kind, setting in kinds
            ]
    return columns


def _crosses(dataset: DataSettings, ids: Sequence[str]) -> list[DerivedColumn]:
    columns = []
    for names in dataset.crosses:
        if not 2 <= len(names) <= MOST_CROSSED or len(set(names)) < len(names):
            raise ConfigError(
                f"dataset.crosses: {shown(names)} must be 2 or {MOST_CROSSED} different columns, "
                "such as [C1, C2]"
            )
        _check_known("dataset.crosses", names, ids, "column of ids")
        columns.append(DerivedColumn("_x_".join(names), Derivation.CROSS, tuple(names)))
    return columns


def _vocabularies(
    dataset: DataSettings, ids: Sequence[str], shared: Iterable[Sequence[str]]
) -> list[DerivedColumn]:
    """Return a vocabulary for each chosen feature; features that read one table have one, which
    counts the ids of all.
    """
    frequency = dataset.min_frequency
    if frequency is None:
        return []
    least = dict(frequency) if isinstance(frequency, Mapping) else dict.fromkeys(ids, frequency)
    _check_known("dataset.min_frequency", least, ids, "column of ids")
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in ids}
    for features in _joined(shared):
        group = tuple(name for name in ids if name in features)
        numbers = {least[name] for name in group if name in least}
        if len(numbers) > 1:
            raise ConfigError(
                f"dataset.min_frequency={shown(frequency)}: {' and '.join(group)} read one table, "
                "which has one vocabulary: give them one number"
            )
        for name in group if numbers else ():
            least[name] = min(numbers)
            groups[name] = group
    return [
        DerivedColumn(name, Derivation.VOCABULARY, groups[name], least[name])
        for name in ids
        if name in least
    ]


def _joined(groups: Iterable[Sequence[str]]) -> list[set[str]]:
    """Return groups of which no two have a name in common: those that have are joined."""
    joined_groups: list[set[str]] = []
    for group in groups:
        names = set(group)
        apart = [other for other in joined_groups if not other & names]
        joined_groups = [*apart, names.union(*(other for other in joined_groups if other & names))]
    return joined_groups


def _check_known(setting: str, names: Iterable[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{setting} names {name}, which is no {what}; {suggest(name, known)}")


def _check_names(columns: Sequence[DerivedColumn], of_logs: Sequence[str]) -> None:
    names = [column.name for column in columns]
    crosses = [column.name for column in columns if column.kind is Derivation.CROSS]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"dataset.crosses makes {name} twice; name each cross once"
                if name in crosses
                else f"dataset: two settings make a derived column {name}: rename a column of these"
            )
        if name in of_logs:
            raise ConfigError(
                f"dataset: the derived column {name} has the name of a column of the logs; rename "
                "that column, or leave the derived one out"
            )
