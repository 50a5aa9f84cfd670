"""A plan file says what a plan is, is read as it was written, and every mistake in it is one line
that names file, table and entry.
"""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from jobs import recipe, small, validation
from parity.cases import random_tiling

from recapp.cli.compose import with_absolute_paths
from recapp.errors import ConfigError, PlanError
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import RESERVE_BYTES, PlanningProblem, Topology
from recapp.run.plan_of_run import build_plan, problem_of_run
from recapp.sharding.plan_file import load_plan, plan_to_yaml, read_plan, write_plan
from recapp.sharding.sharding_plan import PlannedFor, Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig

MIXED = [
    PlanRule("row_wise", rows_above=500),
    PlanRule("column_wise", dim_at_least=256),
    PlanRule("data_parallel", rows_at_most=10),
    PlanRule("table_wise"),
]


def table(name, rows, dim, **more):
    return EmbeddingBagConfig(
        **{
            "name": name,
            "num_embeddings": rows,
            "embedding_dim": dim,
            "feature_names": [f"{name}_id"],
            **more,
        }
    )


TABLES = [
    table("large", 1000, 128),
    table("wide", 100, 256, data_type="bf16", pooling="mean"),
    table("tiny", 4, 8, id_rule="hash"),
    table("small", 50, 16, feature_names=["a", "b"], init_range=1e-05),
]
STATISTICS = {
    "large": {
        "ids_per_sample": 1.0,
        "bags_per_sample": 0.9,
        "distinct": [[1, 1.0], [512, 3e-07]],
        "load": [0.25, 0.75],
    },
    "small": {"ids_per_sample": 2},
}
WRITTEN = """\
# A sharding plan. To train with it: python -m recapp.train +plan=file plan.path=THIS_FILE \
trainer.devices=2
# A shard is a rectangle on a rank: rows and cols are [first, one past the last]; left out, they \
are all there are.
name: mixed
ranks: 2
batch_per_rank: 512
notes:
  - "rules: \\"few\\", and [#1]"
tables:
  large:
    table: {rows: 1000, dim: 128, data_type: fp32, features: [large_id]}
    type: row_wise
    mode: unique
    shards:
      - {rank: 0, rows: [0, 500]}
      - {rank: 1, rows: [500, 1000]}
  wide:
    table: {rows: 100, dim: 256, data_type: bf16, features: [wide_id], pooling: mean}
    type: column_wise
    mode: unique
    shards:
      - {rank: 0, cols: [0, 64]}
      - {rank: 1, cols: [64, 128]}
      - {rank: 0, cols: [128, 192]}
      - {rank: 1, cols: [192, 256]}
  tiny:
    table: {rows: 4, dim: 8, data_type: fp32, features: [tiny_id], id_rule: hash}
    type: data_parallel
    mode: replicated
  small:
    table: {rows: 50, dim: 16, data_type: fp32, features: [a, b], init_range: 1.0e-05}
    type: table_wise
    mode: unique
    shards:
      - {rank: 0}
statistics:
  large: {ids_per_sample: 1.0, bags_per_sample: 0.9, distinct: [[1, 1.0], [512, 3.0e-07]], \
load: [0.25, 0.75]}
  small: {ids_per_sample: 2}
"""


def mixed():
    made = plan_by_rules(TABLES, Topology(2), MIXED, name="mixed")
    return ShardingPlan(
        made.tables,
        2,
        "mixed",
        ('rules: "few", and [#1]',),
        made_for=PlannedFor(tuple(TABLES), 512, STATISTICS),
    )


def everything(plan):
    """All of a plan, also what equality of plans leaves out, in an order."""
    return list(plan.tables.items()), plan.world_size, plan.name, list(plan.notes), plan.made_for


def test_a_plan_is_written_as_people_would_write_it_and_read_as_it_was(tmp_path):
    write_plan(mixed(), tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == WRITTEN
    assert everything(read_plan(tmp_path / "plan.yaml")) == everything(mixed())


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_survives_with_any_names(tmp_path, seed):
    rng = random.Random(seed)
    names = [
        "yes",
        "null",
        "1e3",
        "007",
        "a: b",
        "ünïcode 🙂",
        "-",
        "C 1",
        '"',
        "#x",
        "line\nbreak",
        "~",
    ]
    tables = [table(name, rng.randint(1, 40), rng.randint(1, 9)) for name in rng.sample(names, 6)]
    world = rng.randint(1, 5)
    shardings = {t.name: random_tiling(t, world, rng) for t in tables}
    one = tables[0]
    parts = [rows for rows in (range(1), range(1, one.num_embeddings)) if len(rows)]
    copies = [Shard(k, rows, range(one.embedding_dim)) for k in range(world) for rows in parts]
    shardings[one.name] = TableSharding(tuple(copies), "replicated")
    for made_for in (
        None,
        PlannedFor(tuple(tables)),
        PlannedFor(tuple(reversed(tables)), 8, {tables[0].name: {"load": [1.0]}}),
    ):
        plan = ShardingPlan(shardings, world, rng.choice(names), made_for=made_for)
        write_plan(plan, tmp_path / "plan.yaml")
        again = read_plan(tmp_path / "plan.yaml")
        assert (again, again.made_for) == (plan, made_for)
        assert plan_to_yaml(again) == (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(
    "value",
    [
        1e-05,
        1e22,
        0.1 + 0.2,
        -0.0,
        5e-324,
        float("inf"),
        float("-inf"),
        3,
        -7,
        True,
        None,
        "yes",
        "1e5",
        "",
        [[]],
        {},
    ],
)
def test_statistics_of_any_plain_type_survive(tmp_path, value):
    plan = ShardingPlan(
        mixed().tables,
        2,
        made_for=PlannedFor(tuple(TABLES), None, {"large": {"x y": [value, {"deep": value}]}}),
    )
    write_plan(plan, tmp_path / "plan.yaml")
    assert repr(read_plan(tmp_path / "plan.yaml").made_for.statistics) == repr(
        plan.made_for.statistics
    )


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    write_plan(
        ShardingPlan(
            mixed().tables,
            2,
            made_for=PlannedFor(tuple(TABLES), 4, {"large": {"load": (np.float64(0.25),)}}),
        ),
        tmp_path / "plan.yaml",
    )
    assert read_plan(tmp_path / "plan.yaml").made_for.statistics == {"large": {"load": [0.25]}}


def test_a_checkpoint_keeps_what_a_plan_carries_and_plans_of_old_checkpoints_are_read():
    plan = mixed()
    assert everything(ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict())))) == everything(
        plan
    )
    bare = ShardingPlan(plan.tables, 2, "mixed")
    assert set(bare.to_dict()) == {"name", "world_size", "tables"}
    assert everything(ShardingPlan.from_dict(bare.to_dict())) == everything(bare)


def test_part_of_a_plan_carries_its_part():
    part = mixed().part(["small", "large"])
    assert [t.name for t in part.made_for.tables] == ["large", "small"] and set(
        part.made_for.statistics
    ) == {"large", "small"}


def test_mixed_rows_are_a_line_of_a_table_and_others_none(tmp_path):
    rules = [PlanRule("row_wise", rows_above=500, row_order="mixed"), PlanRule("table_wise")]
    plan = plan_by_rules(TABLES, Topology(2), rules, name="dealt")
    write_plan(plan, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert text.count("row_order") == 1 and "mode: unique\n    row_order: mixed\n" in text
    assert everything(read_plan(tmp_path / "plan.yaml")) == everything(plan)
    (tmp_path / "wrong.yaml").write_text(text.replace("order: mixed", "order: mixd"))
    with pytest.raises(PlanError, match=r"tables\.large\.row_order=mixd: did you mean mixed"):
        read_plan(tmp_path / "wrong.yaml")


def test_a_file_by_hand_may_be_short(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "ranks: 2\ntables: {t: {table: {rows: 9, dim: 4}, shards: [{rank: 1}]}}"
    )
    plan = read_plan(tmp_path / "p.yaml")
    assert (
        plan.tables["t"] == TableSharding((Shard(1, range(9), range(4)),), "auto", "custom")
        and plan.made_for is None
    )


def test_the_same_plan_in_json_is_read_as_well_even_where_tabs_indent_it(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(yaml.safe_load(WRITTEN), indent="\t"))
    assert everything(read_plan(tmp_path / "p.json")) == everything(mixed())


BROKEN = {
    "rows: [500, 1000]": {
        "rows: [400, 1000]": (
            "tables.large.shards[1] {rank: 1, rows: [400, 1000]} overlaps [0] {rank: 0, rows: "
            "[0, 500]} in rows 400..499, columns 0..127: each cell lies in one shard"
        ),
        "rows: [600, 1000]": (
            "tables.large.shards: rows 500..599, columns 0..127 lie in no shard: widen one, or "
            "add {rank: ..., rows: [500, 600]}"
        ),
        "rows: [500, 1001]": (
            "tables.large.shards[1].rows=[500, 1001]: must be [first, one past the last] within "
            "[0, 1000]"
        ),
        "rows: [700, 700]": (
            "tables.large.shards[1].rows=[700, 700]: must be [first, one past the last] within "
            "[0, 1000]"
        ),
        "rows: 5": "tables.large.shards[1].rows=5: must be [first,",
        "row: [500, 1000]": "tables.large.shards[1]: unknown key row; did you mean rows?",
    },
    "{rank: 1, cols: [192, 256]}": {
        "{rank: 2, cols: [192, 256]}": "tables.wide.shards[3].rank=2: there are 2 ranks (0..1)",
        "{rank: 1, rows: [0, 99], cols: [192, 256]}": (
            "tables.wide.shards: rows 99..99, columns 192..255 lie in no shard"
        ),
        "{rank: yes, cols: [192, 256]}": (
            "tables.wide.shards[3].rank=True: must be a whole number of at least 0"
        ),
        "{cols: [192, 256]}": "tables.wide.shards[3]: rank must be given",
        "5": "tables.wide.shards[3]: must be a mapping with rank",
    },
    "      - {rank: 0}\n": {
        "": "tables.small: shards: must be a list",
    },
    "    shards:\n      - {rank: 0}\n": {
        "": (
            "tables.small: needs shards, e.g. `shards: [{rank: 0}]` for the whole table on rank "
            "0, or `mode: replicated`"
        )
    },
    "    mode: replicated": {
        "    mode: replicated\n    shards: [{rank: 0}]": (
            "tables.tiny.shards: rows 0..3, columns 0..7 lie in no shard of rank 1: widen one, or "
            "add {rank: 1}"
        ),
        "    mode: replicate": "tables.tiny.mode=replicate: did you mean replicated?",
        "    mode: replicated\n    mode: unique": (
            "line 29, column 5: neither YAML nor JSON: mode stands twice"
        ),
    },
    "type: table_wise": {"type: tablewise": "tables.small.type=tablewise: did you mean table_wise"},
    "rows: 50,": {
        "rows: 0,": "tables.small.table.rows=0: must be a whole number of at least 1",
        "": "tables.small.table: rows must be given",
    },
    "data_type: bf16": {
        "data_type: bf61": "tables.wide.table: tables.wide.data_type=bf61: did you mean bf16"
    },
    "features: [a, b]": {
        "features: [a, a]": (
            "tables.small.table: tables.small.feature_names=['a', 'a']: name the features"
        ),
        "pooling: sum": "tables.small.table.features must be given where batch_per_rank is",
    },
    "ranks: 2": {
        "ranks: two": "ranks=two: must be a whole number of at least 1",
        "rank: 2": "unknown key rank; did you mean ranks?",
    },
    "batch_per_rank: 512": {
        "batch_per_rank: 0": "batch_per_rank=0: must be a whole number of at least 1"
    },
    "  small: {ids": {"  smal: {ids": "statistics: unknown key smal; did you mean small?"},
    "tables:": {"tables: [": "line 10, column 10: neither YAML nor JSON:"},
}


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [(a, b, says) for a, found in BROKEN.items() for b, says in found.items()],
)
def test_a_mistake_names_its_entry_and_what_would_be_right(tmp_path, right, wrong, says):
    path = tmp_path / "plan.yaml"
    body = WRITTEN.partition("name: mixed")
    assert right in body[2]
    path.write_text(body[0] + body[1] + body[2].replace(right, wrong, 1))
    with pytest.raises(PlanError, match=re.escape(f"{path}") + ".*" + re.escape(says)) as refused:
        read_plan(path)
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_no_plan_at_all_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    for text, says in (
        ("just a text", "must be a mapping with ranks, tables"),
        ("ranks: 2\ntables: {}", "must name at least one table"),
        ("", "must be a mapping with ranks, tables"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=says):
            read_plan(path)
    with pytest.raises(
        PlanError, match=r"plan.path=.*gone.yaml: No such file or directory: .*recapp.plan export"
    ):
        read_plan(tmp_path / "gone.yaml")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text"):
        read_plan(path)
    with pytest.raises(PlanError, match="cannot be written"):
        write_plan(mixed(), tmp_path / "gone" / "plan.yaml")


def test_a_file_for_other_ranks_or_tables_is_refused_with_the_command_that_makes_it_again(tmp_path):
    path = tmp_path / "plan.yaml"
    write_plan(mixed(), path)
    assert load_plan(path, TABLES, 2) == mixed()
    for tables, world, says in (
        (
            TABLES,
            4,
            "was made for 2 ranks, and there are 4: set trainer.devices=2, or make one for 4: "
            "python -m recapp.plan export trainer.devices=4",
        ),
        (TABLES[:-1], 2, "tables.small: the model has no such table; known: large, tiny, wide"),
        (
            [*TABLES, table("more", 7, 2)],
            2,
            "has no entry for table more (7 rows x 2); add tables.more, or make it again",
        ),
        (
            [table("large", 1001, 128), *TABLES[1:]],
            2,
            "tables.large was made for 1000 rows x 128, the model's table has 1001 x 128: "
            "make it again: python -m recapp.plan export trainer.devices=2",
        ),
        (
            [table("large", 1000, 64), *TABLES[1:]],
            2,
            "was made for 1000 rows x 128, the model's table has 1000 x 64",
        ),
    ):
        with pytest.raises(PlanError, match=re.escape(says)):
            load_plan(path, tables, world)


def test_the_path_holds_wherever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths({"plan": {"path": "my.yaml"}})["plan"]["path"] == str(
        tmp_path / "my.yaml"
    )


def settings_for(data, *plan):
    return recipe("train", [*data, "trainer.max_steps=3", *plan])


@pytest.fixture
def logs(tmp_path):
    """Small generated data, its tables, and a plan for two ranks that a person has edited."""
    data = small(tmp_path / "data", rows=2000)
    tables = settings_for(data).model_tables.tables
    path = tmp_path / "plan.yaml"
    write_plan(plan_by_rules(tables, Topology(2), [PlanRule("table_wise")], name="whole"), path)
    path.write_text(
        path.read_text()
        .replace("{rank: 0}", "{rank: 1}", 3)
        .replace("name: whole", "name: by_hand")
    )
    return data, tables, path


def planned(data, tables, topology, *plan):
    settings = settings_for(data, *plan)
    return build_plan(settings, problem_of_run(settings, PlanningProblem(tables, topology)))


def test_the_settings_name_a_file_and_nothing_beside_it(logs):
    data, tables, path = logs
    made = planned(data, tables, Topology(2), "+plan=file", f"plan.path={path}")
    assert made == read_plan(path) and made.name == "by_hand"
    with pytest.raises(
        PlanError, match=r"was made for 2 ranks, and there are 1: set trainer.devices=2"
    ):
        planned(data, tables, Topology(1), "+plan=file", f"plan.path={path}")
    with pytest.raises(
        ConfigError,
        match=r"plan.mode: cannot be set together with plan.path, which names a whole plan",
    ):
        planned(data, tables, Topology(2), "+plan=file", f"plan.path={path}", "+plan.mode=pooled")
    with pytest.raises(PlanError, match="plan by_hand does not fit"):
        small = Topology(2, memory_bytes=[RESERVE_BYTES + 1000] * 2)
        planned(data, tables, small, "+plan=file", f"plan.path={path}")
    with pytest.raises(ConfigError, match=r"plan.path must be given: plan.path=\.\.\."):
        settings_for(data, "+plan=file")


@pytest.mark.full
def test_training_follows_the_file_to_the_weights_of_any_plan(jobs, logs, tmp_path):
    data, _, path = logs
    measured = [
        jobs.train(tmp_path / name, *data, "trainer.max_steps=3", *plan)
        for name, plan in (
            ("file", ("+plan=file", f"plan.path={path}")),
            ("rows", ("+plan=row_wise",)),
        )
    ]
    assert [m["plan"] for m in measured] == ["by_hand", "row_wise"] and validation(
        measured[0]
    ) == validation(measured[1])


def test_the_range_of_start_values_is_kept_and_a_function_is_not(tmp_path):
    tables = [
        table("shifted", 20, 8, weight_init_min=0.0, weight_init_max=0.125),
        table("made", 20, 8, init_fn=torch.nn.init.zeros_),
    ]
    plan = plan_by_rules(tables, Topology(2), MIXED, name="mixed")
    plan = replace(plan, made_for=PlannedFor(tuple(tables)))
    write_plan(plan, tmp_path / "plan.yaml")
    kept = (tables[0], replace(tables[1], init_fn=None))
    assert read_plan(tmp_path / "plan.yaml").made_for.tables == kept
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))).made_for.tables == kept
