"""Training steps of one rank on a GPU as one CUDA graph: forward, loss, backward, the update of the
tables and the dense optimiser's step start with one launch, and the host waits for nothing.

    step = StepGraph(model, loss, optimizer)
    for batch in batches:
        value = step(batch)
    step.finish()

    a form of batches comes for the fourth time    the step is recorded; the batch is trained
    a batch of a recorded form                     its tensors are copied to those of the recorded
                                                   one, the rates to theirs; the graph runs
    another batch                                  the same kernels, launched one by one: same bits

Batches of one form have tensors of the same shapes, and each feature has as many ids: one id a bag,
or another fixed number. At most `MOST_GRAPHS` forms are recorded.

Nobody waits for the verdict on a batch, so it stops the step itself: an id that is an error, or a
loss that is not finite, sets a number on the device. Where it is set, tables and dense optimiser
stay as they are, in this step and all later ones. The host reads it up to `MOST_UNREAD` steps
later, and raises the error of that step.

No GPU has run this file yet: the tests record steps without one, and repeat them on other batches.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.console import note_once
from recapp.engine.fused_integers import FusedBatch
from recapp.engine.sharded_collection import sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import TrainingError
from recapp.kernels.links import DeviceRate, Scratch
from recapp.optim.optimizer import HybridOptimizer
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.transfer import start_to_host
from recapp.tables.ids import OutsideTable
from recapp.transport.communicator import SideStream

WARM_UP = 3  # steps before a form is recorded: kernels are compiled, memory has its size
MOST_GRAPHS = 3  # each keeps the memory of a step
MOST_UNREAD = 2  # steps whose verdict the host has not read

# Records the work that a function gives the device, without doing it, and returns the function's
# result and a function that does the work.
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class _Recorded(NamedTuple):
    """A recorded step: the batch that it reads, its loss, the function that runs it, the integers
    whose reports it writes, and the memory that it needs.
    """

    batch: Batch
    loss: Tensor
    replay: Callable[[], None]
    integers: list[FusedBatch]
    leases: list[list[Scratch]]


class _Unread(NamedTuple):
    """A step whose verdict is under way: its number and batch, the verdict and the reports on the
    host, and the event at the end of the copies.
    """

    step: int
    batch: Batch
    stopped: Tensor
    reports: list[tuple[FusedBatch, Tensor]]
    arrived: Any


class StepGraph:
    """Run the training steps of one rank, as graphs where that is possible.

    Args:
        model: The model, sharded on one rank.
        loss: Returns the loss of a batch from the model and the batch, a scalar.
        optimizer: The optimiser, one of torch's with `fused=True`, or a `HybridOptimizer` of such a
            one. Its param groups stay as they are; each step brings their rates to the device.
        capture: Records a step; None records a CUDA graph.

    Attributes:
        why_not: The reason why steps are launched one by one, which is noted once; empty while they
            are recorded. Where the device could not stop a step, steps are those of an ordinary
            loop, and errors of ids are raised at once.
        steps: The number of steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        optimizer: Optimizer,
        capture: Capture | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.tables = sharded_tables(model)
        self.steps = 0
        device = next(model.parameters()).device
        self._dense = optimizer.dense if isinstance(optimizer, HybridOptimizer) else optimizer
        self.why_not = "" if capture or device.type == "cuda" else f"the model is on the {device}"
        self.why_not = self.why_not or obstacle(self.tables, self._dense)
        self._stops = not self.why_not
        if self.why_not:
            self._note()
        self._capture = capture or _cuda_graph
        self._graphs: dict[Hashable, _Recorded] = {}
        self._seen: Counter[Hashable] = Counter()
        self._unread: deque[_Unread] = deque()
        self._stopped = torch.zeros(1, dtype=torch.int32, device=device)
        self._found_inf = torch.zeros((), device=device)
        if not self._stops:
            return
        self._dense.found_inf = self._found_inf  # type: ignore[attr-defined]
        sizes = [4 * len(t.update.rules) for t in self.tables]
        sizes.append(len(self._dense.param_groups))
        self._header = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        *self._numbers, self._rates = torch.split(self._header, sizes)
        for shared in self.tables:
            shared.comm.side = SideStream()  # a graph has one stream

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch that is on the device, and return its loss.

        Raises:
            IdError: An id of one of the last batches is outside of its table. Nothing was trained
                since.
            TrainingError: The loss of one of the last batches was not finite. Nothing was trained
                since.
        """
        self._settle(MOST_UNREAD - 1)
        self.steps += 1
        if not self._stops:
            return self._step(batch).detach()
        form = _form(self.model, batch)
        recorded = self._graphs.get(form)
        self._write_rates()
        if recorded is None and not self.why_not and len(self._graphs) < MOST_GRAPHS:
            self._seen[form] += 1
            if self._seen[form] > WARM_UP:
                return self._recorded(form, batch)
        if recorded is None:
            with self._unwatched() as integers:
                loss = self._step(batch).detach()
            self._copy_verdict(batch, integers)
            return loss
        torch._foreach_copy_(recorded.batch.tensors(), batch.tensors(), non_blocking=True)
        recorded.replay()
        for shared in self.tables:
            shared.update.count()
        self._copy_verdict(batch, recorded.integers)
        return recorded.loss.clone()

    def finish(self) -> None:
        """Wait for the last steps, and raise their errors, as a call does."""
        self._settle(0)

    def _step(self, batch: Batch) -> Tensor:
        """Train on a batch, unless the device has stopped."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch)
        if self._stops:
            self._stopped.logical_or_(~loss.detach().isfinite())
        loss.backward()  # type: ignore[no-untyped-call]
        with self._rates_on_device() if self._stops else nullcontext():
            self.optimizer.step()
        return loss

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

    def _recorded(self, form: Hashable, batch: Batch) -> Tensor:
        """Train on a batch, then record the same step for other batches of its form."""
        static = batch.each(torch.clone)
        leases = [[Scratch(t.comm.device) for _ in t.state.routes] for t in self.tables]
        loss = self._step_with(leases, static)
        updates = [t.update.updates for t in self.tables]
        try:
            with self._unwatched() as integers:
                captured, replay = self._capture(lambda: self._step_with(leases, static, False))
            self._graphs[form] = _Recorded(static, captured.detach(), replay, integers, leases)
        except RuntimeError as error:  # of torch, such as too little memory
            self.why_not = " ".join(str(error).split())
            self._note()
        for shared, before in zip(self.tables, updates, strict=True):
            shared.update.updates = before
        return loss

    def _note(self) -> None:
        note_once(f"StepGraph: steps are launched one by one, without a CUDA graph: {self.why_not}")

    def _step_with(self, leases: list[list[Scratch]], batch: Batch, watched: bool = True) -> Tensor:
        """Train on a batch with memory of its own; if `watched`, copy its verdict to the host."""
        for shared, lease in zip(self.tables, leases, strict=True):
            shared.state.give_back(lease, trains=True)
        if watched:
            with self._unwatched() as integers:
                loss = self._step(batch).detach()
            self._copy_verdict(batch.each(torch.clone), integers)
        else:
            loss = self._step(batch)
        for shared in self.tables:
            shared.state.lease(trains=True)  # the one that was given back last
        return loss

    @contextmanager
    def _unwatched(self) -> Iterator[list[FusedBatch]]:
        """Let the device judge the ids of the steps in this context. Yield the integers whose
        reports it writes.
        """
        integers: list[FusedBatch] = []
        for shared, numbers in zip(self.tables, self._numbers, strict=True):
            shared.state.stopped = self._stopped
            shared.state.unread = integers
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
                shared.update.device_rates = None

    def _write_rates(self) -> None:
        """Bring the rates of the next update to the device."""
        numbers = [x for t in self.tables for rule in t.update.next_numbers() for x in rule]
        rates = [group["lr"] for group in self._dense.param_groups]
        values = torch.tensor([*numbers, *rates], dtype=torch.float64, device="cpu")
        self._header.copy_(values, non_blocking=True)

    def _copy_verdict(self, batch: Batch, integers: list[FusedBatch]) -> None:
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


def obstacle(tables: list[ShardedTables], dense: Optimizer) -> str:
    """Return the reason why the device cannot stop a step; empty if it can.

    Args:
        tables: The tables of the model.
        dense: The optimiser of the dense part.
    """
    for shared in tables:
        if why := shared.why_no_graph():
            return why
    unfused = [group for group in dense.param_groups if not group.get("fused")]
    if not unfused:
        return ""
    return (
        f"{type(dense).__name__}(fused={unfused[0].get('fused')}) cannot be stopped by the device: "
        "make a torch.optim.Adam, AdamW, SGD or Adagrad with fused=True"
    )


def _form(model: nn.Module, batch: Batch) -> Hashable:
    """Return what batches of one graph have in common."""
    shapes = tuple((x.shape, x.dtype) for x in batch.tensors())
    ids = batch.sparse
    return model.training, tuple(ids.keys()), tuple(ids.length_per_key()), shapes


def _cuda_graph(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record a step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()
    return loss, graph.replay
