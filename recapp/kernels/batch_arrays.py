"""The integers of a batch for all groups of one rank: the arrays that kernels write, and the
numbers that they read.

A slot is a lookup of a strip; an entry is a pair of a slot and an id. The entries of a group have a
region of whole blocks in every array, with room for one more, so that a program works for one
group. So have its bags. Letters: S slots, G groups, P entries, M bags.

`triton_integers.py` has the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024  # entries of a program
NOTHING = 2**62  # in a report: no id is outside of its table


class SlotNumbers(NamedTuple):
    """The constants of a slot.

    Args:
        lookup: The lookup.
        rule: The number of the id rule.
        rows: The rows of the table.
        min_key: The id of row 0.
        factor: The multiplier of mixed rows.
        shift: The shift of mixed rows.
        mixed: The number of mixed rows; 0 where rows are not mixed.
        base: The strip's first row in the store.
        sequence: Whether each id is a bag.
        mean: Whether the ids of a bag are averaged.
        first: Whether the slot is the first of its lookup.
    """

    lookup: int
    rule: int
    rows: int
    min_key: int
    factor: int
    shift: int
    mixed: int
    base: int
    sequence: bool
    mean: bool
    first: bool


class SlotPlace(NamedTuple):
    """The place of a slot in a batch.

    Args:
        id: Its first id.
        entry: Its first entry.
        bag: Its first bag.
        vector: The offset of its first vector in the output.
        step: The distance of two vectors in the output.
    """

    id: int
    entry: int
    bag: int
    vector: int
    step: int


class GroupPlace(NamedTuple):
    """The place of a group in a batch.

    Args:
        slot: Its first slot.
        slot_end: The slot behind its last.
        block: Its first block of entries.
        entry_end: The entry behind its last.
        bag_block: Its first block of bags.
        bag_end: The bag behind its last.
        key: Its first key.
        no_key: The key that stands for no entry.
    """

    slot: int
    slot_end: int
    block: int
    entry_end: int
    bag_block: int
    bag_end: int
    key: int
    no_key: int


class BatchArrays(NamedTuple):
    """The integers of a batch, group by group in regions of whole blocks.

    Args:
        index_P: The row in the store of each entry, in the order of the batch.
        weight_P: The weight of each entry; None where all are 1.
        offset_M: Where the entries of each bag begin, counted from the group's first; the offset
            behind a group's last bag is the number of its entries.
        at_M: The offset of each bag's vector in the output.
        row_U: The distinct rows.
        start_U: Where the entries of each distinct row begin, like `offset_M`.
        gradient_P: The offset of each entry's gradient, row by row.
        gradient_weight_P: The weight of each entry, row by row; None where all are 1.
        count_G: The number of distinct rows of each group, int32.
        report: The index of the first id that is an error, or `NOTHING`; and the number of changed
            ids of each lookup.
    """

    index_P: Tensor
    weight_P: Tensor | None
    offset_M: Tensor
    at_M: Tensor
    row_U: Tensor
    start_U: Tensor
    gradient_P: Tensor
    gradient_weight_P: Tensor | None
    count_G: Tensor
    report: Tensor


class BatchSizes(NamedTuple):
    """The sizes of a batch that the host knows.

    Args:
        entries: The entries of all regions, P.
        bags: The bags of all regions, M.
        slots: The slots, S.
        groups: The groups, G.
        samples: The samples, B.
        row_dtype: The type of rows in the stores.
        key_dtype: The type of sort keys.
        offset_dtype: The type of offsets in the output.
    """

    entries: int
    bags: int
    slots: int
    groups: int
    samples: int
    row_dtype: torch.dtype
    key_dtype: torch.dtype
    offset_dtype: torch.dtype
