"""The id rules as operations of an exported program, which `torch.export` traces without numbers.

In eager mode the host reads facts about a batch's ids: the number of ids of each feature, the ids
outside of tables, the number of ids that leave their bags. During an export there is nothing to
read, so this module writes the rules without reads:

    error    an assertion in the program for each lookup: it names table and feature, not the id
    clamp    the nearest row; not counted
    drop     the ids that stay are selected, however many they are
    hash     as ever

Rows are those of eager mode. `recapp/tables/ids.py` explains the rules.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recapp.sparse.batch import MISSING
from recapp.sparse.transfer import to_device
from recapp.tables.config import IdRule
from recapp.tables.lookups import TableLookup


def exported_rows(
    ids_L: Tensor, count_F: Tensor, lookups: Sequence[TableLookup]
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of ids, and a mask of the ids that stay in their bags; None if all stay.

    Args:
        ids_L: Ids, counted from 0 for every table, lookups-major.
        count_F: The number of ids of each lookup.
        lookups: The lookups, of tables that are not dynamic.
    """
    rules = [x.table.id_rule for x in lookups]
    size_L = per_id([x.table.num_embeddings for x in lookups], count_F, ids_L)
    missing_L = ids_L == MISSING
    row_L = torch.where(missing_L, 0, ids_L)
    rows_L = row_L.clamp(min=0).minimum(size_L - 1)
    outside_L = rows_L != row_L
    if IdRule.HASH in rules:
        hashed_L = _of_rule(IdRule.HASH, rules, count_F, ids_L)
        others_L = (size_L - 1).clamp(min=1)  # for a table of one row, which is not hashed
        hash_L = torch.where(missing_L, 0, 1 + ids_L.remainder(others_L))
        rows_L = torch.where(hashed_L, hash_L, rows_L)
    if IdRule.ERROR in rules:
        _assert_inside(outside_L, count_F, lookups)
    if IdRule.DROP not in rules:
        return rows_L, None
    return rows_L, ~(outside_L & _of_rule(IdRule.DROP, rules, count_F, ids_L))


def exported_hot(
    lengths_FB: Tensor, ids_L: Tensor, lookups: Sequence[TableLookup]
) -> Tensor | None:
    """Return a mask of the ids that stay when concatenations limit the length of bags; None for
    all.

    Args:
        lengths_FB: The number of ids of each bag.
        ids_L: The ids.
        lookups: The lookups. A lookup that does not truncate gets an assertion in the program.
    """
    cut = False
    for i, x in enumerate(lookups):
        if x.hotness is None:
            continue
        cut |= x.truncates
        if not x.truncates:
            torch._assert_async(
                (lengths_FB[i] <= x.hotness).all(),
                f"lookup {x.output}: feature {x.feature} has a bag of more than {x.hotness} ids, a "
                f"concatenation of hotness={x.hotness} takes {x.hotness}",
            )
    if not cut:
        return None
    most_F = [x.hotness if x.hotness and x.truncates else _ALL for x in lookups]
    lengths_N = lengths_FB.flatten().long()
    begin_L = per_id(lengths_N.cumsum(0) - lengths_N, lengths_N, ids_L)
    nth_L = torch.arange(ids_L.shape[0], device=ids_L.device) - begin_L
    return nth_L < per_id(most_F, lengths_FB.sum(1), ids_L)


def per_id(numbers_N: Sequence[int] | Tensor, count_N: Tensor, ids_L: Tensor) -> Tensor:
    """Return a number for each id from a number for each lookup or bag.

    Args:
        numbers_N: The numbers.
        count_N: The number of ids for each number.
        ids_L: The ids.
    """
    if not isinstance(numbers_N, Tensor):
        numbers_N = to_device(numbers_N, ids_L.device)
    return torch.repeat_interleave(numbers_N, count_N, output_size=ids_L.shape[0])


_ALL = torch.iinfo(torch.int64).max


def _of_rule(rule: IdRule, rules: Sequence[str], count_F: Tensor, ids_L: Tensor) -> Tensor:
    """Return for each id whether its table has a rule."""
    return per_id([int(r == rule) for r in rules], count_F, ids_L) > 0


def _assert_inside(outside_L: Tensor, count_F: Tensor, lookups: Sequence[TableLookup]) -> None:
    """Assert in the program that no id is outside of a table whose rule is `error`."""
    before_L1 = torch.nn.functional.pad(outside_L.cumsum(0), (1, 0))
    edge_F1 = torch.nn.functional.pad(count_F.cumsum(0), (1, 0))
    outside_F = before_L1[edge_F1].diff()
    for i, x in enumerate(lookups):
        if x.table.id_rule is not IdRule.ERROR:
            continue
        first = x.table.min_key
        rows = x.table.num_embeddings
        torch._assert_async(
            outside_F[i] == 0,
            f"table {x.table.name}: feature {x.feature} has an id outside its {rows} rows "
            f"({first}..{first + rows - 1}): give the table more rows, or set its id_rule to hash, "
            "clamp or drop before it is exported",
        )
