"""Which source files a kernel is made of.

A kernel is its function and the functions that this closes over: a row rule is one of them, and may
be a user's. What they name are numbers and functions of their modules, and of what these import. So
a kernel is made of the files of those modules and of all that they import of their own package,
wherever in a file the import stands. Versions of Python, numba and the processor are known to
numba's cache.
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
    """Return the SHA-256 of the files that a kernel is made of.

    Args:
        function: The function that is compiled, with all that it closes over.
    """
    return _digest_of(frozenset(sources(function)))


def sources(function: Callable[..., Any]) -> set[Path]:
    """Return the files that a kernel is made of.

    Args:
        function: The function that is compiled, with all that it closes over.
    """
    modules = {inner.__module__ for inner in _functions_in(function, set())}
    return set().union(*map(files_of_module, modules))


def _functions_in(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """Yield a function and those that it closes over, alone or in tuples, compiled or plain."""
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
            with suppress(ValueError):  # empty: the name that the function itself is about to get
                yield from _functions_in(cell.cell_contents, seen)


def files_of_module(name: str) -> frozenset[Path]:
    """Return the file of a loaded module and those that it imports of its own package, directly or
    not.

    There are none for what was typed into a notebook: numba compares the code of such functions.

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
    """Return the files that a file imports of a package that lies in `root`."""
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
    """Return the file of a module, if there is one."""
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
