"""Offsets in a flat buffer: what one rank calls asked, the other calls served, and nothing
overlaps.
"""

import numpy as np
import pytest
import torch

from recapp.transport.communicator import Comm
from recapp.transport.step_messages import HEADER, Buffers, MessageLayout, swap_counts

CPU = torch.device("cpu")


def layouts(world, groups, answered, seed):
    """The layout of every rank's message for one random exchange: asks[a][b] is what rank a asks
    of rank b, by group.
    """
    asks = np.random.default_rng(seed).integers(0, 5, (world, world, groups))
    return asks, [MessageLayout(asks[r], asks[:, r], r, answered) for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_what_arrives_is_what_was_sent_in_the_right_place(world, seed):
    asks, made = layouts(world, 3, 2, seed)
    buffers = [torch.full((m.numel,), -1) for m in made]
    for r, (m, b) in enumerate(zip(made, buffers, strict=True)):
        for g in range(3):
            for to, (first, last) in enumerate(m.asked_WG1[:, g : g + 2].tolist()):
                place = b[first:last]
                place.copy_(torch.arange(len(place)) + 1000 * g + 100 * r + 10 * to)
    for a in range(world):
        for b in range(world):
            if a != b:
                buffers[b][slice(*made[b].requests()[1][a])] = buffers[a][
                    slice(*made[a].requests()[0][b])
                ]
    for r, (m, b) in enumerate(zip(made, buffers, strict=True)):
        assert int((b == -1).sum()) == 0
        for g in range(3):
            for source, (first, last) in enumerate(m.served_WG1[:, g : g + 2].tolist()):
                assert b[first:last].tolist() == [
                    1000 * g + 100 * source + 10 * r + k for k in range(asks[source, r, g])
                ]


@pytest.mark.parametrize("world", [2, 4])
def test_answers_leave_out_the_groups_that_are_not_answered(world):
    asks, made = layouts(world, 3, 2, 9)
    for r, m in enumerate(made):
        send, receive = m.answers()
        assert [b - a for a, b in receive] == asks[r, :, :2].sum(1).tolist()
        assert [b - a for a, b in send] == asks[:, r, :2].sum(1).tolist()


def test_counts_reach_the_rank_they_are_for_with_everybodys_header(ranks):
    for rank, (heads, counts) in enumerate(ranks.run(counts_of, 3)):
        assert heads.tolist() == [[10 * r + k for k in range(HEADER)] for r in range(3)]
        assert counts.tolist() == [[[100 * r + rank, g, 7] for g in range(2)] for r in range(3)]


def counts_of(comm):
    counts = np.array(
        [[[100 * comm.rank + to, g, 7] for g in range(2)] for to in range(comm.world)]
    )
    return swap_counts(comm, [10 * comm.rank + k for k in range(HEADER)], counts)()


def test_one_rank_tells_itself():
    heads, counts = swap_counts(Comm(), range(HEADER), np.array([[[1, 2, 3]]]))()
    assert heads.tolist() == [list(range(HEADER))] and counts.tolist() == [[[1, 2, 3]]]


def test_memory_is_lent_to_one_message_at_a_time_and_used_again_after():
    buffers = Buffers()
    a, b = (buffers.take(100, torch.float32, CPU) for _ in range(2))
    a.zero_()
    b.fill_(1)
    assert a.sum() == 0 and a.data_ptr() != b.data_ptr()
    place = a.data_ptr()
    buffers.give_back(a)
    assert buffers.take(50, torch.float64, CPU).data_ptr() != place
    # there is a little room for larger batches
    assert buffers.take(110, torch.float32, CPU).data_ptr() == place


def test_memory_that_became_too_small_is_let_go():
    buffers = Buffers()
    for numel in (10, 1_000, 100_000):
        buffers.give_back(buffers.take(numel, torch.float32, CPU))
    assert [len(b) >= 100_000 for b in buffers.free()] == [True]
