"""Reads the imports, sizes and docstrings of a package's files, and says in one line each what
breaks the rules of the house.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

COMMANDS = (
    "__main__, data, train, eval, predict, export, serve, plan, bench, report, "
    "model_export, model_loading, plan_verbs, calibration, inference_bench"
)

LAYERS = f"""
compat
{COMMANDS}
cli
benchmarks | logs
run
serving
trainer | inference
parallel | reporting
graphs | data_parallel
stored | engine | planner
transport
processes
models | dataset | tasks
metrics
sharding
kernels
optim
tables
sparse
settings
console
errors
"""
"""High to low; one imports only what is lower, or itself. Names between commas see each other,
names between bars do not.
"""

THIRD_PARTIES = {
    "hydra": ("cli",),
    "omegaconf": ("cli",),
    "fsspec": ("dataset",),
    "pyarrow": (
        "dataset",
        "logs",
        "inference.build_cpp",
        "inference_bench",
        "run.run_rows",
        "serving.served_model",
        "serving.json_rows",
        "serving.open_inference",
    ),
    "prometheus_client": ("serving",),
    "starlette": ("serving",),
    "uvicorn": ("serving",),
    "lightning": ("trainer", "run", "cli", "compat"),
    "torch.distributed": (
        "transport",
        "compat",
        "parallel",
        "data_parallel",
        "engine.sharded_state",
        "trainer.strategy",
        "planner.embedding_planner",
        "benchmarks.session",
        "benchmarks.calibrate",
    ),
}
"""Where a third party is at home: rooms or files, below the package."""

FLOORS = 14
"""The most rooms that stand on one another, by the imports that there are."""

FILE_STATEMENTS = 350
FUNCTION_STATEMENTS = 40
COLUMNS = 100
TOP = "recapp"
SLACK = 40


@dataclass(frozen=True)
class File:
    """A module: its dotted name without the package (`sparse.batch`; a room's own `__init__` is
    `sparse`) and its text.
    """

    name: str
    text: str
    is_room: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which every check looks through."""
        return list(ast.walk(self.tree))

    @property
    def layer_name(self) -> str:
        return self.name.split(".")[0]


def read_package(root: Path) -> list[File]:
    """Every Python file below a package's directory."""
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_room = parts[-1] == "__init__"
        files.append(File(".".join(parts[:-1] if is_room else parts), path.read_text(), is_room))
    return files


def imported(file: File) -> Iterator[tuple[int, str, str | None]]:
    """(line, dotted module, name taken from it or None), wherever the import stands."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, "." * node.level + (node.module or ""), alias.name)
                for alias in node.names
            )


def wrong_layers(files: list[File], package: str) -> list[str]:
    """Imports that go up or sideways, and files that no layer names."""
    height_of = {}
    group = {}
    for height, line in enumerate(reversed(LAYERS.strip().splitlines())):
        for siblings in line.split("|"):
            for name in siblings.split(","):
                height_of[name.strip()] = height
                group[name.strip()] = siblings
    found = []
    for file in files:
        if not file.name:
            continue
        own = file.layer_name
        if own not in height_of:
            found.append(f"{file.name}: no layer names it: add it to LAYERS")
            continue
        for line, module, name in imported(file):
            other = _layer_of(module, name, package)
            if other is None:
                continue
            if other not in height_of:
                found.append(f"{file.name}:{line}: imports {other}, which no layer names")
            elif group[other] != group[own] and height_of[other] >= height_of[own]:
                found.append(f"{file.name}:{line}: {own} may not import {other}")
    return found


def floors(files: list[File], package: str) -> dict[str, int]:
    """The floor of each room and of each file at the top: one above the highest that it imports."""
    below: dict[str, set[str]] = {}
    for file in files:
        if file.name:
            names = (_layer_of(module, name, package) for _, module, name in imported(file))
            others = {name for name in names if name and name != file.layer_name}
            below.setdefault(file.layer_name, set()).update(others)

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in below[room] if other in below), default=0)

    return {room: floor(room) for room in below}


def wrong_budgets(files: list[File], design: str) -> list[str]:
    """Rooms with more statements than their row of the table of budgets in `docs/design.md` allows,
    or with so many fewer that the budget could fall. Files at the top are one room.
    """
    rows = re.findall(r"^\| `(\w+)` +\| +([\d,]+) \|", design, re.MULTILINE)
    budgets = {room: int(most.replace(",", "")) for room, most in rows}
    counts: dict[str, int] = {}
    for file in files:
        room = (file.layer_name if file.is_room or "." in file.name else "") or TOP
        counts[room] = counts.get(room, 0) + sum(isinstance(n, ast.stmt) for n in file.nodes)
    return [
        f"{room} has {counts.get(room, 0)} statements: docs/design.md allows {budgets.get(room, 0)}"
        for room in sorted(budgets.keys() | counts.keys())
        if not 0 <= budgets.get(room, 0) - counts.get(room, 0) <= SLACK
    ]


def _layer_of(module: str, name: str | None, package: str) -> str | None:
    if module == package:
        return name or package
    return (
        module.removeprefix(f"{package}.").split(".")[0]
        if module.startswith(f"{package}.")
        else None
    )


def wrong_third_parties(files: list[File]) -> list[str]:
    """Third parties outside their homes, imported or reached through a dotted name such as
    `torch.distributed.barrier`.
    """
    found = []
    for file in files:
        reached = [
            (line, f"{module}.{name}" if name else module) for line, module, name in imported(file)
        ]
        reached += [
            (node.lineno, ast.unparse(node))
            for node in file.nodes
            if isinstance(node, ast.Attribute)
        ]
        for party, homes in THIRD_PARTIES.items():
            at_home = any(_inside(file.name, home) for home in homes)
            found += [
                f"{file.name}:{line}: {party} is at home in {', '.join(homes)}"
                for line in sorted({line for line, name in reached if _inside(name, party)})
                if not at_home
            ]
    return found


def _inside(name: str, whole: str) -> bool:
    return name == whole or name.startswith(f"{whole}.")


def wrong_paths(files: list[File], package: str) -> list[str]:
    """Names with a second import path: relative imports, stars, tests, and names taken from a file
    that itself imported them.
    """
    defined = {file.name: set(_defined(file.tree)) for file in files}
    found = []
    for file in files:
        for line, module, name in imported(file):
            where = f"{file.name}:{line}"
            if module.startswith("."):
                found.append(f"{where}: a relative import: write {package}....")
            elif name == "*":
                found.append(f"{where}: imports *")
            elif _inside(module, "tests"):
                found.append(f"{where}: imports tests")
            elif _inside(module, package) and name:
                source = module.removeprefix(package).removeprefix(".")
                if (
                    source in defined
                    and name not in defined[source]
                    and f"{source}.{name}".removeprefix(".") not in defined
                ):
                    found.append(
                        f"{where}: {name} is not defined in {module}: import it from where it is"
                    )
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def wrong_rooms(files: list[File]) -> list[str]:
    """`__init__.py` with more than a docstring, and files deeper than one room. `compat` has a room
    for each other system.
    """
    found = [
        f"{file.name}/__init__.py holds more than a docstring"
        for file in files
        if file.is_room
        and file.name  # the package's own shows the public names
        and (len(file.tree.body) > 1 or ast.get_docstring(file.tree) is None)
    ]
    return found + [
        f"{file.name} lies deeper than one room"
        for file in files
        if file.name.count(".") > (2 if file.layer_name == "compat" else 1)
    ]


def statements(node: ast.AST) -> int:
    """Count the statements inside of a node, at any depth; docstrings are none."""
    return sum(
        isinstance(inner, ast.stmt) and inner is not node and not _is_docstring(inner)
        for inner in ast.walk(node)
    )


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def wrong_sizes(files: list[File]) -> list[str]:
    """Files and functions with more statements than they may have."""
    found = []
    for file in files:
        if (count := statements(file.tree)) > FILE_STATEMENTS:
            found.append(f"{file.name} has {count} statements, above {FILE_STATEMENTS}")
        for node in file.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (count := statements(node)) > FUNCTION_STATEMENTS:
                found.append(
                    f"{file.name}:{node.lineno}: {node.name} has {count} statements, above "
                    f"{FUNCTION_STATEMENTS}"
                )
    return found


def long_lines(files: list[File]) -> list[str]:
    """Lines above 100 columns, those that end in a comment for a tool included."""
    return [
        f"{file.name}:{number}: {len(line)} columns"
        for file in files
        for number, line in enumerate(file.text.splitlines(), 1)
        if len(line) > COLUMNS
    ]


def packed_assignments(files: list[File]) -> list[str]:
    """Tuples assigned to tuples where separate statements would do: `a, b = x, y`, but no swap."""
    return [
        f"{file.name}:{node.lineno}: {ast.unparse(node.targets[0])}: one assignment a line"
        for file in files
        for node in file.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and not _needs_one_statement(node.targets[0], node.value)
    ]


def _needs_one_statement(targets: ast.Tuple, values: ast.Tuple) -> bool:
    """Whether a value reads what an earlier target would have overwritten, or a star takes some."""
    if any(isinstance(part, ast.Starred) for part in (*targets.elts, *values.elts)):
        return True
    written = [ast.unparse(target) for target in targets.elts]
    return any(
        ast.unparse(inner) in written[:number]
        for number, part in enumerate(values.elts)
        for inner in (*ast.walk(part), *ast.walk(targets.elts[number]))
        if isinstance(inner, ast.expr)
    )


def missing_docstrings(files: list[File]) -> list[str]:
    """Modules, and public functions, classes and methods, without a docstring. A method marked
    `@override` has that of the method that it overrides.
    """
    found = []
    for file in files:
        found += (
            [] if ast.get_docstring(file.tree) else [f"{file.name}: the module has no docstring"]
        )
        found += [
            f"{file.name}:{node.lineno}: {node.name} has no docstring"
            for node in _public(file.tree)
            if not ast.get_docstring(node)
        ]
    return found


def _public(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not (
            child.name.startswith("_") or "override" in map(ast.unparse, child.decorator_list)
        ):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def repeated_names(files: list[File]) -> list[str]:
    """Names of files that stand in more than one room; each room of `compat` names its own."""
    rooms: dict[str, list[str]] = {}
    for file in files:
        if not file.is_room and file.name.count(".") < 2:
            home, _, name = file.name.rpartition(".")
            rooms.setdefault(name, []).append(home or "the package itself")
    return [f"{name} stands in {', '.join(homes)}" for name, homes in rooms.items() if homes[1:]]


def import_cycles(files: list[File], package: str) -> list[list[str]]:
    """Sets of files that import each other in a circle, wherever in a file the imports stand:
    those inside of functions and for type checking count.
    """
    names = {file.name for file in files}
    imports = {file.name: sorted(files_imported_by(file, package, names)) for file in files}
    return _strong_components(imports)


def files_imported_by(file: File, package: str, names: set[str]) -> set[str]:
    """Return which files of the package a file imports, in whichever of its parts."""
    found = set()
    for _, module, name in imported(file):
        if _inside(module, package):
            inner = module.removeprefix(package).removeprefix(".")
            whole = f"{inner}.{name}".removeprefix(".") if name else inner
            found.add(whole if whole in names else inner)
    return (found & names) - {file.name, ""}


def _strong_components(graph: dict[str, list[str]]) -> list[list[str]]:
    """The strong components of a graph that have more than one node (Tarjan), sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found)


SETTINGS = {
    "config",
    "settings",
    "recipe",
    "dataset",
    "engine",
    "launch",
    "optimizer",
    "planner",
    "tables",
    "topology",
    "trainer",
}
"""Names under which settings are handed on."""
PLAIN_SETTINGS = ("cli.compose", "cli.command", "run")
"""Where settings are plain values: what Hydra composes, and what files hold."""


def read_by_string(files: list[File]) -> list[str]:
    """Settings that are read by a string and not as an attribute of a record, which mypy sees."""
    return [
        f"{file.name}:{node.lineno}: {_name_of(node.value)}[{node.slice.value!r}]"
        for file in files
        if not any(_inside(file.name, home) for home in PLAIN_SETTINGS)
        for node in file.nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and _name_of(node.value) in SETTINGS
    ]


READS_IN_REPORTS = 60
"""The most entries of records that `recapp/reporting` reads by a string; the others are types."""


def reads_in_reports(files: list[File]) -> list[str]:
    """The reads of an entry by a string, `row["ms"]` or `row.get("ms")`, in the reports."""
    return [
        f"{file.name}:{node.lineno}"
        for file in files
        if _inside(file.name, "reporting")
        for node in file.nodes
        if isinstance(node, ast.Subscript | ast.Call) and _reads_a_string(node)
    ]


def _reads_a_string(node: ast.Subscript | ast.Call) -> bool:
    if isinstance(node, ast.Subscript):
        entry = node.slice
    elif _name_of(node.func) == "get" and node.args:
        entry = node.args[0]
    else:
        return False
    return isinstance(entry, ast.Constant) and isinstance(entry.value, str)


def _name_of(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)


def missing_names(files: list[File], package: str) -> list[str]:
    """Names of modules, or of what they define, in strings (a lazy import, what ranks import early)
    that are not there.
    """
    defined = {f"{package}.{file.name}".rstrip("."): _bound(file) for file in files}
    lines = []
    for file in files:
        for node in file.nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(rf"({package}(\.\w+)+ ?)+", text):
                for name in text.split():
                    module, _, last = name.rpartition(".")
                    if name not in defined and last not in defined.get(module, ()):
                        lines.append(f"{file.name}:{node.lineno}: {name} is not there")
    return lines


def _bound(file: File) -> set[str]:
    """The names that a module defines, or gives lazily by a table of names."""
    names = {node.id for node in file.nodes if isinstance(node, ast.Name)}
    names |= {
        node.name for node in file.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    tables = (node.keys for node in file.nodes if isinstance(node, ast.Dict))
    return names | {key.value for keys in tables for key in keys if isinstance(key, ast.Constant)}
