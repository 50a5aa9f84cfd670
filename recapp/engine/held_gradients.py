"""Gradients of touched rows that wait for the step of an optimiser that clips them.

    backward                owners sum each touched row's gradient, and keep it
    optimizer.step()        the norm of all gradients: one number from each rank to each other
                            rows' gradients are scaled; the update

The norm counts each row once: the strips of a row add up, and of replicas only the rows of rank 0
count. A guest of a dynamic table gets no row and does not count. The held memory is the touched
rows in the compute type, and 8 bytes per row.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from recapp.engine.fused_update import FusedUpdate
from recapp.engine.state import EngineState
from recapp.errors import ConfigError
from recapp.optim.rules import GRADIENT
from recapp.optim.table_gradients import joined
from recapp.transport.communicator import Comm


class HeldGradients:
    """The held gradients of the tables of one exchange (`recapp/optim/table_gradients.py`).

    Args:
        state: The engine state of the tables.
        update: The fused update of the tables.
    """

    def __init__(self, state: EngineState, update: FusedUpdate) -> None:
        self.state = state
        self.update = update

    def defer(self, optimizer: object) -> None:
        """Defer updates to `end_step` from now on.

        Args:
            optimizer: The optimiser that calls `end_step` in its step. It must live as long as the
                tables train.

        Raises:
            ConfigError: Some tables are parameters, whose gradients are complete when backward
                ends.
        """
        if GRADIENT in self.update.rules:
            tables = self.state.layout.tables_of_rule(self.update.rules.index(GRADIENT))
            raise ConfigError(
                f"tables {', '.join(tables)} are parameters (compute kernel dense): they and "
                "tables that a rule updates cannot be clipped together: leave the kernel of these "
                "tables open, or clip the dense part alone"
            )
        self.update.defer(optimizer)

    def power_sum(self, order: float, dense: float) -> float:
        """Return the sum of |g|^order over all elements of the gradients, in fp64, or the maximum
        of |g|.

        Args:
            order: The exponent, or infinity for the maximum.
            dense: The same sum or maximum over the other gradients. Only the value of rank 0
                counts.
        """
        comm = self.state.comm
        parts = [0.0 if comm.rank else dense, *(_power(x, order) for x in self._counted())]
        return joined(_from_ranks(comm, joined(parts, order)), order)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        for _, gradients in self.update.held():
            gradients.mul_(factor)

    def clamp(self, most: float) -> None:
        """Clamp the elements of the gradients to [-most, most]."""
        for _, gradients in self.update.held():
            gradients.clamp_(-most, most)

    def end_step(self) -> None:
        """Update the rows with the held gradients. Do nothing where updates are not deferred."""
        if self.update.deferred:
            self.state.observer.begins()
            self.update.end_step()
            self.state.observer.ends("update")

    def drop(self) -> None:
        """Drop the held gradients. Do nothing where updates are not deferred."""
        if self.update.deferred:
            self.update.drop()

    def _counted(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank counts."""
        state = self.state
        groups = state.layout.groups
        for group, store, (row_U, gradients) in zip(
            groups, state.stores, self.update.held(), strict=False
        ):
            if group.mode == "replicated" and state.comm.rank:
                continue
            trained_U = store.trained(row_U)
            if trained_U is None:
                yield gradients
            else:
                yield gradients.view(-1, store.width)[trained_U]


def _power(values: Tensor, order: float) -> float:
    """Return the sum of |value|^order, or the maximum of |value| where the order is infinity."""
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values, order, dtype=torch.float64))
    return norm if math.isinf(order) else norm**order


def _from_ranks(comm: Comm, value: float) -> list[float]:
    """Return the number of every rank, in rank order."""
    buffer = torch.full((comm.world,), value, dtype=torch.float64, device=comm.device)
    own = [(comm.rank, comm.rank + 1)] * comm.world
    comm.swap(buffer, own, [(rank, rank + 1) for rank in range(comm.world)])()
    found: list[float] = buffer.tolist()
    return found
