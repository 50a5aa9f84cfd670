"""Plans of tables that are only read, and the fewest ranks on which they fit."""

import pytest

from recapp.errors import ConfigError, PlanError
from recapp.kernels.quantised import bytes_of_packed_row
from recapp.planner.embedding_planner import fewest_ranks, serving_plan, stored_as
from recapp.planner.problem import Topology
from recapp.planner.rank_memory import bytes_per_rank
from recapp.tables.config import EmbeddingBagConfig, lookups_of

ROWS = (1000, 600, 400)
DIM = 16


def tables():
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=n, embedding_dim=DIM, feature_names=[f"f{i}"]
        )
        for i, n in enumerate(ROWS)
    ]


def as_stored(data_type):
    made = tables()
    return stored_as(made, lookups_of(made), {t.name: data_type for t in made})


@pytest.mark.parametrize(
    ("data_type", "row"),
    [
        ("fp32", 64),
        ("fp16", 32),
        ("int8", bytes_of_packed_row(16, 8)),
        ("int4", bytes_of_packed_row(16, 4)),
    ],
)
def test_bytes_are_those_of_the_stored_rows(data_type, row):
    made, lookups = as_stored(data_type)
    fit = fewest_ranks(made, lookups, Topology(1, memory_bytes=[10**9]))
    assert (fit.plan.world_size, fit.bytes, fit.largest) == (1, sum(ROWS) * row, sum(ROWS) * row)


def test_fewer_bits_need_fewer_ranks_and_each_holds_what_it_may():
    ranks = {}
    for data_type in ("fp32", "fp16", "int8", "int4"):
        made, lookups = as_stored(data_type)
        fit = fewest_ranks(made, lookups, Topology(1, memory_bytes=[26_000], reserve_bytes=1000))
        held = bytes_per_rank(made, fit.plan, None)
        assert max(rank.total for rank in held) == fit.largest <= 25_000
        assert sum(rank.total for rank in held) >= fit.bytes
        assert fit.plan.world_size >= -(-fit.bytes // 25_000)
        ranks[data_type] = fit.plan.world_size
    assert ranks == {"fp32": 6, "fp16": 3, "int8": 2, "int4": 1}


def test_one_rank_fewer_does_not_fit():
    made, lookups = as_stored("fp16")
    fit = fewest_ranks(made, lookups, Topology(1, memory_bytes=[25_000]))
    with pytest.raises(PlanError):
        serving_plan(
            made,
            Topology(fit.plan.world_size - 1, memory_bytes=[25_000] * (fit.plan.world_size - 1)),
        )


def test_every_table_asks_for_distinct_rows():
    made, lookups = as_stored("int8")
    plan = serving_plan(made, Topology(4), lookups)
    assert {s.mode for s in plan.tables.values()} <= {"unique", "replicated"}


def test_memory_that_is_not_known_or_too_small_is_said():
    made, lookups = as_stored("int8")
    with pytest.raises(ConfigError, match=r"topology\.memory_bytes must be given"):
        fewest_ranks(made, lookups, Topology(1))
    with pytest.raises(
        PlanError, match=r"topology\.reserve_bytes=100 \(100 B\).*topology\.memory_bytes=100"
    ):
        fewest_ranks(made, lookups, Topology(1, memory_bytes=[100], reserve_bytes=100))
