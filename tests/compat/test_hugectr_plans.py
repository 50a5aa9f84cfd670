"""HugeCTR's plans: its well-known two as golden files, two dialects, broken rules one at a time."""

import copy
import json
import re
from functools import cache
from hashlib import sha256

import pytest
from jobs import recipe, small, validation

from recapp.compat.hugectr.plans import (
    hugectr_lists,
    notebook_lists,
    plan_from_values,
    printed,
    takes,
    written_plan,
)
from recapp.errors import PlanError
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import PlanningProblem, Topology
from recapp.run.plan_of_run import build_plan, problem_of_run
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.sharding.sharding_types import equal_ranges
from recapp.tables.config import EmbeddingBagConfig, TableLookup
from recapp.trainer.strategy import plan_from

SIZES = [
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
WHOLE = [[0, 11], [1, 14], [2, 19], [3, 20], [4, 21], [6, 22], [9, 23], [10]]
REPLICATED = [5, 7, 8, 12, 13, 15, 16, 17, 18, 24, 25]


def table(name, rows, features=None, dim=16):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or [name]
    )


CRITEO = [table(f"C{k + 1}", rows) for k, rows in enumerate(SIZES)]


def group(local, every, word="mp", **more):
    return {
        "local_embedding_list": local,
        "global_embedding_list": every,
        "table_placement_strategy": word,
    } | more


def well_known(gpus=8):
    """Small tables data parallel, the others dealt round robin, as HugeCTR's example makes its
    file.
    """
    dealt = [k for k, rows in enumerate(SIZES) if rows > 6000]
    every = [dealt[g::gpus] for g in range(gpus)]
    return [
        [group(every[g], every), group(REPLICATED, [REPLICATED] * gpus, "dp")] for g in range(gpus)
    ]


def by_rows(gpus=8, count="shards_count", shard="shard_id", word="mp"):
    """Every table over all GPUs."""
    whole = list(range(26))
    return [[group(whole, [whole] * gpus, word, **{count: gpus, shard: g})] for g in range(gpus)]


@cache
def composed(*overrides):
    return recipe("train", overrides)


def named(option, world, tables=CRITEO, *more):
    """What `+plan=option` makes."""
    settings = composed(f"+plan={option}", *more)
    return build_plan(settings, problem_of_run(settings, PlanningProblem(tables, Topology(world))))


def lookups_by_rank(plan, tables=CRITEO):
    return [
        [
            k
            for k, t in enumerate(tables)
            if plan.tables[t.name].mode != "replicated" and r in plan.tables[t.name].ranks
        ]
        for r in range(plan.world_size)
    ]


def test_the_well_known_plan_is_made_by_name_and_falls_where_hugectrs_falls():
    plan = named("dp_and_localized", 8)
    assert lookups_by_rank(plan) == WHOLE
    assert [
        k for k, t in enumerate(CRITEO) if plan.tables[t.name].sharding_type == "data_parallel"
    ] == REPLICATED
    assert json.loads(written_plan(plan, CRITEO)) == well_known()
    assert plan_from_values(well_known(), CRITEO, "x.json").tables == plan.tables


def test_every_table_over_all_gpus_is_made_by_name_and_says_how_rows_moved():
    plan = named("distributed", 8)
    assert lookups_by_rank(plan)[0] == list(range(26)) and {
        s.sharding_type for s in plan.tables.values()
    } == {"row_wise"}
    assert json.loads(written_plan(plan, CRITEO)) == by_rows()
    made = plan_from_values(by_rows(), CRITEO, "x.json")
    assert made.tables == plan.tables and made.world_size == 8
    assert made.notes == (
        "HugeCTR puts row r of a sharded table on shard r mod n; here rows are mixed and shard s "
        "of n holds the s-th of n equal strips: as many rows, as evenly dealt, other ones",
    )
    assert {s.row_order for s in made.tables.values()} == {"mixed"}
    well = plan_from_values(well_known(), CRITEO, "x.json")
    assert not well.notes and {s.row_order for s in well.tables.values()} == {"natural"}


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16, 40])
def test_named_plans_exist_for_any_number_of_ranks_and_come_back_from_json(world):
    for option in ("dp_and_localized", "distributed"):
        plan = named(option, world)
        plan.check(CRITEO)
        again = plan_from_values(json.loads(written_plan(plan, CRITEO)), CRITEO, "x.json")
        assert {n: s.shards for n, s in again.tables.items()} == {
            n: s.shards for n, s in plan.tables.items()
        }
    dealt = [
        r
        for k, t in enumerate(CRITEO)
        if SIZES[k] > 6000
        for r in named("dp_and_localized", world).tables[t.name].ranks
    ]
    assert dealt == [k % world for k in range(15)]


def test_the_bound_of_replicas_is_a_setting_and_only_where_a_rule_asks_for_it():
    plan = named("dp_and_localized", 4, CRITEO, "plan.dp_max_rows=100")
    assert [SIZES[k] for k, t in enumerate(CRITEO) if plan.tables[t.name].mode == "replicated"] == [
        n for n in SIZES if n <= 100
    ]
    with pytest.raises(
        PlanError,
        match=(
            r"plan.dp_max_rows=7: no rule of this plan asks for it; choose "
            r"\+plan=dp_and_localized with it"
        ),
    ):
        named("mixed", 4, CRITEO, "+plan.dp_max_rows=7")


def test_the_dialects_of_key_names_mean_the_same():
    whole = plan_from_values(by_rows(), CRITEO, "x").tables
    assert (
        plan_from_values(by_rows(8, "num_sharding", "sharding_id", "localized"), CRITEO, "x").tables
        == whole
    )


# lookups 0 and 1 read t, 2 reads u, 3 reads v
SHARED = [table("t", 10, ["f", "g"]), table("u", 7), table("v", 5)]


def test_numbers_are_lookups_not_tables():
    every = [[0, 1], [2]]
    plan = plan_from_values(
        [[group(every[g], every), group([3], [[3], [3]], "dp")] for g in range(2)], SHARED, "x"
    )
    assert [plan.tables[n].ranks for n in "tuv"] == [[0], [1], [0, 1]] and plan.tables[
        "v"
    ].mode == "replicated"
    assert json.loads(written_plan(plan, SHARED)) == [
        [group(every[g], every), group([3], [[3], [3]], "dp")] for g in range(2)
    ]


# HugeCTR's own examples: lookups 0, 1, 2, 3, 4 on tables 0, 1, 2, 1, 3, on two GPUs
FOUR = [
    table(name, rows, features)
    for name, rows, features in (
        ("t0", 10, ["f0"]),
        ("t1", 7, ["f1", "f3"]),
        ("t2", 5, ["f2"]),
        ("t3", 4, ["f4"]),
    )
]
BY_NUMBER = {feature: t for t in FOUR for feature in t.feature_names}


def declared(*features):
    return [TableLookup(BY_NUMBER[f], f, f"out_{f}", "sum") for f in features]


FIVE = declared("f0", "f1", "f2", "f3", "f4")
ALL_REPLICATED = [[group([0, 1, 2, 3, 4], [[0, 1, 2, 3, 4]] * 2, "dp")]] * 2
MIXED = [[group(own, [[0, 2], [1, 3]]), group([4], [[4], [4]], "dp")] for own in ([0, 2], [1, 3])]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_lookups_are_numbered_as_they_are_declared_whatever_the_order_of_tables(order):
    tables = [FOUR[k] for k in order]
    plan = plan_from_values(ALL_REPLICATED, tables, "x", FIVE)
    assert {s.mode for s in plan.tables.values()} == {"replicated"}
    assert json.loads(written_plan(plan, tables, FIVE)) == ALL_REPLICATED
    plan = plan_from_values(MIXED, tables, "x", FIVE)
    assert [plan.tables[f"t{k}"].ranks for k in range(4)] == [[0], [1], [0], [0, 1]]
    assert plan.tables["t3"].mode == "replicated"
    assert json.loads(written_plan(plan, tables, FIVE)) == MIXED


def test_a_plan_that_shards_lookups_of_one_table_differently_names_both_and_their_gpus():
    lookups = declared("f1", "f0", "f2", "f3", "f4")  # 0 and 3 read t1, as the example's prose says
    says = (
        "my.json: GPU 0, group 0: lookup 3 (t1) and lookup 0 read one table, which is sharded "
        "once, but only one of them is here (rule 10): lookup 0 lies on GPU 0, lookup 3 lies on "
        "GPU 1"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(says)}$"):
        plan_from_values(MIXED, FOUR, "my.json", lookups)


def test_a_plan_file_is_read_by_the_lookups_that_are_declared(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(MIXED))
    plan = load_plan(path, FOUR, 2, FIVE)
    assert plan.tables["t1"].ranks == [1]
    with pytest.raises(PlanError, match=r"lookup 2 \(t1\) and lookup 1 read one table"):
        load_plan(path, FOUR, 2)  # by table: lookups 1 and 2 read t1


@pytest.mark.parametrize(
    ("option", "json_sum", "size", "printed_sum", "lines"),
    [
        (
            "dp_and_localized",
            "09368829331a8889ef4b8e91a81fee808827b714ff31eddb3ca23ab3dc6c1ccc",
            28_999,
            "f4d859efc70b1b6626943f41512d6e8b77fcac3815f6da5f2e89c3f3fde14c3e",
            168,
        ),
        (
            "distributed",
            "ccc04418bda722948c51d9acc222277caebb6a8bfe047851143e4ccdeeaeb1f1",
            47_634,
            "d1451ddc6a57a2a5f2b84cc026641169aa6bf2d5d22d0c9f14e400d58352ee7b",
            104,
        ),
    ],
)
def test_what_the_notebook_writes_and_prints_comes_out_byte_for_byte(
    option, json_sum, size, printed_sum, lines
):
    plan = named(option, 8)
    text = written_plan(plan, CRITEO, indent=4)
    assert len(text) == size and sha256(text.encode()).hexdigest() == json_sum
    assert plan_from_values(json.loads(text), CRITEO, "x").tables == plan.tables
    shown = printed(notebook_lists(hugectr_lists(plan, CRITEO)))
    assert shown.count("\n") == lines and sha256(shown.encode()).hexdigest() == printed_sum


@pytest.mark.parametrize(
    ("world", "lists"),
    [
        (2, [[0, 2, 4, 9, 11, 19, 21, 23], [1, 3, 6, 10, 14, 20, 22]]),
        (4, [[0, 4, 11, 21], [1, 6, 14, 22], [2, 9, 19, 23], [3, 10, 20]]),
    ],
)
def test_whole_tables_are_dealt_to_fewer_gpus_as_the_notebook_deals_them(world, lists):
    written = hugectr_lists(named("dp_and_localized", world), CRITEO)
    assert written[0][0]["global_embedding_list"] == lists
    assert [own[1]["local_embedding_list"] for own in written] == [REPLICATED] * world


def test_two_lookups_of_one_table_may_be_data_parallel_together():
    plan = plan_from_values([[group([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, "dp")]] * 2, SHARED, "x")
    assert {s.mode for s in plan.tables.values()} == {"replicated"}


def test_shards_follow_their_ids_and_gpus_that_hold_nothing_have_empty_lists():
    every = [[0, 1, 2, 3], [], [0, 1, 2, 3], []]
    ids = [1, 0, 0, 0]
    plan = plan_from_values(
        [
            [group(every[g], every, shards_count=2 if every[g] else 1, shard_id=ids[g])]
            for g in range(4)
        ],
        SHARED,
        "x",
    )
    assert plan.tables["t"].shards == (
        Shard(2, range(5), range(16)),
        Shard(0, range(5, 10), range(16)),
    )
    assert plan.tables["t"].sharding_type == "custom"
    written = json.loads(written_plan(plan, SHARED))
    counted = [(g[0]["shards_count"], g[0]["shard_id"]) for g in written]
    assert counted == [(2, 1), (2, 0), (2, 0), (2, 1)]  # HugeCTR counts idle GPUs, too
    assert plan_from_values(written, SHARED, "x").tables == plan.tables


def test_more_gpus_than_rows_leave_the_last_without_any():
    plan = plan_from_values(by_rows(), CRITEO, "x")
    assert plan.tables["C6"].ranks == [0, 1, 2, 3] and plan.tables["C13"].ranks == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    plan.check(CRITEO)


def good():
    """Two GPUs: t and u whole, v on both; in groups 0 and 1."""
    every = [[0, 1], [2]]
    return [[group(every[g], every), group([3], [[3], [3]], "dp")] for g in range(2)]


def sharded():
    return [[group([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, shards_count=2, shard_id=g)] for g in range(2)]


def change(plan, gpu, k, **keys):
    plan[gpu][k] |= keys
    return plan


def without(plan, gpu, k, key):
    del plan[gpu][k][key]
    return plan


def everywhere(plan, k, every):
    for g, groups in enumerate(plan):
        groups[k] |= {"local_embedding_list": every[g], "global_embedding_list": every}
    return plan


BROKEN = {
    "no list": ([], "must be a list of GPUs, each with a list of its groups (rule 1)"),
    "a group for a GPU": ([group([0], [[0]])], "GPU 0: must be a list of groups, not {"),
    "no group": ([[5]], "GPU 0, group 0: must be an object with local_embedding_list"),
    "a table's number too many": (
        everywhere(good(), 0, [[0, 1], [4]]),
        "GPU 0, group 0: lookup 4 in global_embedding_list[1]: the model has lookups 0..3, a "
        "(table, feature) each (rule 2)",
    ),
    "a key missing": (
        without(good(), 1, 0, "global_embedding_list"),
        "GPU 1, group 0: global_embedding_list must be given (rule 3)",
    ),
    "a key misspelt": (
        change(good(), 1, 0, shard_count=1),
        "GPU 1, group 0: unknown key shard_count; did you mean shards_count",
    ),
    "a placement": (
        change(good(), 0, 1, table_placement_strategy="ddp"),
        "GPU 0, group 1: table_placement_strategy=ddp: did you mean dp?",
    ),
    "no lookups": (
        change(good(), 0, 1, local_embedding_list="0"),
        'GPU 0, group 1: local_embedding_list must be a list of lookups, not "0"',
    ),
    "true for 1": (
        change(good(), 0, 0, local_embedding_list=[0, True]),
        "must be a list of lookups, not [0, true] (rule 3)",
    ),
    "no list of lists": (
        change(good(), 0, 1, global_embedding_list=3),
        "GPU 0, group 1: global_embedding_list must be a list of lists",
    ),
    "an id as high as the count": (
        change(sharded(), 1, 0, shard_id=2),
        "GPU 1, group 0: shard id 2 of 2 shards: ids are 0..n-1 (rule 4)",
    ),
    "an id without a count": (
        change(good(), 1, 0, shard_id=1),
        "GPU 1, group 0: shard id 1 of 1 shards",
    ),
    "a count of two dialects": (
        change(sharded(), 1, 0, num_sharding=3),
        "GPU 1, group 0: shards_count=2 and num_sharding=3: must be one whole",
    ),
    "data parallel shards": (
        change(good(), 1, 1, shards_count=2),
        "GPU 1, group 1: 2 shards of a dp group, which is whole on every GPU: leave shards_count "
        "out (rule 5)",
    ),
    "a group less": (
        [good()[0], good()[1][:1]],
        "GPU 1 has 1 groups, GPU 0 has 2: all GPUs must have the same number",
    ),
    "two placements": (
        [good()[0], good()[1][::-1]],
        "GPU 1, group 0: is dp, on GPU 0 it is mp: a group has one placement (rule 6)",
    ),
    "two global lists": (
        change(good(), 1, 0, global_embedding_list=[[0, 1], [2, 3]]),
        "GPU 1, group 0: global_embedding_list is not that of GPU 0",
    ),
    "a list of another GPU": (
        change(good(), 0, 0, local_embedding_list=[2]),
        "GPU 0, group 0: local_embedding_list [2] is not global_embedding_list[0] [0, 1] (rule 7)",
    ),
    "too many global lists": (
        everywhere(good(), 0, [[0, 1], [2], []]),
        "GPU 0, group 0: global_embedding_list has 3 lists for 2 GPUs (rule 7)",
    ),
    "a lookup twice": (
        everywhere(good(), 0, [[0, 1, 0], [2]]),
        "GPU 0, group 0: lookup 0 (t) stands twice in local_embedding_list (rule 7)",
    ),
    "a replica missing": (
        everywhere(good(), 1, [[3], []]),
        "GPU 1, group 1: local_embedding_list [] is not that of GPU 0, [3]: a dp group has one "
        "list (rule 8)",
    ),
    "lists that overlap": (
        everywhere(good(), 0, [[0, 1], [1, 2]]),
        "GPU 1, group 0: lookup 1 (t) is on GPU 0, too, whose list is another one: GPUs that share "
        "a lookup share the whole list (rule 9)",
    ),
    "a count too low": (
        everywhere(good(), 0, [[0, 1, 2], [0, 1, 2]]),
        "GPU 0, group 0: lookup 0 (t) lies on GPUs 0, 1, but shards_count is 1: it must be 2 "
        "(rule 9)",
    ),
    "an id twice": (
        change(sharded(), 1, 0, shard_id=0),
        "GPU 1, group 0: lookup 0 (t) lies on GPUs 0, 1, and shard_id 0 stands twice: the ids "
        "must be 0..1 (rule 9)",
    ),
    "a table in two groups": (
        [
            [group(a, [a, []]), group(b, [b, []])]
            if g == 0
            else [group([], [a, []]), group([], [b, []])]
            for a, b in (([0, 2], [1, 3]),)
            for g in range(2)
        ],
        "GPU 0, group 1: lookup 1 (t) and lookup 0 read one table, which is sharded once, but "
        "lookup 0 is in group 0 (rule 10)",
    ),
    "a table on two GPUs": (
        everywhere(good(), 0, [[0], [1, 2]]),
        "GPU 0, group 0: lookup 1 (t) and lookup 0 read one table, which is sharded once, but "
        "only one of them is here (rule 10)",
    ),
    "a lookup in two groups": (
        everywhere(good(), 1, [[2, 3], [2, 3]]),
        "GPU 1, group 0: lookup 2 (u) is in group 1 of GPU 0, too: it may be in one (rule 12)",
    ),
    "a lookup in none": (
        everywhere(good(), 0, [[0, 1], []]),
        "lookup 2 (u) is in no group of any GPU: add it to a group (rule 12)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_gpu_group_and_lookup(name):
    plain, says = BROKEN[name]
    start = "^my.json: " if says.startswith("GPU") else ""
    with pytest.raises(PlanError, match=start + re.escape(says)):
        plan_from_values(plain, SHARED, "my.json")


def test_what_is_broken_above_is_whole_before():
    for plain in (good(), sharded()):
        assert takes(plain)
        plan_from_values(copy.deepcopy(plain), SHARED, "x").check(SHARED)


def test_a_matrix_of_later_versions_is_refused_with_its_replacement():
    matrix = {"shard_matrix": [["t"]], "shard_strategy": [["mp", ["t"]]]}
    assert takes(matrix)
    with pytest.raises(PlanError, match=r"^my.json: recapp does not read plans that are a matrix"):
        plan_from_values(matrix, SHARED, "my.json")


def test_what_hugectrs_lists_cannot_say_is_refused_with_table_and_reason():
    wide = [table("w", 10, dim=128), table("u", 10)]
    strips = plan_by_rules(
        wide,
        Topology(2),
        [PlanRule("column_wise", dim_at_least=128), PlanRule("table_wise")],
        name="x",
    )
    with pytest.raises(
        PlanError,
        match=(
            r"table w \(column_wise\) cannot be written for HugeCTR: HugeCTR's lists cannot "
            r"cut columns"
        ),
    ):
        written_plan(strips, wide)
    uneven = ShardingPlan(
        strips.tables
        | {
            "w": TableSharding((Shard(0, range(3), range(128)), Shard(1, range(3, 10), range(128))))
        },
        2,
    )
    with pytest.raises(
        PlanError,
        match=r"table w \(custom\) cannot be written for HugeCTR: its rows must be cut into equal",
    ):
        written_plan(uneven, wide)
    with pytest.raises(PlanError, match="has no entry for table u"):
        written_plan(strips.part(["w"]), wide)


def test_mixed_placements_share_groups_where_they_can():
    tables = [table(f"t{k}", 12) for k in range(5)]
    ranks = [(0,), (1, 2, 3, 4), (5,), (0, 1, 2, 3, 4, 5), (5, 0)]
    shards = {
        t.name: TableSharding(
            tuple(
                Shard(r, rows, range(16))
                for r, rows in zip(own, equal_ranges(12, len(own)), strict=True)
            )
        )
        for t, own in zip(tables, ranks, strict=True)
    }
    plan = ShardingPlan(shards, 6)
    written = json.loads(written_plan(plan, tables))
    assert [[g["global_embedding_list"] for g in own] for own in written[:1]] == [
        [[[0], [1], [1], [1], [1], [2]], [[3]] * 6, [[4], [], [], [], [], [4]]]
    ]
    again = plan_from_values(written, tables, "x")
    assert {n: s.shards for n, s in again.tables.items()} == {
        n: s.shards for n, s in shards.items()
    }


def test_a_json_file_is_known_by_its_content_and_refused_for_other_gpus(tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text(json.dumps(well_known()))
    assert lookups_by_rank(load_plan(path, CRITEO, 8)) == WHOLE
    with pytest.raises(
        PlanError,
        match=re.escape(
            "plan.txt was made for 8 ranks, and there are 2: set trainer.devices=8, or make one "
            "for "
            "2: python -m recapp.plan export as=hugectr +plan=dp_and_localized trainer.devices=2"
        ),
    ):
        load_plan(path, CRITEO, 2)
    path.write_text(json.dumps(well_known())[:-1])
    with pytest.raises(PlanError, match=r"plan.txt, line 2, column .*neither YAML nor JSON"):
        load_plan(path, CRITEO, 8)


@pytest.mark.full
def test_both_plans_train_to_the_weights_of_any_plan(jobs, tmp_path):
    data = small(tmp_path / "data", rows=2000)
    tables = recipe("train", data).model_tables.tables
    measured = [
        validation(jobs.train(tmp_path / "rows", *data, "trainer.max_steps=3", "+plan=row_wise"))
    ]
    for option in ("dp_and_localized", "distributed"):
        (tmp_path / f"{option}.json").write_text(written_plan(named(option, 2, tables), tables))
        measured.append(
            validation(
                jobs.train(
                    tmp_path / option,
                    *data,
                    "trainer.max_steps=3",
                    "+plan=file",
                    f"plan.path={tmp_path / option}.json",
                )
            )
        )
    assert measured[1:] == measured[:1] * 2


def test_a_strategy_reads_hugectrs_plans_by_their_content(tmp_path):
    """`import recapp` has named the format (`recapp/settings/other_systems.py`)."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(well_known(2)))
    made = plan_from(str(path), PlanningProblem(CRITEO, Topology(2)))
    assert made.name == "hugectr" and made.tables["C1"].ranks == [0]
