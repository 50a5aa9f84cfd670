"""`dense`: compare the dense part of its training step with its own
matrix products.

    vectors of the tables, made up -- model -- loss -- backward      `dense`
    every matrix product of that step, alone                         `products`

One rank runs both in turn. The products have the shapes and strides of those that ran, and write
into allocated memory. The times are CPU times of one thread, because other processes of a machine
that is shared lengthen a step. Tables, exchange and optimiser have no part.

The model is that of `recapp.train model=NAME` over Criteo's columns with 16 columns a table. Those
that read histories get 0 to 20 behaviours for a sample, and field-aware models 4 columns for each
pair of fields.

B samples of a batch, L behaviours of all samples, D columns of a sequence, K columns of a
collection with the room before them.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.timing import Steps, ratio, spread
from recapp.cli.command import recipe_under
from recapp.models.layer_table import COUNTED, ProductCounter
from recapp.run.model import build_model
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import collections_in
from recapp.tasks.task import Task

from .lab import Lab

BEHAVIOURS = 20
"""The most behaviours of a sample."""
Product = Callable[[], object]


class _FromTables(torch.autograd.Function):
    """Gives memory to the model as if tables had written it, so that gradients come back to it."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, memory: Tensor) -> Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class DensePart:
    """The dense part of a model's training step, on vectors that no table was read for.

    Args:
        model: The model, with its tables on the meta device.
        task: The task, which has the loss.
        numbers: The number of dense features.
        batch_size: The samples of a batch, B.
    """

    def __init__(self, model: nn.Module, task: Task, numbers: int, batch_size: int) -> None:
        self.model = model.train()
        self.task = task
        self.dense = [p for p in model.parameters() if not p.is_meta]
        self.wanted = torch.zeros((), requires_grad=True)
        generator = torch.Generator().manual_seed(0)
        lengths_B = torch.randint(BEHAVIOURS + 1, (batch_size,), generator=generator)
        features = []
        for _, collection in collections_in(model):
            features += [x.feature for x in collection.lookups]
            pools = all(x.columns for x in collection.lookups)
            make = self._pooled if pools else self._sequences
            collection.__dict__["forward"] = make(collection, batch_size, lengths_B)
        names = list(dict.fromkeys(features))
        ids_L = torch.zeros(len(names) * batch_size, dtype=torch.int64)
        sparse = KeyedJaggedTensor(names, ids_L, lengths=ids_L + 1, stride=batch_size)
        self.batch = Batch(
            torch.rand(batch_size, numbers, generator=generator),
            sparse,
            torch.randint(2, (batch_size,), generator=generator).float(),
        )

    def _pooled(
        self, collection: Any, batch_size: int, _: Tensor
    ) -> Callable[[object], KeyedTensor]:
        names = [x.output for x in collection.lookups]
        columns = [x.columns for x in collection.lookups]
        room = collection.room
        memory_BK = torch.randn(batch_size, room + sum(columns)).mul_(0.1)

        def forward(_: object) -> KeyedTensor:
            values_BK: Tensor = _FromTables.apply(  # type: ignore[no-untyped-call]
                self.wanted, memory_BK
            )
            return KeyedTensor(names, columns, values_BK, room=room)

        return forward

    def _sequences(
        self, collection: Any, _: int, lengths_B: Tensor
    ) -> Callable[[object], dict[str, JaggedTensor]]:
        behaviours = int(lengths_B.sum())
        memory_LD = {x.output: torch.randn(behaviours, x.dim).mul_(0.1) for x in collection.lookups}

        def forward(_: object) -> dict[str, JaggedTensor]:
            return {
                name: JaggedTensor.unchecked(
                    _FromTables.apply(self.wanted, each_LD),  # type: ignore[no-untyped-call]
                    None,
                    lengths_B,
                )
                for name, each_LD in memory_LD.items()
            }

        return forward

    def step(self, _: int = 0) -> None:
        """Run the model forward and backward on the batch."""
        for parameter in self.dense:
            parameter.grad = None
        found = self.model(self.batch)
        loss = self._loss_of(found)
        if hasattr(self.model, "extra_losses"):
            for extra in self.model.extra_losses(found, self.batch, self._loss_of).values():
                loss = loss + extra
        loss.backward()  # type: ignore[no-untyped-call]

    def _loss_of(self, found: Tensor | Mapping[str, Tensor]) -> Tensor:
        outputs = self.task.named(found, self.batch.rows, type(self.model).__name__)
        return self.task.loss(outputs, self.batch)


class ProductRecorder(ProductCounter):  # type: ignore[no-untyped-call]
    """A context that notes the matrix products that run, for `again`."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Product] = []
        """The products that ran, each into memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and note it if it is a product."""
        found = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if name in COUNTED:
            self.again.append(_again(name.removeprefix("aten::"), func, args, kwargs or {}, found))
        return found


def _again(name: str, func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Product:
    """Return a product of the same shapes and strides, without the sum that `addmm` adds it to."""
    given = [_of_its_shape(x) if isinstance(x, Tensor) else x for x in args]
    plain = {"addmm": torch.mm, "baddbmm": torch.bmm, "mm": torch.mm, "bmm": torch.bmm}.get(name)
    if plain is None:
        more = {key: value for key, value in kwargs.items() if key != "out"}
        return lambda: func(*given, **more)
    left, right = given[-2:]
    room = _of_its_shape(found)
    return lambda: plain(left, right, out=room)


def _of_its_shape(tensor: Tensor) -> Tensor:
    """Return random numbers with the shape and strides of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return torch.randn(last + 1).to(tensor.dtype).as_strided(tensor.shape, tensor.stride())


HISTORY = ("tables.sequences=[C26]", "tables.shared={C26: C25}")
FIELD_AWARE = (f"tables.dim={4 * (13 + 26)}",)
TABLES = {"din": HISTORY, "bst": HISTORY, "ffm": FIELD_AWARE, "onn": FIELD_AWARE}
"""The settings of the tables of models that cannot take the usual ones."""


def recipe_with(name: str) -> Any:
    """Return the recipe of `recapp.train model=NAME` over Criteo's columns."""
    return recipe_under("train", [f"model={name}", "dataset=generated", *TABLES.get(name, ())])


def run(session: Lab) -> None:
    """Measure models of `conf/model` at every batch size, in one process."""
    for name in session.settings.model:
        recipe = recipe_with(name)
        for batch_size in session.settings.batch_size:
            contenders, operations = _contenders(recipe, batch_size)
            # two threads would count the waits of one for the other
            measured = session.measure(f"{name}, batch {batch_size}", contenders, threads=1)
            dense = measured["dense"]
            products = measured["products"]
            session.add(
                {
                    "model": name,
                    "batch_size": batch_size,
                    **spread(dense),
                    **spread(products, prefix="products_"),
                    **ratio("products", dense if operations else None, products),
                    "products_flops": operations,
                    "rounds": len(dense.rounds["step"]),
                }
            )


def _contenders(recipe: Any, batch_size: int) -> tuple[dict[str, Steps], int]:
    """Return the dense part and its products, and the operations of the products."""
    torch.manual_seed(recipe.seed)
    part = DensePart(build_model(recipe), recipe.built_task, len(recipe.schema.numbers), batch_size)
    recorder = ProductRecorder()
    with recorder:
        part.step()

    def products(_: int) -> None:
        for product in recorder.again:
            product()

    steps = {"dense": part.step, "products": products}
    contenders = {
        name: Steps({"step": step}, clock=time.process_time) for name, step in steps.items()
    }
    return contenders, recorder.operations
