"""TorchRec's awaitables: values that are waited for when they are needed.

A sharded collection here returns its `KeyedTensor`, which has a `wait()` too; these classes are for
programs that make awaitables of their own:

    class Later(LazyAwaitable[Tensor]):
        def _wait_impl(self): ...

    later = Later()
    torch.add(later, 1), 2 * later, later[1:3], later.shape      # each waits, if nothing has yet
"""

import operator
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

W = TypeVar("W")
K = TypeVar("K")
V = TypeVar("V")
P = TypeVar("P")

_UNARY = ("neg", "pos", "invert", "abs")
_COMPARED = ("eq", "ne", "lt", "gt", "le", "ge")
_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
_OF_BITS = ("and", "or", "xor")
_OF_ONE: Mapping[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "contains": operator.contains,
    **{kind.__name__: kind for kind in (iter, len, bool, int, float)},
}


class Awaitable(ABC, Generic[W]):
    """A value that `wait` returns; a subclass says in `_wait_impl` how it is waited for."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Return the functions that the value goes through, in order: append yours."""
        return self._callbacks

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    def wait(self) -> W:
        """Return the value, waiting for it if need be."""
        value = self._wait_impl()
        for callback in self.callbacks:
            value = callback(value)
        return value


class NoWait(Awaitable[W]):
    """A value that is there already.

    Args:
        obj: The value.
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class _TracedAndAbstract(torch.fx.ProxyableClassMeta, ABCMeta):  # type: ignore
    """Has `torch.fx` trace that an awaitable is made, instead of making it of proxies."""


class LazyAwaitable(Awaitable[W], metaclass=_TracedAndAbstract):
    """An awaitable that stands for its value: functions of torch, operators, indices and attributes
    wait for it and get the value. It is waited for once.

    Raises:
        RuntimeError: It is used, and the `__init__` of its class did not call this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waited = False
        self._result: W | None = None

    def wait(self) -> W:
        """Return the value, the same object every time."""
        if not self._waited:
            self._result = super().wait()
            self._waited = True
        value: Any = self._result
        return value  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the values of all awaitables among its arguments."""
        values = torch.fx.node.map_aggregate(tuple(args), _value)
        named = torch.fx.node.map_aggregate(dict(kwargs or {}), _value)
        return func(*values, **named)

    def __getattr__(self, name: str) -> Any:
        if name in ("_waited", "_result", "_callbacks"):
            raise RuntimeError(
                f"{type(self).__name__} has not been initialized properly: have its __init__ call "
                "super().__init__()"
            )
        if name.startswith("__"):  # protocols of copy and pickle
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)

    __hash__ = object.__hash__  # which a class with `==` loses


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A value that is there already, for a program that expects a lazy awaitable.

    Args:
        obj: The value.
    """


class LazyGetItemMixin(Generic[K, V]):
    """Stands before `LazyAwaitable` among the bases of a class, whose `[key]` does not wait then:
    it returns an awaitable of the part.
    """

    def __getitem__(self, key: K) -> LazyAwaitable[V]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]


class GetItemLazyAwaitable(LazyAwaitable[W], Generic[W, P, K]):
    """A part of the value of a lazy awaitable.

    Args:
        parent: The awaitable.
        key: The index of the part.
    """

    def __init__(self, parent: LazyAwaitable[P], key: K) -> None:
        super().__init__()
        self._parent = parent
        self._key = key

    def _wait_impl(self) -> W:
        whole: Any = self._parent.wait()
        part: W = whole[self._key]
        return part


def _value(given: Any) -> Any:
    """Return the value of an awaitable; anything else as it is."""
    return given.wait() if isinstance(given, LazyAwaitable) else given


def _of_values(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """Return an operator as a method that computes with values."""

    def method(*operands: Any) -> Any:
        values = [_value(operand) for operand in operands]
        return function(*(values[::-1] if swapped else values))

    return method


for _name, _function in _OF_ONE.items():
    setattr(LazyAwaitable, f"__{_name}__", _of_values(_function))
for _name in (*_UNARY, *_COMPARED, *_BINARY, *_OF_BITS):
    _function = getattr(operator, f"__{_name}__")
    setattr(LazyAwaitable, f"__{_name}__", _of_values(_function))
    if _name in (*_BINARY, *_OF_BITS):
        setattr(LazyAwaitable, f"__r{_name}__", _of_values(_function, swapped=True))
