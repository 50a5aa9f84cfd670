"""What the pages say is so: every block is run, composed or output, and every name exists. Their
pictures are drawn by their script, and the list of settings is that of the settings.
"""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import architecture
import pytest
import yaml
from documents import (
    AS_WRITTEN,
    PAGES,
    REPOSITORY,
    blocks,
    commands,
    fenced,
    own_files,
    prose,
    quoted,
    table,
)
from hydra.core.override_parser.overrides_parser import OverridesParser
from jobs import command, environment, resolved, script, small
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from serving.processes import ServerProcess

import recapp
from recapp.cli import compose
from recapp.compat.foreign_names import NAMES
from recapp.planner.planner_settings import PlanRule
from recapp.run.recipe import COMMANDS as RECORDS
from recapp.run.recipe import read_settings
from recapp.settings.option_files import options
from recapp.settings.records import names_of
from recapp.sharding.plan_file import read_plan
from recapp.tables.config import EmbeddingBagConfig

LANGUAGES = {"bash", "sh", "python", "yaml", "text"}
README_LINES = 150
COLUMNS = 100
LINK = re.compile(r"!?\[[^]]*\]\(([^)]+)\)", re.DOTALL)
COMMANDS = sorted(
    {
        *commands([*fenced("bash"), *fenced("sh")]),
        *commands(span for span in quoted() if span.startswith("python -m ")),
    },
    key=lambda c: (c.name, c.arguments),
)
TOUR = "docs/tour.md"  # is typed in its order
# have a verb, a path or a name, and tests of their own
ON_PAPER = ("plan", "bench", "report", "serve", "data")


# ---- form


def test_every_block_says_its_language_and_bash_is_typed_by_a_test():
    assert [b for b in blocks() if b.language not in LANGUAGES] == []
    assert {b.page for b in blocks("bash")} == {"README.md", "CONTRIBUTING.md"}
    assert all(text.count("```") % 2 == 0 for text in PAGES.values())


def test_the_readme_is_short_and_no_page_is_wide():
    assert len(PAGES["README.md"].splitlines()) <= README_LINES
    pages = [*PAGES, "CHANGELOG.md", "data/README.md"]
    wide = [
        (page, number)
        for page in pages
        for number, line in enumerate((REPOSITORY / page).read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert wide == []


def anchors(text):
    """The anchors of a page's headings, as web pages of repositories make them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere_and_every_page_and_picture_is_linked():
    reached = set()
    for page, text in PAGES.items():
        for target in LINK.findall(prose(text)):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
            assert path.exists(), (page, target)
            key = str(path.resolve().relative_to(REPOSITORY.resolve()))
            reached.add(key)
            assert not anchor or anchor in anchors(PAGES[key]), (page, target)
    pictures = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/pictures/*")}
    assert {*PAGES, *pictures} - reached <= {"README.md"}


def test_the_site_has_every_page_in_an_order_and_is_built_by_ci():
    """The build itself refuses links that lead nowhere, and needs the extra `docs`."""
    listed = yaml.safe_load((REPOSITORY / "docs" / "mkdocs.yml").read_text())["nav"]
    pages = [
        page
        for part in listed
        for inner in part.values()
        for page in ([inner] if isinstance(inner, str) else [p for e in inner for p in e.values()])
    ]
    made = {"docs/reference.md", "docs/sharding_strategies.md"}
    assert pages[0] == "README.md" and len(pages) == len(set(pages))
    assert set(pages) == {*PAGES, "CHANGELOG.md", "data/README.md"} | made
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert "\n.venv/bin/python docs/build_site.py\n" in ci
    book = pages[1 : pages.index("docs/questions.md") + 1]
    for page in [page for page in book if page not in made]:
        head, *_ = re.split(r"^(?:```|## )", PAGES[page], maxsplit=1, flags=re.MULTILINE)
        assert re.search(r"\bAssumes\b", head), page
        assert re.search(r"\bNext\b", PAGES[page]), page


# ---- what scripts make


@pytest.mark.full
def test_the_pictures_are_drawn_by_their_script(tmp_path):
    script = REPOSITORY / "docs" / "draw.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    kept = REPOSITORY / "docs" / "pictures"
    of_results = set(re.findall(r"pictures/(\w+\.svg)", PAGES["docs/results.md"]))
    drawn = {p.name for p in tmp_path.iterdir()}
    assert not drawn & of_results  # docs/make_results.py draws these
    assert drawn | of_results == {p.name for p in kept.iterdir()}
    for folder in (tmp_path, kept):
        for path in folder.iterdir():
            drawn = ElementTree.fromstring(path.read_text())
            assert sum(1 for _ in drawn.iter()) > 100, path


def test_the_list_of_settings_is_that_of_the_settings():
    script = "import list_settings; print(list_settings.page(), end='')"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY / "docs",
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    page = PAGES["docs/configuration.md"]
    assert ran.stdout == page, "run python docs/list_settings.py"
    for name in names_of(RECORDS["train"]):
        if name.count(".") == 1 and not name.startswith("plan."):
            assert f"`{name}" in page, name
    for group in (path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir()):
        assert all(f"{group}={option}`" in page for option in options(group)), group


# ---- commands and settings


@pytest.mark.full
def test_every_command_of_the_pages_means_something(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_files(tmp_path)
    for folder in ("mine", "shop"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    made = [*small(tmp_path / "data/generated", rows=3000), "trainer.max_steps=1"]
    jobs.train("outputs/first", "+plan=mixed", *made)
    composed = [c for c in COMMANDS if c.name not in ON_PAPER and not missing(c)]
    assert len({c.name for c in composed}) > 1 and len(composed) >= 20
    for found, overrides in ((c, o) for c in composed for o in c.overrides):
        overrides = [
            "ckpt_path=outputs/first/checkpoints/last.ckpt" if o.startswith("ckpt_path=") else o
            for o in overrides
            if "=" in o
        ]
        if "split=test" in overrides:
            overrides.append("dataset.test_path=/logs/test")
        settings = resolved(found.name, overrides, [tmp_path / f for f in found.folders])
        plan = [o.partition("=")[2] for o in overrides if o.startswith("+plan=")]
        assert settings["choices"].get("plan") == (
            plan[0] if plan else "mixed" if settings["ckpt_path"] else None
        ), found


@pytest.mark.full
def test_every_command_on_paper_is_composed():
    on_paper = [c for c in COMMANDS if c.name in {*ON_PAPER} - {"bench"}]
    assert len(on_paper) >= 12
    for found in on_paper:
        ((*said,),) = found.overrides
        overrides = [o for o in said if "=" in o]
        of_verb = f"{found.name}_{next(iter(found.arguments), '')}"
        name = of_verb if of_verb in RECORDS else found.name
        composed = compose.compose(name, overrides)
        plain = compose.to_plain(
            OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"]),
            whole=found.name == "plan",
        )
        if "???" not in str(plain):
            read_settings(plain, name)


def test_every_setting_that_the_pages_name_exists():
    listed = re.findall(r"^- `(\w+\.\w+)", PAGES["docs/configuration.md"], re.MULTILINE)
    trainer = [f"trainer.{name}" for name in signature(Trainer).parameters]
    groups = "|".join([*(path.name for path in (REPOSITORY / "conf").glob("*/")), "engine"])
    named = {
        found[1]
        for span in quoted()
        if (found := re.match(rf"\+?((?:{groups})\.[a-z]\w*)(?![\w/])", span))
        and not span.endswith((".yaml", ".json", "()"))
    }
    assert len(named) >= 30
    assert sorted(named - {*listed, *trainer, *names_of(RECORDS["train"])}) == []


def test_settings_of_ones_own_are_an_experiment(tmp_path):
    own_files(tmp_path)
    small_run = next(c for c in COMMANDS if "experiment=small" in c.arguments)
    (overrides,) = small_run.overrides
    settings = resolved("train", overrides, [tmp_path / f for f in small_run.folders])
    assert (settings["seed"], settings["trainer"]["max_steps"]) == (7, 6)
    assert settings["tables"]["dim"] == 8


def test_a_plan_written_by_hand_tiles_its_tables(tmp_path):
    own_files(tmp_path)
    plan = read_plan(tmp_path / "by_hand.yaml")
    listed = resolved("train", ["dataset=sample", "tables=sample"])["tables"]["tables"]
    plan.check([EmbeddingBagConfig(**table) for table in listed])
    assert plan.name == "by_hand" and plan.world_size == 2


def test_the_conditions_of_rules_are_those_of_the_page_on_plans():
    cells = [names for names, _ in table("condition", PAGES["docs/plans.md"])]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(
        f.name for f in fields(PlanRule) if f.name not in ("type", "mode", "row_order")
    )


def test_the_tolerance_of_pooled_tables_is_the_one_that_is_tested():
    from test_runs import DOUBLE_APART, SINGLE_APART

    text = " ".join(PAGES["docs/concepts.md"].split())
    (found,) = re.findall(
        r"agree within (0\.\d+) in single precision[^(]*\((\S+) relative in double\)", text
    )
    assert [float(number) for number in found] == [SINGLE_APART, DOUBLE_APART]


# ---- names


def test_every_path_that_the_pages_name_exists():
    spans = [
        span
        for page, text in PAGES.items()
        if page not in AS_WRITTEN
        for span in quoted(text)
        if re.fullmatch(r"(recapp|conf|tests|docs|\.ci)/[a-z0-9_/.]*", span)
    ]
    assert len(spans) >= 20
    assert [span for span in spans if not (REPOSITORY / span).exists()] == []


def test_scripts_import_public_names_only():
    scripts = [b for b in blocks("python") if b.page != "CONTRIBUTING.md"]
    assert len(scripts) >= 6
    for block in scripts:
        for node in ast.walk(ast.parse(block.text)):
            if not isinstance(node, ast.ImportFrom) or not node.module.startswith("recapp"):
                continue
            if block.page == "docs/from_torchrec.md" and node.module != "recapp":
                path = node.module.removeprefix("recapp.")
                assert {f"{path}.{name.name}" for name in node.names} <= NAMES.keys(), block
                continue
            assert node.module == "recapp", block
            assert {name.name for name in node.names} <= set(recapp.__all__), block


def test_the_public_names_are_those_of_the_page_on_python():
    cells = [names for names, _ in table("names", PAGES["docs/python.md"])]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(recapp.__all__)


def test_the_rooms_the_layers_and_the_commands_are_those_of_the_page_for_contributors():
    text = PAGES["CONTRIBUTING.md"]
    package = REPOSITORY / "recapp"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert {room.strip("`") for room, _ in table("room", text)} == rooms
    runnable = {
        path.stem for path in package.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    (found,) = re.findall(r"a module at the top of `recapp/` \(([^)]*)\)", text)
    assert set(re.findall(r"`(\w+)`", found)) == runnable - {"__main__"}
    layers = architecture.LAYERS.replace(architecture.COMMANDS, "commands").strip()
    assert layers in [block.strip() for block in fenced("text", "CONTRIBUTING.md")]


def test_variables_of_the_environment_are_read_somewhere():
    names = {name for text in PAGES.values() for name in re.findall(r"RECAPP_[A-Z_]+", text)}
    files = [
        path
        for folder in ("recapp", "tests")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path != Path(__file__)
    ]
    sources = "".join(path.read_text() for path in files)
    assert names and all(f'"{name}"' in sources for name in names)


# ---- scripts


def missing(found):
    """The package that a command names, `pip install` fetches and this environment lacks, if any;
    recapp is used with them, and never needs them.
    """
    packages = ("optuna", "wandb", "mlflow")
    named = [name for name in packages if any(name in word for word in found.arguments)]
    return next((name for name in named if find_spec(name) is None), None)


def run_script(block, base, world=None):
    """What a script of a page prints: on two ranks if it makes a process group. `torchrun` itself
    starts that of the README, in `test_readme.py`.
    """
    path = base / (block.file or f"{block.page.replace('/', '_').removesuffix('.md')}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    if "init_process_group" in block.text and world is None:
        names = re.findall(r"torchrun --nproc-per-node 2 (\w+\.py)", PAGES[block.page])
        assert (path.name if block.file else "clicks.py") in names
        world = 2
    return script(path, cwd=base, world=world)


@pytest.fixture(scope="module")
def with_a_checkpoint(tmp_path_factory):
    """A directory with what the pages' first command leaves, made on few rows."""
    base = tmp_path_factory.mktemp("documents")
    arguments = ["trainer.max_steps=4", *small("data/generated", rows=3000)]
    ran = command("train", "+plan=mixed", "hydra.run.dir=outputs/first", *arguments, cwd=base)
    assert ran.code == 0, ran.err
    return base


@pytest.mark.full
def test_the_script_of_the_readme_runs_on_one_rank(tmp_path):
    (block,) = blocks("python", "README.md")
    assert re.fullmatch(r"rank 0: loss 0\.\d{4}\n", run_script(block, tmp_path, world=1))


@pytest.mark.full
@pytest.mark.parametrize(
    "block",
    [b for b in blocks("python") if b.page != TOUR],
    ids=lambda b: f"{b.page} {b.file or ''}",
)
def test_every_script_runs(block, with_a_checkpoint):
    said = run_script(block, with_a_checkpoint)
    if block.file == "plain_loop.py":
        assert re.search(r"user: 5,000 x 16, \w+", said)
        assert re.search(r"item: 200 x 16, \w+", said)
        assert re.search(r"^AUC [01]\.\d{3}$", said, re.MULTILINE)


def scores_over_http(found, folder, path):
    """What a server that the command starts, at a free port, answers to the rows of its model."""
    given = dict(argument.split("=", 1) for argument in found.arguments)
    artefact, name = folder / given.pop("artefact"), given["name"]
    del given["port"]
    settings = [f"{key}={value}" for key, value in given.items()]
    with ServerProcess(folder / "server", artefact, *settings, PYTHONPATH=path) as server:
        asked = server.ask("GET", f"/v2/models/{name}/example")[2]
        return json.loads(server.ask("POST", f"/v2/models/{name}/infer_rows", asked)[2])["scores"]


@pytest.mark.full
def test_the_page_from_logs_to_a_served_model_is_typed_in_its_order(tmp_path):
    own_files(tmp_path)
    path = os.pathsep.join((str(REPOSITORY), str(tmp_path / "shop")))
    typed = []
    for block in blocks(page=TOUR):
        if block.language == "python":
            run_script(block, tmp_path)
        for found in [c for c in commands([block.text]) if not missing(c)]:
            if found.name == "serve":
                assert all(0 < score < 1 for score in scores_over_http(found, tmp_path, path))
                continue
            short = ["trainer.max_steps=12"] if found.name == "train" else []
            if "hydra/sweeper=optuna" in found.arguments:
                short.append("hydra.sweeper.n_trials=2")
            ran = command(found.name, *found.arguments, *short, cwd=tmp_path, PYTHONPATH=path)
            assert ran.code == 0, (found, ran.err)
            typed.append(found.name)
    assert {"train", "predict", "export"} <= set(typed)


def test_the_row_rule_of_the_page_for_contributors_is_one(tmp_path, monkeypatch):
    import torch

    (block,) = [b for b in blocks("python") if b.file == "recapp/optim/rules.py"]
    (tmp_path / "decayed_rule.py").write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = import_module("decayed_rule").decayed_adagrad(lr=0.1, decay=0.5, eps=0.0)
    zero = torch.zeros(2, 3)
    gradient = torch.full((2, 3), 2.0)
    weight, total = rule.step(zero, gradient, None, rule.lr, torch.sqrt, *rule.constants, zero + 8)
    assert torch.equal(total, zero + 8) and torch.allclose(weight, -0.1 * gradient / 8**0.5)


def test_examples_in_the_help_of_settings_can_be_typed():
    """Hydra's grammar is not YAML: it refuses keys in quotes, for one. An option shows the comments
    of the option that it extends, too.
    """
    parser = OverridesParser.create()
    nested = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
    shown = []
    for file in sorted((REPOSITORY / "conf").rglob("*.yaml")):
        texts = [file.read_text()]
        for extended in (OmegaConf.to_container(OmegaConf.create(texts[0])) or {}).get(
            "defaults", []
        ):
            if isinstance(extended, str) and (file.parent / f"{extended}.yaml").is_file():
                texts.append((file.parent / f"{extended}.yaml").read_text())
        for text in texts:
            comments = [line.partition("#")[2].strip() for line in text.splitlines()]
            for example in re.findall(nested, " ".join(comments)):
                if ": " in example and example != '{"rows": [...]}':  # which is printed
                    parser.parse_override(f"setting={example}")
                    shown.append(example)
    assert len(shown) > 20 and len(set(shown)) >= 8
