"""The distributions of generated click logs: the frequency of ids, the values that are missing
together, and the effects on clicks.

The numbers of `criteo_columns` describe Criteo's 1TB logs (measured on 10,000 rows of the first
day): ids follow a power law, the giant columns give a quarter of all rows to one default id, and
columns go missing in blocks, because one upstream system failed to answer for all of them.
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
"""Table sizes of the 26 columns in HugeCTR's DCN sample.

It has the first 5 million rows of a day, without the ids that occur fewer than 6 times.
"""

SAMPLE_SIZES = {"large_table": 1_000_000, "wide_table": 100_000, "small_table": 10_000}
SAMPLE_BAG = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The facts that ids and numbers share.

    Args:
        name: The column's name.
        missing: The share of rows without a value.
        block: A number; columns with the same number are missing in the same rows.
        effect: The standard deviation of the effect of the values on the click model's logit.
    """

    name: str
    missing: float
    block: int
    effect: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumn(Column):
    """The distribution of the ids of a feature.

    Args:
        rows: The size of the table. Ids are 1 to rows - 1 in a single-valued feature (row 0 is for
            missing ids), and 0 to rows - 1 in bags.
        bag: The ids per row; 0 for a single-valued feature.
        exponent: The exponent of the power law.
        default_mass: The share of rows with the default id.
    """

    rows: int
    bag: int = 0
    exponent: float = 1.05
    default_mass: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberColumn(Column):
    """The distribution of an integer column: exp(centre + spread * normal) - 1, rounded down.

    The effect is that of one standard deviation of log1p(max(x, 0)).

    Args:
        centre: The mean of the logarithms.
        spread: The standard deviation of the logarithms.
        negative: The share of rows with the number -1 instead.
    """

    centre: float
    spread: float
    negative: float


@dataclass(frozen=True, slots=True)
class ColumnShapes:
    """All columns of a generated data set beside the label column, which is called `label`.

    Args:
        numbers: The dense columns.
        ids: The sparse columns.
    """

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


def criteo_columns(sizes: tuple[int, ...] = CRITEO_SIZES) -> ColumnShapes:
    """Return Criteo's columns I1 to I13 and C1 to Cn.

    Args:
        sizes: The table size of each of the n id columns.

    Raises:
        ConfigError: There is no table, or a table has fewer than two rows (row 0 is for missing
            ids).
    """
    if not sizes or min(sizes) < 2:
        raise ConfigError(
            f"dataset.table_rows={list(sizes)}: each table needs at least 2 rows, row 0 being "
            "that of missing ids"
        )
    return ColumnShapes(
        _numbers(),
        tuple(_criteo_column(number, rows) for number, rows in enumerate(sizes, start=1)),
    )


def sample_columns() -> ColumnShapes:
    """Return I1 to I13 and the columns of the three sample tables, each with ten ids per row."""
    columns = (
        IdColumn(name=name, rows=rows, bag=SAMPLE_BAG, missing=0.0, block=0, effect=effect)
        for (name, rows), effect in zip(SAMPLE_SIZES.items(), (0.8, 1.2, 1.6), strict=True)
    )
    return ColumnShapes(_numbers(), tuple(columns))


def _numbers() -> tuple[NumberColumn, ...]:
    return tuple(
        NumberColumn(
            name=f"I{number}",
            centre=centre,
            spread=1.3,
            negative=0.06 if number == 8 else 0.0,
            missing=gap / 100,
            block=block,
            effect=0.25 if number % 2 else 0.1,
        )
        for number, (centre, (gap, block)) in enumerate(
            zip(_NUMBER_CENTRES, _NUMBER_GAPS, strict=True), start=1
        )
    )


def _criteo_column(number: int, rows: int) -> IdColumn:
    gap, block = _ID_GAPS.get(number, (0.0, 0))
    giant = rows >= _GIANT_ROWS
    exponent = 1.05 if rows > 2_000 else 1.3 if rows > 100 else 1.6
    # A few hundred thousand rows are too few to train rare ids, so ids of large tables have smaller
    # effects.
    effect = 0.2 if giant else 0.25 if rows > 2_000 else 0.3
    return IdColumn(
        name=f"C{number}",
        rows=rows,
        exponent=exponent,
        default_mass=0.26 if giant else 0.0,
        missing=gap / 100,
        block=block,
        effect=effect,
    )
