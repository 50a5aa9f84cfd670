"""The one optimiser object that Lightning sees.

Lightning's automatic optimisation wants exactly one. This one owns the dense parameters' optimiser,
any of torch's, and shows a param group per row rule of each sharded collection beside it. Those
groups hold no parameters: tables are updated in backward, and the update reads the group's live
`lr`. So a learning-rate schedule or a monitor treats tables and dense part alike.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from recapp.optim.table_gradients import TableGradients


def run_closure(closure: Callable[[], float] | None) -> float | None:
    """Run what an optimiser's `step` was given, with gradients; it returns the loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class HybridOptimizer(Optimizer):
    """A dense optimiser plus groups of tables that were updated in backward already.

    Args:
        dense: The optimiser of the dense parameters.
        sparse_groups: The `param_groups` of all sharded collections; their names are made unique.

    `table_gradients` are those of tables whose update `step` ends, where gradients are clipped over
    the tables too.
    """

    def __init__(self, dense: Optimizer, sparse_groups: Sequence[dict[str, Any]]) -> None:
        self.dense = dense
        self.table_gradients: list[TableGradients] = []
        self.sparse_groups = list(sparse_groups)
        for number, group in enumerate(dense.param_groups):
            group.setdefault("name", "dense" if len(dense.param_groups) == 1 else f"dense/{number}")
        # The names that the collections gave, without the numbers that another optimiser added.
        names = ["/".join(group["name"].split("/")[:2]) for group in self.sparse_groups]
        for number, (group, name) in enumerate(zip(self.sparse_groups, names, strict=True)):
            group["name"] = name if names.count(name) == 1 else f"{name}/{number}"
        super().__init__(dense.param_groups + self.sparse_groups, dense.defaults)
        self.state = dense.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the very dict that the dense optimiser or the fused update reads, not a copy."""
        self.param_groups.append(param_group)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then update the dense part.

        The closure runs forward and backward, and with backward the update of the tables.
        """
        loss = run_closure(closure)
        self.dense.step()
        for gradients in self.table_gradients:
            gradients.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the dense gradients, and those of tables whose update waits for a step."""
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
        """Load what `state_dict` returned; the fused updates keep reading the same group dicts."""
        self.dense.load_state_dict(state_dict["dense"])
        for group, stored in zip(self.sparse_groups, state_dict["sparse"], strict=True):
            # names and tables are those of this run's rules
            group.update({key: stored[key] for key in stored if key not in ("name", "tables")})
        self.param_groups = self.dense.param_groups + self.sparse_groups
        self.state = self.dense.state


def hybrid(dense: Optimizer, collections: Iterable[Any]) -> HybridOptimizer:
    """Return the optimiser of a model.

    Args:
        dense: The optimiser of its dense part.
        collections: Its sharded collections, each with `param_groups`.
    """
    return HybridOptimizer(dense, [group for c in collections for group in c.param_groups])
