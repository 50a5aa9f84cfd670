"""Makes TorchRec's module paths importable from recapp, by `import recapp.distributed.embeddingbag`
and as the attribute `recapp.distributed.embeddingbag`. A program changes one import line only:

    import recapp as torchrec
    torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder

`from recapp import hugectr` gives the names of HugeCTR. Two tables list the paths and names
(`recapp/compat/foreign_names.py`). The first use of a name imports its object.
A module of recapp that has a path of the table keeps its own names and gets those of the table as
well; its own names take precedence.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from recapp.compat.foreign_names import ABSENT, NAMES

ROOT = "recapp"


class ForeignModule(ModuleType):
    """A module of the table. A call of the module calls its function of the same name: TorchRec
    has a function `apply_optimizer_in_backward` in a module of that name, and in its package one
    name stands for both.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the module that has the last part of the module's name."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a module by its path, because notebooks send their globals to other processes."""
        return import_module, (self.__name__,)


class ForeignLoader(Loader):
    """Makes the modules that the table has and recapp has not."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module."""
        return ForeignModule(
            spec.name, f"Names of another system that `{spec.name}` has (recapp/compat)."
        )

    def exec_module(self, module: ModuleType) -> None:
        """Add the names of the table to the module, its docstring and its `dir()`."""
        add_names(module)
        names = sorted(_NAMES.get(below_root(module.__name__), {}))
        module.__doc__ = f"{module.__doc__}\n\n{', '.join(names)}"
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *names})


class ForeignFinder(MetaPathFinder):
    """Finds the modules of the table; `install` puts this finder before Python's own finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; None for any other module."""
        if below_root(fullname) not in _PATHS:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None:
            below = any(path.startswith(f"{below_root(fullname)}.") for path in _PATHS)
            return ModuleSpec(fullname, ForeignLoader(), is_package=below)
        if spec.loader is not None:
            vars(spec.loader)["exec_module"] = _then_add_names(spec.loader.exec_module)
        return spec


def _then_add_names(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return a function that runs a module of recapp and then adds the names of the table."""

    def exec_module(module: ModuleType) -> None:
        run(module)
        add_names(module)

    return exec_module


def add_names(module: ModuleType) -> None:
    """Give a module the names and submodules that the table lists below its path."""
    path = below_root(module.__name__)
    vars(module)["__getattr__"] = lambda name: object_at(path, name)


def object_at(path: str, name: str) -> Any:
    """Return the object that a name of the table stands for.

    Args:
        path: The module, without the name of the package; empty for the package itself.
        name: A name in the module, or the name of a submodule.

    Raises:
        AttributeError: The table has no such name or module.
        ImportError: recapp leaves the name out on purpose; the message names a replacement.
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
    """Put the finder before Python's own finders, unless it is there already."""
    if not any(isinstance(finder, ForeignFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ForeignFinder())


def below_root(fullname: str) -> str:
    """Return a module's path without the name of the package; empty for other packages' modules."""
    root, _, path = fullname.partition(".")
    return path if root == ROOT else ""


def _read(table: Mapping[str, str]) -> dict[str, dict[str, str]]:
    names: dict[str, dict[str, str]] = {}
    for where, home in table.items():
        path, _, name = where.rpartition(".")
        names.setdefault(path, {})[name] = home
    return names


_NAMES = _read(NAMES)
_ABSENT = _read(ABSENT)
_PATHS = {
    ".".join(parts[: count + 1])
    for path in (*_NAMES, *_ABSENT)
    for parts in [path.split(".")]
    for count in range(len(parts))
    if path
}
