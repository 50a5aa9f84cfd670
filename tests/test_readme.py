"""What the README says is so. The full tier types all of it in a fresh copy; what holds for every
page is tested in `test_documents.py`. The commands of CONTRIBUTING are what `.ci/run` does.
"""

import csv
import json
import os
import re
import shutil
import subprocess

import pytest
from documents import FENCE, REPOSITORY, commands, fenced
from jobs import command, metrics_of, small, validation

BLOCKS = fenced("bash", "README.md")
IN_BLOCKS = commands(BLOCKS)
CI_RUN = (REPOSITORY / ".ci" / "run").read_text()
# of the newcomer's copy, whose lines are typed as they stand: few rows, and no C++
CHEAPER = {
    "conf/dataset/generated.yaml": ("rows: 200000", "rows: 20000"),
    "conf/export.yaml": ("compile: true", "compile: false"),
}
SUMMARY = re.compile(
    r"^Summary$.*?^validation AUC +(0\.\d+)$.*?^checkpoint +(\S+)", re.DOTALL | re.MULTILINE
)


def test_its_code_does_not_scroll_sideways_and_its_first_command_is_one():
    text = (REPOSITORY / "README.md").read_text()
    code = [line for block in FENCE.findall(text) for line in block[1].splitlines()]
    assert [line for line in code if len(line) > 80] == []
    assert len(BLOCKS[0].strip().replace("\\\n", "").splitlines()) == 1


def test_a_contributor_runs_four_commands_and_ci_does_what_they_do(request):
    (block,) = fenced("bash", "CONTRIBUTING.md")
    set_up, affected, every, style = block.splitlines()
    assert BLOCKS[0].startswith(set_up.partition(" && ")[0])
    assert affected == ".venv/bin/python -m pytest --affected"
    assert hasattr(request.config.option, "affected")
    tiers = every.split(" && ")
    assert tiers == [f".venv/bin/python -m pytest{tier}" for tier in ("", " -m full")]
    assert f"\n{set_up} && {tiers[0]} ||\n    exit 1" in CI_RUN and tiers[1] in CI_RUN
    for tool in style.replace("ruff format .", "ruff format --check .").split(" && "):
        assert f"\n{tool}\n" in CI_RUN, tool


def test_a_test_that_needs_more_than_pip_says_how_to_get_it():
    ways = re.compile(r"needs? (?:cmake|a C\+\+)|no (?:C\+\+|Chromium)", re.IGNORECASE)
    reasons = [
        line.strip()
        for path in (REPOSITORY / "tests").rglob("*.py")
        for line in path.read_text().splitlines()
        if ("reason=" in line or "pytest.skip(" in line) and ways.search(line)
    ]
    assert len(reasons) >= 4
    assert [line for line in reasons if "apt-get install" not in line] == []


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The first command, cut short and on few rows, in a directory of its own."""
    base = tmp_path_factory.mktemp("readme")
    first = IN_BLOCKS[0]
    ran = command(
        first.name,
        *first.arguments,
        "trainer.max_steps=20",
        *small("data/generated", rows=3000),
        cwd=base,
        fresh=True,
    )
    assert ran.code == 0, ran.err
    return base, ran


@pytest.mark.full
def test_the_first_command_says_what_it_does_and_leaves_what_the_readme_names(first_run):
    base, ran = first_run
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
    run = base / "outputs" / "first"
    assert (base / checkpoint).is_dir() and list(run.glob("checkpoints/*.ckpt"))
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
    base, _ = first_run
    measure = next(c for c in IN_BLOCKS if c.name == "eval" and len(c.arguments) == 1)
    ran = command(measure.name, *measure.arguments, cwd=base, fresh=True)
    assert ran.code == 0, ran.err
    (found,) = base.glob("outputs/20*/*/metrics.json")
    last = json.loads((base / "outputs/first/checkpoints/last.ckpt/manifest.json").read_text())
    assert validation(metrics_of(found.parent)) == pytest.approx(last["metrics"], abs=1e-12)
    assert SUMMARY.search(ran.out)


@pytest.mark.full
def test_a_newcomer_types_the_readme(tmp_path):
    copy = tmp_path / "recapp"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.split("\0")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, copy / name, follow_symlinks=False)
    for name, (usual, cheaper) in CHEAPER.items():
        text = (copy / name).read_text()
        assert text.count(usual) == 1, name
        (copy / name).write_text(text.replace(usual, cheaper))
    said = _typed("".join(BLOCKS), copy)
    measuring = [c for c in IN_BLOCKS if c.name in ("train", "eval")]
    assert len(SUMMARY.findall(said)) == sum(len(c.overrides) for c in measuring)
    served = copy / "outputs/served"
    assert (served / "manifest.json").is_file() and list((served / "rows").glob("int8_*.bin"))
    scored = metrics_of(copy / "outputs/scored")
    assert scored["rows"] > 0 and (copy / "outputs/scores.parquet").is_file()
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
    (script,) = fenced("python", "README.md")
    (copy / "clicks.py").write_text(script)
    run = "source .venv/bin/activate\ntorchrun --nproc-per-node 2 clicks.py"
    assert _typed(run, copy).count("loss 0.") == 2


def _typed(lines, base):
    """What bash prints when the lines are typed into it in `base`; fails at the first that
    fails.
    """
    untouched = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "RECAPP_", "OMP_"))
    }
    # bytecode is made of what is imported, and not of all of torch
    ran = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", lines],
        cwd=base,
        env=untouched | {"PIP_COMPILE": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    return ran.stdout
