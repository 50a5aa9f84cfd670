"""A kernel is read from disk as long as the files that it is made of have not changed, and only so
long.
"""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from recapp.kernels import numba_cache

numba = pytest.importorskip("numba")
PACKAGE = Path(numba_cache.__file__).parents[1]
RULE = "def step(w, g, mean_square, lr, sqrt):\n    return (w - lr * g,)\n"


def kernels():
    """The functions of some kernels: those made for a width or a rule, and those that stand in
    their modules.
    """
    from recapp.kernels import numba_unique, numba_vectors
    from recapp.kernels.numba_integers import group_rows
    from recapp.kernels.numba_key_index import hash_of
    from recapp.kernels.numba_text import xxh64
    from recapp.optim.rules import adam, lamb

    kinds = ("element", "element")
    updates = adam().step, adam().constants, False, kinds, 0, False, 3
    squares = lamb().squares, lamb().constants, kinds, lamb().means, 3
    made = {
        "pool": numba_vectors.pool.on_one_thread(3, False, 0),
        "pool packed": numba_vectors.pool.on_threads(3, False, 8),
        "update": numba_vectors.update.on_one_thread(*updates),
        "row squares": numba_vectors.row_squares(*squares),
        "link": numba_unique.link.on_one_thread(),
        "group": group_rows,
        "hash": hash_of,
        "text": xxh64,
    }
    return {name: kernel.py_func for name, kernel in made.items()}


def fresh():
    """The reader of sources, which keeps what it has read, as the next process has it."""
    spec = spec_from_file_location("fresh_kernel_sources", numba_cache.__file__)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_by(monkeypatch, file, functions):
    """The names of the functions that a change of a file makes new kernels of."""
    reader = fresh()
    before = {name: reader.digest(function) for name, function in functions.items()}
    read = Path.read_bytes
    reader = fresh()
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "read_bytes", lambda path: read(path) + b"\n" * (path == file.resolve())
        )
        after = {name: reader.digest(function) for name, function in functions.items()}
    return {name for name in functions if before[name] != after[name]}


ALL = {"pool", "pool packed", "update", "row squares", "link", "group", "hash", "text"}


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("kernels/numba_vectors.py", ALL),
        ("kernels/links.py", ALL),
        ("optim/rules.py", {"update", "row squares"}),
        ("tables/ids.py", set()),
    ],
)
def test_a_change_makes_those_kernels_anew_that_are_made_of_the_file(monkeypatch, file, kinds):
    assert (PACKAGE / file).is_file()
    assert changed_by(monkeypatch, PACKAGE / file, kernels()) == kinds


def named_by(function, seen):
    """The functions that a function names, closes over or calls inside of its intrinsics, and so
    on.
    """
    todo = [function]
    for value in todo:
        value = getattr(value, "py_func", getattr(value, "_defn", value))
        if not isinstance(value, FunctionType) or value in seen:
            continue
        seen.add(value)
        for name in names_in(value.__code__):
            found = value.__globals__.get(name)
            todo += vars(found).values() if is_of_kernels(found) else [found]
        todo += [cell.cell_contents for cell in value.__closure__ or ()]
    return seen


def is_of_kernels(value):
    return isinstance(value, ModuleType) and value.__name__.startswith("recapp.kernels.numba_")


def names_in(code):
    inner = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def test_a_kernel_is_made_of_every_file_whose_functions_it_names():
    for name, function in kernels().items():
        files = {
            Path(sys.modules[inner.__module__].__file__)
            for inner in named_by(function, set())
            if inner.__module__.startswith("recapp.")
        }
        assert files and files <= numba_cache.sources(function), name


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Import a module of a package that consists of these texts by file names; what its `kernel`
    is made of.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def sources(module, **texts):
        for name, text in {"room/__init__": "", "__init__": "", **texts}.items():
            path = tmp_path / "made_up" / f"{name.replace('_in_', '/')}.py"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        function = importlib.import_module(module).kernel
        return {path.relative_to(tmp_path).as_posix() for path in numba_cache.sources(function)}

    yield sources
    for name in [name for name in sys.modules if name.split(".")[0] == "made_up"]:
        del sys.modules[name]


def test_a_kernel_is_made_of_all_files_of_its_package(made_up):
    assert made_up(
        "made_up.room.kernels",
        room_in_kernels="def kernel():\n    from ..above import number",
        above="number = 1",
    ) == {f"made_up/{name}.py" for name in ("room/kernels", "room/__init__", "above", "__init__")}


def test_a_rule_from_outside_of_the_package_counts_with_its_file(tmp_path, monkeypatch):
    from recapp.kernels import numba_vectors

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules_of_my_own.py").write_text(RULE)
    step = importlib.import_module("rules_of_my_own").step
    mine = {"update": numba_vectors.update.on_one_thread(step, (), False, (), 0, False, 3).py_func}
    assert changed_by(monkeypatch, Path(step.__code__.co_filename), mine) == {"update"}
    assert changed_by(monkeypatch, PACKAGE / "kernels" / "simd.py", mine) == {"update"}
    assert not changed_by(monkeypatch, PACKAGE / "optim" / "rules.py", mine)


def test_a_rule_without_a_file_is_fine():
    """As one that is typed into a notebook."""
    typed = {"__name__": "notebook"}
    exec(RULE, typed)
    assert numba_cache.sources(typed["step"]) == set()
