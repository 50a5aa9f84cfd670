"""TorchRec's train pipelines on recapp's look-ahead, and its awaitables.

While one batch computes, a pipeline copies the next batch to the device and exchanges its ids:

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            break

Under Lightning `engine.look_ahead` does the same. recapp does not trace the model: it exchanges the
ids of the next batch for every collection. A collection that the model calls with other ids gets no
look-ahead (`recapp/trainer/lookahead.py`).

A program waits for the value of an awaitable when it uses the value. A sharded collection of recapp
returns a `KeyedTensor`, which has a `wait()` too. The classes are for programs that define
awaitables of their own:

    class Later(LazyAwaitable[Tensor]):
        def _wait_impl(self): ...

    later = Later()
    torch.add(later, 1), 2 * later, later[1:3], later.shape      # each waits, if nothing has yet
"""

import operator
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.engine.sharded_collection import sharded_tables
from recapp.trainer.lookahead import LookAhead

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineBase(Generic[In, Out]):
    """Trains a model batch by batch. Type parameters may name the types of batch and output:
    `TrainPipelineBase[Batch, Tensor]`.

    Args:
        model: A model that returns (losses, output) for a batch.
        optimizer: The optimiser of the dense parameters; backward updates the tables.
        device: The device of the batches.
        custom_model_fwd: A function of a batch that the pipeline calls instead of the model.
    """

    depth = 0
    """The number of batches to look ahead."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._forward = custom_model_fwd or model
        self._source: Iterator[In] | None = None
        self._batches: Iterator[In] = iter(())

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on the next batch and return the model's output; in eval mode only run the forward.

        Args:
            dataloader_iter: Batches with a method `to(device, non_blocking)`; the same number of
                batches on every rank.

        Raises:
            StopIteration: The iterator has no further batch.
        """
        if self._source is not dataloader_iter:
            self._source = dataloader_iter
            self._batches = self._read(dataloader_iter)
        batch = next(self._batches)
        if not self.model.training:
            eval_output: Out = self._forward(batch)[1]
            return eval_output
        self.optimizer.zero_grad()
        output: Out
        losses, output = self._forward(batch)
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return output

    def _read(self, batches: Iterator[In]) -> Iterator[In]:
        if not self.depth:
            return map(self._moved, batches)
        tables = sharded_tables(self.model)
        side = tables[0].comm.side if tables else None
        ahead = LookAhead(batches, self.depth, lambda: tables, self._moved, side)
        return iter(ahead)

    def _moved(self, batch: Any) -> Any:
        return batch.to(self.device, non_blocking=True)


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """A pipeline that exchanges the ids of the next batch while a batch computes. The arguments are
    those of `TrainPipelineBase`.
    """

    depth = 1


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
    """A value that `wait` returns; a subclass implements the waiting in `_wait_impl`."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[W], W]] = []
        """The functions that `wait` applies to the value, in order; append yours."""

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    def wait(self) -> W:
        """Wait for the value if it is not ready, and return it."""
        value = self._wait_impl()
        for callback in self.callbacks:
            value = callback(value)
        return value


class NoWait(Awaitable[W]):
    """An awaitable whose value is ready.

    Args:
        obj: The value.
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class _TracedAndAbstract(torch.fx.ProxyableClassMeta, ABCMeta):  # type: ignore
    """Makes `torch.fx` record the construction of an awaitable instead of running it on proxies."""


class LazyAwaitable(Awaitable[W], metaclass=_TracedAndAbstract):
    """An awaitable that a program uses like its value: functions of torch, operators, indexing and
    attribute access wait for the value and use it. The first use waits; later uses do not.

    Raises:
        RuntimeError: The `__init__` of a subclass did not call this `__init__`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waited = False
        self._result: W | None = None

    def wait(self) -> W:
        """Return the value; every call returns the same object."""
        if not self._waited:
            self._result = super().wait()
            self._waited = True
        return self._result  # type: ignore[return-value]

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
        keywords = torch.fx.node.map_aggregate(dict(kwargs or {}), _value)
        return func(*values, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name in ("_waited", "_result", "callbacks"):
            raise RuntimeError(
                f"{type(self).__name__} has not been initialized properly: have its __init__ call "
                "super().__init__()"
            )
        if name.startswith("__"):  # protocols of copy and pickle
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)

    __hash__ = object.__hash__  # Python removes it from a class that defines `==`


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A lazy awaitable whose value is ready.

    Args:
        obj: The value.
    """


class LazyGetItemMixin(Generic[K, V]):
    """A mixin that makes `[key]` return an awaitable of that part, without waiting. List it before
    `LazyAwaitable` among the bases of a class.
    """

    def __getitem__(self, key: K) -> LazyAwaitable[V]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]


class GetItemLazyAwaitable(LazyAwaitable[W], Generic[W, P, K]):
    """An awaitable of one part of the value of another awaitable.

    Args:
        parent: The awaitable.
        key: The index of the part.
    """

    def __init__(self, parent: LazyAwaitable[P], key: K) -> None:
        super().__init__()
        self._parent = parent
        self._key = key

    def _wait_impl(self) -> W:
        return self._parent.wait()[self._key]  # type: ignore[index, no-any-return]


def _value(value: Any) -> Any:
    return value.wait() if isinstance(value, LazyAwaitable) else value


def _of_values(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:

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
