"""The integers of a batch for all groups at once: the arrays that kernels write, and the numbers
that they read (`triton_integers.py`).

A slot is a lookup of a strip; an entry is a pair of a slot and an id. For the owner of rows, a slot
is the request of a rank, and an entry is a requested row. The entries of a group have a region of
whole blocks in every array, with room for one more, so that a program works for one group. So have
its bags. Letters: S slots, G groups, K pieces, P entries, M bags, W ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024  # entries of a program
NOTHING = 2**62  # in a report: no id is outside of its table
# What the kernels of a hash table of keys read on the device: its address and number of buckets;
# the number of keys before a step; the numbers of the step before, and of the step; the slots that
# the last step has taken for keys that get no row yet; the number of keys, which is that of the
# next new one; the number of slots that were ever used; and an address: key n takes the slot that
# stands there as number n if it is below that number of slots, which so were given back, else slot
# n.
INDEX_NUMBERS = (
    *("table", "buckets", "first", "before", "step"),
    *("passing", "next", "used", "stack"),
)
MODES = "unique", "replicated", "pooled"  # in their order, the numbers of `GroupRequests.mode`


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
        base: The strip's first row in the store, where this rank has all rows of the strip.
        key: The strip's first key among those of its group; on a single rank, the strip of a
            dynamic table.
        sequence: Whether each id is a bag.
        mean: Whether the ids of a bag are averaged.
        first: Whether the slot is the first of its lookup.
        places: The bags of a sample: those of a concatenation have an id each, or none.
        place: The distance of the vectors of two of these bags; 0 if there is one.
    """

    lookup: int
    rule: int
    rows: int
    min_key: int
    factor: int
    shift: int
    mixed: int
    base: int
    key: int
    sequence: bool
    mean: bool
    first: bool
    places: int
    place: int


class SlotPlace(NamedTuple):
    """The place of a slot in a batch.

    Args:
        id: Its first id.
        entry: Its first entry.
        bag: Its first bag.
        vector: The offset of its first vector in the output.
        step: The distance of two vectors in the output.
        ends: Where the ends of bags begin in the message of ids, if the slot is a request for
            sums of bags.
        weights: Where the sample weights of such a request begin.
    """

    id: int
    entry: int
    bag: int
    vector: int
    step: int
    ends: int
    weights: int


class PieceNumbers(NamedTuple):
    """The constants of a piece of a table. Where owners sum bags, all pieces of an owner are one:
    its keys number the bags of the group, a number that each batch decides on.

    Args:
        group: Its group.
        key: Its first key among those of the group; of an owner of sums, in units of the bags.
        key_end: The key behind its last.
        base: Its first row in the owner's store.
        rank: Its owner; -1: all ranks have it.
    """

    group: int
    key: int
    key_end: int
    base: int
    rank: int


class PiecePlace(NamedTuple):
    """The place of a piece's requests.

    Args:
        first: The number of its first distinct row among those of its group.
        id: The offset of its first row in the message of ids.
        vector: The offset of its first vector in the message of vectors.
        entry: The number of its first entry among those of its group, like the following only
            where owners sum bags.
        ends: The offset of the end of its first bag in the message of ids.
        weights: The offset of its first sample weight there.
    """

    first: int
    id: int
    vector: int
    entry: int
    ends: int
    weights: int


class GroupRequests(NamedTuple):
    """The requests of a group.

    Args:
        piece: Its first piece.
        piece_end: The piece behind its last.
        width: The columns of its vectors.
        mode: The number of its mode in `MODES`.
    """

    piece: int
    piece_end: int
    width: int
    mode: int


class GroupPlace(NamedTuple):
    """The place of a group in a batch.

    Args:
        slot: Its first slot.
        slot_end: The slot behind its last.
        block: Its first block of entries.
        entry_end: The entry behind its last.
        bag_block: Its first block of bags.
        bag_end: The bag behind its last.
        strips: The strips of a dynamic table's group whose rows ranks request of each other, and
            the numbers at the head of a request, the rows of each strip; else 0.
        key: Its first key.
        no_key: The key that stands for no entry.
    """

    slot: int
    slot_end: int
    block: int
    entry_end: int
    bag_block: int
    bag_end: int
    strips: int
    key: int
    no_key: int


class Entries(NamedTuple):
    """The entries of a batch, in the order of the batch.

    Args:
        key_P: The key of each entry's row. Behind the entries of a group, and where an entry's row
            is only read, the group's `no_key`: no distinct row has such entries. Of a dynamic table
            the strip, until a search has found the row; for the ranks that hold the rows, the
            stretch of the strip.
        row_P: The row of each entry in this rank's store. Of a dynamic table the position of the
            key, until a search has found the row.
        where_P: The offset of each entry's gradient; where owners sum bags, the row of the entry in
            its owner's store.
        weight_P: The weight of each entry; None where all are 1. Where owners sum bags, its sample
            weight alone.
    """

    key_P: Tensor
    row_P: Tensor
    where_P: Tensor
    weight_P: Tensor | None


class DistinctRows(NamedTuple):
    """The distinct rows of a batch; those of a group stand at the start of its region. Where owners
    sum bags, the pairs of an owner and a bag have the place of rows, owner by owner, and what
    `Entries` says of offsets holds here.

    Args:
        row_U: The rows: keys, counted from the group's first.
        start_U: Where the entries of each row begin, counted from the group's first; behind those
            of the last row stands the number of entries.
        gradient_P: The offset of each entry's gradient, row by row.
        weight_P: The weight of each entry, row by row; None where all are 1.
        count_G: The number of distinct rows of each group, int32.
        number_P: The number of each entry's row among the distinct rows, int32, in the order of the
            batch; None where nobody asks for it.
        position_U: The position of each row of a dynamic table; None where ranks request none.
    """

    row_U: Tensor
    start_U: Tensor
    gradient_P: Tensor
    weight_P: Tensor | None
    count_G: Tensor
    number_P: Tensor | None
    position_U: Tensor | None


class Sizes(NamedTuple):
    """The sizes and types of a batch, which the host knows.

    Args:
        entries: The entries of all regions, P.
        bags: The bags of all regions, M.
        groups: The groups, G.
        row: The type of rows in the stores.
        key: The type of keys.
        offset: The type of offsets in the output or in the message of vectors.
    """

    entries: int
    bags: int
    groups: int
    row: torch.dtype
    key: torch.dtype
    offset: torch.dtype
