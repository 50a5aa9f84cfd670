"""The optimiser of sharded tables as an optimiser object, TorchRec's `fused_optimizer`.

Backward updates the tables, so `step` and `zero_grad` do nothing, unless an optimiser that clips
gradients defers the update (`recapp/optim/clipping.py`). The object serves everything else that a
program does with an optimiser: read and set the learning rate, print it, save and load its state
with that of the dense optimiser (TorchRec's `CombinedOptimizer`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from recapp.engine.sharded_state import load_strips
from recapp.engine.table_strips import TableStrips
from recapp.errors import ConfigError
from recapp.optim.keyed import KeyedOptimizer
from recapp.optim.optimizer import TableGradients, run_closure
from recapp.sharding.layout import Block
from recapp.tables.config import EmbeddingConfig


class FusedOptimizer(KeyedOptimizer):
    """The fused updates of some sharded collections.

    `param_groups` are the live param groups: a learning rate that a user or a schedule sets there
    applies from the next backward on. `params` has the config of each table by the name of its
    weight in the unsharded model.

    Args:
        collections: Sharded collections by path. The path is empty where the model itself is the
            collection.

    Raises:
        ConfigError: The tables are read-only.
    """

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self.collections = dict(collections)
        params = {
            _name(path, collection, table.name): table
            for path, collection in self.collections.items()
            for table in _updated_here(collection)
        }
        self.shared = list(dict.fromkeys(c.shared for c in self.collections.values()))
        groups = [group for shared in self.shared for group in shared.param_groups]
        super().__init__(params, {}, groups)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, and update the tables if their update was deferred. Else backward
        has updated them. Every rank calls it.
        """
        loss = run_closure(closure)
        for gradients in self.table_gradients:
            gradients.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a deferred update. Without one, tables have no gradients."""
        for gradients in self.table_gradients:
            gradients.drop()

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the held gradients of each exchange, for deferred updates."""
        return [shared.update for shared in self.shared]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's strips of the optimiser's state. Every rank calls it.

        Each tensor consists of strips, as tables do in the state dict of the model. `updates` is
        the number of updates of the table.
        """
        state: dict[str, dict[str, Any]] = {}
        for path, collection in self.collections.items():
            configs = {table.name: table for table in collection.tables()}
            for table, tensors in _state_blocks(collection).items():
                shared = collection.shared
                held: dict[str, Any] = {
                    part: TableStrips.of(
                        blocks,
                        configs[table],
                        blocks[0].shape[1],
                        shared.state.layout,
                        shared.comm.rank,
                    )
                    for part, blocks in tensors.items()
                }
                held[_UPDATES] = torch.tensor(collection.shared.updates, device="cpu")
                state[_name(path, collection, table)] = held
        return {"state": state} | self._stored_groups()

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the sorted names of the weights in a param group."""
        return sorted(
            _name(path, collection, table)
            for path, collection in self.collections.items()
            if any(group is own for own in collection.shared.param_groups)
            for table in (t.name for t in collection.tables())
            if table in group["tables"]
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` on a rank that holds the same rectangles, or load whole
        tensors. Every rank calls it.

        Raises:
            ConfigError: A table is missing, or its state does not fit.
        """
        self.check_names(state_dict["state"])
        for path, collection in self.collections.items():
            for table, tensors in _state_blocks(collection).items():
                weight = _name(path, collection, table)
                stored = state_dict["state"].get(weight, {})
                for name, held in tensors.items():
                    _load(f"{weight}, {name}", stored.get(name), held)
                if _UPDATES not in stored:
                    raise ConfigError(f"the state has no entry for {weight}, {_UPDATES}")
                collection.shared.updates = int(stored[_UPDATES])
        self.load_groups(state_dict)

    def __repr__(self) -> str:
        groups = ", ".join(f"{g['name']}, lr {g['lr']:g}" for g in self.param_groups)
        return f"FusedOptimizer({len(self.params)} tables: {groups})"


_UPDATES = "updates"
"""The entry of a table's state that counts its updates."""


def _name(path: str, collection: Any, table: str) -> str:
    return f"{path}.{collection.weight_name(table)}".removeprefix(".")


def _updated_here(collection: Any) -> list[EmbeddingConfig]:
    """Return the tables of a collection that backward updates, without those that are
    parameters.
    """
    return [t for t in collection.tables() if t.name not in collection.parameters_of]


def _state_blocks(collection: Any) -> dict[str, dict[str, list[Block]]]:
    """Return this rank's blocks of the optimiser's state, by table and by tensor.

    Raises:
        ConfigError: A table is dynamic.
    """
    for table in _updated_here(collection):
        if table.dynamic is not None:
            raise ConfigError(
                f"table {table.name} is dynamic: the state of its rows is in checkpoints and not "
                "in state dicts: save it with recapp.stored.checkpoint.write_checkpoint"
            )
    held: dict[str, dict[str, list[Block]]] = {t.name: {} for t in _updated_here(collection)}
    for block in collection.blocks():
        if block.tensor != "weight":
            held[block.table].setdefault(block.tensor, []).append(block)
    return held


def _load(name: str, value: Any, held: list[Block]) -> None:
    if value is None:
        raise ConfigError(f"the state has no entry for {name}")
    fault = load_strips(value, held, held[0].shape, held[0].data.dtype)
    if fault:
        raise ConfigError(f"{name}: {fault}")
