"""What a program sees of the package: its public names, the console command."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from jobs import command

import recapp
from recapp import __main__ as console_command
from recapp.run import recipe as commands

PACKAGE = Path(recapp.__file__).parent
NAMES = [
    "AUC",
    "Batch",
    "Calibration",
    "ClickData",
    "ClickTask",
    "DLRM",
    "DataSettings",
    "DataType",
    "DistanceLFU_EvictionPolicy",
    "DistributedModelParallel",
    "DynamicRows",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "EmbeddingShardingPlanner",
    "EmbeddingShardingStrategy",
    "Export",
    "HybridOptimizer",
    "IdRule",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "LogLoss",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "Measure",
    "NormalizedEntropy",
    "Output",
    "ParameterConstraints",
    "PoolingType",
    "ScoreWriter",
    "ScoringSettings",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "ShardingType",
    "StepGraph",
    "TableLookup",
    "Task",
    "TaskModule",
    "Topology",
    "adagrad",
    "adam",
    "analyze_plan",
    "export_model",
    "ftrl",
    "gathered_state_dict",
    "lamb",
    "lars_sgd",
    "load_model",
    "load_table",
    "momentum_sgd",
    "partial_row_wise_adam",
    "partial_row_wise_lamb",
    "read_plan",
    "rowwise_adagrad",
    "run_ranks",
    "sgd",
    "shard_model",
    "static_table",
    "write_plan",
]


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=120,
    )


def test_the_public_names_are_these_and_sorted():
    assert sorted(recapp.__all__) == sorted(NAMES)
    assert set(recapp.__all__) <= set(dir(recapp))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_what_its_file_defines(name):
    found = getattr(recapp, name)
    home = import_module(found.__module__)
    assert getattr(home, name) is found and found.__module__ == recapp._HOMES[name]


def test_type_checkers_see_the_same_names_in_the_same_files():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("recapp.")
        for alias in node.names
    }
    assert seen == recapp._HOMES
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_that_of_the_installed_package():
    assert recapp.__version__ == version("recapp")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'KeyedJagged'"):
        _ = recapp.KeyedJagged


def test_the_commands_are_the_modules_that_run_and_a_person_types():
    runnable = {
        path.stem for path in PACKAGE.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    assert set(console_command.COMMANDS) == runnable - {"__main__"}


def test_without_a_command_they_are_listed(capsys):
    assert console_command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"    {name} " in listed for name in console_command.COMMANDS)
    assert max(map(len, listed.splitlines())) <= 80


def test_an_unknown_command_is_one_line(capsys):
    assert console_command.main(["trian"]) == 1
    assert capsys.readouterr().err == (
        "error: recapp trian: no such command; did you mean train?\n"
    )


def test_a_command_behind_recapp_is_the_module_itself(tmp_path):
    here = run("-m", "recapp", "plan", "types", "format=json")
    there = command("plan", "types", "format=json", cwd=tmp_path)
    assert here.returncode == there.code == 0 and here.stdout == there.out
    wrong = run("-m", "recapp", "train", "trainer.max_stepz=1")
    assert wrong.returncode == 1 and "did you mean trainer.max_steps" in wrong.stderr


def test_the_verbs_are_those_of_the_commands():
    from recapp import bench, plan

    assert tuple(plan.VERBS) == commands.VERBS["plan"]
    assert commands.VERBS["bench"] == (*bench.MEASURES,) == (*bench.COLUMNS,)
