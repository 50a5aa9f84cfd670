"""Weights of tables that row rules update, as a model's own code sees them.

    bags.embedding_bags["users"].weight.requires_grad_(False)      the table is frozen

The rows of a sharded table lie on several ranks, and have no gradient. So its weight has no rows,
and is a parameter of the modules around it only while a module makes its optimisers.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingConfig


class UpdatedWeight(nn.Parameter):
    """The weight of a table that a row rule updates, with no rows. Every rank sets `requires_grad`
    alike, between two steps.

    Args:
        tables: The sharded tables, which can `freeze` one.
        table: The table.
        device: The device of the rank.

    `table` is the name of the table. Optimisers can have the weight while it is `offered`.
    """

    tables: weakref.ref[Any]
    table: str
    offered: bool

    def __new__(cls, tables: Any, table: EmbeddingConfig, device: torch.device) -> "UpdatedWeight":
        """Make the weight."""
        rows = torch.empty(0, table.embedding_dim, dtype=table.data_type.dtype, device=device)
        weight = torch.Tensor._make_subclass(cls, rows, False)
        weight.tables = weakref.ref(tables)
        weight.table = table.name
        weight.offered = False
        return weight

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def shared(self) -> Any:
        """Return the sharded tables that hold the rows."""
        return self.tables()

    @property
    def requires_grad(self) -> bool:
        """Return whether updates change the rows of the table."""
        return not self.shared.is_frozen(self.table)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        """Freeze the table, or train it again."""
        self.shared.freeze([self.table], not requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> "UpdatedWeight":
        """Freeze the table, or train it again."""
        self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Return True, which optimisers ask of each parameter that they are given.

        Raises:
            ConfigError: The weight is not offered.
        """
        if not self.offered:
            raise ConfigError(
                f"table {self.table} is sharded, so no torch optimizer can have its weight now: "
                "under Lightning, give it to an optimizer in configure_optimizers; under "
                "DistributedModelParallel, set its rate in the param groups of fused_optimizer"
            )
        return True


class UpdatedTable(nn.Module):
    """A table that a row rule updates, under its name in a sharded collection.

    Args:
        weight: The weight of the table.
    """

    weight: UpdatedWeight

    def __init__(self, weight: UpdatedWeight) -> None:
        super().__init__()
        self.__dict__["weight"] = weight  # not as a parameter of the modules around

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weight: Lightning's `BaseFinetuning` freezes what each module yields itself."""
        yield self.weight

    def offer(self, offered: bool) -> None:
        """Make the weight a parameter of the modules around, or end that."""
        self.weight.offered = offered
        if offered:
            self._parameters["weight"] = self.weight
        else:
            self._parameters.pop("weight", None)
