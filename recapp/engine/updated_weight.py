"""Weights of tables that row rules update, as a model's own code sees them.

    bags.embedding_bags["users"].weight.requires_grad_(False)      the table is frozen

The rows of a sharded table lie on several ranks, and have no gradient. So its weight has no rows,
and is a parameter of the modules around it only while a module makes its optimisers.
"""

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from recapp.errors import ConfigError


class UpdatedWeight(nn.Parameter):
    """The weight of a table that a row rule updates, with no rows. Every rank sets `requires_grad`
    alike, between two steps.

    Args:
        tables: The sharded tables, which can `freeze` one.
        table: The name of the table.
        rows: No rows, in the compute type, on the device of the rank.

    Optimisers can have the weight while it is `offered`.
    """

    tables: weakref.ref[Any]
    table: str
    offered: bool

    def __new__(cls, tables: Any, table: str, rows: Tensor) -> "UpdatedWeight":
        """Make the weight."""
        weight = Tensor._make_subclass(cls, rows, False)
        weight.tables = weakref.ref(tables)
        weight.table = table
        weight.offered = False
        return weight

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "UpdatedWeight":
        """Return the weight of the copied tables."""
        return UpdatedWeight(deepcopy(self.shared, memo), self.table, self.data.clone())

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


class MethodOf:
    """A function as a method of one module, which it does not keep alive: a module with itself
    among its attributes would keep its tables until a garbage collection.

    Args:
        module: The module.
        function: The function, whose first argument is the module.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = weakref.ref(module)
        self.function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function with the module."""
        return self.function(self.module(), *arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the copied module."""
        return MethodOf, (self.module(), self.function)


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
