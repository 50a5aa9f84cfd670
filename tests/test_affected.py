"""`pytest --affected`: which tests a change reaches, on a made-up checkout and on this one."""

import subprocess
import sys
from pathlib import Path

import pytest
from affected import affected, changes, git
from jobs import REPOSITORY, environment

TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\ntestpaths = ['tests']\n",
    "README.md": "```bash\npython -m recapp.serve\n```\n",
    "conf/model.yaml": "_target_: recapp.room.made.Made  # not of recapp.room.alone\n",
    "docs/page.md": "```python\nfrom recapp import Thing\n```\n",
    "recapp/__init__.py": '_HOMES = {\n    "Thing": "recapp.room.thing",\n}\n',
    "recapp/compat/foreign_names.py": 'NAMES = {"other.path.Name": "recapp.room.alone"}\n',
    "recapp/errors.py": "class E(Exception): ...\n",
    "recapp/room/__init__.py": "",
    "recapp/room/thing.py": "from recapp.errors import E\nclass Thing: ...\n",
    "recapp/room/made.py": "def inside():\n    from recapp.room import made_of\n",
    "recapp/room/made_of.py": "",
    "recapp/room/alone.py": "",
    "recapp/room/typed.py": "if TYPE_CHECKING:\n    from recapp.room.alone import A\n",
    "recapp/page/drawn.py": '"""Named in a docstring: recapp.room.alone."""\n',
    "recapp/page/style.css": "",
    "recapp/train.py": 'WORKER = "recapp.worker"\nHELP = "see recapp.serve"\n',
    "recapp/serve.py": "",
    "recapp/worker.py": "from importlib import import_module\ndef run(name): import_module(name)\n",
    "tests/conftest.py": "import pytest\nfrom jobs import Jobs\nfrom help.always import on\n"
    "@pytest.fixture\ndef jobs():\n    return Jobs()\n"
    "@pytest.fixture(autouse=True)\ndef around():\n    on()\n",
    "tests/help/always.py": "def on(): ...\n",
    "tests/jobs.py": "import recapp.errors\nROOT = 1\n"
    "def command(name): return ['-m', f'recapp.{name}']\n"
    "class Jobs:\n    IMPORTED = ['recapp.worker']\n",
    "tests/standin_worker.py": "import recapp.room.alone\n",
    "tests/data/old.json": "",
    "tests/a/conftest.py": "",
    "tests/a/helper.py": "from recapp.page import drawn\ndef used(): ...\n"
    "def unused():\n    import recapp.serve\n",
    "tests/a/test_imports.py": "def test():\n    from recapp.room.thing import Thing\n",
    "tests/a/test_helper.py": "from a.helper import used\ndef test(): used()\n",
    "tests/a/test_typed.py": "import recapp.room.typed\n",
    "tests/test_public.py": "import recapp as r\ndef test(): r.Thing\n",
    "tests/test_foreign.py": "from recapp.other.path import Name\n",
    "tests/test_command.py": "from jobs import command\ndef test(): command('train')\n",
    "tests/test_any_command.py": "from jobs import command\ndef test(x): command(x)\n",
    "tests/test_fixture.py": "def test(jobs): ...\n",
    "tests/test_root.py": "from jobs import ROOT\n",
    "tests/test_string.py": "def test(): run('import sys; from recapp import Thing')\n",
    "tests/test_module.py": "def test(): launch(module='standin_worker')\n",
    "tests/test_page.py": "def test(): open(REPOSITORY / 'docs' / 'page.md')\n",
    "tests/test_readme.py": "def test(): (ROOT / 'README.md').read_text()\n",
    "tests/test_conf.py": "def test(): list((ROOT / 'conf').iterdir())\n",
    "tests/test_data.py": "def test(): open('tests/data/old.json')\n",
    "tests/test_nothing.py": "def test(): ...\n",
}
ALL = {path for path in TREE if "/test_" in path}
TRAINING = {"test_command", "test_any_command", "test_fixture"}


def names(paths):
    return {Path(path).stem for path in paths}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The made-up checkout, with one commit in git."""
    root = tmp_path_factory.mktemp("tree")
    for path, text in TREE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        git(root, "-c", "user.name=a", "-c", "user.email=a@b", *arguments)
    return root


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("recapp/room/thing.py", {"test_imports", "test_public", "test_string", "test_page"}),
        ("recapp/room/made.py", TRAINING),  # what the worker makes, settings name
        ("recapp/room/made_of.py", TRAINING),
        ("recapp/room/alone.py", {"test_module", "test_foreign"}),
        ("recapp/room/typed.py", {"test_typed"}),
        ("recapp/page/style.css", {"test_helper"}),
        ("recapp/train.py", {"test_command", "test_any_command"}),
        ("recapp/worker.py", TRAINING),
        ("recapp/serve.py", {"test_any_command", "test_readme"}),
        ("conf/model.yaml", {"test_conf"}),
        ("docs/page.md", {"test_page"}),
        ("README.md", {"test_readme"}),
        ("tests/data/old.json", {"test_data"}),
        ("tests/jobs.py", TRAINING | {"test_root"}),
        ("tests/help/always.py", names(ALL)),
        ("tests/a/helper.py", {"test_helper"}),
        ("tests/a/conftest.py", {"test_imports", "test_helper", "test_typed"}),
        ("tests/standin_worker.py", {"test_module"}),
        ("tests/test_nothing.py", {"test_nothing"}),
        ("tests/conftest.py", names(ALL)),
        ("pyproject.toml", names(ALL)),
        ("LICENSE", set()),
    ],
)
def test_a_change_reaches_who_imports_names_or_reads_what_has_changed(tree, changed, reached):
    tests, found = affected(tree, set(TREE), {changed})
    assert set(tests) == ALL
    assert names(found) == reached


def test_errors_reach_all_that_import_the_package_in_any_way(tree):
    _, found = affected(tree, set(TREE), {"recapp/errors.py"})
    assert names(found) == TRAINING - {"test_fixture"} | {
        "test_imports",
        "test_public",
        "test_string",
        "test_page",
        "test_fixture",
        "test_root",
    }


def test_what_is_not_committed_and_what_is_new_or_gone_is_changed(tree):
    assert changes(tree, "") == changes(tree, "HEAD") == set()
    (tree / "recapp/serve.py").unlink()
    (tree / "tests/test_new.py").write_text("")
    try:
        assert changes(tree, "") == {"recapp/serve.py", "tests/test_new.py"}
        assert names(affected(tree, set(TREE), changes(tree, ""))[1]) == {
            "test_any_command",
            "test_readme",
            "test_new",
        }
    finally:
        git(tree, "checkout", "-q", ".")
        (tree / "tests/test_new.py").unlink()
    with pytest.raises(pytest.UsageError, match="--affected=gone: git knows no such commit here"):
        changes(tree, "gone")


@pytest.mark.full
@pytest.mark.parametrize("workers", ["0", "2"])
def test_pytest_runs_those_and_says_how_many(tree, workers):
    def run():
        path = f"{REPOSITORY / 'tests'}:{tree}"
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "affected", "-n", workers, "--affected", "-q"],
            cwd=tree,
            env=environment(
                PYTHONPATH=path, PYTEST_ADDOPTS="-p no:cacheprovider", PYTHONDONTWRITEBYTECODE="1"
            ),
            capture_output=True,
            text=True,
        )
        return ran.returncode, ran.stdout

    code, said = run()
    assert (code, f"affected: 0 changed files reach 0 of {len(ALL)} test files" in said) == (
        0,
        True,
    ), said
    (tree / "recapp/room/typed.py").write_text("import typing\n")
    (tree / "tests/test_nothing.py").write_text("def test(): assert False\n")
    try:
        code, said = run()
    finally:
        git(tree, "checkout", "-q", ".")
    assert f"affected: 2 changed files reach 2 of {len(ALL)} test files" in said
    assert (code, "1 failed in " in said) == (1, True), said


# ---- this checkout

REACHED = {
    "recapp/serving/http.py": {"serving/test_service", "serving/test_serve_command"},
    "recapp/serving/model_page.css": {"serving/test_service"},
    "recapp/kernels/reference.py": {"kernels/test_backends", "engine/test_steps", "test_predict"},
    "recapp/kernels/numba_vectors.py": {"kernels/test_backends", "test_end_to_end"},
    "recapp/errors.py": {"test_console", "tables/test_ids", "planner/test_bounds"},
    "recapp/trainer/curves.py": {"trainer/test_curves", "test_end_to_end", "test_readme"},
    "recapp/inference/cpp/main.cpp": {"inference/test_cpp", "inference/test_every_path"},
    "recapp/models/published_dlrm.py": {"models/test_dlrm", "test_end_to_end", "test_sweep"},
    "recapp/compat/torchrec/models.py": {"compat/test_torchrec_dlrm", "test_documents"},
    "conf/train.yaml": {"test_settings", "test_end_to_end", "test_readme", "test_documents"},
    "docs/plans.md": {"test_documents"},
    "tests/jobs.py": {"test_predict", "kernels/test_disk_cache"},
    "tests/parity/cases.py": {"parity/test_sharded_matches_unsharded", "engine/test_steps"},
    "tests/trainer/plain_data_script.py": {"trainer/test_plain_data"},
    "tests/kernels/compile_for_gpu.py": {"kernels/test_triton"},
}
SHARE = {  # of all files of tests, from and to
    "recapp/serving/http.py": (0.02, 0.3),
    "recapp/kernels/reference.py": (0.5, 0.9),
    "recapp/errors.py": (0.9, 1),
    "docs/plans.md": (0, 0.05),
}


@pytest.fixture(scope="module")
def reached():
    """What each test of this checkout reaches."""
    from reach import Checkout

    folders = ("recapp", "conf", "docs", "tests")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files = [p for p in paths if p.is_file() and "__pycache__" not in p.parts]
    names = ["README.md", *(path.relative_to(REPOSITORY).as_posix() for path in files)]
    checkout = Checkout(REPOSITORY, names)
    return {test: checkout.reached_by(test) for test in checkout.tests}


@pytest.mark.full
@pytest.mark.parametrize("changed", REACHED)
def test_known_tests_are_reached_here_too(reached, changed):
    assert {f"tests/{name}.py" for name in REACHED[changed]} <= {
        test for test in reached if changed in reached[test]
    }


@pytest.mark.full
@pytest.mark.parametrize("changed", SHARE)
def test_few_many_and_nearly_all_are_reached_here(reached, changed):
    low, high = SHARE[changed]
    assert low <= sum(changed in files for files in reached.values()) / len(reached) <= high


@pytest.mark.full
def test_every_module_of_the_package_is_reached_by_a_test_of_its_own(reached):
    """By others than those that read all sources."""
    sources = {f"tests/test_{name}.py" for name in ("architecture", "documents", "public_face")}
    found = set().union(*(files for test, files in reached.items() if test not in sources))
    modules = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "recapp").rglob("*.py")}
    assert modules - found == set()
