"""Tables as parameters, which the user's own optimiser updates: TorchRec's `dense` kernel.

    plan.tables["users"] = TableSharding(..., mode="replicated", as_parameter=True)

    weight   a parameter: the rows in the store of this rank's replica
    grad     mean over ranks of the batch gradients, added in rank order: the same bits on all

The engine sends the row gradients of a replica to every rank, which updates its copy. Here the
update is the rule `GRADIENT` (`recapp/optim/rules.py`): its state is the gradient, and it does not
change the weights. So the gradients of two backwards add up. All else is as for other replicas.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from recapp.engine.row_store import FloatStore
from recapp.errors import ConfigError
from recapp.optim.rules import GRADIENT, RowRule
from recapp.sharding.layout import Layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.config import EmbeddingConfig


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
        held = self.weight.grad
        if held is None:
            self._gradient.zero_()
        elif held.data_ptr() != self._gradient.data_ptr():
            self._gradient.copy_(held)
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
    found: dict[str, TableParameter] = {}
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
            found[table.name] = TableParameter(store.weights[rows], gradients[rows])
    return found
