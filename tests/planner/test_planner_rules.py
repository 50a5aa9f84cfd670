"""Plans from rules: first match wins, names beat globs, equal inputs give equal plans, and load is
spread.
"""

import random
import re
from dataclasses import replace

import pytest
import yaml

from recapp.errors import ConfigError, PlanError
from recapp.optim.rules import rowwise_adagrad
from recapp.planner.plan_rules import plan_by_rules, table_facts
from recapp.planner.planner_settings import PlanRule, PlanSettings
from recapp.planner.problem import Topology, machine
from recapp.planner.rank_memory import bytes_per_rank
from recapp.reporting.plan_report import plan_rows, rank_rows
from recapp.settings.option_files import conf_dir
from recapp.settings.records import record
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import default_statistics

MIXED = [
    PlanRule("row_wise", rows_above=100_000, dim_below=256),
    PlanRule("column_wise", dim_at_least=256),
    PlanRule("data_parallel", rows_at_most=6_000),
    PlanRule("table_wise"),
]
CRITEO = [
    203931,
    18598,
    14092,
    7012,
    18977,
    4,
    6385,
    1245,
    49,
    186213,
    71328,
    67288,
    11,
    2168,
    7338,
    61,
    4,
    932,
    15,
    204515,
    141526,
    199433,
    60919,
    9137,
    71,
    34,
]


def table(name, rows, dim, dtype="fp32"):
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=[f"feature_of_{name}"],
        data_type=dtype,
    )


SAMPLE = [
    table("large_table", 1_000_000, 128),
    table("wide_table", 100_000, 256),
    table("small_table", 10_000, 32),
]


def plan(tables, rules=MIXED, world=2, hosts=1, **options):
    return plan_by_rules(tables, Topology(world, hosts), rules, name="mixed", **options)


def shipped(name):
    """The rules of `conf/plan/<name>.yaml`."""
    plain = yaml.safe_load((conf_dir() / f"plan/{name}.yaml").read_text())
    return read_rules(*plain["rules"])


def read_rules(*plain):
    """The rules of `plan.rules`."""
    return list(record(PlanSettings, {"rules": list(plain)}, check=True).rules)


def types(made):
    return {name: s.sharding_type for name, s in made.tables.items()}


def weights(tables, made):
    return [sum(h.weights.values()) for h in bytes_per_rank(tables, made, None)]


def test_the_mixed_rules_give_the_three_sample_tables_three_types_and_even_bytes():
    made = plan(SAMPLE)
    assert types(made) == {
        "large_table": "row_wise",
        "wide_table": "column_wise",
        "small_table": "table_wise",
    }
    assert sorted(weights(SAMPLE, made)) == [307_200_000, 308_480_000]


def test_the_mixed_rules_mix_three_types_on_criteos_tables():
    tables = [table(f"C{k + 1}", rows, 16) for k, rows in enumerate(CRITEO)]
    found = types(plan(tables))
    assert set(found.values()) == {"row_wise", "table_wise", "data_parallel"}
    assert (
        found["C1"] == "row_wise" and found["C2"] == "table_wise" and found["C6"] == "data_parallel"
    )


@pytest.mark.parametrize(
    ("rows", "dim", "kind"),
    [
        (100_001, 255, "row_wise"),
        (100_000, 255, "table_wise"),
        (100_001, 256, "column_wise"),
        (10, 256, "column_wise"),
        (6_000, 255, "data_parallel"),
        (6_001, 255, "table_wise"),
    ],
)
def test_bounds_of_a_rule_are_where_its_condition_says(rows, dim, kind):
    assert types(plan([table("t", rows, dim)])) == {"t": kind}


def test_rules_may_name_tables_and_globs_and_set_their_mode():
    rules = [PlanRule("row_wise", tables=["user_*", "item"], mode="pooled"), PlanRule("table_wise")]
    made = plan(
        [table(n, 10, 4) for n in ("user_id", "item", "item_id", "my_user_x")], rules
    ).tables
    assert [(s.sharding_type, s.mode) for s in made.values()] == [("row_wise", "pooled")] * 2 + [
        ("table_wise", "unique")
    ] * 2


def test_rows_are_mixed_where_a_table_is_cut_by_rows_and_a_rule_or_the_plan_says_so():
    rules = [PlanRule("row_wise", tables=["a"]), PlanRule("table_wise", tables=["b"])]
    rules += [PlanRule("row_wise", tables=["c"], row_order="natural"), PlanRule("data_parallel")]
    made = plan([table(n, 10, 4) for n in "abcd"], rules, row_order="mixed").tables
    orders = {name: s.row_order for name, s in made.items()}
    assert orders == {"a": "mixed", "b": "natural", "c": "natural", "d": "natural"}
    dealt = PlanRule("row_wise", row_order="mixed")
    assert plan([table("a", 10, 4)], [dealt]).tables["a"].row_order == "mixed"
    with pytest.raises(PlanError, match=r"table a: plan\.row_order=mix: did you mean mixed"):
        plan([table("a", 10, 4)], rules, row_order="mix")
    with pytest.raises(ConfigError, match=r"rules\[0\]\.row_order=mix: did you mean mixed"):
        read_rules({"type": "row_wise", "row_order": "mix"})


def test_a_glob_written_as_text_is_one_glob():
    rules = read_rules({"type": "row_wise", "tables": "C*"}, {"type": "table_wise"})
    assert types(plan([table("C1", 10, 4), table("x", 10, 4)], rules)) == {
        "C1": "row_wise",
        "x": "table_wise",
    }


def test_single_tables_are_overridden_by_name_or_glob_and_a_name_wins_whatever_the_order():
    for order in (("*_table", "small_table"), ("small_table", "*_table")):
        kinds = {"*_table": "table_wise", "small_table": "data_parallel"}
        made = plan(SAMPLE, overrides={k: kinds[k] for k in order})
        assert types(made) == {
            "large_table": "table_wise",
            "wide_table": "table_wise",
            "small_table": "data_parallel",
        }


def test_an_override_needs_no_rule_that_matches():
    made = plan(
        SAMPLE[:1], [PlanRule("table_wise", rows_at_most=5)], overrides={"large_table": "row_wise"}
    )
    assert types(made) == {"large_table": "row_wise"}


def test_an_override_of_no_table_offers_the_close_matches():
    with pytest.raises(
        PlanError, match=r"plan.tables.larg_table: no such table; did you mean large_table"
    ):
        plan(SAMPLE, overrides={"larg_table": "row_wise"})
    with pytest.raises(
        PlanError,
        match=r"plan.tables.Z\*: no such table; known: large_table, small_table, wide_table",
    ):
        plan(SAMPLE, overrides={"Z*": "row_wise"})


def test_a_table_without_a_rule_is_an_error_that_says_how_to_end_the_list():
    with pytest.raises(
        PlanError,
        match=(
            r"table small_table \(10,000 x 32\): no rule of the plan matches; .*e.g. \{type: "
            r"table_wise\}"
        ),
    ):
        plan(SAMPLE, [PlanRule("row_wise", rows_above=50_000)])


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"type": "row_wise", "row_above": 5}, "row_above: did you mean .*rows_above"),
        ({"rows_above": 5}, r"rules\[1\].type must be given"),
        ("row_wise", r"rules\[1\]=row_wise: is a group of settings"),
        ({"type": "row_wise", "rows_above": "many"}, "rows_above=many: must be a whole number of"),
        ({"type": "row_wise", "memory_share_above": -1}, "=-1: must be a number of at least 0"),
        ({"type": "row_wise", "dim_below": True}, "dim_below=true: must be a whole number"),
        ({"type": "row_wise", "lookups_per_row_above": float("nan")}, "=nan: must be"),
        ({"type": "row_wise", "access": "frequently"}, "access=frequently: did you mean frequent"),
        ({"type": "row_wise", "interconnect": "infiniband"}, "=infiniband: .*fast.*slow"),
    ],
)
def test_wrong_rules_are_refused_in_one_line(rule, says):
    with pytest.raises(ConfigError, match=says):
        read_rules({"type": "table_wise"}, rule)


def test_an_unknown_type_is_refused():
    with pytest.raises(
        PlanError, match="table large_table: unknown sharding type rowwise; did you mean row_wise"
    ):
        plan(SAMPLE, [PlanRule("rowwise")])


def test_each_decision_names_the_rule_that_fired():
    made = plan(
        SAMPLE,
        [
            PlanRule("row_wise", rows_above=100_000, dim_below=256),
            PlanRule("table_wise", tables=["wide*", "x"]),
            PlanRule("data_parallel"),
        ],
        overrides={"small*": "table_wise"},
    )
    assert made.reasons == {
        "large_table": (
            "rules[0] of mixed: row_wise for more than 100,000 rows, fewer than 256 columns"
        ),
        "wide_table": "rules[1] of mixed: table_wise for named wide* or x",
        "small_table": "plan.tables.small*=table_wise",
    }
    assert plan(SAMPLE[2:], [PlanRule("data_parallel")]).reasons == {
        "small_table": "rules[0] of mixed: data_parallel for all that is left"
    }


def first_to_fire(conditions, t=SAMPLE[0], **options):
    """Whether a rule of these conditions fires."""
    made = plan([t], [PlanRule("row_wise", **conditions), PlanRule("table_wise")], **options)
    return made.tables[t.name].sharding_type == "row_wise"


def test_lookups_per_row_are_ids_of_all_ranks_over_rows():
    """1,000 rows, 2 ranks of 300 samples: one id each makes 0.6 lookups per row, three make 1.8."""
    t = table("t", 1000, 8)
    three = {"t": default_statistics(t, 3.0)}
    known = {"batch_per_rank": 300, "world": 2}
    (facts,) = table_facts([t], Topology(2), batch_per_rank=300)
    assert facts.lookups_per_row == 0.6 and facts.access == "between"
    assert first_to_fire({"lookups_per_row_above": 0.59}, t, **known) and not first_to_fire(
        {"lookups_per_row_above": 0.6}, t, **known
    )
    assert first_to_fire({"lookups_per_row_at_most": 0.6}, t, **known)
    assert first_to_fire({"lookups_per_row_above": 1.79}, t, statistics=three, **known)
    assert first_to_fire(
        {"access": "frequent"}, t, statistics=three, **known
    ) and not first_to_fire({"access": "frequent"}, t, **known)
    assert first_to_fire(
        {"access": "sparse"}, table("t", 60_000, 8), **known
    ) and not first_to_fire({"access": "sparse"}, t, **known)
    two = replace(t, feature_names=["a", "b"])
    assert first_to_fire({"lookups_per_row_above": 1.1}, two, **known)


def test_memory_interconnect_and_hosts_are_asked_of_the_topology():
    t = table("t", 1000, 8)  # 32,000 bytes
    small = Topology(2, memory_bytes=[90_000, 74_000], reserve_bytes=10_000)
    for share, fires in ((0.49, True), (0.5, False)):
        made = plan_by_rules(
            [t],
            small,
            [PlanRule("row_wise", memory_share_above=share), PlanRule("table_wise")],
            name="x",
        )
        assert (made.tables["t"].sharding_type == "row_wise") is fires
    one = machine("dgx_h100")
    two = machine("dgx_h100_x2")
    slow = machine("dgx1_v100", 16)
    for topology, conditions, fires in (
        (one, {"interconnect": "fast"}, True),
        (one, {"interconnect": "slow"}, False),
        (slow, {"interconnect": "slow"}, True),
        (machine("dgx1_v100"), {"interconnect": "fast"}, True),
        (two, {"hosts_at_least": 2}, True),
        (one, {"hosts_at_least": 2}, False),
        (one, {"hosts_at_most": 1}, True),
        (two, {"hosts_at_most": 1}, False),
    ):
        made = plan_by_rules(
            [t], topology, [PlanRule("row_wise", **conditions), PlanRule("table_wise")], name="x"
        )
        assert (made.tables["t"].sharding_type == "row_wise") is fires, (
            topology.world_size,
            conditions,
        )


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        (
            {"access": "sparse"},
            "rules that ask for access do not fire: the batch size is not known",
        ),
        (
            {"lookups_per_row_at_most": 9},
            "rules that ask for lookups_per_row_at_most do not fire: the batch size is not known",
        ),
        (
            {"memory_share_at_most": 9},
            (
                r"rules that ask for memory_share_at_most do not fire: no memory is known "
                r"\(topology.memory_bytes\)"
            ),
        ),
        (
            {"interconnect": "slow"},
            (
                r"rules that ask for interconnect do not fire: no interconnect is known "
                r"\(topology.hardware\)"
            ),
        ),
    ],
)
def test_what_is_unknown_fires_no_rule_and_is_noted(conditions, says):
    made = plan(SAMPLE, [PlanRule("row_wise", **conditions), PlanRule("table_wise")])
    assert set(types(made).values()) == {"table_wise"}
    assert len(made.notes) == 1 and re.fullmatch(says, made.notes[0])
    assert not plan(SAMPLE).notes


PRODUCTION_CASES = {
    "users": (1_500_000, 128, "row_wise"),
    "texts": (100_000, 512, "column_wise"),
    "days": (10_000, 32, "table_wise"),
    "bounds": (1_000_000, 256, "table_wise"),
    "both": (1_000_001, 512, "row_wise"),
    "wide": (1_000_000, 257, "column_wise"),
}


def test_the_production_rules_are_strict():
    tables = [table(n, rows, dim) for n, (rows, dim, _) in PRODUCTION_CASES.items()]
    wanted = {n: kind for n, (_, _, kind) in PRODUCTION_CASES.items()}
    assert types(plan(tables, shipped("production"))) == wanted


def test_the_mixed_rules_are_those_that_are_shipped():
    assert shipped("mixed") == MIXED


@pytest.mark.parametrize(
    ("rows", "dim", "topology", "kind"),
    [
        (1_000, 16, "dgx_h100", "data_parallel"),  # small, read every step
        (99_999, 16, "dgx_h100", "table_wise"),  # small
        (100_000, 16, "dgx_h100", "row_wise"),  # between, where all-to-all is cheap
        (100_000, 16, "dgx1_v100", "row_wise"),
        (100_000, 16, None, "table_wise"),  # nobody knows what it costs
        (900_000_000, 16, "dgx_h100", "row_wise"),  # little memory: rows,
        (60_000_000, 256, "dgx_h100", "column_wise"),  # or columns where they are wide
        (900_000_000, 16, "dgx_h100_x2", "table_row_wise"),  # several hosts: inside one
        (60_000_000, 256, "dgx_h100_x2", "table_row_wise"),
        (10_000_000, 16, "dgx_h100", "row_wise"),  # rarely read
        (10_000_000, 16, "dgx_h100_x2", "table_row_wise"),
        (10_000_000, 16, None, "row_wise"),
    ],
)
def test_the_guidelines_do_what_the_field_advises(rows, dim, topology, kind):
    made = plan_by_rules(
        [table("t", rows, dim)],
        machine(topology) if topology else Topology(8),
        shipped("guidelines"),
        name="guidelines",
        batch_per_rank=1024,
    )
    assert types(made) == {"t": kind}, made.reasons


def test_the_guidelines_keep_large_tables_whole_that_are_read_every_step():
    t = table("t", 200_000, 16)
    made = plan_by_rules(
        [t],
        Topology(8),
        shipped("guidelines"),
        name="guidelines",
        batch_per_rank=1024,
        statistics={"t": default_statistics(t, 40.0)},
    )
    assert types(made) == {"t": "table_wise"} and "frequent access" in made.reasons["t"]


def test_round_robin_deals_strips_and_hosts_in_the_models_order():
    tables = [
        table("a", 9, 128),
        table("r", 9, 16),
        table("b", 5, 16),
        table("c", 90, 64),
        table("d", 1, 192),
    ]
    rules = [
        PlanRule("column_wise", dim_at_least=128),
        PlanRule("row_wise", tables=["r"]),
        PlanRule("table_wise"),
    ]
    made = plan(tables, rules, world=3, balanced=False).tables
    assert {n: [s.rank for s in made[n].shards] for n in "abcd"} == {
        "a": [0, 1],
        "b": [2],
        "c": [0],
        "d": [1, 2, 0],
    }
    grid = plan(
        [table("g", 10, 128), table("t", 10, 8)],
        [PlanRule("grid_shard", dim_at_least=128), PlanRule("table_row_wise")],
        world=6,
        hosts=3,
        balanced=False,
    ).tables
    assert (grid["g"].ranks, grid["t"].ranks) == ([0, 1, 2, 3], [4, 5])


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
    # Graham's bound for largest first
    assert max(held) <= max(max(CRITEO) * 64, 4 / 3 * sum(held) / world)


def test_whole_tables_make_room_for_tables_on_all_ranks():
    """Rank 1 has one row less of the spread ones, so the largest whole table goes there, although
    it is named first.
    """
    tables = [table("whole", 6, 64), table("spread", 4, 64), table("last", 5, 64)]
    made = plan(
        [*tables, table("odd", 1, 64)],
        [PlanRule("row_wise", tables=["spread", "odd"]), PlanRule("table_wise")],
    ).tables
    assert (made["whole"].ranks, made["last"].ranks) == ([1], [0])


def test_hosts_bound_table_row_wise_and_grid_shards():
    made = plan(
        [table("a", 100, 8), table("b", 100, 8)], [PlanRule("table_row_wise")], world=4, hosts=2
    )
    assert sorted(s.ranks for s in made.tables.values()) == [[0, 1], [2, 3]]
    grid = plan([table("g", 100, 128)], [PlanRule("grid_shard")], world=4, hosts=2).tables["g"]
    assert [(s.rank, s.cols.start) for s in grid.shards] == [(0, 0), (1, 0), (2, 64), (3, 64)]


def test_ranks_that_do_not_spread_over_the_hosts_are_refused():
    with pytest.raises(
        ConfigError, match=r"topology.hosts=3: 4 ranks must spread equally; use one of \[1, 2, 4\]"
    ):
        Topology(4, 3)
    with pytest.raises(ConfigError, match="world_size=0: must be at least 1"):
        Topology(0)


def test_a_plan_has_a_row_for_people_for_each_table():
    rows = plan_rows(SAMPLE, plan(SAMPLE))
    assert [(r["table"], r["rows"], r["dim"], r["type"]) for r in rows] == [
        ("large_table", 1_000_000, 128, "row_wise"),
        ("wide_table", 100_000, 256, "column_wise"),
        ("small_table", 10_000, 32, "table_wise"),
    ]
    assert [r["ranks"] for r in rows] == ["all", "all", "0"]
    rules = [PlanRule("table_wise", tables=["l*"]), PlanRule("data_parallel")]
    assert [r["ranks"] for r in plan_rows(SAMPLE, plan(SAMPLE, rules, world=8))[1:]] == ["all"] * 2


def test_ranks_are_listed_with_their_bytes():
    first, second = rank_rows(SAMPLE, plan(SAMPLE), rowwise_adagrad())
    state = 500_000 * 4 + 2 * 100_000 * 4
    assert {first["bytes"], second["bytes"]} == {307_200_000 + state, 308_480_000 + state + 40_000}
    assert (first["tables"], second["tables"]) in ((2, 3), (3, 2))
    assert 307_200_000 in (first["weights"], second["weights"])
    assert all(r["weights"] + r["optimiser_state"] == r["bytes"] for r in (first, second))


def test_narrow_tables_count_their_own_bytes():
    half = [replace(t, data_type="fp16") for t in SAMPLE]
    assert sorted(weights(half, plan(half))) == [153_600_000, 154_240_000]
