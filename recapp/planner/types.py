"""What each sharding type is good and bad at, in words. Where the usual advice and our measurements
differ, ours stand.

The usual advice has row-wise cost more than table-wise: there every bag asks every rank and partial
sums are reduced. Here a batch's distinct rows are asked for once, wherever they lie (mode
`unique`): row-wise sends what table-wise sends, and balances it better.
"""

from typing import NamedTuple


class TypeFacts(NamedTuple):
    """Of one sharding type: what it does, what it is best for, and what speaks for and against
    it.
    """

    type: str
    description: str
    best_for: str
    pros: str
    cons: str


TYPES = (
    TypeFacts(
        "table_wise",
        "the whole table on one rank",
        "tables that fit a rank, when there are many more tables than ranks",
        "one owner per table; no strip has to agree with another",
        "one hot table makes one hot rank; a rank must have room for all of it",
    ),
    TypeFacts(
        "column_wise",
        "vertical strips, dealt over the ranks",
        "wide tables (256 columns and more) that are too much for one rank",
        "spreads bytes and traffic of one table",
        "every strip asks for the batch's ids again; row-wise Adagrad costs one message more",
    ),
    TypeFacts(
        "row_wise",
        "horizontal strips over all ranks",
        "large tables, and most tables where ids repeat within a batch",
        "balances bytes, lookups and updates by itself; costs what table-wise costs, as "
        "distinct rows travel once (mode unique)",
        "hot neighbours crowd a rank unless strips are uneven; pooled bags of many ids ask "
        "several ranks each",
    ),
    TypeFacts(
        "table_row_wise",
        "horizontal strips over the ranks of one host",
        "large tables on several hosts with a slower network between",
        "the strips of a row stay on fast links of one host",
        "hosts must be balanced like ranks; on one host it is row-wise by another name",
    ),
    TypeFacts(
        "grid_shard",
        "vertical strips, each cut by rows over one host",
        "tables that are wide and long at once, on several hosts",
        "spreads one giant over hosts by columns and inside them by rows",
        "ids travel once per strip, as column-wise",
    ),
    TypeFacts(
        "data_parallel",
        "the whole table on every rank",
        "small tables that are read in every step",
        "forward asks nobody",
        "every rank receives every rank's touched rows and updates them all; memory on every rank",
    ),
)
