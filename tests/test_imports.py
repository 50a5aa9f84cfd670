"""Nothing is imported that a command does not use: each in a fresh interpreter, with exactly the
packages of others that it may have loaded when it has answered or is about to start ranks.
"""

import json
import subprocess
import sys

import pytest
from jobs import environment, small
from serving.processes import trained
from stored import copy
from tiers import one_of

from recapp.__main__ import COMMANDS

PACKAGES = [
    "antlr4",
    "hydra",
    "lightning",
    "matplotlib",
    "numba",
    "numpy",
    "omegaconf",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "rich",
    "safetensors",
    "starlette",
    "sympy",
    "tensorboard",
    "torch",
    "torchmetrics",
    "triton",
    "uvicorn",
    "yaml",
]
"""What recapp uses, and what that would load: sympy and triton come with torch's compiler."""
COMPOSING = "antlr4 hydra omegaconf yaml"
SERVING = (
    "antlr4 hydra numba numpy omegaconf prometheus_client pyarrow rich starlette torch uvicorn yaml"
)
OF_COMMAND = """
import json, sys
from importlib import import_module

def no_ranks(*_, **__):
    from recapp.errors import LaunchError
    raise LaunchError("ranks would be started")

file, module, *arguments = sys.argv[1:]
if arguments[:1] == ["ranks"]:
    import recapp.cli.job
    recapp.cli.job.launch = no_ranks
    arguments = arguments[1:]
if arguments[:1] == ["answering"]:
    import os, signal
    import recapp.serve
    say = recapp.serve._say

    def say_and_stop(*given):
        say(*given)
        os.kill(os.getpid(), signal.SIGTERM)

    recapp.serve._say = say_and_stop
    arguments = arguments[1:]
runs = [[]]
for word in arguments:
    runs.append([]) if word == "then" else runs[-1].append(word)
for given in runs:
    sys.argv = [module, *given]
    try:
        found = import_module(module)
        code = found.main(given) if hasattr(found, "main") else 0
    except SystemExit as end:
        code = end.code
with open(file, "w") as written:
    json.dump([code, sorted(sys.modules)], written)
"""


@pytest.fixture
def loaded(tmp_path):
    """`loaded(module, *arguments)`: the packages in memory after a command has run in a fresh
    interpreter, and what it said. Behind `ranks` it ends where ranks would be started, behind
    `answering` where a server answers. Behind `then` it runs again, and the code is of the last.
    """

    def run(module, *arguments, code=0):
        file = tmp_path / "modules.json"
        ran = subprocess.run(
            [sys.executable, "-c", OF_COMMAND, str(file), module, *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        found, modules = json.loads(file.read_text())
        assert found == code, ran.stderr
        return " ".join(name for name in PACKAGES if name in modules), ran.stdout + ran.stderr

    return run


def test_a_package_that_is_imported_is_found(loaded):
    assert loaded("numpy")[0] == "numpy"


def test_the_package_and_the_list_of_commands_import_nothing_of_others(loaded):
    assert loaded("recapp")[0] == ""
    assert loaded("recapp.__main__", "--help")[0] == ""


@pytest.mark.parametrize("name", one_of(8, COMMANDS))
def test_help_and_a_misspelt_setting_are_answered_by_what_composes(loaded, name):
    verb = {"plan": ["explain"], "bench": ["step"], "data": ["inspect"]}.get(name, [])
    packages, said = loaded(f"recapp.{name}", "--help", "then", *verb, "frmat=json", code=1)
    assert packages == COMPOSING
    helped, _, refused = said.partition("error: ")
    assert "format" in helped and "format" in refused


def test_training_is_composed_and_checked_without_torch(loaded, tmp_path):
    packages, said = loaded(
        "recapp.train",
        "ranks",
        "+plan=mixed",
        "optimizer.dense.lr=0.1",
        "model.top_layers=[8,1]",
        *small(tmp_path / "logs"),
        code=1,
    )
    assert "ranks would be started" in said
    assert packages == COMPOSING


def test_text_is_converted_without_torch(loaded, tmp_path):
    (tmp_path / "clicks.csv").write_text("click,user,price\n1,u1,0.5\n0,77,\n")
    packages, _ = loaded("recapp.data", "convert", "clicks.csv", "out=out", "types={user: text}")
    assert packages == "antlr4 hydra numba numpy omegaconf pyarrow rich yaml"


@pytest.mark.parametrize("name", one_of(3, ["eval", "predict", "train"]))
def test_a_checkpoint_is_looked_at_without_lightning(loaded, stored, name):
    run = stored.small_run("+plan=mixed")
    rows = {"predict": [f"input={run}/logs", "output=scores.parquet"]}.get(name, [])
    given = [f"ckpt_path={run}/checkpoints/last.ckpt", *rows]
    packages, said = loaded(f"recapp.{name}", "ranks", *given, code=1)
    assert "ranks would be started" in said
    assert packages == "antlr4 hydra numpy omegaconf torch yaml"


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["types"], "antlr4 hydra numpy omegaconf yaml"),
        (["explain"], "antlr4 hydra numpy omegaconf pyarrow rich torch yaml"),
        pytest.param(
            ["scale", "ranks=[2,4]", "plans=[row_wise]"],
            "antlr4 hydra numpy omegaconf pyarrow rich torch yaml",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [
                "export",
                "+plan=mixed",
                "then",
                "devices",
                "topology.memory_bytes=1e9",
                "format=json",
            ],
            "antlr4 hydra numpy omegaconf pyarrow torch yaml",
            marks=pytest.mark.full,
        ),
    ],
)
def test_plans_on_paper_do_without_lightning_and_without_torchs_compiler(
    loaded, arguments, packages
):
    assert loaded("recapp.plan", *arguments)[0] == packages


def test_a_report_is_drawn_without_torch(loaded, stored, tmp_path):
    run = copy(stored.small_run("+plan=mixed"), tmp_path / "run")
    packages, said = loaded("recapp.report", f"path={run}")
    assert packages == "antlr4 hydra matplotlib numpy omegaconf rich yaml", said


@pytest.mark.full
@pytest.mark.parametrize(
    ("verb", "used"),
    [
        ("step", "antlr4 hydra omegaconf yaml"),
        # who generates data measures their scores by torchmetrics
        ("data", "antlr4 hydra matplotlib numpy omegaconf pyarrow torch torchmetrics yaml"),
    ],
)
def test_a_measurement_is_checked_without_lightning(loaded, verb, used):
    packages, said = loaded("recapp.bench", "ranks", verb, code=1)
    assert "ranks would be started" in said
    assert packages == used


@pytest.mark.full
def test_a_server_answers_without_lightning(loaded, stored):
    artefact = trained(stored)
    packages, said = loaded("recapp.serve", "answering", f"artefact={artefact}", "port=0")
    assert packages == SERVING, said


@pytest.mark.full
def test_an_export_does_without_lightning(loaded, stored):
    run = stored.small_run("+plan=mixed")
    given = [f"ckpt_path={run}/checkpoints/last.ckpt", "output=served", "compile=false"]
    packages, _ = loaded("recapp.export", *given)
    assert not {"lightning", "triton", "sympy", "tensorboard"} & set(packages.split())
