"""A data set at a fraction of its size: what `dataset.scale` changes, and what it leaves."""

from dataclasses import replace

import pytest

from recapp.dataset.data_settings import DataSettings, Generate
from recapp.errors import ConfigError

WHOLE = DataSettings(
    path="data/clicks",
    batch_size=65_536,
    val_batch_size=4_096,
    lanes=16,
    table_rows=(203_931, 4),
    generate=Generate(rows=41_250_000),
)


def at(scale, **changes):
    return replace(WHOLE, scale=scale, **changes)


def test_at_scale_one_nothing_changes():
    assert WHOLE.scaled is WHOLE


def test_batches_and_generated_rows_are_scaled_and_tables_are_not():
    found = at("1/1000").scaled
    assert (found.batch_size, found.val_batch_size) == (64, 16)
    assert found.generate == Generate(rows=41_250)
    assert found.table_rows == WHOLE.table_rows
    assert found.path == "data/clicks_1_1000"  # beside what is generated at another scale


def test_applied_twice_it_does_no_more():
    once = at("1/1000").scaled
    assert once.scaled == once


@pytest.mark.parametrize("scale", ["1/3", "1/64", 0.01, 1e-9, "0.7"])
def test_a_batch_stays_a_multiple_of_the_lanes(scale):
    found = at(scale).scaled
    for key in ("batch_size", "val_batch_size"):
        assert getattr(found, key) >= 16 and getattr(found, key) % 16 == 0
    assert found.generate.rows >= 1


def test_a_number_and_the_fraction_that_it_is_are_one_scale():
    assert at(0.001).scaled == at("1/1000").scaled


def test_logs_that_exist_are_read_where_they_are():
    found = at("1/8", generate=None, val_batch_size=None).scaled
    assert found.path == "data/clicks" and found.generate is None
    assert (found.batch_size, found.val_batch_size) == (8_192, None)


@pytest.mark.parametrize("scale", ["x", "1/0", 0, -1, "9/8", "nan"])
def test_what_is_no_share_is_refused(scale):
    with pytest.raises(ConfigError, match=f"^dataset.scale={scale}: must be "):
        at(scale)
