"""What pieces of Python name: modules, strings, paths and the names of others."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

GAP = "\0"  # in a string: what is filled in


@dataclass
class Piece:
    """What some statements name.

    Args:
        imports: Modules, and the name taken from each or None.
        strings: String constants, docstrings left out.
        paths: Those behind slashes: `root / "docs" / "draw.py"` has "docs/draw.py".
        names: What is loaded or asked for as an argument.
        attributes: Attributes of a name: `a.b` has ("a", "b").
        loaded: What stands in calls that import a module by its name.
    """

    imports: set[tuple[str, str | None]] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)


def piece_of(nodes: Iterable[ast.AST]) -> Piece:
    """Return what statements name. Docstrings and what type checkers read name nothing."""
    found = Piece()
    for node in _that_run(nodes):
        match node:
            case ast.Import():
                found.imports |= {(alias.name, None) for alias in node.names}
            case ast.ImportFrom():
                found.imports |= {(node.module or "", alias.name) for alias in node.names}
            case ast.JoinedStr():
                parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                found.strings.add("".join(map(str, parts)))
            case ast.Constant(value=str(text)):
                found.strings.add(text)
            case ast.BinOp(op=ast.Div()):
                found.paths.add("/".join(_behind_slashes(node)))
            case ast.Name():
                found.names.add(node.id)
            case ast.arg():
                found.names.add(node.arg)
            case ast.Call(func=ast.Name(id="import_module" | "run_module" | "__import__")):
                found.loaded |= piece_of(node.args).strings
            case ast.Attribute(value=ast.Name(id=owner)):
                found.attributes.add((owner, node.attr))
    return found


def _behind_slashes(node: ast.expr) -> list[str]:
    match node:
        case ast.BinOp(op=ast.Div(), left=left, right=ast.Constant(value=str(text))):
            return [*_behind_slashes(left), text]
        case ast.BinOp(op=ast.Div()):
            return ["*"]
    return []


def _that_run(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _that_run(node.orelse)
            case ast.JoinedStr(values=values):  # one string: its parts are none of their own
                yield node
                yield from _that_run(v for v in values if isinstance(v, ast.FormattedValue))
            case ast.BinOp(op=ast.Div()):  # its left part names no path of its own
                yield node
                while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                    yield from _that_run([node.right])
                    node = node.left
                yield from _that_run([node])
            case _:
                yield node
                yield from _that_run(ast.iter_child_nodes(node))


class Module:
    """A file of Python, by the names that its statements bind.

    Attributes:
        body: Its statements.
        bound: The statements that define or assign each name.
        sources: The module behind each name that is imported at the top, and the name in it.
        loose: The statements that bind nothing and run in any case.
    """

    def __init__(self, text: str) -> None:
        self.body = ast.parse(text).body
        self.bound: dict[str, list[ast.stmt]] = {}
        self.sources: dict[str, tuple[str, str | None]] = {}
        self.loose: list[ast.stmt] = []
        for node in self.body:
            self._sort(node)

    def _sort(self, node: ast.stmt) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    known = alias.asname or alias.name.split(".")[0]
                    self.sources[known] = (alias.name, None)
            case ast.ImportFrom():
                for alias in node.names:
                    self.sources[alias.asname or alias.name] = (node.module or "", alias.name)
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                self.bound.setdefault(node.name, []).append(node)
            case ast.Assign() | ast.AnnAssign():
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        self.bound.setdefault(inner.id, []).append(node)
            case _:
                self.loose.append(node)

    def piece(self, name: str | None = None) -> Piece:
        """Return what the statements that bind a name, and the loose ones, name; or all of them."""
        nodes = self.body if name is None else [*self.bound.get(name, ()), *self.loose]
        return piece_of(nodes)

    @cached_property
    def fixtures(self) -> dict[str, bool]:
        """The fixtures of tests, and whether each is for all tests."""
        found = {}
        for name, nodes in self.bound.items():
            said = " ".join(map(ast.unparse, getattr(nodes[0], "decorator_list", ())))
            if "fixture" in said:
                found[name] = "autouse" in said
        return found

    @cached_property
    def packages(self) -> dict[str, str]:
        """The package behind each name by which `import` makes one known, wherever it stands."""
        nodes = [n for top in self.body for n in ast.walk(top) if isinstance(n, ast.Import)]
        aliases = [alias for node in nodes for alias in node.names]
        firsts = {(a.asname or a.name.split(".")[0]): a for a in aliases}
        return {k: a.name if a.asname else a.name.split(".")[0] for k, a in firsts.items()}
