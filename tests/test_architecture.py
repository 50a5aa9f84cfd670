import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from architecture import (
    FLOORS,
    READS_IN_REPORTS,
    File,
    files_imported_by,
    floors,
    import_cycles,
    long_lines,
    missing_docstrings,
    missing_names,
    packed_assignments,
    read_by_string,
    read_package,
    reads_in_reports,
    repeated_names,
    wrong_budgets,
    wrong_layers,
    wrong_paths,
    wrong_rooms,
    wrong_sizes,
    wrong_third_parties,
)
from ranks import early_modules

FILES = read_package(Path(__file__).parents[1] / "recapp")
DESIGN = Path(__file__).parents[1] / "docs/design.md"
TOP_LEVEL = {
    "pyproject.toml",
    "conf",
    "recapp",
    "data",
    "tests",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
}


def imported_files(file: File) -> set[str]:
    """The files of the package that a file imports, in whichever of its parts."""
    return files_imported_by(file, "recapp", {each.name for each in FILES})


def layers(name: str, text: str) -> list[str]:
    return wrong_layers([File(name, text)], "recapp")


def test_the_whole_package_is_read():
    assert {"errors", "sparse", "sparse.bags", "engine.lookup"} <= {file.name for file in FILES}


def test_imports_go_down_the_layers():
    assert wrong_layers(FILES, "recapp") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sparse.batch", "from recapp.tables.config import X"),
        ("sparse.batch", "import recapp.trainer"),
        ("errors", "from recapp import console"),
        ("models.dlrm", "from recapp.dataset.schema import Schema"),
        ("planner.rules", "def f():\n    from recapp.engine.state import EngineState"),
        ("kernels.reference", "if True:\n    import recapp.sharding.layout as layout"),
        ("trainer.module", "from recapp.train import main"),
        ("cli.build", "from recapp.train import main"),
    ],
)
def test_an_import_upwards_or_sideways_is_found(name, text):
    (line,) = layers(name, text)
    assert "may not import" in line and line.startswith(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "sparse.batch",
            "from recapp.sparse.bags import X\nfrom recapp.errors import Y\nimport torch",
        ),
        (
            "train",
            "from recapp.eval import measure\nfrom recapp.cli.command import main\nimport "
            "recapp.errors",
        ),
        ("stored.block_files", "from recapp.sharding.layout import Block"),
    ],
)
def test_an_import_downwards_or_within_a_room_is_fine(name, text):
    assert layers(name, text) == []


def test_a_file_without_a_layer_is_found():
    assert layers("helpers", "") == ["helpers: no layer names it: add it to LAYERS"]
    assert layers("train", "import recapp.helpers") == [
        "train:1: imports helpers, which no layer names"
    ]


def test_third_parties_stay_at_home():
    assert wrong_third_parties(FILES) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer.module", "from omegaconf import DictConfig"),
        ("processes.launch", "def f():\n    import hydra.core"),
        ("cli.build", "import pyarrow.parquet as pq"),
        ("models.dlrm", "from lightning.pytorch import LightningModule"),
        ("trainer.callbacks", "import torch.distributed as dist"),
        ("metrics", "from torch import distributed"),
        ("metrics", "from torch.distributed import all_reduce"),
        ("stored.checkpoint", "import torch\ndef f():\n    torch.distributed.barrier()"),
    ],
)
def test_a_third_party_away_from_home_is_found(name, text):
    (line,) = wrong_third_parties([File(name, text)])
    assert "is at home in" in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cli.command", "import hydra"),
        ("dataset.source", "import pyarrow as pa"),
        ("trainer.strategy", "import torch.distributed as dist"),
        ("transport.communicator", "from torch.distributed import all_reduce"),
        ("models.dlrm", "import torch\ntorch.nn.Linear(1, 1)"),
    ],
)
def test_a_third_party_at_home_is_fine(name, text):
    assert wrong_third_parties([File(name, text)]) == []


def _without_main(file: File) -> File:
    """The file of a command without its function `main`."""
    tree = ast.parse(file.text)
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "main"]
    return File(file.name, ast.unparse(tree))


@pytest.mark.full
def test_what_a_rank_runs_does_without_hydra():
    """Whatever the commands import in their functions counts as well, except in `main`, which no
    rank calls.
    """
    root = Path(__file__).parents[1]
    names = {file.name: file for file in FILES}
    todo = ["train", "eval", "predict"]
    names |= {name: _without_main(names[name]) for name in todo}
    for name in todo:
        todo += [found for found in imported_files(names[name]) if found not in todo]
    modules = [f"recapp.{name}" for name in todo if names[name].name]
    loading = f"""
import sys
for name in {modules}:
    try:
        __import__(name)
    except ImportError:  # kernels for what is not installed here
        assert "kernels" in name, name
print(*sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", loading],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ran.stdout.split())
    assert {"recapp.run.training", "recapp.trainer.strategy", "torch"} <= loaded
    assert not {"hydra", "omegaconf"} & loaded


def test_no_file_name_stands_twice():
    assert repeated_names(FILES) == []
    twice = [File("plan", ""), File("sharding.plan", ""), File("sharding", "", True)]
    assert repeated_names(twice) == ["plan stands in the package itself, sharding"]


def test_no_files_import_each_other_in_a_circle():
    assert import_cycles(FILES, "recapp") == []


def test_a_circle_of_imports_is_found_wherever_they_stand():
    a = File("a", "if TYPE_CHECKING:\n    from recapp.room.b import B")
    b = File("room.b", "def f():\n    from recapp.room import c")
    c = File("room.c", "import recapp.a")
    room = File("room", "", True)
    assert import_cycles([a, b, c, room], "recapp") == [["a", "room.b", "room.c"]]
    assert import_cycles([a, b, room, File("room.c", "")], "recapp") == []


def test_every_name_has_one_import_path():
    assert wrong_paths(FILES, "recapp") == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from .batch import Batch", "relative import"),
        ("from recapp.sparse.batch import *", r"imports \*"),
        ("from tests.ranks import Ranks", "imports tests"),
        ("from recapp.sparse.batch import Tensor", "Tensor is not defined in recapp.sparse.batch"),
    ],
)
def test_a_second_import_path_is_found(text, fault):
    batch = File("sparse.batch", "from torch import Tensor\nMISSING: int = 0\nclass Batch: ...")
    (line,) = wrong_paths([batch, File("models.dlrm", text)], "recapp")
    assert fault.replace("\\", "") in line
    assert (
        wrong_paths(
            [batch, File("models.dlrm", "from recapp.sparse.batch import MISSING, Batch")], "recapp"
        )
        == []
    )
    assert (
        wrong_paths(
            [
                batch,
                File("sparse", "", True),
                File("models.dlrm", "from recapp.sparse import batch"),
            ],
            "recapp",
        )
        == []
    )


def test_rooms_hold_files_and_their_init_a_docstring():
    assert wrong_rooms(FILES) == []


def test_a_busy_init_and_a_deep_file_are_found():
    busy = [
        File("sparse", '"""Jagged."""\nfrom recapp.sparse.batch import Batch', True),
        File("models", "", True),
    ]
    assert wrong_rooms(busy) == [
        "sparse/__init__.py holds more than a docstring",
        "models/__init__.py holds more than a docstring",
    ]
    assert wrong_rooms([File("models.layers.mlp", "")]) == [
        "models.layers.mlp lies deeper than one room"
    ]
    assert wrong_rooms([File("sparse", '"""Jagged."""', True), File("sparse.batch", "")]) == []


def test_few_rooms_stand_on_one_another():
    assert max(floors(FILES, "recapp").values()) <= FLOORS


def test_a_floor_is_one_above_the_highest_below():
    files = [
        File("cli.x", "import recapp.engine.y"),
        File("engine.y", "import torch\nfrom recapp import errors"),
        File("errors", ""),
    ]
    assert floors(files, "recapp") == {"cli": 3, "engine": 2, "errors": 1}


def test_rooms_keep_to_the_budgets_of_the_design():
    assert wrong_budgets(FILES, DESIGN.read_text()) == []


def test_a_room_above_its_budget_or_far_below_is_found():
    files = [File("engine.y", "x = 1\n" * 50), File("errors", "x = 1\n" * 50)]
    rows = "| `engine` | {} | rows |\n| `recapp` | {} | pages |\n"
    assert wrong_budgets(files, rows.format(50, 60)) == []
    assert wrong_budgets(files, rows.format(49, "1,060")) == [
        "engine has 50 statements: docs/design.md allows 49",
        "recapp has 50 statements: docs/design.md allows 1060",
    ]
    assert wrong_budgets(files[:1], "") == ["engine has 50 statements: docs/design.md allows 0"]


def test_files_and_functions_keep_to_their_budgets():
    assert wrong_sizes(FILES) == []


def test_a_file_or_function_above_its_budget_is_found():
    function = 'def long():\n    """A docstring is none."""\n' + "    pass\n" * 40
    assert wrong_sizes([File("a", function)]) == []
    assert wrong_sizes([File("a", function + "    pass\n")]) == [
        "a:1: long has 41 statements, above 40"
    ]
    assert wrong_sizes([File("a", '"""A."""\n' + "x = 1\n" * 350)]) == []
    assert wrong_sizes([File("a", "x = 1; y = 2\n" * 176)]) == ["a has 352 statements, above 350"]


def test_no_line_is_longer_than_100_columns():
    tests = [File(path.stem, path.read_text()) for path in Path(__file__).parent.rglob("*.py")]
    assert long_lines([*FILES, *tests]) == []
    assert long_lines([File("a", "x" * 100 + "\n" + "x" * 101)]) == ["a:2: 101 columns"]


def test_a_statement_assigns_one_thing():
    assert packed_assignments(FILES) == []


@pytest.mark.parametrize(
    ("text", "packed"),
    [
        ("a, b = 1, 2", True),
        ("self.a, self.b = a, b", True),
        ("a, (b, c) = x, y", True),
        ("a, b = b, a", False),
        ("a, b = x, a.y", False),
        ("a, a[0] = x, y", False),
        ("a, b = pair", False),
        ("a, *b = x, y, z", False),
    ],
)
def test_a_packed_assignment_is_found(text, packed):
    assert bool(packed_assignments([File("a", text)])) == packed


def test_everything_public_says_what_it_is():
    assert missing_docstrings(FILES) == []


def test_a_missing_docstring_is_found():
    text = (
        '"""M."""\ndef f(): ...\nclass C:\n    """C."""\n    def g(self): ...\n    def _h(self): '
        "...\n    def __len__(self): ...\n    @override\n    def i(self): ...\n"
    )
    assert missing_docstrings([File("m", text)]) == [
        "m:2: f has no docstring",
        "m:5: g has no docstring",
    ]
    assert missing_docstrings([File("m", "def _f(): ...")]) == ["m: the module has no docstring"]
    assert (
        missing_docstrings(
            [File("m", '"""M."""\nclass _C:\n    def g(self): ...\ndef _f():\n    def g(): ...\n')]
        )
        == []
    )


def test_nothing_is_left_unfinished():
    words = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert [f"{file.name}: {word}" for file in FILES for word in words if word in file.text] == []


def test_the_top_level_keeps_its_few_names():
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: which files are the project's is not known")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    top = {name.split("/")[0] for name in tracked}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_settings_are_read_as_attributes_but_where_they_are_composed():
    assert read_by_string(FILES) == []


def test_reports_read_typed_records():
    assert len(reads_in_reports(FILES)) <= READS_IN_REPORTS
    read = 'x = row["ms"] + row.get("ms") + row[0]'
    assert len(reads_in_reports([File("reporting.page", read)])) == 2


@pytest.mark.parametrize("read", ["settings['seed']", "self.config['dataset']", "dataset['path']"])
def test_a_setting_that_is_read_by_a_string_is_found(read):
    assert read_by_string([File("trainer.module", f"x = {read}")])
    assert not read_by_string([File("run.read", f"x = {read}")])


def test_modules_that_are_named_in_strings_are_there():
    assert missing_names(FILES, "recapp") == []
    names = 'x = "recapp.a recapp.b"\ny = "recapp.a.f"\nz = "recapp.a.g"\n'
    files = [File("a", "def f(): ..."), File("c", names)]
    assert missing_names(files, "recapp") == [
        "c:1: recapp.b is not there",
        "c:3: recapp.a.g is not there",
    ]
    assert [name for name in early_modules() if find_spec(name) is None] == []
