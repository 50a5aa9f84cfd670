"""Strips, pieces and groups of a plan: where every row is, and that finding it stays cheap for many
tables and ranks.
"""

import random
import sys

import pytest
import torch
from parity.cases import KINDS, sharding

from recapp.engine.exchange_modes import make_routes
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.config import EmbeddingBagConfig

CPU = torch.device("cpu")


def table(name, rows, dim, features=("f",), dtype="fp32"):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, data_type=dtype
    )


def layout_of(tables, kinds, world, mode="unique", column_width=2):
    ranks = CandidateRanks(list(range(world)), [list(range(world))])
    made = {
        t.name: tile(t, k, ranks, mode, column_width=column_width)
        for t, k in zip(tables, kinds, strict=True)
    }
    return make_layout(tables, ShardingPlan(made, world))


def test_strips_of_one_width_mode_and_type_are_one_group_and_replicas_come_last():
    tables = [
        table("dp", 4, 2, ["a"]),
        table("cw", 6, 4, ["b"]),
        table("tw", 5, 2, ["c"]),
        table("half", 5, 2, ["d"], "fp16"),
        table("w3", 3, 3, ["e"]),
    ]
    layout = layout_of(
        tables, ["data_parallel", "column_wise", "table_wise", "table_wise", "table_wise"], 2
    )
    assert [(g.width, g.mode, g.dtype) for g in layout.groups] == [
        (2, "unique", torch.float16),
        (2, "unique", torch.float32),
        (3, "unique", torch.float32),
        (2, "replicated", torch.float32),
    ]
    assert [[(s.lookup, s.column) for s in g.slots] for g in layout.groups] == [
        [(3, 0)],
        [(1, 0), (1, 2), (2, 0)],
        [(4, 0)],
        [(0, 0)],
    ]
    assert layout.groups[1].rows_W == (6 + 5, 6) and layout.groups[3].rows_W == (4, 4)
    assert layout.column_cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_every_row_is_found_in_the_store_that_holds_it(kind, world):
    rng = random.Random(kind)
    tables = [
        table(f"t{k}", rows, dim, [f"f{k}"])
        for k, (rows, dim) in enumerate([(7, 4), (1, 3), (12, 4), (5, 1)])
    ]
    layout = make_layout(
        tables,
        ShardingPlan({t.name: sharding(kind, t, world, rng, "unique") for t in tables}, world),
    )
    stored = {(g, rank): set() for g in range(len(layout.groups)) for rank in range(world)}
    for p in layout.pieces:
        g = layout.strips[p.strip].group
        rows = set(range(p.base, p.base + len(p.rows)))
        assert not rows & stored[g, p.rank]
        stored[g, p.rank] |= rows
    assert all(
        stored[g, rank] == set(range(group.rows_W[rank]))
        for g, group in enumerate(layout.groups)
        for rank in range(world)
    )
    for number, group in enumerate(layout.groups):
        for rank in range(world):
            routes = make_routes(layout, number, rank, CPU)
            for nth, i in enumerate(
                i for i, strip in enumerate(layout.strips) if strip.group == number
            ):
                pieces = [
                    p
                    for p in layout.pieces
                    if p.strip == i and (group.mode != "replicated" or p.rank == rank)
                ]
                expected = [(p.rank, p.base + k) for p in pieces for k in range(len(p.rows))]
                found = slice(*routes.piece_I1[nth : nth + 2].tolist())
                ends = [*routes.start_K[found].tolist()[1:], int(routes.rows_I[nth])]
                held = zip(
                    routes.start_K[found].tolist(),
                    ends,
                    routes.rank_K[found].tolist(),
                    routes.base_K[found].tolist(),
                    strict=True,
                )
                assert [
                    (rank, base + k)
                    for first, last, rank, base in held
                    for k in range(last - first)
                ] == expected


def test_all_groups_number_rows_in_one_type_because_they_share_a_message():
    giant = table("giant", 3 * 2**31, 4, ["a"])
    small = table("small", 10, 2, ["b"])
    layout = layout_of([giant, small], ["table_wise", "table_wise"], 1)
    assert {make_routes(layout, g, 0, CPU).row_dtype for g in range(2)} == {torch.int64}
    split = layout_of([giant, small], ["row_wise", "table_wise"], 4)
    assert {make_routes(split, g, 0, CPU).row_dtype for g in range(2)} == {torch.int32}


def calls_in(work):
    """Python and C functions entered: a measure of work that does not depend on the machine."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_per_piece(count):
    tables = [table(f"t{k}", 100_000 + k, 64, [f"f{k}"]) for k in range(count)]
    kinds = [
        ("row_wise", "table_wise", "column_wise", "data_parallel")[k % 4] for k in range(count)
    ]
    made = []
    calls = calls_in(lambda: made.append(layout_of(tables, kinds, 128, column_width=16)))
    assert len(made[0].pieces) == count // 4 * (128 + 1 + 4 + 128)
    return calls / len(made[0].pieces)


def test_the_layout_of_200_tables_on_128_ranks_costs_a_few_calls_per_piece_however_many_there_are():
    few = calls_per_piece(40)
    many = calls_per_piece(200)
    assert many < 60 and many < 1.2 * few
