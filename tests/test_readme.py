"""What the README says is so: its commands run, its names exist. The full tier types all of it in a
fresh copy.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from jobs import command, environment, metrics_of, resolved, small, validation
from lightning.pytorch import Trainer
from readme import REPOSITORY, TEXT, commands, fenced, indented, quoted, table

IN_BLOCKS = commands(line for block in fenced("bash") for line in block.splitlines())
ON_PAPER = ("plan", "report")  # typed by tests of their own
IN_TEXT = [
    c
    for c in commands(indented())
    + commands(span for span in quoted() if span.startswith("python -m "))
    if c.name not in ON_PAPER
]
SCRIPTS = dict(zip(("strategies.py", "script.py"), fenced("python"), strict=True))
SUMMARY = re.compile(
    r"^Summary$.*?^validation AUC +(0\.\d+)$.*?^checkpoint +(\S+)", re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The first command, cut short and on few rows, in a directory of its own."""
    place = tmp_path_factory.mktemp("readme")
    first = IN_BLOCKS[0]
    ran = command(
        first.name,
        *first.arguments,
        "trainer.max_steps=20",
        *small("data/generated", rows=3000),
        cwd=place,
    )
    assert ran.code == 0, ran.err
    return place, ran


@pytest.mark.full
def test_the_first_command_says_what_it_does_and_leaves_what_the_readme_names(first_run):
    place, ran = first_run
    said = ran.out + ran.err
    for part in (
        "seed 1, 2 ranks, backend",
        "Layers",
        "Plan",
        "Ranks",
        "step 20/20, ",
        "s for ",
        "loss ",
        "lr ",
    ):
        assert part in said
    assert "Warning" not in said and "Traceback" not in said and "\x1b" not in said
    _, checkpoint = SUMMARY.search(ran.out).groups()
    run = place / "outputs" / "first"
    assert (place / checkpoint).is_dir() and list(run.glob("checkpoints/*.ckpt"))
    for name in (
        "metrics.json",
        "csv/metrics.csv",
        "resolved.yaml",
        "../../data/generated/_truth.json",
    ):
        assert (run / name).is_file(), name
    assert metrics_of(run)["plan"] == "mixed" and metrics_of(run)["status"] == "ok"


@pytest.mark.full
def test_its_checkpoint_is_measured_as_the_readme_says(first_run):
    place, _ = first_run
    measure = next(c for c in IN_BLOCKS if c.name == "eval" and len(c.arguments) == 1)
    ran = command(measure.name, *measure.arguments, cwd=place)
    assert ran.code == 0, ran.err
    (found,) = place.glob("outputs/20*/*/metrics.json")
    last = json.loads((place / "outputs/first/checkpoints/last.ckpt/manifest.json").read_text())
    assert validation(metrics_of(found.parent)) == pytest.approx(last["metrics"], abs=1e-12)
    assert SUMMARY.search(ran.out)


def test_every_command_of_the_readme_means_something(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs.train(
        "outputs/first",
        *IN_BLOCKS[0].overrides[0],
        *small(tmp_path / "data/generated", rows=3000),
        "trainer.max_steps=1",
    )
    jobs = [(c, overrides) for c in IN_BLOCKS + IN_TEXT for overrides in c.overrides]
    assert len({c.name for c, _ in jobs}) > 1 and len(jobs) >= 10
    for found, overrides in jobs:
        overrides = [
            o.replace("ckpt_path=DIR", "ckpt_path=outputs/first/checkpoints/last.ckpt")
            for o in overrides
            if "=" in o
        ]
        if "split=test" in overrides:
            overrides.append("dataset.test_path=/logs/test")
        settings = resolved(found.name, overrides)
        plan = [o.partition("=")[2] for o in overrides if o.startswith("+plan=")]
        assert settings["choices"].get("plan") == (
            plan[0] if plan else "mixed" if settings["ckpt_path"] else None
        )


def run_script(name, place):
    """What a script of the README prints on two ranks."""
    assert f"`torchrun --nproc-per-node 2 {name}`" in TEXT
    (place / name).write_text(SCRIPTS[name])
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", name],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.full
def test_the_script_runs(tmp_path):
    said = run_script("script.py", tmp_path)
    assert re.search(r"users: 200,000 x 16, \w+", said) and re.search(
        r"items: 1,000 x 16, \w+", said
    )
    assert re.search(r"^loss 0\.\d{4}$", said, re.MULTILINE)


@pytest.mark.full
def test_the_script_that_compares_strategies_runs(tmp_path):
    found = dict(
        re.findall(
            r"^(\w+) +\[(\d+, \d+)\] bytes, +[\d.]+ ms a step$",
            run_script("strategies.py", tmp_path),
            re.MULTILINE,
        )
    )
    assert list(found) == ["data_parallel", "table_wise", "row_wise", "column_wise"]
    assert (
        found["data_parallel"] == "615680000, 615680000"
        and found["row_wise"] == found["column_wise"] == "307840000, 307840000"
    )


def test_the_table_of_groups_is_the_configuration():
    conf = REPOSITORY / "conf"
    options = {
        folder.name: {file.stem for file in folder.glob("*.yaml")}
        for folder in conf.iterdir()
        if folder.is_dir()
    }
    told = {}
    for group, cell, _ in table("group"):
        names = re.findall(r"`([^`]+)`", cell)
        told[group.strip("`")] = {name for name in names if "=" not in name}
        for inner, option in (name.split("=") for name in names if "=" in name):
            assert (conf / inner / f"{option}.yaml").is_file(), inner
    (alone,) = re.findall(r"^(.*) have one option each", TEXT, re.MULTILINE)
    rest = {group: names for group, names in options.items() if group not in told}
    assert told == {group: options[group] for group in told}
    assert {group for group in rest if rest[group]} == set(re.findall(r"`(\w+)`", alone))
    assert all(len(names) == 1 for names in rest.values() if names)


def test_the_tolerance_of_pooled_tables_is_the_one_that_is_tested():
    from test_runs import DOUBLE_APART, SINGLE_APART

    (told,) = re.findall(
        r"agree within (0\.\d+) in single precision[^(]*\((\S+) relative in double\)",
        " ".join(TEXT.split()),
    )
    assert [float(number) for number in told] == [SINGLE_APART, DOUBLE_APART]


def test_every_setting_the_readme_names_exists():
    known = resolved("train", ["dataset=custom", "dataset.path=x", "+plan=mixed"])
    named = re.findall(
        r"^\+?(dataset|tables|trainer|plan)\.(\w+)", "\n".join(quoted()), re.MULTILINE
    )
    assert len(named) >= 6
    known["plan"]["path"] = None  # of +plan=file, which has no other
    known["trainer"] |= signature(Trainer).parameters
    assert [f"{group}.{setting}" for group, setting in named if setting not in known[group]] == []


def test_settings_of_ones_own_are_an_experiment(tmp_path):
    assert "`--config-dir FOLDER experiment=NAME`" in TEXT
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nseed: 7\ntrainer: {max_steps: 5}\n"
    )
    settings = resolved("train", ["experiment=mine", "trainer.max_steps=6"], folders=(tmp_path,))
    assert (settings["seed"], settings["trainer"]["max_steps"]) == (7, 6)


def test_every_path_and_module_of_the_readme_exists():
    walk = [
        word.rstrip(",")
        for line in indented()
        for word in line.split()
        if word.startswith("recapp/")
    ]
    spans = [
        span
        for span in quoted()
        if re.fullmatch(r"(recapp|conf|tests|optim|sharding|\.ci)/[a-z_/.]*", span)
    ]
    assert len(walk) >= 8 and len(spans) >= 5
    for path in walk + spans:
        places = [REPOSITORY / path, REPOSITORY / f"{path}.py", REPOSITORY / "recapp" / path]
        assert any(place.exists() for place in places), path


def test_the_rooms_and_the_commands_are_those_of_the_readme():
    package = REPOSITORY / "recapp"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert {room.strip("`") for room, _ in table("room")} == rooms
    runnable = {
        path.stem for path in package.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    (told,) = re.findall(r"a module at the top of `recapp/` \(([^)]*)\)", TEXT)
    assert set(re.findall(r"`(\w+)`", told)) == runnable - {"__main__"}


def test_variables_of_the_environment_are_read_somewhere():
    names = set(re.findall(r"RECAPP_[A-Z_]+", TEXT))
    files = [
        path
        for folder in ("recapp", "tests")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path != Path(__file__)
    ]
    sources = "".join(path.read_text() for path in files)
    assert names and all(f'"{name}"' in sources for name in names)


def test_ci_sets_up_and_tests_as_the_readme_says():
    text = (REPOSITORY / ".ci" / "run").read_text()
    script = text.replace("--constraint .ci/constraints.txt ", "").splitlines()
    told = [part for line in fenced("bash")[-1].splitlines() for part in line.split(" && ")]
    assert any("[dev]" in part for part in told) and any("pytest" in part for part in told)
    assert [part for part in told if part not in script] == []


@pytest.mark.full
def test_a_newcomer_types_the_readme(tmp_path):
    copy = tmp_path / "recapp"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.split("\0")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, copy / name)
    *blocks, develop = fenced("bash")
    said = _typed("".join(blocks), copy)
    assert len(SUMMARY.findall(said)) == sum(len(c.overrides) for c in IN_BLOCKS)
    first = metrics_of(copy / "outputs/first")
    measured = [metrics_of(path.parent) for path in sorted(copy.glob("outputs/20*/*/metrics.json"))]
    *again, further = measured
    assert [m["ranks"] for m in again] == [2, 1, 2] and [m["plan"] for m in again] == [
        "mixed",
        "mixed",
        "row_wise",
    ]
    assert all(validation(m) == pytest.approx(validation(first), abs=1e-9) for m in again)
    assert further["steps"] == 2 * first["steps"]
    (table_of_sweep,) = copy.glob("multirun/*/*/comparison.csv")
    with table_of_sweep.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["plan"] for row in rows] == [
        "data_parallel",
        "table_wise",
        "row_wise",
        "column_wise",
        "mixed",
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert len({(row["val_auc"], row["val_log_loss"]) for row in rows}) == 1
    (copy / "script.py").write_text(SCRIPTS["script.py"])
    assert "loss 0." in _typed(
        "source .venv/bin/activate\ntorchrun --nproc-per-node 2 script.py", copy
    )
    # .ci/run is what runs them
    _typed(develop.replace("-m pytest", "-m pytest --collect-only --quiet"), copy)


def _typed(lines, place):
    """What bash prints when the lines are typed into it in `place`; fails at the first that
    fails.
    """
    untouched = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "RECAPP_", "OMP_"))
    }
    ran = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", lines],
        cwd=place,
        env=untouched,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    return ran.stdout
