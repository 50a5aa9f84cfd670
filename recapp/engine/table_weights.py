"""Weights of tables that row rules update, as a model's own code sees them.

    bags.embedding_bags["users"].weight.requires_grad_(False)      the table is frozen

The rows of a sharded table lie on several ranks, and have no gradient. So its weight has no rows,
and is a parameter of the modules around it only while a module makes its optimisers.

Tables as parameters, which the user's own optimiser updates: TorchRec's `dense` kernel.

    plan.tables["users"] = TableSharding(..., mode="replicated", as_parameter=True)

    weight   a parameter: the rows in the store of this rank's replica
    grad     mean over ranks of the batch gradients, added in rank order: the same bits on all

The engine sends the row gradients of a replica to every rank, which updates its copy. Here the
update is the rule `GRADIENT` (`recapp/optim/rules.py`): its state is the gradient, and it does not
change the weights. So the gradients of two backwards add up. All else is as for other replicas.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from recapp.engine.row_store import FloatStore
from recapp.errors import ConfigError
from recapp.optim.rules import GRADIENT, RowRule
from recapp.sharding.layout import Layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.config import EmbeddingConfig


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


class TableParameter(nn.Module):
    """A replica as a parameter.

    Args:
        weight_RD: The rows, in the memory of the store.
        gradient_RD: The memory in which row gradients add up.
    """

    def __init__(self, weight_RD: Tensor, gradient_RD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_RD)
        self._gradient = gradient_RD

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TableParameter":
        """Leave the rows on the device and in the dtype of the store."""
        return self

    @property
    def changes(self) -> int:
        """Return torch's count of the changes of the rows."""
        return self.weight._version

    def begin_update(self) -> None:
        """Make the store's memory the gradient of the parameter, with the values of the gradient so
        far.

        Raises:
            ConfigError: An optimiser in backward waits for a gradient from autograd, which never
                comes.
        """
        if hasattr(self.weight, "_in_backward_optimizers"):
            raise ConfigError(
                "a table that is a parameter has an optimizer by apply_optimizer_in_backward, "
                "which does not get its gradient: step an optimizer of this parameter yourself, "
                "or leave the table's compute kernel dense (as_parameter) out"
            )
        if not self.weight.requires_grad:
            return
        gradient = self.weight.grad
        if gradient is None:
            self._gradient.zero_()
        elif gradient.data_ptr() != self._gradient.data_ptr():
            self._gradient.copy_(gradient)
        self.weight.grad = self._gradient


def with_parameters(
    rules: dict[str, RowRule], tables: Iterable[EmbeddingConfig], plan: ShardingPlan
) -> dict[str, RowRule]:
    """Return the rule of each table, with `GRADIENT` for tables that are parameters.

    Args:
        rules: The rule of each table, by name; empty for read-only tables.
        tables: The tables.
        plan: The plan, which names the tables that are parameters.

    Raises:
        ConfigError: A table cannot be a parameter.
    """
    of_parameters = {t.name: GRADIENT for t in tables if plan.tables[t.name].as_parameter}
    for t in tables:
        if t.name in of_parameters:
            _check(t, plan)
    return rules | of_parameters if rules else rules


def _check(table: EmbeddingConfig, plan: ShardingPlan) -> None:
    sharding = plan.tables[table.name]
    why = ""
    if sharding.mode != "replicated":
        why = f"mode={sharding.mode}: a parameter is whole on every rank: make it data_parallel"
    elif table.dynamic is not None:
        why = "its rows come and go: give num_embeddings a number"
    elif sharding.row_order != "natural":
        why = f"row_order={sharding.row_order}: a parameter has its rows by number: leave it out"
    if why:
        raise ConfigError(f"table {table.name} is to be a parameter (as_parameter), but {why}")


def table_parameters(
    layout: Layout, stores: Iterable[nn.Module], rank: int
) -> dict[str, TableParameter]:
    """Return the tables of a layout that are parameters, by name.

    Args:
        layout: The layout.
        stores: The stores of the layout's groups.
        rank: The rank of the stores.

    Raises:
        ConfigError: A table is stored in a narrower type than the compute type, which is the
            gradient's type.
    """
    parameters: dict[str, TableParameter] = {}
    for number, store in enumerate(stores):
        if not isinstance(store, FloatStore) or store.rule != GRADIENT:
            continue
        (gradients,) = store.state
        for piece in layout.pieces_of(rank, number):
            table = layout.tables[layout.strips[piece.strip].table]
            if gradients.dtype != store.weights.dtype:
                raise ConfigError(
                    f"table {table.name} is to be a parameter (as_parameter), but "
                    f"data_type={table.data_type} is narrower than the compute type, "
                    f"{gradients.dtype}: give the table another data_type"
                )
            rows = slice(piece.base, piece.base + len(piece.rows))
            parameters[table.name] = TableParameter(store.weights[rows], gradients[rows])
    return parameters
