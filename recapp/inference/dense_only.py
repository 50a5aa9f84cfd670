"""The dense part of a model as a function of tensors, which can be exported and compiled.

    dense_BI, vectors of each collection --DenseOnly--> logits_B

Every collection of tables is replaced by a stand-in that hands out vectors which were looked up
before. So whatever makes the vectors (the engine, another process, a C++ program) feeds the same
dense part.
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
from recapp.tasks.task import only_output


class Input(NamedTuple):
    """What the dense part gets of a collection.

    Args:
        outputs: The names of its lookups.
        columns: The columns of each of their vectors.
        pooled: Whether that is one matrix [B, sum of columns]; else for each lookup its vectors
            [L, D] and the lengths [B] of its bags.
    """

    outputs: tuple[str, ...]
    columns: tuple[int, ...]
    pooled: bool

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return 1 if self.pooled else 2 * len(self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._asdict().items()}


class _Given(nn.Module):
    """Stands for a collection: hands out what was put there."""

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
        model: With sharded collections; it stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = collections_of(model)
        memo: dict[int, Any] = {id(c): _Given(input_of(c), c.lookups) for c in held}
        self.model = copy.deepcopy(model, memo)
        self._given = [memo[id(c)] for c in held]

    @property
    def inputs(self) -> list[Input]:
        """What it gets of each collection, in order."""
        return [given.wanted for given in self._given]

    def forward(self, dense_BI: Tensor, *vectors: Tensor) -> Tensor:
        """Return the logits of a batch, [B].

        Args:
            dense_BI: Its numbers.
            vectors: Those of all collections, one after the other (`Input`).
        """
        batch = SimpleNamespace(dense_BI=dense_BI, sparse=object(), rows=dense_BI.shape[0])
        left = list(vectors)
        for given in self._given:
            given.vectors = left[: given.wanted.tensors]
            given.features = batch.sparse
            del left[: given.wanted.tensors]
        logits_B = only_output(self.model(batch))
        for given in self._given:
            given.vectors = []
        return logits_B


def collections_of(model: nn.Module) -> list[ShardedCollection]:
    """Return the sharded collections of a model, each once, in order."""
    return [m for m in model.modules() if isinstance(m, ShardedCollection)]


def input_of(collection: ShardedCollection) -> Input:
    """Return what a dense part gets of a collection."""
    pooled = isinstance(collection, ShardedEmbeddingBagCollection)
    columns = tuple(x.columns or x.dim for x in collection.lookups)
    return Input(tuple(x.output for x in collection.lookups), columns, pooled)


def looked_up(collections: Sequence[ShardedCollection], batch: Batch) -> list[Tensor]:
    """Return the vectors of a batch that a dense part gets, one collection after the other.

    Collections leave no room beside their vectors, so matrices are contiguous.
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
    """Return tensors of a batch of four samples, and of a few ids where there are sequences."""
    made = [torch.zeros(4, dense)]
    for wanted in inputs:
        if wanted.pooled:
            made.append(torch.zeros(4, sum(wanted.columns), dtype=dtype))
            continue
        for width in wanted.columns:
            made.append(torch.zeros(6, width, dtype=dtype))
            made.append(torch.tensor([1, 2, 0, 3]))
    return made
