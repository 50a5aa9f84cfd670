"""Separate the dense part of a model as a function of tensors, which torch can export and compile.

    dense_BI, vectors of each collection --DenseOnly--> outputs, each [B]

A stand-in replaces each collection of tables and returns vectors that were looked up before. So the
same dense part takes its vectors from the engine, from another process or from a C++ program.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recapp.engine.sharded_collection import ShardedCollection, ShardedEmbeddingBagCollection
from recapp.errors import ConfigError
from recapp.sparse.batch import Batch
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.lookups import TableLookup
from recapp.tasks.task import Task


class Input(NamedTuple):
    """The inputs of the dense part from one collection.

    Args:
        outputs: The output names of the collection's lookups.
        columns: The columns of the vectors of each lookup.
        pooled: Whether the input is one matrix [B, sum of columns]; if not, there are vectors [L,
            D] and lengths [B] for each lookup.
    """

    outputs: tuple[str, ...]
    columns: tuple[int, ...]
    pooled: bool

    @property
    def tensors(self) -> int:
        """Return the number of input tensors."""
        return 1 if self.pooled else 2 * len(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the input as plain data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._asdict().items()}


class _Given(nn.Module):
    """Stand in for a collection, and return the vectors that were assigned before."""

    def __init__(self, wanted: Input, lookups: Sequence[TableLookup]) -> None:
        super().__init__()
        self.wanted = wanted
        self.lookups = tuple(lookups)
        self.vectors: list[Tensor] = []
        self.features: object = None

    def forward(self, features: object) -> Any:
        if features is not self.features:
            raise ConfigError(
                "the model looks up other ids than those of its batch, so its dense part cannot be "
                "compiled"
            )
        if self.wanted.pooled:
            return KeyedTensor(self.wanted.outputs, self.wanted.columns, self.vectors[0])
        return {
            name: JaggedTensor.unchecked(values_LD, None, lengths_B)
            for name, values_LD, lengths_B in zip(
                self.wanted.outputs, self.vectors[::2], self.vectors[1::2], strict=True
            )
        }


class DenseOnly(nn.Module):
    """A copy of a model without tables.

    Args:
        model: The model, with sharded collections; it is not changed.
        task: Names the outputs of the model.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.task = task
        held = collections_of(model)
        memo: dict[int, Any] = {id(c): _Given(input_of(c), c.lookups) for c in held}
        self.model = copy.deepcopy(model, memo)
        self._given = [memo[id(c)] for c in held]

    @property
    def inputs(self) -> list[Input]:
        """Return the inputs from each collection, in order."""
        return [given.wanted for given in self._given]

    def forward(self, dense_BI: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of a batch in the task's order, each [B].

        Args:
            dense_BI: The dense features of the batch.
            vectors: The tensors of all collections, one collection after the other (`Input`).
        """
        batch = SimpleNamespace(dense_BI=dense_BI, sparse=object(), rows=dense_BI.shape[0])
        left = list(vectors)
        for given in self._given:
            given.vectors = left[: given.wanted.tensors]
            given.features = batch.sparse
            del left[: given.wanted.tensors]
        outputs = self.task.picked(self.model(batch), type(self.model).__name__)
        for given in self._given:
            given.vectors = []
        return tuple(outputs.values())


def collections_of(model: nn.Module) -> list[ShardedCollection]:
    """Return the sharded collections of a model, each once, in order."""
    return [m for m in model.modules() if isinstance(m, ShardedCollection)]


def input_of(collection: ShardedCollection) -> Input:
    """Return the inputs of the dense part from a collection."""
    pooled = isinstance(collection, ShardedEmbeddingBagCollection)
    columns = tuple(x.columns or x.dim for x in collection.lookups)
    return Input(tuple(x.output for x in collection.lookups), columns, pooled)


def looked_up(collections: Sequence[ShardedCollection], batch: Batch) -> list[Tensor]:
    """Look up a batch, and return the inputs of the dense part, one collection after the other.

    The matrices are contiguous, because collections leave no space beside their vectors.
    """
    made: list[Tensor] = []
    for collection in collections:
        found = collection(batch.sparse)
        if isinstance(found, KeyedTensor):
            made.append(found.values())
        else:
            for jagged in found.values():
                made += [jagged.values(), jagged.lengths()]
    return made


def example_inputs(inputs: Sequence[Input], dense: int, dtype: torch.dtype) -> list[Tensor]:
    """Return example tensors of a batch of four samples, with a few ids for each sequence."""
    made = [torch.zeros(4, dense)]
    for wanted in inputs:
        if wanted.pooled:
            made.append(torch.zeros(4, sum(wanted.columns), dtype=dtype))
            continue
        for width in wanted.columns:
            made.append(torch.zeros(6, width, dtype=dtype))
            made.append(torch.tensor([1, 2, 0, 3]))
    return made
