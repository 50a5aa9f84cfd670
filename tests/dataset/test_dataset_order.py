"""The order of an epoch, as pure functions of numbers of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapp.dataset.stream import after, check_order, deal, permutations, rank_lanes
from recapp.errors import ConfigError

segments = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def expanded(pieces):
    """Return a lane's rows one by one: (segment, row)."""
    return [
        (segment, first + offset)
        for segment, first, rows in pieces.tolist()
        for offset in range(rows)
    ]


def dealt_row_by_row(sizes, lanes, shuffle_rows):
    """Deal one row at a time, as the contract's text says: an independent oracle."""
    total = sum(sizes)
    room = [total // lanes + (1 if lane < total % lanes else 0) for lane in range(lanes)]
    out = [[] for _ in range(lanes)]
    run = max(1, (shuffle_rows or 4096) // lanes)
    for segment, size in enumerate(sizes):
        step = run if size * lanes > total else size
        units = [list(range(first, min(first + step, size))) for first in range(0, size, step)]
        for unit in units:
            while unit:
                lane = min(
                    (lane for lane in range(lanes) if len(out[lane]) < room[lane]),
                    key=lambda lane: (len(out[lane]), lane),
                )
                taken = unit[: room[lane] - len(out[lane])]
                out[lane] += [(segment, row) for row in taken]
                unit = unit[len(taken) :]
    return out


@given(segments, st.integers(1, 9), st.integers(0, 40))
def test_rows_are_dealt_as_the_contract_says(sizes, lanes, shuffle_rows):
    assert [
        expanded(pieces) for pieces in deal(sizes, lanes, shuffle_rows).lanes
    ] == dealt_row_by_row(sizes, lanes, shuffle_rows)


@given(segments, st.integers(1, 9), st.integers(0, 40))
def test_lanes_differ_by_at_most_one_row_and_lose_none(sizes, lanes, shuffle_rows):
    result = deal(sizes, lanes, shuffle_rows)
    counts = [int(lane[:, 2].sum()) for lane in result.lanes]
    assert max(counts) - min(counts) <= 1
    rows = sorted(row for pieces in result.lanes for row in expanded(pieces))
    assert rows == [(segment, row) for segment, size in enumerate(sizes) for row in range(size)]


def test_equal_row_groups_go_round_the_lanes_in_file_order():
    result = deal([10] * 6, 3, 30)
    assert [[piece[0] for piece in pieces.tolist()] for pieces in result.lanes] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


def test_a_full_lane_passes_the_rest_of_its_row_group_on():
    result = deal([5, 5, 5], 2, 40)
    assert result.lanes[0].tolist() == [[0, 0, 5], [2, 0, 3]]
    assert result.lanes[1].tolist() == [[1, 0, 5], [2, 3, 2]]


def test_a_large_row_group_is_cut_into_pieces():
    result = deal([24], 2, 8)
    assert result.cut.tolist() == [True]
    assert result.lanes[0].tolist() == [[0, 0, 4], [0, 8, 4], [0, 16, 4]]


def test_a_row_group_of_exactly_a_lane_is_not_cut():
    result = deal([6, 6], 2, 4)
    assert [pieces.tolist() for pieces in result.lanes] == [[[0, 0, 6]], [[1, 0, 6]]]


@given(segments, st.integers(1, 5), st.integers(0, 30), st.data())
def test_what_is_left_of_a_lane_is_its_rows_without_the_first(sizes, lanes, shuffle_rows, data):
    pieces = deal(sizes, lanes, shuffle_rows).lanes[0]
    position = data.draw(st.integers(0, len(expanded(pieces))))
    assert expanded(after(pieces, position)) == expanded(pieces)[position:]


def permutation(seed, epoch, lane, block, rows):
    """Return the order of the rows of one lane's block, the same beside other lanes'."""
    return permutations(seed, epoch, range(lane - 1, lane + 2), block, rows)[1]


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256])
def test_a_block_is_permuted(rows):
    assert sorted(permutation(1, 2, 3, 4, rows)) == list(range(rows))


def test_a_permutation_depends_on_seed_epoch_lane_and_block():
    numbers = [
        (1, 0, 0, 0),
        (2, 0, 0, 0),
        (1, 1, 0, 0),
        (1, 0, 1, 0),
        (1, 0, 0, 1),
        (0, 1, 0, 0),
        (-1, 0, 0, 0),
    ]
    assert len({tuple(permutation(*number, 20)) for number in numbers}) == len(numbers)


def test_a_permutation_is_the_same_on_every_machine_and_version():
    assert permutation(1, 0, 0, 0, 12).tolist() == [8, 0, 9, 3, 11, 10, 4, 6, 5, 7, 1, 2]


def test_permutations_are_spread_evenly():
    firsts = np.bincount(
        [permutation(7, 0, 0, block, 10)[0] for block in range(2000)], minlength=10
    )
    assert firsts.min() > 140
    assert firsts.max() < 260


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_ranks_share_all_lanes_between_them(world):
    shares = [rank_lanes(rank, world, 16) for rank in range(world)]
    assert [lane for share in shares for lane in share] == list(range(16))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((64, 3, 4), "dataset.lanes=3: each of the 4 ranks needs a lane; set dataset.lanes=4"),
        ((100, 16, 2), "dataset.batch_size=100: .* dataset.lanes=16, .* set 96"),
        ((0, 16, 2), "dataset.batch_size=0: .* set 16"),
        ((64, 0, 1), "dataset.lanes=0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_the_setting_to_change(numbers, text):
    with pytest.raises(ConfigError, match=text):
        check_order(*numbers)
