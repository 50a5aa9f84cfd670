"""The sharding types. The record of a type has its name, the function that cuts a table, the ranks
on which the parts may lie, and a description for people.

| type           | blocks of a table                           | candidate ranks of a block |
|----------------|---------------------------------------------|----------------------------|
| table_wise     | one: the whole table                        | any one rank               |
| row_wise       | one: horizontal strips, one for each rank   | all ranks                  |
| data_parallel  | one: the whole table once for each rank     | all ranks                  |
| column_wise    | a block for each vertical strip             | any one rank               |
| table_row_wise | one: horizontal strips, one for each rank   | the ranks of any one host  |
|                | of a host                                   |                            |
| grid_shard     | a block for each vertical strip: horizontal | the ranks of any one host  |
|                | strips, one for each rank of a host         |                            |

Tilings, plan rules, the planner, its constraints and its explanations read these records and know
no type by name. So a new type is one function that cuts and one record:

    def row_wise_on_two_ranks(table: TableToCut) -> list[Block]: ...

    register(ShardingTypeRecord("row_wise_on_two", ..., cut=row_wise_on_two_ranks))

Commands register the records that `plan.sharding_types` names
(`recapp/run/plan_of_run.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from recapp.errors import PlanError, suggest

# default columns of a vertical strip: 256 columns make four; 64 fp32 are four cache lines
COLUMN_WIDTH = 64
CUSTOM = "custom"  # the label of rectangles that no sharding type made

Ints = npt.NDArray[np.int64]


class ShardingType(StrEnum):
    """The names of the built-in sharding types, as TorchRec spells them."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    GRID_SHARD = "grid_shard"
    DATA_PARALLEL = "data_parallel"


class CandidateRanks:
    """The ranks on which a table may lie, as sets of ranks. A block takes one set.

    Args:
        ranks: The ranks, in the order of preference.
        hosts: The ranks of each host, hosts in the order of preference. All hosts count with as
            many ranks as the smallest host has.

    Attributes:
        each_rank: Every rank by itself, [W, 1].
        all_ranks: All ranks at once in ascending order, [1, W].
        each_host: The ranks of every host in ascending order, [H, ranks of a host].
    """

    def __init__(self, ranks: Sequence[int], hosts: Sequence[Sequence[int]]) -> None:
        smallest = min(len(host) for host in hosts)
        self.each_rank: Ints = np.array(ranks, np.int64)[:, None]
        self.all_ranks: Ints = np.array([sorted(ranks)], np.int64)
        self.each_host: Ints = np.array([sorted(host)[:smallest] for host in hosts], np.int64)


class TableToCut(NamedTuple):
    """The arguments of a sharding type's `cut`.

    Args:
        rows: The table's rows.
        columns: The table's columns.
        ranks: The ranks on which the table may lie.
        column_width: Columns of a vertical strip.
    """

    rows: int
    columns: int
    ranks: CandidateRanks
    column_width: int = COLUMN_WIDTH


class RectangleGroup(NamedTuple):
    """Rectangles of a table; the planner chooses their ranks together.

    Args:
        rows: The first row of each of m rectangles and the row after its last one, [m, 2].
        columns: The columns of all m rectangles.
        candidates: Sets of ranks that could hold the block, in the order of preference, [A, m]: a
            rank for each rectangle. The ranks of a set are distinct.
    """

    rows: Ints
    columns: range
    candidates: Ints


@dataclass(frozen=True)
class ShardingTypeRecord:
    """A sharding type: its name, its function that cuts a table, and its texts for reports.

    Args:
        name: The name of the type in settings, plans and reports.
        description: A text: how the type shards a table.
        best_for: A text: the tables for which the type is best.
        pros: A text: the advantages.
        cons: A text: the disadvantages.
        cut: The function that cuts a table into blocks that cover it once; no block if the given
            ranks do not suffice.
        cuts: The dimensions along which the type cuts. The planner tries several column widths for
            a type that cuts columns.
        chooses_ranks: Whether a block has several sets of candidate ranks; False if it always takes
            all ranks.
        replicated: Whether every rank holds the whole table. Then a table needs all ranks, and its
            mode is `replicated`.
        several_hosts: Whether the type differs from a simpler type only on several hosts.
    """

    name: str
    description: str
    best_for: str
    pros: str
    cons: str
    cut: Callable[[TableToCut], list[RectangleGroup]]
    cuts: Literal["nothing", "rows", "columns", "rows and columns"] = "nothing"
    chooses_ranks: bool = True
    replicated: bool = False
    several_hosts: bool = False

    @property
    def cuts_rows(self) -> bool:
        """Return whether the type makes horizontal strips."""
        return self.cuts in ("rows", "rows and columns")

    @property
    def cuts_columns(self) -> bool:
        """Return whether the type makes vertical strips."""
        return self.cuts in ("columns", "rows and columns")


# ---- how they cut


def equal_ranges(total: int, parts: int) -> list[range]:
    """Return at most `parts` contiguous ranges of equal length, the last one shorter."""
    length = -(-total // parts)
    return [range(start, min(start + length, total)) for start in range(0, total, length)]


def column_strips(columns: int, width: int) -> list[range]:
    """Return vertical strips of `width` columns, the last one narrower."""
    return [range(start, min(start + width, columns)) for start in range(0, columns, width)]


def row_strips(rows: int, parts: int) -> Ints:
    """Return at most `parts` equal horizontal strips: the first row of each and the row after its
    last one, [m, 2].
    """
    return np.array([(part.start, part.stop) for part in equal_ranges(rows, parts)], np.int64)


def _strips(table: TableToCut, ranks: Ints, columns: Sequence[range]) -> list[RectangleGroup]:
    """Return a block for each range of columns, cut by rows over as many ranks as a candidate
    has.
    """
    rows = row_strips(table.rows, ranks.shape[1])
    return [RectangleGroup(rows, part, ranks[:, : len(rows)]) for part in columns]


def _table_wise(table: TableToCut) -> list[RectangleGroup]:
    return _strips(table, table.ranks.each_rank, [range(table.columns)])


def _row_wise(table: TableToCut) -> list[RectangleGroup]:
    return _strips(table, table.ranks.all_ranks, [range(table.columns)])


def _data_parallel(table: TableToCut) -> list[RectangleGroup]:
    ranks = table.ranks.all_ranks
    rows = np.repeat(row_strips(table.rows, 1), ranks.shape[1], 0)
    return [RectangleGroup(rows, range(table.columns), ranks)]


def _column_wise(table: TableToCut) -> list[RectangleGroup]:
    return _strips(table, table.ranks.each_rank, column_strips(table.columns, table.column_width))


def _table_row_wise(table: TableToCut) -> list[RectangleGroup]:
    return _strips(table, table.ranks.each_host, [range(table.columns)])


def _grid_shard(table: TableToCut) -> list[RectangleGroup]:
    return _strips(table, table.ranks.each_host, column_strips(table.columns, table.column_width))


# ---- the records. Where the usual advice and our measurements differ, the texts follow our
# measurements. By the usual advice, row-wise costs more than table-wise, because every bag asks
# every rank and partial sums are reduced. Here ranks ask once for the distinct rows of a batch,
# wherever they lie (mode `unique`): row-wise sends as much as table-wise and balances better.

BUILT_IN = (
    ShardingTypeRecord(
        ShardingType.TABLE_WISE.value,
        "the whole table on one rank",
        "tables that fit a rank, when there are many more tables than ranks",
        "one owner per table; no row statistics to exchange",
        "one hot table makes one hot rank; a rank must have room for all of it",
        cut=_table_wise,
    ),
    ShardingTypeRecord(
        ShardingType.ROW_WISE.value,
        "horizontal strips over all ranks",
        "large tables, and most tables where ids repeat within a batch",
        "balances bytes, lookups and updates by itself; costs what table-wise costs, as "
        "distinct rows travel once (mode unique)",
        "hot neighbours crowd a rank unless rows are mixed; pooled bags of many ids ask "
        "several ranks each",
        cut=_row_wise,
        cuts="rows",
        chooses_ranks=False,
    ),
    ShardingTypeRecord(
        ShardingType.DATA_PARALLEL.value,
        "the whole table on every rank",
        "small tables that are read in every step",
        "forward asks nobody",
        "every rank receives every rank's touched rows and updates them all; memory on every rank",
        cut=_data_parallel,
        chooses_ranks=False,
        replicated=True,
    ),
    ShardingTypeRecord(
        ShardingType.COLUMN_WISE.value,
        "vertical strips, dealt over the ranks",
        "wide tables (256 columns and more) that are too much for one rank",
        "spreads bytes and traffic of one table",
        "every strip asks for the batch's ids again; row-wise Adagrad costs one message more",
        cut=_column_wise,
        cuts="columns",
    ),
    ShardingTypeRecord(
        ShardingType.TABLE_ROW_WISE.value,
        "horizontal strips over the ranks of one host",
        "large tables on several hosts with a slower network between",
        "the strips of a row stay on fast links of one host",
        "hosts must be balanced like ranks; on one host it is row-wise by another name",
        cut=_table_row_wise,
        cuts="rows",
        several_hosts=True,
    ),
    ShardingTypeRecord(
        ShardingType.GRID_SHARD.value,
        "vertical strips, each cut by rows over one host",
        "tables that are wide and long at once, on several hosts",
        "spreads one giant over hosts by columns and inside them by rows",
        "ids travel once per strip, as column-wise",
        cut=_grid_shard,
        cuts="rows and columns",
    ),
)

SHARDING_TYPES: dict[str, ShardingTypeRecord] = {record.name: record for record in BUILT_IN}
"""Every sharding type by name, the simplest first: among types of equal cost the planner takes the
first. `register` adds types to the built-in ones.
"""


def register(record: ShardingTypeRecord) -> None:
    """Add a sharding type in this process, or replace an added type.

    Plan rules and constraints may then name the type. Without a constraint that names it the
    planner does not use it, so no other plan changes.

    Raises:
        PlanError: The name is a built-in type's, or the label of rectangles without a type.
    """
    if record.name in {CUSTOM, *ShardingType}:
        raise PlanError(
            f"sharding type {record.name}: recapp has a type of this name; give your type "
            "another name"
        )
    SHARDING_TYPES[record.name] = record


def sharding_type(name: str, setting: str) -> ShardingTypeRecord:
    """Return the record of a sharding type.

    Args:
        name: The type.
        setting: The setting that names it, for the error.

    Raises:
        PlanError: There is no such type.
    """
    if name not in SHARDING_TYPES:
        raise PlanError(f"{setting}: unknown sharding type {name}; {suggest(name, SHARDING_TYPES)}")
    return SHARDING_TYPES[name]
