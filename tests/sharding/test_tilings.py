"""What each named type means."""

from pathlib import Path

import pytest

from recapp.cli.help_text import comments_of
from recapp.errors import PlanError
from recapp.sharding.sharding_plan import tile
from recapp.sharding.sharding_types import (
    BUILT_IN,
    CandidateRanks,
    ShardingType,
    TableToCut,
    column_strips,
    equal_ranges,
)
from recapp.tables.config import EmbeddingBagConfig

CONF = Path(__file__).parents[2] / "conf"
RANKS = CandidateRanks(ranks=[2, 0, 3, 1], hosts=[[2, 3], [0, 1]])


def table(rows=10, dim=8):
    return EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])


def shards(kind, rows=10, dim=8):
    return [
        (s.rank, s.rows.start, s.rows.stop, s.cols.start, s.cols.stop)
        for s in tile(table(rows, dim), kind, RANKS, column_width=3).shards
    ]


def test_table_wise_is_one_rectangle_on_the_first_rank():
    assert shards("table_wise") == [(2, 0, 10, 0, 8)]


def test_column_wise_deals_strips_over_the_ranks_the_last_may_be_narrower():
    assert shards("column_wise") == [(2, 0, 10, 0, 3), (0, 0, 10, 3, 6), (3, 0, 10, 6, 8)]
    assert [s[0] for s in shards("column_wise", dim=15)] == [2, 0, 3, 1, 2]


def test_row_wise_spans_all_ranks_in_rank_order_and_short_tables_leave_some_empty():
    assert shards("row_wise") == [
        (0, 0, 3, 0, 8),
        (1, 3, 6, 0, 8),
        (2, 6, 9, 0, 8),
        (3, 9, 10, 0, 8),
    ]
    assert shards("row_wise", rows=2) == [(0, 0, 1, 0, 8), (1, 1, 2, 0, 8)]


def test_table_row_wise_stays_on_the_first_host():
    assert shards("table_row_wise") == [(2, 0, 5, 0, 8), (3, 5, 10, 0, 8)]


def test_grid_shard_puts_each_strip_on_a_host_and_cuts_it_there():
    assert shards("grid_shard") == [
        (2, 0, 5, 0, 3),
        (3, 5, 10, 0, 3),
        (0, 0, 5, 3, 6),
        (1, 5, 10, 3, 6),
        (2, 0, 5, 6, 8),
        (3, 5, 10, 6, 8),
    ]


def test_data_parallel_is_whole_on_every_rank_and_replicated_whatever_the_mode():
    assert shards("data_parallel") == [(k, 0, 10, 0, 8) for k in range(4)]
    assert {tile(table(), "data_parallel", RANKS, mode).mode for mode in ("unique", "pooled")} == {
        "replicated"
    }


@pytest.mark.parametrize("kind", ShardingType)
@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (10, 8), (3, 7), (131, 64)])
def test_every_type_tiles_every_table(kind, mode, rows, dim):
    found = tile(table(rows, dim), kind, RANKS, mode, column_width=3)
    assert found.cells(table(rows, dim), 4)
    assert found.sharding_type == kind.value and found.mode in (mode, "replicated")


def test_ranges_are_cut_evenly_and_never_into_empty_ones():
    assert equal_ranges(10, 4) == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    assert equal_ranges(2, 4) == [range(1), range(1, 2)]
    assert column_strips(256, 64) == [
        range(64),
        range(64, 128),
        range(128, 192),
        range(192, 256),
    ]


def test_wrong_settings_are_refused_with_what_is_allowed():
    with pytest.raises(
        PlanError, match=r"table t: unknown sharding type row_wize; did you mean row_wise"
    ):
        tile(table(), "row_wize", RANKS)
    with pytest.raises(PlanError, match=r"table t: plan.mode=uniqe: did you mean unique"):
        tile(table(), "row_wise", RANKS, "uniqe")
    with pytest.raises(PlanError, match=r"plan.column_width=0: must be at least 1"):
        tile(table(), "column_wise", RANKS, column_width=0)


def test_there_is_a_record_for_every_named_type_the_simplest_first():
    assert [record.name for record in BUILT_IN] == [
        "table_wise",
        "row_wise",
        "data_parallel",
        "column_wise",
        "table_row_wise",
        "grid_shard",
    ]
    assert {record.name for record in BUILT_IN} == {kind.value for kind in ShardingType}


@pytest.mark.parametrize("record", BUILT_IN, ids=lambda record: record.name)
def test_a_record_says_of_its_type_what_its_blocks_show(record):
    blocks = record.cut(TableToCut(12, 8, RANKS, 3))
    assert record.chooses_ranks == (len(blocks[0].candidates) > 1)
    assert record.cuts_columns == (len(blocks) > 1)
    pieces = {tuple(rows) for block in blocks for rows in block.rows.tolist()}
    assert record.cuts_rows == (len(pieces) > 1)
    assert record.replicated == (record.name == "data_parallel")


@pytest.mark.parametrize("record", BUILT_IN, ids=lambda record: record.name)
def test_the_plan_of_one_type_begins_with_what_its_record_says(record):
    about = comments_of(CONF / "plan" / f"{record.name}.yaml").about
    assert about.startswith(f"Every table: {record.description}")
