"""The places of a batch in the arrays of the kernels for all groups at once: groups one behind the
other in regions of whole blocks (`recapp/kernels/batch_arrays.py`), the slots of a group one behind
the other in its region, and the requests of each piece in the messages.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from recapp.kernels.batch_arrays import BLOCK, DistinctRows
from recapp.kernels.links import Counts, Links
from recapp.tables.positions import STRETCHES
from recapp.transport.step_messages import MessageLayout


class Region(NamedTuple):
    """The place of a group in the arrays of a batch.

    Args:
        entry: Its first entry.
        entries: The number of its entries.
        longest: A number of entries that no bag and no row exceeds.
        bag: Its first bag.
        bags: The number of its bags.
    """

    entry: int
    entries: int
    longest: int
    bag: int = 0
    bags: int = 0

    @property
    def here(self) -> slice:
        """The entries of the group."""
        return slice(self.entry, self.entry + self.entries)

    def links_of(
        self, group: int, distinct: DistinctRows, at_U: Tensor | None, weighted: bool = True
    ) -> Links:
        """Return the links from the distinct rows of the group to the offsets of their gradients.

        Args:
            group: The number of the group.
            distinct: The distinct rows.
            at_U: The offset of each row's result; None: results stand side by side.
            weighted: Whether entries of the group may have weights.
        """
        weight_P = distinct.weight_P if weighted else None
        return Links(
            distinct.gradient_P[self.here],
            distinct.start_U[self.entry : self.here.stop + 1],
            None if weight_P is None else weight_P[self.here],
            None if at_U is None else at_U[self.here],
            self.entries,
            used=distinct.count_G[group : group + 1],
            longest=self.longest,
        )


class Places(NamedTuple):
    """The places of slots and groups in the arrays of a batch.

    Args:
        of_slots: The places of the slots, [S x `SlotPlace`].
        of_groups: The places of the groups, [G x `GroupPlace`].
        regions: The regions of the groups.
        keys: The number of all keys.
    """

    of_slots: Counts
    of_groups: Counts
    regions: list[Region]
    keys: int


def block_behind(end: int) -> int:
    """Return the end of the block that has room for one more entry."""
    return (end // BLOCK + 1) * BLOCK


def places_of_requests(
    rows_G: Counts,
    width_G: Counts,
    strips_G: Counts,
    counts_WG3: Counts,
    pooled_G: Counts,
    words: MessageLayout,
    vectors: MessageLayout,
) -> Places:
    """Return the places of the requests of each rank, group by group, and of the groups.

    Args:
        rows_G: The rows of each group.
        width_G: The columns of its vectors.
        strips_G: The strips of each dynamic table's group (`GroupPlace.strips`).
        counts_WG3: The numbers of rows, vectors and words that each rank requests.
        pooled_G: Whether vectors are sums of the rows.
        words: The offsets in the message of ids.
        vectors: The offsets in the message of vectors.
    """
    world, groups, _ = counts_WG3.shape
    id_S, vector_S = (x.served_WG1[:, :-1].T.ravel() for x in (words, vectors))
    sizes_WG2 = np.where(pooled_G[:, None] | [True, False], counts_WG3[..., :2], 0)
    places = id_S, vector_S, np.repeat(width_G, world)
    # each rank asks for a row once, unless it asks for sums
    longest_G = np.where(pooled_G, counts_WG3[..., 0].sum(0), world)
    sizes_S2 = sizes_WG2.swapaxes(0, 1).reshape(-1, 2)
    slot_G1 = np.arange(groups + 1) * world
    return in_regions(*places, sizes_S2, slot_G1, rows_G, strips_G, longest_G)


def in_regions(
    id_S: Counts,
    vector_S: Counts,
    step_S: Counts,
    sizes_S2: Counts,
    slot_G1: Counts,
    rows_G: Counts,
    strips_G: Counts,
    longest_G: Counts,
) -> Places:
    """Return the places of slots and groups. The groups stand one behind the other in whole blocks,
    with room for one more entry and bag.

    Args:
        id_S: The first id of each slot.
        vector_S: The offset of its first vector.
        step_S: The distance of two vectors.
        sizes_S2: The entries and bags of each slot.
        slot_G1: The slots of each group.
        rows_G: The rows of each group, which keys number, with a key more for no row.
        strips_G: The strips of each dynamic table's group (`GroupPlace.strips`).
        longest_G: A number of entries of a group that no bag and no row exceeds.
    """
    edge_S2 = np.concatenate([np.zeros((1, 2), np.int64), sizes_S2.cumsum(0)])
    edge_G2 = edge_S2[slot_G1]
    size_G2 = np.diff(edge_G2, axis=0)
    room_G2 = (size_G2 // BLOCK + 1) * BLOCK
    first_G2 = room_G2.cumsum(0) - room_G2
    first_S2 = edge_S2[:-1] + np.repeat(first_G2 - edge_G2[:-1], np.diff(slot_G1), 0)
    entry_G, bag_G = first_G2.T
    entries_G, bags_G = size_G2.T
    key_G1 = np.array([0, *(rows_G + 1).cumsum()])
    end_S2 = id_S[:, None] + sizes_S2.cumsum(1)
    of_slots = [id_S, *first_S2.T, vector_S, step_S, *end_S2.T]
    of_groups = [
        *(slot_G1[:-1], slot_G1[1:], entry_G // BLOCK, entry_G + entries_G),
        *(bag_G // BLOCK, bag_G + bags_G, strips_G, key_G1[:-1], key_G1[1:] - 1),
    ]
    spans = np.stack([entry_G, entries_G, longest_G, bag_G, bags_G], 1)
    regions = [Region(*span) for span in spans.tolist()]
    return Places(np.stack(of_slots, 1), np.stack(of_groups, 1), regions, int(key_G1[-1]))


def places_of_pieces(
    pieces: Counts,
    rows_K: Counts,
    counts_WG3: Counts,
    width_G: Counts,
    words_WG: Counts,
    vectors: MessageLayout,
    own: int,
) -> Counts:
    """Return the place of the requests of each piece, [K x `PiecePlace`]: the pieces of a rank
    stand one after the other in its requests of a group.

    Args:
        pieces: The pieces, group by group, [K x `PieceNumbers`].
        rows_K: The number of distinct rows of each piece.
        counts_WG3: The numbers of rows, vectors and words requested of each rank.
        width_G: The columns of the vectors of each group.
        words_WG: The offset of each rank's rows in the message of ids.
        vectors: The offsets in the message of vectors.
        own: This rank, which answers requests of which all ranks have the rows.
    """
    group_K = pieces[:, 0]
    rank_K = np.where(pieces[:, -1] < 0, own, pieces[:, -1])
    by_rank = np.lexsort((rank_K, group_K))  # stable
    nth_K = np.empty_like(rows_K)
    nth_K[by_rank] = _before(rows_K[by_rank], (group_K * len(words_WG) + rank_K)[by_rank])
    at_id = words_WG[rank_K, group_K] + nth_K
    at_vector = vectors.asked_WG1[rank_K, group_K] + nth_K * width_G[group_K]
    # of an owner of sums, which is one piece
    ends = at_id[:, None] + counts_WG3[rank_K, group_K, :2].cumsum(1)
    entry_K = _before(counts_WG3[rank_K, group_K, 0], group_K)
    return np.stack([_before(rows_K, group_K), at_id, at_vector, entry_K, *ends.T], 1)


def heads_of_requests(
    pieces: Counts, strips_G: Counts, words_WG: Counts, rows_K: Counts
) -> tuple[Counts, Counts]:
    """Return what is at the head of each rank's requests for rows of dynamic tables: the number of
    rows of each strip, at its offset in the message of ids, [W x strips]; first the offsets.

    Args:
        pieces: The pieces, group by group, [K x `PieceNumbers`].
        strips_G: The strips of each dynamic table's group (`GroupPlace.strips`).
        words_WG: The offset of each rank's requests in the message.
        rows_K: The number of distinct rows of each piece.
    """
    first_G = strips_G.cumsum() - strips_G
    group_N = np.repeat(np.arange(len(strips_G)), strips_G)
    at_WN = (words_WG - first_G)[:, group_N] + np.arange(len(group_N))
    rows_WN = np.zeros_like(at_WN)
    of_K = strips_G[pieces[:, 0]] > 0
    group_K, key_K, _, _, rank_K = pieces[of_K].T
    strip_K = first_G[group_K] + key_K // STRETCHES
    np.add.at(rows_WN, (rank_K, strip_K), rows_K[of_K])
    every_K = strip_K[rank_K < 0]  # all ranks have it: counted for the last one
    rows_WN[:, every_K] = rows_WN[-1, every_K]
    return at_WN, rows_WN


def _before(rows_K: Counts, block_K: Counts) -> Counts:
    """Return the rows of the pieces before each piece, in a block of pieces with one number."""
    before_K = rows_K.cumsum() - rows_K
    first_K = np.searchsorted(block_K, block_K)
    return before_K - before_K[first_K]
