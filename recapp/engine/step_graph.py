"""Training steps of one rank on a GPU as one CUDA graph: forward, loss, backward, the update of the
tables and the dense optimiser's step start with one launch, and the host waits for nothing.

    step = StepGraph(model, loss, optimizer)
    for batch in batches:
        value = step(batch)
    step.finish()

    a form of batches comes for the fourth time    the step is recorded; the batch is trained
    a batch that fits a recorded step              its tensors are copied to those of the recorded
                                                   one, the rates to theirs; the graph runs
    another batch                                  the same kernels, launched one by one: same bits

Batches of one form have as many samples, and features of bags may have any number of ids. Where
the batches before had as many (one id a bag, or another fixed number), the recorded one fits those
that have as many. Otherwise it has room behind the ids of each feature, and the device counts those
that are there: it reads no others. After three batches that do not fit, the fourth is recorded with
more room. At most `MOST_GRAPHS` steps are recorded; they share their memory.

Where a batch has room, the flat values of all features are no use: a model that reads ids itself
takes those of `batch.sparse[key]`, of which there may be more than its bags hold. For a model that
weighs ids itself, no batch has room. Batches with tensors that need a gradient are not recorded.

Nobody waits for the verdict on a batch, so it stops the step itself: an id that is an error, or a
loss that is not finite, sets a number on the device. Where it is set, tables and dense optimiser
stay as they are, in this step and all later ones. The host reads it up to `MOST_UNREAD` steps
later, and raises the error of that step.

No GPU has run this file yet: the tests record steps without one, and repeat them on other batches.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from recapp.console import note_once
from recapp.engine.cut_lookup import CutLookup
from recapp.engine.fused_integers import FusedBatch
from recapp.engine.sharded_collection import sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import TrainingError
from recapp.kernels.links import DeviceRate, Scratch
from recapp.optim.optimizer import HybridOptimizer
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import start_to_host
from recapp.tables.ids import OutsideTable
from recapp.transport.communicator import SideStream, average_over_ranks

WARM_UP = 3  # steps before a form is recorded: kernels are compiled, memory has its size
MOST_GRAPHS = 3
SLACK = 0.1  # of the largest number of ids, free for batches with more
MOST_UNREAD = 2  # steps whose verdict the host has not read
FORMS_KEPT = 64  # forms of batches whose steps are counted

# Records the work that a function gives the device, without doing it, and returns the function's
# result and a function that does the work.
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


@runtime_checkable
class Samples(Protocol):
    """What a graph knows of a batch: `Batch` of recapp and that of TorchRec's examples."""

    @property
    def sparse(self) -> KeyedJaggedTensor:
        """The ids of the tables."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with `change` applied to each tensor."""


class _Left(NamedTuple):
    """What a recorded step leaves in its memory: its result; and, where the lookups are cut, the
    vectors that it reads, with their gradients, and the gradients of the dense part.
    """

    result: Any
    cuts: Sequence[CutLookup] = ()
    dense: Mapping[nn.Parameter, Tensor] = {}


class _Recorded(NamedTuple):
    """A recorded step: the form of its batches, whether they may have fewer ids than the batch that
    it reads, this batch, what it leaves, the function that runs it, the integers whose reports it
    writes, and the memory that it needs.
    """

    form: Hashable
    has_room: bool
    batch: Samples
    left: _Left
    replay: Callable[[], None]
    integers: list[FusedBatch]
    leases: list[list[Scratch]]

    def takes(self, form: Hashable, per_F: list[int]) -> bool:
        """Return whether a batch with some ids of each feature fits."""
        room_F = self.batch.sparse.length_per_key()
        return self.form == form and (
            per_F == room_F
            or (self.has_room and all(n <= room for n, room in zip(per_F, room_F, strict=True)))
        )


class _Unread(NamedTuple):
    """A step whose verdict is under way: its number and batch, the verdict and the reports on the
    host, and the event at the end of the copies.
    """

    step: int
    batch: Samples
    stopped: Tensor
    reports: list[tuple[FusedBatch, Tensor]]
    arrived: Any


class StepGraph:
    """Run the training steps of one rank, as graphs where that is possible.

    Args:
        model: The model, sharded on one rank.
        loss: Returns the loss of a batch from the model and the batch, a scalar; or a tuple of the
            loss and an output, whose tensors may be in tuples, lists and dicts.
        optimizer: The optimiser, one of torch's with `fused=True`, or a `HybridOptimizer` of such a
            one. Its param groups stay as they are; each step brings their rates to the device.
        capture: Records a step; None records a CUDA graph.
        share: Returns the factor of this rank's loss in the last lookup's batch, by which several
            ranks train like one; None where a single rank trains.

    Attributes:
        why_not: The reason why steps are launched one by one, which is noted once; empty while they
            are recorded. Where the device could not stop a step, steps are those of an ordinary
            loop, and errors of ids are raised at once.
        steps: The number of steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Any],
        optimizer: Optimizer,
        capture: Capture | None = None,
        share: Callable[[], float] | None = None,
    ) -> None:
        self.share = share
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.tables = sharded_tables(model)
        self.steps = 0
        device = next(model.parameters()).device
        self._dense = optimizer.dense if isinstance(optimizer, HybridOptimizer) else optimizer
        self.why_not = "" if capture or device.type == "cuda" else f"the model is on the {device}"
        self.why_not = self.why_not or obstacle(self.tables, self._dense, share is not None)
        self._stops = not self.why_not
        if self.why_not:
            self._note()
        self._graphs: list[_Recorded] = []
        self._unfit = defaultdict[Hashable, list[list[int]]](list)  # numbers of ids, by form
        lookups = [x for t in self.tables for x in t.state.layout.lookups]
        self._pooled = {x.feature for x in lookups} - {x.feature for x in lookups if not x.columns}
        self._unread: deque[_Unread] = deque()
        self._stopped = torch.zeros(1, dtype=torch.int32, device=device)
        self._found_inf = torch.zeros((), device=device)
        if not self._stops:
            return
        self._capture = capture or partial(_cuda_graph, torch.cuda.graph_pool_handle())
        self._dense.found_inf = self._found_inf  # type: ignore[attr-defined]
        sizes = [4 * len(t.update.rules) for t in self.tables]
        sizes += [len(self._dense.param_groups), 1]
        self._header = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        *self._numbers, self._rates, self._share = torch.split(self._header, sizes)
        self.cuts = any(shared.needs_host for shared in self.tables)
        if self.cuts and len(self._pooled) < len({x.feature for x in lookups}):
            self.why_not = "the host takes part in lookups whose vectors are not sums of bags"
            self._note()
        for shared in () if self.cuts else self.tables:
            shared.comm.side = SideStream()  # a graph has one stream

    def __call__(self, batch: Samples) -> Any:
        """Train on a batch that is on the device, and return what `loss` has returned.

        Raises:
            IdError: An id of one of the last batches is outside of its table. Nothing was trained
                since.
            TrainingError: The loss of one of the last batches was not finite. Nothing was trained
                since.
        """
        self._settle(MOST_UNREAD - 1)
        self.steps += 1
        if not self._stops:
            return self._step(batch)
        with self._cut(batch):
            self._write_rates()
            return self._train(batch)

    def _train(self, batch: Samples) -> Any:
        """Train on a batch by the recorded step that it fits; by one that is recorded now, or
        launch by launch, if there is none.
        """
        form = self._form(batch)
        per_F = batch.sparse.length_per_key()
        weighted = batch.sparse.weights_or_none() is not None
        recorded = next((one for one in self._graphs if one.takes(form, per_F)), None)
        learns = any(x.requires_grad for x in batch.tensors())
        can_record = not self.why_not and not learns and len(self._graphs) < MOST_GRAPHS
        if recorded is None and can_record:
            if len(self._unfit) == FORMS_KEPT:
                self._unfit.clear()
            self._unfit[form].append(per_F)
            if len(self._unfit[form]) % (WARM_UP + 1) == 0:
                return self._recorded(form, batch)
        if recorded is None:
            with self._unwatched() as integers:
                result = self._step(batch)
            self._copy_verdict(batch, integers)
            if any(one.rows.weights_L is not None for one in integers) and not weighted:
                self._pooled.clear()  # the model weighs the flat ids itself
            return result
        left = recorded.left
        _copy(recorded.batch, batch)
        for there, here in zip(left.cuts, self._all_cut(), strict=True):
            there.fill(here)
        recorded.replay()
        if self.cuts:
            with self._unwatched():
                self._update([cut.gradients for cut in left.cuts], left.dense)
        else:
            for shared in self.tables:
                shared.update.count()
        self._copy_verdict(batch, recorded.integers)
        return tree_map_only(Tensor, Tensor.clone, left.result)

    @contextmanager
    def _cut(self, batch: Samples) -> Iterator[None]:
        """Do the lookups of a batch before its model runs, if they need the host."""
        for shared in self.tables if self.cuts else ():
            shared.cut = shared.cut_lookup(batch.sparse)
        try:
            yield
        finally:
            for shared in self.tables:
                shared.cut = None

    def _all_cut(self) -> list[CutLookup]:
        """Return the lookups of the batch that were done before its model runs."""
        return [shared.cut for shared in self.tables if shared.cut is not None]

    def finish(self) -> None:
        """Wait for the last steps, and raise their errors, as a call does."""
        self._settle(0)

    def _form(self, batch: Samples) -> Hashable:
        """Return what batches of one form have in common."""
        ids = batch.sparse
        of_ids = ids.values(), ids.weights_or_none()
        shapes = tuple(
            (x.dtype, x.requires_grad, any(x is y for y in of_ids) or x.shape)
            for x in batch.tensors()
        )
        of_keys = zip(ids.keys(), ids.stride_per_key(), ids.length_per_key(), strict=True)
        keys = tuple((key, bags, key in self._pooled or n) for key, bags, n in of_keys)
        vectors = tuple(value.shape for cut in self._all_cut() for value in cut.values)
        return self.model.training, keys, shapes, vectors

    def _step(self, batch: Samples) -> Any:
        """Train on a batch, unless the device has stopped."""
        result = self._computed(batch)
        cuts = self._all_cut()
        if not all(cut.is_read for cut in cuts):
            self.why_not = "the model looks up other ids than those of the batch"
            self.cuts = False
            self._note()
        self._update([cut.gradients for cut in cuts], _gradients(self._dense))
        return result

    def _computed(self, batch: Samples) -> Any:
        """Compute the gradients of a batch, and whether its loss is finite."""
        self.optimizer.zero_grad(set_to_none=True)
        result = self.loss(self.model, batch)
        loss = result if isinstance(result, Tensor) else result[0]
        if self._stops:
            self._stopped.logical_or_(~loss.detach().isfinite())
        if self.share is not None:
            loss = loss * self._share[0].to(loss.dtype)
        loss.backward()
        return tree_map_only(Tensor, Tensor.detach, result)

    def _update(
        self, gradients: Sequence[Sequence[Tensor | None]], dense: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Update the tables whose lookups were cut, and the dense part. Several ranks average its
        gradients, and stop together.

        Args:
            gradients: The gradients of the vectors of each cut lookup.
            dense: The gradients of the dense part.
        """
        if self.share is not None:
            stopped = self._stopped.float()
            average_over_ranks([*dense.values(), stopped])
            self._stopped.logical_or_(stopped > 0)
        for cut, of_cut in zip(self._all_cut(), gradients, strict=True):
            cut.update(of_cut)
        for parameter, gradient in dense.items():
            parameter.grad = gradient
        with self._rates_on_device() if self._stops else nullcontext():
            self.optimizer.step()

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Let the dense optimiser read its rates, and whether it has stopped, on the device."""
        self._found_inf.copy_(self._stopped[0])
        groups = self._dense.param_groups
        self._dense.param_groups = [
            group | {"lr": rate, "capturable": rate.is_cuda}
            for group, rate in zip(groups, self._rates.float().unbind(), strict=True)
        ]
        try:
            yield
        finally:
            self._dense.param_groups = groups

    def _recorded(self, form: Hashable, batch: Samples) -> Any:
        """Train on a batch, then record the same step for other batches of its form."""
        room_F = _room(self._unfit[form])
        has_room = room_F != batch.sparse.length_per_key()
        static = batch.each(torch.clone)
        static.sparse.make_room(room_F)
        _copy(static, batch)
        leases = [[Scratch(t.comm.device) for _ in t.state.routes] for t in self.tables]
        with self._unwatched(has_room) as integers:
            result = self._step(batch) if self.cuts else self._step_with(leases, static).result
        self._copy_verdict(batch, integers)
        updates = [t.update.updates for t in self.tables]
        record = partial(self._step_with, leases)
        if self.cuts:
            record = partial(self._computed_from, [cut.copy() for cut in self._all_cut()])
        try:
            with self._unwatched(has_room) as integers:
                left, replay = self._capture(partial(record, static))
            self._graphs.append(_Recorded(form, has_room, static, left, replay, integers, leases))
        except RuntimeError as error:  # of torch, such as too little memory
            self.why_not = " ".join(str(error).split())
            self._note()
        for shared, before in zip(self.tables, updates, strict=True):
            shared.update.updates = before
        return result

    def _note(self) -> None:
        note_once(f"StepGraph: steps are launched one by one, without a CUDA graph: {self.why_not}")

    def _step_with(self, leases: list[list[Scratch]], static: Samples) -> _Left:
        """Train on a batch with memory of its own."""
        for shared, lease in zip(self.tables, leases, strict=True):
            shared.state.give_back(lease, trains=True)
        result = self._step(static.each(lambda tensor: tensor))  # which may keep what it computes
        for shared in self.tables:
            shared.state.lease(trains=True)  # the one that was given back last
        return _Left(result)

    def _computed_from(self, cuts: list[CutLookup], static: Samples) -> _Left:
        """Compute the gradients of a batch from vectors with memory of their own."""
        batch = static.each(lambda tensor: tensor)
        for shared, cut in zip(self.tables, cuts, strict=True):
            cut.features = batch.sparse
            shared.cut = cut
        return _Left(self._computed(batch), cuts, _gradients(self._dense))

    @contextmanager
    def _unwatched(self, has_room: bool = False) -> Iterator[list[FusedBatch]]:
        """Let the device judge the ids of the steps in this context, and count them if features
        have free room. Yield the integers whose reports it writes.
        """
        integers: list[FusedBatch] = []
        for shared, numbers in zip(self.tables, self._numbers, strict=True):
            shared.state.stopped = None if self.cuts else self._stopped
            shared.state.unread = integers
            shared.state.counts_ids = has_room
            shared.update.device_rates = [
                DeviceRate(numbers_4, rates, self._stopped)
                for numbers_4, rates in zip(
                    numbers.view(-1, 4), shared.update.rate_counts, strict=True
                )
            ]
        try:
            yield integers
        finally:
            for shared in self.tables:
                shared.state.stopped = None
                shared.state.counts_ids = False
                shared.update.device_rates = None

    def _write_rates(self) -> None:
        """Bring the rates of the next update to the device."""
        numbers = [x for t in self.tables for rule in t.update.next_numbers() for x in rule]
        rates = [group["lr"] for group in self._dense.param_groups]
        share = 1.0 if self.share is None else self.share()
        values = torch.tensor([*numbers, *rates, share], dtype=torch.float64, device="cpu")
        self._header.copy_(values, non_blocking=True)

    def _copy_verdict(self, batch: Samples, integers: list[FusedBatch]) -> None:
        """Start to copy the verdict on a step to the host."""
        on_device = [self._stopped, *(one.report for one in integers)]
        (stopped, *reports), arrived = start_to_host(on_device)
        pairs = list(zip(integers, reports, strict=True))
        self._unread.append(_Unread(self.steps, batch, stopped, pairs, arrived))

    def _settle(self, most: int) -> None:
        """Read verdicts until at most some are unread."""
        while len(self._unread) > most:
            unread = self._unread.popleft()
            if unread.arrived is not None:
                unread.arrived.synchronize()
            if int(unread.stopped):
                self._unread.clear()
                self._raise(unread)
            for integers, report in unread.reports:
                integers.check(report.tolist())

    def _raise(self, unread: _Unread) -> None:
        """Raise the error of the step that has stopped."""
        for shared in self.tables:
            try:
                _, check = shared.state.rows_of(unread.batch.sparse, [True] * len(shared.members))
                check()
            except OutsideTable as error:
                raise error.at(f" (step {unread.step})") from None
        raise TrainingError(
            f"step {unread.step}: the loss is not finite; the weights are those before that step: "
            "lower the learning rate, or look for extreme values in the batch"
        )


def obstacle(tables: list[ShardedTables], dense: Optimizer, averages: bool = False) -> str:
    """Return the reason why the device cannot stop a step; empty if it can.

    Args:
        tables: The tables of the model.
        dense: The optimiser of the dense part.
        averages: Whether the step averages dense gradients over the ranks.
    """
    for shared in tables:
        if shared.comm.world > 1 and not averages:
            return "several ranks average their dense gradients as their own loop says"
        if why := shared.why_unstoppable():
            return why
    kinds = {p.dtype for group in dense.param_groups for p in group["params"]}
    if averages and len(kinds) > 1:
        return f"dense weights of {len(kinds)} types are not averaged at once"
    unfused = [group for group in dense.param_groups if not group.get("fused")]
    if not unfused:
        return ""
    return (
        f"{type(dense).__name__}(fused={unfused[0].get('fused')}) cannot be stopped by the device: "
        "make a torch.optim.Adam, AdamW, SGD or Adagrad with fused=True"
    )


def _gradients(dense: Optimizer) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of the dense part."""
    parameters = [p for group in dense.param_groups for p in group["params"]]
    return {p: p.grad for p in parameters if p.grad is not None}


def _room(numbers_TF: list[list[int]]) -> list[int]:
    """Return the room for ids of each feature in a step that is recorded for batches like some: the
    number of ids if it is always the same, otherwise a number above it, rounded up to an eighth of
    a power of two.
    """
    most_F = np.max(numbers_TF, 0)
    changes_F = np.ptp(numbers_TF, 0) > 0
    above_F = np.maximum((1 + SLACK) * most_F, 8)
    eighth_F = 2 ** np.ceil(np.log2(above_F)) / 8
    room_F = np.ceil(above_F / eighth_F) * eighth_F
    return [int(n) for n in np.where(changes_F, room_F, most_F)]


def _copy(static: Samples, batch: Samples) -> None:
    """Copy a batch to the tensors of a recorded one: ids feature by feature, if that has room."""
    per_F = batch.sparse.length_per_key()
    room_F = static.sparse.length_per_key()
    sizes = [size for n, room in zip(per_F, room_F, strict=True) for size in (n, room - n)]
    of_ids = static.sparse.values(), static.sparse.weights_or_none()
    to = list[Tensor]()
    of = list[Tensor]()
    for there, here in zip(static.tensors(), batch.tensors(), strict=True):
        values = here[: sum(per_F)] if any(there is x for x in of_ids) else here
        if len(there) == len(values):
            to.append(there)
            of.append(values)
        else:
            parts_F = torch.split(there, sizes)[::2]
            torch._foreach_copy_(parts_F, torch.split(values, per_F), non_blocking=True)
    torch._foreach_copy_(to, of, non_blocking=True)


def _cuda_graph(pool: Any, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a step as a CUDA graph. Graphs may share the memory of a pool, because one runs after
    the other, and nobody reads what it leaves there but its result.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        result = step()
    return result, graph.replay
