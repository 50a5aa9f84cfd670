"""TorchRec's awaitables: values that are waited for when they are needed.

A sharded collection here returns its `KeyedTensor`, which has a `wait()` too; these classes are for
programs that make awaitables of their own.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """A value that `wait` returns; a subclass says in `_wait_impl` how it is waited for."""

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    def wait(self) -> W:
        """Return the value, waiting for it if need be."""
        return self._wait_impl()


class NoWait(Awaitable[W]):
    """A value that is there already.

    Args:
        obj: The value.
    """

    def __init__(self, obj: W) -> None:
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class LazyAwaitable(Awaitable[W]):
    """An awaitable that waits once, at the latest when an attribute of the value is asked for."""

    def wait(self) -> W:
        """Return the value, the same object every time."""
        if "_result" not in vars(self):
            vars(self)["_result"] = self._wait_impl()
        value: W = vars(self)["_result"]
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)
