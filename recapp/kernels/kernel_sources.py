"""The source files of a kernel.

A kernel consists of its function and the functions in its closure, such as a row rule, which may be
a user's. They use numbers and functions of their modules and of imported modules. So the sources of
a kernel are the files of those modules and all files that they import from their own package,
wherever in a file the import stands. numba's cache itself tells versions of Python, numba and the
processor apart.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType
from typing import Any


def digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the source files of a kernel.

    Args:
        function: The compiled function, with its closure.
    """
    return _digest_of(frozenset(sources(function)))


def sources(function: Callable[..., Any]) -> set[Path]:
    """Return the source files of a kernel.

    Args:
        function: The compiled function, with its closure.
    """
    modules = {inner.__module__ for inner in _functions_in(function, set())}
    return set().union(*map(files_of_module, modules))


def _functions_in(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """Yield a function and the functions in its closure, alone or in tuples, compiled or plain."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        for part in value:
            yield from _functions_in(part, seen)
    plain = getattr(value, "py_func", value)
    if isinstance(plain, FunctionType):
        yield plain
        for cell in plain.__closure__ or ():
            with suppress(ValueError):  # an empty cell: a function that is being defined
                yield from _functions_in(cell.cell_contents, seen)


def files_of_module(name: str) -> frozenset[Path]:
    """Return the file of a loaded module and the files that it imports from its own package,
    directly or not.

    A notebook has no such files: numba compares the code of functions that are typed there.

    Args:
        name: The name of the module.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    return _files_from(name, Path(file).resolve()) if file and Path(file).is_file() else frozenset()


@lru_cache(None)
def _files_from(name: str, file: Path) -> frozenset[Path]:
    root = file.parents[name.count(".") + (file.stem == "__init__")]
    todo = [file]
    for path in todo:
        found = _imported_files(path, root, name.split(".")[0])
        todo += [each for each in found if each not in todo]
    return frozenset(todo)


@lru_cache(None)
def _imported_files(file: Path, root: Path, package: str) -> frozenset[Path]:
    """Return the files that a file imports from a package in `root`."""
    home = ".".join(file.relative_to(root).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), home)
            names = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.split(".")[0] == package:
                found |= {_file_of(root, f"{module}.{name}") or _file_of(root, module)}
    return frozenset(path for path in found if path)


def _file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module; None if there is no such file."""
    whole = root.joinpath(*module.split("."))
    files = (whole.with_suffix(".py"), whole / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@lru_cache(None)
def _digest_of(files: frozenset[Path]) -> str:
    each = [_digest_of_file(file) for file in sorted(files)]
    return sha256(b"".join(each)).hexdigest()


@lru_cache(None)
def _digest_of_file(file: Path) -> bytes:
    return sha256(file.read_bytes()).digest()
