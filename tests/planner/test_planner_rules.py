"""Plans from rules: first match wins, names beat globs, equal inputs give equal plans, and load is spread."""

import random
from dataclasses import replace

import pytest

from recapp.errors import ConfigError, PlanError
from recapp.optim.rules import adam, rowwise_adagrad
from recapp.planner.automatic import automatic_plan
from recapp.planner.explain import plan_rows, rank_rows
from recapp.planner.memory import bytes_per_rank
from recapp.planner.rules import PlanRule, plan_by_rules, read_rule
from recapp.planner.topology import Topology
from recapp.tables.config import EmbeddingBagConfig

MIXED = [PlanRule("row_wise", rows_above=100_000, dim_below=256), PlanRule("column_wise", dim_at_least=256),
         PlanRule("data_parallel", rows_at_most=6_000), PlanRule("table_wise")]
CRITEO = [203931, 18598, 14092, 7012, 18977, 4, 6385, 1245, 49, 186213, 71328, 67288, 11, 2168, 7338, 61, 4, 932, 15, 204515, 141526,
          199433, 60919, 9137, 71, 34]


def table(name, rows, dim, dtype="fp32"):
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"feature_of_{name}"], data_type=dtype)


SAMPLE = [table("large_table", 1_000_000, 128), table("wide_table", 100_000, 256), table("small_table", 10_000, 32)]


def plan(tables, rules=MIXED, world=2, hosts=1, **options):
    return plan_by_rules(tables, Topology(world, hosts), rules, name="mixed", **options)


def types(made):
    return {name: s.sharding_type for name, s in made.tables.items()}


def weights(tables, made):
    return [sum(h.weights.values()) for h in bytes_per_rank(tables, made, None)]


def test_the_mixed_rules_give_the_three_sample_tables_three_types_and_even_bytes():
    made = plan(SAMPLE)
    assert types(made) == {"large_table": "row_wise", "wide_table": "column_wise", "small_table": "table_wise"}
    assert sorted(weights(SAMPLE, made)) == [307_200_000, 308_480_000]


def test_the_mixed_rules_mix_three_types_on_criteos_tables():
    tables = [table(f"C{k + 1}", rows, 16) for k, rows in enumerate(CRITEO)]
    found = types(plan(tables))
    assert set(found.values()) == {"row_wise", "table_wise", "data_parallel"}
    assert found["C1"] == "row_wise" and found["C2"] == "table_wise" and found["C6"] == "data_parallel"


@pytest.mark.parametrize(("rows", "dim", "kind"), [
    (100_001, 255, "row_wise"), (100_000, 255, "table_wise"), (100_001, 256, "column_wise"), (10, 256, "column_wise"),
    (6_000, 255, "data_parallel"), (6_001, 255, "table_wise")])
def test_bounds_of_a_rule_are_where_its_condition_says(rows, dim, kind):
    assert types(plan([table("t", rows, dim)])) == {"t": kind}


def test_rules_may_name_tables_and_globs_and_set_their_mode():
    rules = [PlanRule("row_wise", tables=["user_*", "item"], mode="pooled"), PlanRule("table_wise")]
    made = plan([table(n, 10, 4) for n in ("user_id", "item", "item_id", "my_user_x")], rules).tables
    assert [(s.sharding_type, s.mode) for s in made.values()] == [("row_wise", "pooled")] * 2 + [("table_wise", "unique")] * 2


def test_a_glob_written_as_text_is_one_glob():
    rules = [read_rule({"type": "row_wise", "tables": "C*"}, "plan.rules[0]"), PlanRule("table_wise")]
    assert types(plan([table("C1", 10, 4), table("x", 10, 4)], rules)) == {"C1": "row_wise", "x": "table_wise"}


def test_single_tables_are_overridden_by_name_or_glob_and_a_name_wins_whatever_the_order():
    for order in (("*_table", "small_table"), ("small_table", "*_table")):
        kinds = {"*_table": "table_wise", "small_table": "data_parallel"}
        made = plan(SAMPLE, overrides={k: kinds[k] for k in order})
        assert types(made) == {"large_table": "table_wise", "wide_table": "table_wise", "small_table": "data_parallel"}


def test_an_override_needs_no_rule_that_matches():
    made = plan(SAMPLE[:1], [PlanRule("table_wise", rows_at_most=5)], overrides={"large_table": "row_wise"})
    assert types(made) == {"large_table": "row_wise"}


def test_an_override_of_no_table_offers_the_close_matches():
    with pytest.raises(PlanError, match=r"plan.tables.larg_table: no such table; did you mean large_table"):
        plan(SAMPLE, overrides={"larg_table": "row_wise"})
    with pytest.raises(PlanError, match=r"plan.tables.Z\*: no such table; known: large_table, small_table, wide_table"):
        plan(SAMPLE, overrides={"Z*": "row_wise"})


def test_a_table_without_a_rule_is_an_error_that_says_how_to_end_the_list():
    with pytest.raises(PlanError, match=r"table small_table \(10,000 x 32\): no rule of the plan matches; .*e.g. \{type: table_wise\}"):
        plan(SAMPLE, [PlanRule("row_wise", rows_above=50_000)])


def test_unknown_conditions_and_types_are_refused():
    with pytest.raises(ConfigError, match=r"plan.rules\[2\]: unknown condition row_above; did you mean rows_above"):
        read_rule({"type": "row_wise", "row_above": 5}, "plan.rules[2]")
    with pytest.raises(ConfigError, match="a rule needs a type, one of table_wise, column_wise"):
        read_rule({"rows_above": 5}, "plan.rules[0]")
    with pytest.raises(PlanError, match="table large_table: unknown sharding type rowwise; did you mean row_wise"):
        plan(SAMPLE, [read_rule({"type": "rowwise"}, "plan.rules[0]")])


def test_equal_inputs_give_equal_plans_and_the_order_of_tables_does_not_move_the_bytes():
    tables = [table(f"C{k + 1}", rows, 16) for k, rows in enumerate(CRITEO)]
    assert plan(tables, world=4) == plan(tables, world=4)
    shuffled = random.Random(1).sample(tables, len(tables))
    assert weights(shuffled, plan(shuffled, world=4)) == weights(tables, plan(tables, world=4))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_whole_tables_are_dealt_largest_first_so_no_rank_is_a_table_ahead_of_need(world):
    tables = [table(f"C{k + 1}", rows, 16) for k, rows in enumerate(CRITEO)]
    held = weights(tables, plan(tables, [PlanRule("table_wise")], world))
    assert sum(held) == sum(CRITEO) * 16 * 4
    assert max(held) <= max(max(CRITEO) * 64, 4 / 3 * sum(held) / world)      # Graham's bound for largest first


def test_whole_tables_make_room_for_what_has_no_choice():
    """Rank 1 has one row less of the spread ones, so the largest whole table goes there, although it is named first."""
    tables = [table("whole", 6, 64), table("spread", 4, 64), table("last", 5, 64)]
    made = plan([*tables, table("odd", 1, 64)], [PlanRule("row_wise", tables=["spread", "odd"]), PlanRule("table_wise")]).tables
    assert (made["whole"].ranks, made["last"].ranks) == ([1], [0])


def test_hosts_bound_table_row_wise_and_grid_shards():
    made = plan([table("a", 100, 8), table("b", 100, 8)], [PlanRule("table_row_wise")], world=4, hosts=2)
    assert sorted(s.ranks for s in made.tables.values()) == [[0, 1], [2, 3]]
    grid = plan([table("g", 100, 128)], [PlanRule("grid_shard")], world=4, hosts=2).tables["g"]
    assert [(s.rank, s.cols.start) for s in grid.shards] == [(0, 0), (1, 0), (2, 64), (3, 64)]


def test_ranks_that_do_not_spread_over_the_hosts_are_refused():
    with pytest.raises(ConfigError, match=r"topology.hosts=3: 4 ranks must spread equally; use one of \[1, 2, 4\]"):
        Topology(4, 3)
    with pytest.raises(ConfigError, match="world_size=0: must be at least 1"):
        Topology(0)


def test_the_automatic_plan_replicates_small_spreads_large_and_deals_the_rest():
    made = automatic_plan([*SAMPLE, table("tiny", 100, 16)], Topology(2), rowwise_adagrad())
    assert types(made) == {"large_table": "row_wise", "wide_table": "table_wise", "small_table": "table_wise", "tiny": "data_parallel"}
    assert set(types(automatic_plan(SAMPLE, Topology(1))).values()) == {"table_wise"}
    assert types(automatic_plan(SAMPLE, Topology(2), overrides={"wide*": "column_wise"}))["wide_table"] == "column_wise"


def test_the_automatic_plan_must_fit():
    with pytest.raises(PlanError, match="plan automatic does not fit"):
        automatic_plan(SAMPLE, Topology(2, memory_bytes=[10**8] * 2), adam())


def test_plans_are_told_as_rows_for_people():
    told = plan_rows(SAMPLE, plan(SAMPLE))
    assert [(r["table"], r["rows"], r["dim"], r["type"]) for r in told] == [
        ("large_table", 1_000_000, 128, "row_wise"), ("wide_table", 100_000, 256, "column_wise"), ("small_table", 10_000, 32, "table_wise")]
    assert [r["ranks"] for r in told[:2]] == [
        "0: rows 0-499999, 1: rows 500000-999999", "0: cols 0-63, 1: cols 64-127, 0: cols 128-191, 1: cols 192-255"]
    many = plan(SAMPLE, [PlanRule("row_wise", tables=["l*"]), PlanRule("data_parallel")], world=8)
    assert [r["ranks"] for r in plan_rows(SAMPLE, many)] == [
        "0: rows 0-124999, 1: rows 125000-249999, 2: rows 250000-374999, 3: rows 375000-499999, ... 8 shards on 8 ranks",
        "all ranks", "all ranks"]
    whole = plan(SAMPLE[2:], [PlanRule("table_wise")])
    assert plan_rows(SAMPLE[2:], whole)[0]["ranks"] == "0: all"


def test_ranks_are_told_with_their_bytes():
    first, second = rank_rows(SAMPLE, plan(SAMPLE), rowwise_adagrad())
    state = 500_000 * 4 + 2 * 100_000 * 4
    assert {first["bytes"], second["bytes"]} == {307_200_000 + state, 308_480_000 + state + 40_000}
    assert (first["tables"], second["tables"]) in ((2, 3), (3, 2))
    assert "307.2 MB" in (first["weights"], second["weights"])


def test_narrow_tables_count_their_own_bytes():
    half = [replace(t, data_type="fp16") for t in SAMPLE]
    assert sorted(weights(half, plan(half))) == [153_600_000, 154_240_000]
