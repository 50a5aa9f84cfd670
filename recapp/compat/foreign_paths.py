"""Lets `import recapp.distributed.embeddingbag` and `recapp.distributed.embeddingbag` find modules
that TorchRec has and recapp has not, so that a program needs another import line and nothing else:

    import recapp as torchrec
    torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder

`from recapp import hugectr` finds the names of HugeCTR. A path is found in one table
(`recapp/compat/torchrec_names.py`, `hugectr_names.py`), and what stands behind a name is imported
when it is first asked for. Where recapp has a module of the same path, the names of the
table are added to it; its own come first.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from recapp.compat import hugectr_names, torchrec_names

ROOT = "recapp"


class ForeignModule(ModuleType):
    """A module of the table. One that is called is the function of its own name: TorchRec has a
    function `apply_optimizer_in_backward` in a module of that name, and packages show both as one.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the module holds under its own last name."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a module be pickled by its path: notebooks send their globals to other processes."""
        return import_module, (self.__name__,)


class ForeignLoader(Loader):
    """Makes the modules that are in the table alone."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module."""
        return ForeignModule(
            spec.name, f"Names of another system that `{spec.name}` has (recapp/compat)."
        )

    def exec_module(self, module: ModuleType) -> None:
        """Let the module find its names, and show them."""
        add_names(module)
        names = sorted(_NAMES.get(below_root(module.__name__), {}))
        module.__doc__ = f"{module.__doc__}\n\n{', '.join(names)}"
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *names})


class ForeignFinder(MetaPathFinder):
    """Finds the modules of the table; it stands before Python's own finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module is loaded; None for one that is not in the table."""
        if below_root(fullname) not in _PATHS:
            return None
        own = PathFinder.find_spec(fullname, path)
        if own is None:
            return ModuleSpec(fullname, ForeignLoader(), is_package=_is_package(fullname))
        if own.loader is not None:
            vars(own.loader)["exec_module"] = _then_add_names(own.loader.exec_module)
        return own


def _then_add_names(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return a function that runs a module of the house and then adds the names of the table."""

    def exec_module(module: ModuleType) -> None:
        run(module)
        add_names(module)

    return exec_module


def add_names(module: ModuleType) -> None:
    """Let a module find the names and the modules that the table has below its path."""
    path = below_root(module.__name__)
    vars(module)["__getattr__"] = lambda name: found(path, name)


def found(path: str, name: str) -> Any:
    """Return the object that a name of the table stands for.

    Args:
        path: The module, without the name of the package; empty for the package itself.
        name: A name in it, or a module below it.

    Raises:
        AttributeError: The table has neither.
        ImportError: The name stays out on purpose; the message says what to do instead.
    """
    whole = f"{ROOT}.{path}".removesuffix(".")
    if name in _ABSENT.get(path, {}):
        raise ImportError(f"{whole}.{name}: {_ABSENT[path][name]}", name=whole)
    home = _NAMES.get(path, {}).get(name)
    if home is not None:
        module, _, target = home.partition(":")
        return getattr(import_module(module), target or name)
    below = f"{path}.{name}".removeprefix(".")
    if below in _PATHS:
        return import_module(f"{ROOT}.{below}")
    raise AttributeError(f"module {whole!r} has no attribute {name!r}")


def install() -> None:
    """Put the finder before Python's own, once."""
    if not any(isinstance(finder, ForeignFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ForeignFinder())


def below_root(fullname: str) -> str:
    """Return a module's path without the name of the package; empty for other packages' modules."""
    root, _, path = fullname.partition(".")
    return path if root == ROOT else ""


def _is_package(fullname: str) -> bool:
    return any(path.startswith(f"{below_root(fullname)}.") for path in _PATHS)


def _read(table: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the names of each path, with the module and the name that they stand for."""
    names: dict[str, dict[str, str]] = {}
    for where, home in table.items():
        path, _, name = where.rpartition(".")
        names.setdefault(path, {})[name] = home
    return names


_NAMES = _read(torchrec_names.NAMES | hugectr_names.NAMES)
_ABSENT = _read(torchrec_names.ABSENT)
_PATHS = {
    ".".join(parts[: count + 1])
    for path in (*_NAMES, *_ABSENT)
    for parts in [path.split(".")]
    for count in range(len(parts))
    if path
}
