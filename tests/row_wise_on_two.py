"""A seventh sharding type, as a user of recapp writes one: a function that cuts, and its record."""

from itertools import combinations

import numpy as np

from recapp.sharding.sharding_types import RectangleGroup, ShardingTypeRecord, row_strips

NAME = "row_wise_on_two"
PLAN = f"""\
# Every table in two horizontal strips on two ranks.
name: {NAME}
rules:
  - {{type: {NAME}}}
sharding_types:
  {NAME}: {{_target_: row_wise_on_two.row_wise_on_two}}
"""


def cut(table):
    pairs = np.array(list(combinations(table.ranks.each_rank[:, 0], 2)), np.int64)
    rows = row_strips(table.rows, 2)
    return [RectangleGroup(rows, range(table.columns), pairs[:, : len(rows)])] if len(pairs) else []


def row_wise_on_two():
    return ShardingTypeRecord(
        NAME,
        "horizontal strips over two ranks",
        "tables that are too much for one rank and are read too little for all of them",
        "asks fewer ranks than row-wise",
        "two hot strips make two hot ranks",
        cut=cut,
        cuts="rows",
    )


def write_plan(folder):
    """Write the option `+plan=row_wise_on_two` for `--config-dir FOLDER`."""
    path = folder / "plan" / f"{NAME}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PLAN)
    return folder
