"""What is around the part of a step that is recorded where lookups are cut out of it: on several
ranks, and where tables need the host (`recapp/engine/cut_lookup.py`).

    before    the lookups of the batch (`CutLookups`)
    after     the average of dense gradients over the ranks; if one stops, all do (`OfRanks`)

A rank may record, run or launch the part in between, whatever the others do: all of them send the
same messages in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recapp.engine.cut_lookup import CutLookup
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError, IdError, RankError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import average_over_ranks
from recapp.transport.step_messages import hook_of


class OfRanks(NamedTuple):
    """What makes several ranks train like one.

    Args:
        share: Returns the factor of this rank's loss in the batch that was looked up last.
        average: Replaces tensors by their averages over the ranks.
        ddp: The DDP that these averages replace, if there is one.
    """

    share: Callable[[], float]
    average: Callable[[Sequence[Tensor]], None]
    ddp: DistributedDataParallel | None = None

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which the model's forward and backward send no dense gradients."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def take_over(self) -> None:
        """Refuse training calls whose gradients DDP itself would average, from now on: the nodes of
        gradients at which it waits for them are gone (`renew_gradient_nodes`).
        """
        if self.ddp is not None:
            self.ddp.register_forward_pre_hook(_refuse)

    def join(self, gradients: Sequence[Tensor], stopped: Tensor) -> None:
        """Average dense gradients, and stop if a rank has stopped. Every rank calls it.

        Args:
            gradients: The gradients of this rank, which their averages replace.
            stopped: Whether this rank has stopped, which becomes whether one has.
        """
        here = stopped.float()
        self.average([*gradients, here])
        torch.gt(here, 0, out=stopped)


def ranks_of_loop(model: nn.Module, dense: Iterable[Tensor]) -> OfRanks | None:
    """Return what DDP does for a model in a loop of the user: gradients are averaged, and losses
    stay as they are. Return None where no DDP, or one that does more, wraps all that is trained.

    Args:
        model: The model.
        dense: The parameters that are trained.
    """
    wrappers = (part for part in model.modules() if isinstance(part, DistributedDataParallel))
    ddp = next(wrappers, None)
    if ddp is None or not {*dense} <= {*ddp.parameters()}:
        return None
    hooks = len(ddp._comm_hooks) - (hook_of(ddp) is not None)  # but that of recapp
    syncs = ddp.will_sync_module_buffers()  # type: ignore[no-untyped-call]
    if ddp.static_graph or ddp.find_unused_parameters or syncs or hooks:
        return None
    return OfRanks(lambda: 1.0, partial(average_over_ranks, group=ddp.process_group), ddp)


def _refuse(ddp: nn.Module, _: object) -> None:
    if ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        raise RuntimeError(
            "graph=True: DDP does not average the gradients of this call any more, because earlier "
            "ones were recorded on several ranks: train all batches by the same loop, or leave "
            "graph=True out"
        )


class CutLookups:
    """The lookups of a batch that are done before its model runs.

    Args:
        tables: The tables of the model.
    """

    def __init__(self, tables: Sequence[ShardedTables]) -> None:
        self._tables = tables

    def are_needed(self, ids: int | None = None) -> bool:
        """Return whether the host takes part in lookups now, so they cannot be recorded.

        Args:
            ids: The number of ids of the batch (`ShardedTables.needs_host`).
        """
        return any(shared.needs_host(ids) for shared in self._tables)

    def waiting(self) -> list[CutLookup]:
        """Return the lookups that wait for the model."""
        return [shared.cut for shared in self._tables if shared.cut is not None]

    @contextmanager
    def of(self, features: KeyedJaggedTensor, is_known: bool) -> Iterator[list[CutLookup]]:
        """Look a batch up for the model that runs within this context. Every rank calls it.

        Args:
            features: The ids of the batch.
            is_known: Whether the model looks up these ids. Where it may look up others, an error of
                these is left to the model: there are no lookups then.
        """
        try:
            try:
                for shared in self._tables:
                    shared.cut = shared.cut_lookup(features)
            except (ConfigError, IdError, RankError):
                if is_known:
                    raise
                self._drop()
            yield self.waiting()
        finally:
            self._drop()

    def give(self, cuts: Sequence[CutLookup], features: KeyedJaggedTensor) -> None:
        """Let the model read other lookups within the context.

        Args:
            cuts: The lookups.
            features: The ids with which it is called.
        """
        for shared, cut in zip(self._tables, cuts, strict=True):
            cut.features = features
            shared.cut = cut

    def _drop(self) -> None:
        for shared in self._tables:
            shared.cut = None
