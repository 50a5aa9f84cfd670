"""Files of earlier versions: settings under their old names are read, and refused where a person
writes them.

`tests/fixtures/before_engine_group` was written before the settings of the engine had a group.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from jobs import recipe, resolved, validation
from tiers import one_of

from recapp import plan, report, train
from recapp.planner.problem import PlanningProblem
from recapp.planner.topology import Topology
from recapp.recipe.plan_of_run import plan_of_run
from recapp.reporting.comparison import overrides_of
from recapp.settings.check_settings import find_constructor
from recapp.settings.renamed import MODULES, SETTINGS, with_names_of_today
from recapp.stored.checkpoint import read_manifest
from recapp.stored.trust import LOGGERS, MODELS, OF_CONF, RULES, SCHEDULES

OLD = Path(__file__).parent / "fixtures" / "before_engine_group"
CHECKPOINT = OLD / "run" / "checkpoints" / "last.ckpt"
ENGINE = {
    "backend": "torch",
    "transport": "gloo",
    "payload": "bf16",
    "look_ahead": 2,
    "clip_tables": False,
    "compile": False,
    "keep_freed_memory": False,
}


def measured(path):
    return validation(json.loads((OLD / path).read_text()))


def as_measured(metrics, path):
    """Rounding differs from machine to machine."""
    return validation(metrics) == pytest.approx(measured(path), rel=1e-5)


# ---- checkpoints


def test_a_checkpoint_evaluates_to_the_metrics_that_the_old_code_measured(jobs, tmp_path):
    settings = [f"ckpt_path={CHECKPOINT}", f"dataset.path={tmp_path / 'clicks'}"]
    metrics = jobs.evaluate(tmp_path / "eval", *settings)
    assert as_measured(metrics, "run/metrics.json")
    assert metrics["plan"] == "mixed"


def test_training_goes_on_from_it_as_the_old_code_went_on(jobs, tmp_path):
    settings = [f"ckpt_path={CHECKPOINT}", f"dataset.path={tmp_path / 'clicks'}"]
    metrics = jobs.train(tmp_path / "run", *settings, "trainer.max_steps=18")
    assert metrics["steps"] == 18 and as_measured(metrics, "gone_on.json")
    stored = read_manifest(tmp_path / "run" / "checkpoints" / "last.ckpt").info["config"]
    assert stored["engine"] == ENGINE and "look_ahead" not in stored["trainer"]


def test_its_settings_have_the_names_of_today_and_the_command_line_replaces_them():
    settings = resolved("train", [f"ckpt_path={CHECKPOINT}", "engine.look_ahead=0"])
    assert settings["engine"] == ENGINE | {"look_ahead": 0}
    assert not {"transport", "backend", "payload"} & set(settings["topology"])
    assert not {"look_ahead", "compile"} & set(settings["trainer"])
    assert "keep_freed_memory" not in settings["launch"]
    assert settings["choices"]["engine"] == "default"


def test_constructors_that_a_checkpoint_may_name_are_where_it_says():
    stored = read_manifest(CHECKPOINT).config
    named = [
        stored["model"],
        stored["optimizer"]["dense"],
        stored["optimizer"]["sparse"],
        *stored["logger"].values(),
        *stored["callbacks"].values(),
    ]
    targets = [each["_target_"] for each in named]
    for target in (*targets, *RULES, *SCHEDULES, *MODELS, *LOGGERS, *OF_CONF):
        assert find_constructor(target, "model")


# ---- runs


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(OLD / "run", tmp_path / "run", symlinks=True))


@pytest.mark.full
def test_the_report_of_a_run_says_its_settings_under_the_names_of_today(run, capsys):
    assert report.main([f"path={run}"]) == 0, capsys.readouterr().err
    page = (run / "report.html").read_text()
    assert re.search("<td>engine.look_ahead</td><td[^>]*>2</td><td>1</td>", page)
    assert not [name for name in SETTINGS if name in page]


def test_its_prediction_is_checked(run, capsys):
    assert plan.main(["check", f"path={run}", "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"step, ms", "tables, MB"} <= {row["what"] for row in rows}


def test_what_its_command_line_said_is_compared_with_runs_of_today(run):
    said = overrides_of(run)
    assert said["engine.look_ahead"] == "2" and said["engine.payload"] == "bf16"
    assert not set(SETTINGS) & set(said)


# ---- plan files


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_plan_file_loads(name):
    overrides = [f"ckpt_path={CHECKPOINT}", "+plan=file", f"plan.path={OLD / name}"]
    settings = recipe("train", overrides)
    made = plan_of_run(settings, PlanningProblem(settings.model_tables.tables, Topology(2)))
    kinds = [sharding.sharding_type for sharding in made.tables.values()]
    second = "column_wise" if name == "plan.yaml" else "table_wise"
    assert kinds == ["row_wise", second, "data_parallel"]


# ---- names


REFUSED = [
    (old, new, sign, more)
    for more in ([], [f"ckpt_path={CHECKPOINT}"])
    for sign in ("", "+", "++", "~")
    for old, new in SETTINGS.items()
]


@pytest.mark.parametrize(("old", "new", "sign", "more"), one_of(5, REFUSED))
def test_an_old_name_is_refused_with_the_new_one(old, new, sign, more, tmp_path, capsys):
    value = "" if sign == "~" else "=1"
    argument = f"{sign}{old}{value}"
    assert train.main([f"hydra.run.dir={tmp_path}", argument, *more]) == 1
    assert capsys.readouterr().err == f"error: {old}: is {new} now\n"


@pytest.mark.parametrize("old", one_of(3, SETTINGS))
def test_an_old_name_in_a_folder_of_ones_own_is_refused(old, tmp_path, capsys):
    group, _, key = old.partition(".")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\n{group}:\n  {key}: 1\n"
    )
    (tmp_path / group).mkdir()
    usual = {"launch": "local", "topology": "auto"}.get(group, "default")
    (tmp_path / group / "mine.yaml").write_text(f"defaults: [{usual}]\n{key}: 1\n")
    for choice in ("experiment=mine", f"{group}=mine"):
        arguments = ["--config-dir", str(tmp_path), f"hydra.run.dir={tmp_path}/run", choice]
        assert train.main(arguments) == 1
        assert capsys.readouterr().err == f"error: {old}: is {SETTINGS[old]} now\n"


def test_a_sweep_over_an_old_name_is_refused(tmp_path, capsys):
    arguments = ["-m", f"hydra.sweep.dir={tmp_path}", "trainer.look_ahead=0,1"]
    assert train.main(arguments) == 1
    assert capsys.readouterr().err == "error: trainer.look_ahead: is engine.look_ahead now\n"


def test_a_moved_constructor_is_named_as_today_at_any_depth():
    (old, new), *_ = MODULES.items()
    stored = {
        "callbacks": {"own": {"_target_": f"{old}.RecordPerformance", "clock": [{"_target_": "x"}]}}
    }
    own = with_names_of_today(stored)["callbacks"]["own"]
    assert own == {"_target_": f"{new}.RecordPerformance", "clock": [{"_target_": "x"}]}
    assert stored["callbacks"]["own"]["_target_"] == f"{old}.RecordPerformance"
    for module in MODULES.values():
        __import__(module)


@pytest.mark.parametrize(
    "stored",
    [
        {"trainer": [1], "topology": None, "engine": 3},
        {"trainer": {"look_ahead": {}}, "engine": [1]},
        {"trainer": {"look_ahead": 2}, "choices": "dlrm", "model": {"_target_": 4}},
        {"topology": {"payload": "bf16"}, "engine": {"payload": "fp16"}, "choices": {}},
    ],
)
def test_whatever_stands_in_stored_settings_is_left_to_those_who_judge_it(stored):
    before = json.dumps(stored)
    found = with_names_of_today(stored)
    assert json.dumps(stored) == before
    assert set(found) <= {*stored, "engine"}
    assert stored.get("engine", found.get("engine")) == found.get("engine")
