"""The one optimiser object that Lightning sees.

Lightning's automatic optimisation wants exactly one optimiser. This one owns the optimiser of the
dense parameters, which may be any of torch's, and adds a param group for each row rule of each
sharded collection. These groups hold no parameters: tables are updated in backward, and the update
reads the current `lr` of the group. So a learning-rate schedule or a monitor treats tables and
dense part alike.

Gradients are clipped before a step, by their norm or by value, over the dense part and the tables.

    total = (sum over all gradients |g|^p)^(1/p)
    g *= min(1, most / (total + 1e-6))            by the norm
    g = min(max(g, -most), most)                  value by value

Tables have one gradient for each touched row, summed over the batches of all ranks. It is complete
when backward has ended on all ranks. So the update of the tables, which is otherwise the end of
backward, waits for the optimiser's step: gradients of several backwards add up, and `zero_grad`
drops them, as for any parameter. If no gradient exceeds the bound, training gives the same bits as
without clipping.

The factor is that of `torch.nn.utils.clip_grad_norm_`. `engine.clip_tables` clips in Lightning's
step (`recapp/trainer/step_of_ranks.py`), TorchRec's optimiser in its own
(`recapp/compat/torchrec/optimizers.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from recapp.errors import ConfigError


class TableGradients(Protocol):
    """The gradients of the touched rows of some tables, over all ranks.

    Every rank calls each method.
    """

    def defer(self, optimizer: object) -> None:
        """Make updates wait for `end_step` from now on, instead of running at the end of backward.

        Args:
            optimizer: The optimiser that calls `end_step` in its step. It must live as long as the
                tables train.
        """

    def power_sum(self, order: float, dense: float) -> float:
        """Return the sum of the absolute values of all elements to a power, or their maximum: over
        all ranks, each row once, the same number on every rank. It costs one small message.

        Args:
            order: The power, or infinity for the maximum.
            dense: The other gradients' part of the sum; rank 0's value counts.
        """

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""

    def clamp(self, most: float) -> None:
        """Limit the elements of the gradients to -most .. most."""

    def end_step(self) -> None:
        """Update the rows with the waiting gradients, then drop the gradients."""

    def drop(self) -> None:
        """Drop the waiting gradients."""


def joined(parts: Sequence[float], order: float) -> float:
    """Return the sum of powers in their order, or their maximum if the order of the norm is
    infinite. With a part of NaN the result is NaN.
    """
    if any(math.isnan(part) for part in parts):
        return math.nan
    return max(parts, default=0.0) if math.isinf(order) else sum(parts)


def run_closure(closure: Callable[[], float] | None) -> float | None:
    """Run the closure of an optimiser's `step` with gradients enabled; return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class HybridOptimizer(Optimizer):
    """A dense optimiser and the param groups of tables, which backward updates.

    Args:
        dense: The optimiser of the dense parameters.
        sparse_groups: The `param_groups` of all sharded collections. The optimiser makes their
            names unique.

    `table_gradients` holds the gradients of tables whose update `step` ends, where gradients are
    clipped over the tables too.
    """

    def __init__(self, dense: Optimizer, sparse_groups: Sequence[dict[str, Any]]) -> None:
        self.dense = dense
        self.table_gradients: list[TableGradients] = []
        self.sparse_groups = list(sparse_groups)
        for number, group in enumerate(dense.param_groups):
            group.setdefault("name", "dense" if len(dense.param_groups) == 1 else f"dense/{number}")
        # The names from the collections, without the numbers that another optimiser added.
        names = ["/".join(group["name"].split("/")[:2]) for group in self.sparse_groups]
        for number, (group, name) in enumerate(zip(self.sparse_groups, names, strict=True)):
            group["name"] = name if names.count(name) == 1 else f"{name}/{number}"
        self._first_groups = len(dense.param_groups)
        super().__init__(dense.param_groups + self.sparse_groups, dense.defaults)
        self.state = dense.state

    @property
    def parts(self) -> list[Optimizer]:
        """The optimisers whose steps are the step of this one, but for tables."""
        return [self.dense]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the dict that the dense optimiser or the fused update reads, not a copy. A new group
        is the dense optimiser's, and stands behind all others.
        """
        if not any(param_group is group for group in self.dense.param_groups + self.sparse_groups):
            self.dense.add_param_group(param_group)
            param_group = self.dense.param_groups[-1]
            param_group.setdefault("name", f"dense/{len(self.dense.param_groups) - 1}")
        self.param_groups.append(param_group)

    def take_groups(self) -> None:
        """Take param groups that other code has set as this optimiser's: Lightning's
        `BaseFinetuning` sets those that it had added before a run was resumed.
        """
        dense_groups = [group for group in self.param_groups if "tables" not in group]
        if len(dense_groups) != len(self.dense.param_groups):
            self.dense.param_groups = dense_groups

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then update the dense part.

        The closure runs forward and backward; backward updates the tables.
        """
        loss = run_closure(closure)
        self.dense.step()
        for gradients in self.table_gradients:
            gradients.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the dense gradients, and the gradients of tables whose update waits for a step."""
        self.dense.zero_grad(set_to_none)
        for gradients in self.table_gradients:
            gradients.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the dense optimiser's state and the tables' hyper-parameters.

        The tables' state is stored with the tables.
        """
        return {
            "dense": self.dense.state_dict(),
            "sparse": [{k: v for k, v in g.items() if k != "params"} for g in self.sparse_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. The fused updates keep reading the same group dicts."""
        self.dense.load_state_dict(state_dict["dense"])
        stored_groups = groups_of_tables(state_dict["sparse"], self.sparse_groups)
        for group, stored in zip(self.sparse_groups, stored_groups, strict=True):
            # a group keeps the name and tables of this run's rules
            group.update({key: stored[key] for key in stored if key not in ("name", "tables")})
        groups = self.dense.param_groups
        added = groups[self._first_groups :]
        self.param_groups = groups[: self._first_groups] + self.sparse_groups + added
        self.state = self.dense.state


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimisers whose steps are all that the step of one does to dense parameters: the
    optimiser itself, unless it only calls others.
    """
    parts = getattr(optimizer, "parts", None)
    return [optimizer] if parts is None else [x for part in parts for x in parts_of(part)]


def groups_of_tables(
    stored: Sequence[dict[str, Any]], fresh: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return for each new param group of tables a copy of a stored param group: the stored group
    of the first table that has one; the group itself where no table was trained before.

    If a checkpoint stored groups without the names of their tables, all its tables had one rule.
    """
    of_table = {table: group for group in stored for table in group.get("tables", ())}
    groups = []
    for number, group in enumerate(fresh):
        others = [stored[number]] if len(stored) == len(fresh) else [*stored[:1], group]
        known = [of_table[t] for t in group.get("tables", ()) if t in of_table]
        groups.append(dict([*known, *others][0]))
    return groups


def hybrid(dense: Optimizer, collections: Iterable[Any]) -> HybridOptimizer:
    """Return the optimiser of a model.

    Args:
        dense: The optimiser of the model's dense part.
        collections: The model's sharded collections, each with `param_groups`.
    """
    return HybridOptimizer(dense, [group for c in collections for group in c.param_groups])


@torch.no_grad()
def clip_norm(
    parameters: Iterable[Tensor],
    tables: Sequence[TableGradients],
    most: float,
    order: float = 2.0,
) -> float:
    """Scale all gradients so that their norm is at most `most`. Every rank calls this function.

    Args:
        parameters: The dense parameters, whose gradients are the same on all ranks.
        tables: The gradients of table rows.
        most: The largest norm.
        order: The order of the norm, or infinity.

    Returns:
        The norm before scaling, the same number on every rank.

    Raises:
        ConfigError: A dense gradient is sparse.
    """
    gradients = _gradients(parameters)
    norm = _norm(gradients, tables, order)
    factor = most / (norm + 1e-6)
    if not factor >= 1.0:  # a norm of NaN makes all gradients NaN, as in torch
        for gradient in gradients:
            gradient.mul_(factor)
        for of_tables in tables:
            of_tables.scale(factor)
    return norm


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor], tables: Sequence[TableGradients], order: float = 2.0
) -> float:
    """Return the norm of all gradients, the same number on every rank, and change none. Every rank
    calls this function.

    Args:
        parameters: The dense parameters, whose gradients are the same on all ranks.
        tables: The gradients of table rows.
        order: The order of the norm, or infinity.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return _norm(dense, tables, order)


def _norm(gradients: list[Tensor], tables: Sequence[TableGradients], order: float) -> float:
    # one read of all: on a GPU each read waits for the device
    return total_norm(each_norm(gradients, order).tolist() if gradients else [], tables, order)


def each_norm(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of each of some dense gradients, fp64 [G], on their device.

    Args:
        gradients: The gradients, at least one.
        order: The order of the norm, or infinity.
    """
    return torch.stack(torch._foreach_norm(gradients, order, dtype=torch.float64))


def total_norm(
    norms: Sequence[float], tables: Sequence[TableGradients] = (), order: float = 2.0
) -> float:
    """Return the norm of all gradients, the same number on every rank. Every rank calls it.

    Args:
        norms: The norm of each dense gradient.
        tables: The gradients of table rows.
        order: The order of the norms, or infinity.
    """
    dense = joined(norms if math.isinf(order) else [norm**order for norm in norms], order)
    parts = [
        of_tables.power_sum(order, 0.0 if number else dense)
        for number, of_tables in enumerate(tables)
    ]
    total = joined(parts or [dense], order)
    return total if math.isinf(order) else total ** (1.0 / order)


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor], tables: Sequence[TableGradients], most: float) -> None:
    """Limit the elements of all gradients to -most .. most. Every rank calls this function.

    Args:
        parameters: The dense parameters.
        tables: The gradients of table rows, each summed over all ranks.
        most: The largest absolute value.
    """
    torch.nn.utils.clip_grad_value_(parameters, most)
    for of_tables in tables:
        of_tables.clamp(most)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; an empty one has no norm.

    Raises:
        ConfigError: A gradient is sparse.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    for gradient in gradients:
        if gradient.is_sparse:
            raise ConfigError(
                f"a dense parameter of shape {tuple(gradient.shape)} has a sparse gradient, whose "
                "rows may repeat: make its nn.Embedding without sparse=True to clip its norm"
            )
    return gradients
