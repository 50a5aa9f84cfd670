"""What generated click logs look like: how often each id occurs, what is missing together, what
drives the clicks.

The numbers of `criteo_shape` describe Criteo's 1TB logs (measured on 10,000 rows of its first day):
ids follow a power law, the giant columns give a quarter of all rows to one default id, and columns
go missing in blocks, because one upstream system failed to answer for all of them.
"""

from dataclasses import dataclass

from recapp.errors import ConfigError

CRITEO_SIZES = (
    203931,
    18598,
    14092,
    7012,
    18977,
    4,
    6385,
    1245,
    49,
    186213,
    71328,
    67288,
    11,
    2168,
    7338,
    61,
    4,
    932,
    15,
    204515,
    141526,
    199433,
    60919,
    9137,
    71,
    34,
)
"""Table sizes of the 26 columns in HugeCTR's DCN sample (first 5 M rows of a day, rarer than 6
times removed).
"""

SAMPLE_SIZES = {"large_table": 1_000_000, "wide_table": 100_000, "small_table": 10_000}
SAMPLE_BAG = 10


@dataclass(frozen=True, slots=True)
class IdColumn:
    """How the ids of one feature are drawn.

    rows: ids are 1 .. rows - 1 for a single-valued feature (0 is the table's row for missing), 0 ..
    rows - 1 in bags. bag: ids per row, 0 for a single-valued feature. exponent: of the power law.
    default_mass: share of rows that carry one id. missing, block: share of rows without an id;
    columns of one block number are missing in the same rows. effect: standard deviation of the ids'
    effects on the hidden model's logit.
    """

    name: str
    rows: int
    bag: int
    exponent: float
    default_mass: float
    missing: float
    block: int
    effect: float


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """How an integer is drawn: exp(centre + spread * normal) - 1, rounded down; `negative` of them
    are -1.

    missing, block: as for ids. effect: of one standard deviation of log1p(max(x, 0)) on the hidden
    model's logit.
    """

    name: str
    centre: float
    spread: float
    negative: float
    missing: float
    block: int
    effect: float


@dataclass(frozen=True, slots=True)
class Shape:
    """All columns of a generated data set; the label column is `label`."""

    numbers: tuple[NumberColumn, ...]
    ids: tuple[IdColumn, ...]


# (missing %, block) of I1..I13 and C1..C26 in Criteo 1TB; equal shares there are missing in the
# same rows.
_NUMBER_GAPS = (
    (23.8, 1),
    (10.2, 2),
    (25.4, 3),
    (49.3, 4),
    (46.5, 5),
    (9.2, 2),
    (3.1, 2),
    (0, 0),
    (0, 0),
    (9.2, 2),
    (46.5, 5),
    (1.6, 2),
    (25.4, 3),
)
_ID_GAPS = {
    1: (2.6, 6),
    10: (2.6, 6),
    11: (2.6, 6),
    20: (2.6, 6),
    21: (2.6, 6),
    22: (2.6, 6),
    14: (46.7, 7),
    16: (46.7, 7),
    17: (46.7, 7),
    23: (46.7, 7),
}
_NUMBER_CENTRES = (1.0, 1.5, 2.0, 1.5, 7.0, 3.5, 2.0, 2.0, 4.0, 0.5, 1.0, 2.5, 2.0)
_GIANT_ROWS = 50_000


def criteo_shape(sizes: tuple[int, ...] = CRITEO_SIZES) -> Shape:
    """Criteo's columns label, I1..I13, C1..Cn, with a table size for each of the n id columns.

    Raises ConfigError for a table of fewer than two rows (row 0 is for missing ids).
    """
    if not sizes or min(sizes) < 2:
        raise ConfigError(
            f"dataset.table_rows={list(sizes)}: each table needs at least 2 rows, row 0 being "
            "that of missing ids"
        )
    return Shape(
        _numbers(),
        tuple(_criteo_column(number, rows) for number, rows in enumerate(sizes, start=1)),
    )


def sample_shape() -> Shape:
    """The columns of the three sample tables: ten ids a row in each, beside I1..I13."""
    columns = (
        IdColumn(
            name,
            rows,
            bag=SAMPLE_BAG,
            exponent=1.05,
            default_mass=0,
            missing=0,
            block=0,
            effect=effect,
        )
        for (name, rows), effect in zip(SAMPLE_SIZES.items(), (0.8, 1.2, 1.6), strict=True)
    )
    return Shape(_numbers(), tuple(columns))


def _numbers() -> tuple[NumberColumn, ...]:
    return tuple(
        NumberColumn(
            f"I{number}",
            centre,
            1.3,
            0.06 if number == 8 else 0.0,
            gap / 100,
            block,
            0.25 if number % 2 else 0.1,
        )
        for number, (centre, (gap, block)) in enumerate(
            zip(_NUMBER_CENTRES, _NUMBER_GAPS, strict=True), start=1
        )
    )


def _criteo_column(number: int, rows: int) -> IdColumn:
    gap, block = _ID_GAPS.get(number, (0.0, 0))
    giant = rows >= _GIANT_ROWS
    exponent = 1.05 if rows > 2_000 else 1.3 if rows > 100 else 1.6
    # Rare ids cannot be learnt from a few hundred thousand rows, so a large table explains less of
    # the clicks.
    effect = 0.2 if giant else 0.25 if rows > 2_000 else 0.3
    return IdColumn(
        f"C{number}", rows, 0, exponent, 0.26 if giant else 0.0, gap / 100, block, effect
    )
