"""The mixed order of rows: an exact bijection for any number of rows, and neighbours lie evenly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recapp.tables.positions import MOST_ROWS, RowOrder, mixed_order

NAMES = st.sampled_from(["t", "C1", "users"])


@settings(max_examples=60)
@given(NAMES, st.integers(1, 3000))
def test_every_row_has_a_position_of_its_own_and_comes_back(name, rows):
    order = mixed_order(name, rows)
    row_N = torch.arange(rows)
    position_N = order.positions_of(row_N)
    assert position_N.sort().values.tolist() == row_N.tolist()
    assert order.rows_at(position_N).tolist() == row_N.tolist()


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**32 + 15, 2**40 + 1, 2**48, MOST_ROWS])
def test_positions_of_large_tables_are_exact(rows):
    order = mixed_order("t", rows)
    row_N = torch.randint(0, rows, (500,), generator=torch.Generator().manual_seed(1))
    row_N[:2] = torch.tensor([0, rows - 1])
    position_N = order.positions_of(row_N)
    exact = [(order.multiplier * row + order.shift) % rows for row in row_N.tolist()]
    assert position_N.tolist() == exact
    assert torch.equal(order.rows_at(position_N), row_N)


@settings(max_examples=60)
@given(st.data(), NAMES, st.integers(1, 100_000))
def test_any_range_of_rows_has_its_share_of_any_strip_but_for_a_few(data, name, rows):
    first = data.draw(st.integers(0, rows - 1))
    strip = range(first, data.draw(st.integers(first + 1, rows)))
    position_R = mixed_order(name, rows).positions_of(torch.arange(rows))
    inside_R = (position_R >= strip.start) & (position_R < strip.stop)
    share = len(strip) / rows
    excess_R = (inside_R.double() - share).cumsum(0)  # of the ranges that begin with row 0
    assert float(excess_R.max() - excess_R.min()) < 10  # of all ranges; at random it would be 400


def test_tables_of_other_names_begin_elsewhere():
    firsts = {int(mixed_order(f"t{k}", 10_000).positions_of(torch.tensor([0]))) for k in range(20)}
    assert len(firsts) == 20
    assert mixed_order("t", 10_000) == mixed_order("t", 10_000)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 0), (4, 2, 0), (4, 5, 0), (4, 3, 4), (4, 3, -1), (4.0, 3, 0), (4, True, 0)]
)
def test_numbers_that_make_no_bijection_are_refused(numbers):
    with pytest.raises(ValueError, match="row order of"):
        RowOrder(*numbers)
