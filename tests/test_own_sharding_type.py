"""A sharding type that is not recapp's is one function and one record (tests/row_wise_on_two.py)
and one yaml file: rules, planner, explanations, commands and training take it like the others.
"""

import json

import pytest
from jobs import refusal, small, validation
from row_wise_on_two import NAME, row_wise_on_two, write_plan

from recapp import plan
from recapp.errors import ConfigError, PlanError
from recapp.optim.rules import sgd
from recapp.planner.embedding_planner import plan_tables
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import ParameterConstraints, PlanRule, PlanSettings
from recapp.planner.problem import PlanningProblem, Topology
from recapp.reporting.plan_views import print_plan
from recapp.reporting.run_record import PlanReport
from recapp.run.constructors import register_own_types
from recapp.settings.records import Constructor, record
from recapp.sharding.plan_file import read_plan
from recapp.sharding.sharding_plan import tile
from recapp.sharding.sharding_types import (
    SHARDING_TYPES,
    CandidateRanks,
    ShardingTypeRecord,
    register,
)
from recapp.tables.config import EmbeddingBagConfig

IT = "row_wise_on_two.row_wise_on_two"
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
    for name, rows in (("a", 1000), ("b", 10), ("c", 500))
]


@pytest.fixture(autouse=True)
def known_types():
    """The registered types, as they were once the test is over."""
    before = dict(SHARDING_TYPES)
    yield SHARDING_TYPES
    SHARDING_TYPES.clear()
    SHARDING_TYPES.update(before)


@pytest.fixture
def own(known_types):
    register(row_wise_on_two())
    return known_types[NAME]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the folder `own` that has the plan."""
    monkeypatch.chdir(tmp_path)
    return write_plan(tmp_path / "own")


def answer(capsys, *arguments):
    assert plan.main([*arguments, "format=json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def held(sharding):
    return [(s.rank, s.rows.start, s.rows.stop) for s in sharding.shards]


def test_it_is_cut_on_the_first_of_its_candidate_ranks(own):
    ranks = CandidateRanks([2, 0, 3, 1], [[2, 3], [0, 1]])
    assert held(tile(TABLES[1], NAME, ranks)) == [(2, 0, 5), (0, 5, 10)]
    with pytest.raises(PlanError, match=f"table b: {NAME} cannot cut it on 1 ranks"):
        tile(TABLES[1], NAME, CandidateRanks([0], [[0]]))


def test_rules_take_it_and_balance_it_like_the_others(own):
    found = plan_by_rules(TABLES, Topology(4), [PlanRule(NAME)], name="own")
    assert {name: held(sharding) for name, sharding in found.tables.items()} == {
        "a": [(0, 0, 500), (1, 500, 1000)],
        "c": [(2, 0, 250), (3, 250, 500)],
        "b": [(2, 0, 5), (3, 5, 10)],
    }


def test_the_planner_takes_it_where_constraints_name_it_and_nowhere_else(own, known_types):
    problem = PlanningProblem(TABLES, Topology(4, 2), 512, sgd())
    asked = {"*": ParameterConstraints(sharding_types=[NAME]), "b": ParameterConstraints()}
    asked["a"] = ParameterConstraints(ranks=[1, 2, 3])
    found = plan_tables(problem, asked).plan
    found.check(TABLES)
    assert [s.sharding_type for s in found.tables.values()] == [NAME] * 3
    assert set(found.tables["a"].ranks) < {1, 2, 3}
    free = plan_tables(problem)
    del known_types[NAME]
    assert plan_tables(problem).plan == free.plan


def test_tables_that_lie_together_share_it(own):
    asked = {"[ac]": ParameterConstraints(sharding_types=[NAME], together="both")}
    found = plan_tables(PlanningProblem(TABLES, Topology(4), 512, sgd()), asked).plan
    assert found.tables["a"].ranks == found.tables["c"].ranks and len(found.tables["a"].ranks) == 2
    del asked["[ac]"]
    asked["a"] = ParameterConstraints(sharding_types=[NAME], together="both")
    asked["c"] = ParameterConstraints(together="both")
    with pytest.raises(PlanError, match="no sharding type in common"):
        plan_tables(PlanningProblem(TABLES, Topology(4), 512, sgd()), asked)


# ---- commands


def test_a_plan_of_its_own_folder_is_explained_and_listed(folder, capsys):
    asked = ("--config-dir", str(folder), "trainer.devices=4", "tables=sample")
    explained = answer(capsys, "explain", *asked, f"+plan={NAME}")
    assert [(row["type"], len(row["ranks"])) for row in explained["rows"]] == [(NAME, 2)] * 3
    print_plan(record(PlanReport, explained))
    assert f"(3 {NAME})" in capsys.readouterr().out
    listed = answer(capsys, "types", *asked, f"+plan={NAME}")["rows"]
    assert listed[-1]["type"] == NAME and len(listed) == 7
    assert listed[-1]["description"] == "horizontal strips over two ranks"


def test_an_exported_plan_is_read_where_its_type_is_known(folder, capsys, known_types):
    here = ("tables=sample", "trainer.devices=4")
    asked = ("--config-dir", str(folder), *here, f"+plan={NAME}", "path=own.yaml")
    assert plan.main(["export", *asked]) == 0
    made = read_plan("own.yaml")
    assert {sharding.sharding_type for sharding in made.tables.values()} == {NAME}
    del known_types[NAME]
    with pytest.raises(PlanError, match=f"type={NAME}: did you mean row_wise"):
        read_plan("own.yaml")
    again = ("explain", *here, "+plan.path=own.yaml", f"+plan.sharding_types.{NAME}._target_={IT}")
    assert {row["type"] for row in answer(capsys, *again)["rows"]} == {NAME}


def test_the_planner_of_a_command_takes_it_where_settings_name_it(folder, capsys):
    explained = answer(
        capsys,
        "explain",
        "tables=sample",
        "trainer.devices=4",
        f"+plan.sharding_types.{NAME}._target_={IT}",
        f"+plan.tables.large_table={NAME}",
    )
    assert [row["type"] == NAME for row in explained["rows"]] == [True, False, False]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            f"+plan.sharding_types.{NAME}._target_=row_wise_on_two.row_wise_on_three",
            "no such constructor in row_wise_on_two; did you mean row_wise_on_two",
        ),
        (
            f"+plan.sharding_types.{NAME}._target_=row_wise_on_two.write_plan",
            "write_plan",
        ),
        (
            f"+plan.sharding_types.other._target_={IT}",
            f"write plan.sharding_types.{NAME}",
        ),
        (f"+plan.tables.large_table={NAME}", "did you mean row_wise"),
    ],
)
def test_what_makes_no_such_type_is_refused_in_one_line(folder, capsys, setting, says):
    assert plan.main(["explain", "tables=sample", "trainer.devices=4", setting]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: plan.") and says in line


def test_a_name_that_is_taken_is_refused(own):
    register(row_wise_on_two())  # once more is no mistake
    for name in ("row_wise", "custom"):
        with pytest.raises(
            PlanError, match=f"sharding type {name}: recapp has a type of this name"
        ):
            register(ShardingTypeRecord(name, "", "", "", "", cut=own.cut))
    with pytest.raises(ConfigError, match="must make a ShardingTypeRecord"):
        plan_settings = PlanSettings(sharding_types={"x": Constructor("builtins.dict")})
        register_own_types(plan_settings)


@pytest.mark.full
def test_training_under_it_is_the_run_of_every_other_plan(folder, jobs):
    found = [
        validation(
            jobs.train(
                folder.parent / name,
                *small(folder.parent / "data"),
                "trainer.max_steps=5",
                f"+plan={name}",
                world=4,
                folders=(folder,),
            )
        )
        for name in ("row_wise", NAME)
    ]
    assert found[0] == found[1]
    summary = (folder.parent / NAME / "rank0.out").read_text()
    assert NAME in summary


def test_training_refuses_a_plan_whose_type_nobody_knows(folder, jobs):
    job = (folder.parent / "run", *small(folder.parent / "data"), "+plan=row_wise")
    kind, line = refusal(jobs.train, *job, f"plan.rules=[{{type: {NAME}x}}]")
    assert kind == "PlanError" and f"unknown sharding type {NAME}x" in line
