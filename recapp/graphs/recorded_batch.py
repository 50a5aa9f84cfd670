"""What recorded steps share: the batch that they read, and the verdict of the device, for which
nobody waits.

A recorded step knows one batch, to whose tensors those of later batches are copied:

    form      what batches must share with the recorded one: keys, samples, types, shapes; a model
              whose parameters have the same memory, and of which the same parts are trained
    memory    of all tensors, one; a batch that lies in memory like it comes by one copy
    room      for the ids of each feature; the device counts those that are there

A form is recorded when it has come `WARM_UP` times before, and no recorded step takes its batch.

An id that is an error, or a loss that is not finite, sets a number on the device, `stopped`. Where
it is set, tables stay as they are, in this step and all later ones:

    watch     the device judges the ids of the lookups in this context; updates read there what
              their rates are, and whether they have to stop
    copy      the verdict on a step goes to the host
    settle    the host reads verdicts, up to `MOST_UNREAD` steps later, and raises the error

After the error, batches train again: those since the faulty one have changed nothing.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.engine.fused_integers import FusedBatch
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import TrainingError
from recapp.kernels.links import DeviceRate, Scratch, rate_numbers
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import Packed, copy_each, start_to_host
from recapp.tables.collections import SequenceTables
from recapp.tables.ids import OutsideTable
from recapp.transport.communicator import SideStream

WARM_UP = 3  # steps before a form is recorded: kernels are compiled, memory has its size
SLACK = 0.1  # of the largest number of ids, free for batches with more
FORMS_KEPT = 64  # whose batches are counted
MOST_UNREAD = 2  # steps whose verdict the host has not read

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


class StaticBatch:
    """The batch that a recorded step reads, and the memory of its lookups.

    Args:
        form: The form of its batches.
        batch: The first one.
        room_F: The room for ids of each feature.
        tables: The tables of the model.

    `samples` is the batch, and `has_room` whether others may have fewer ids.
    """

    def __init__(
        self, form: Hashable, batch: Samples, room_F: list[int], tables: list[ShardedTables]
    ) -> None:
        self.form = form
        self.has_room = room_F != batch.sparse.length_per_key()
        samples = batch.each(lambda x: _once(x).detach().clone().expand(x.shape))
        samples.sparse.make_room(room_F)
        self._packed = Packed([*map(_once, samples.tensors())], tables[0].comm.device)
        of_batch = zip(samples.tensors(), self._packed.nested, batch.tensors(), strict=True)
        views = {
            id(x): view.expand(x.shape).requires_grad_(of.requires_grad) for x, view, of in of_batch
        }
        self.samples = samples.each(lambda x: views[id(x)])
        self.leases = [[Scratch(t.comm.device) for _ in t.state.routes] for t in tables]
        self._tables = tables
        self.fill(batch)

    def takes(self, form: Hashable, per_F: list[int]) -> bool:
        """Return whether a batch with some ids of each feature fits."""
        room_F = self.samples.sparse.length_per_key()
        return self.form == form and (
            per_F == room_F
            or (self.has_room and all(n <= room for n, room in zip(per_F, room_F, strict=True)))
        )

    def fill(self, batch: Samples) -> None:
        """Copy a batch here: ids feature by feature, if there is room for more."""
        per_F = batch.sparse.length_per_key()
        room_F = self.samples.sparse.length_per_key()
        sizes = [size for n, room in zip(per_F, room_F, strict=True) for size in (n, room - n)]
        of_ids = batch.sparse.values(), batch.sparse.weights_or_none()
        values = [
            x[: sum(per_F)] if any(x is one for one in of_ids) else _once(x)
            for x in batch.tensors()
        ]
        if not self.has_room:
            self._packed.fill(values)
            return
        to = list[Tensor]()
        of = list[Tensor]()
        for there, here in zip(self._packed.nested, values, strict=True):
            in_parts = there.shape != here.shape
            to += torch.split(there, sizes)[::2] if in_parts else [there]
            of += torch.split(here, per_F) if in_parts else [here]
        copy_each(to, of)

    def lend(self) -> None:
        """Let the next lookups of the tables have the memory of this batch."""
        for shared, lease in zip(self._tables, self.leases, strict=True):
            shared.state.give_back(lease, trains=True)

    def take_back(self) -> None:
        """Take the memory from the tables, after the backward of these lookups."""
        for shared in self._tables:
            shared.state.lease(trains=True)  # the one that was given back last


class BatchForms:
    """The forms of the batches of a model.

    Args:
        model: The model, sharded.
        tables: Its tables.

    `reads_rows` is true if the model gets the rows of its ids, too.
    """

    def __init__(self, model: nn.Module, tables: list[ShardedTables]) -> None:
        self._model = model
        self._tables = tables
        self._unfit = defaultdict[Hashable, list[list[int]]](list)  # numbers of ids, by form
        lookups = [x for t in tables for x in t.state.layout.lookups]
        self.reads_rows = any(
            x.need_indices() for x in model.modules() if isinstance(x, SequenceTables)
        )
        self._pooled = {x.feature for x in lookups} - {x.feature for x in lookups if not x.columns}

    def of(self, batch: Samples) -> Hashable:
        """Return what batches of one form have in common."""
        ids = batch.sparse
        of_ids = ids.values(), ids.weights_or_none()
        shapes = tuple(
            (x.dtype, x.requires_grad, x is _once(x), any(x is y for y in of_ids) or x.shape)
            for x in batch.tensors()
        )
        of_keys = zip(ids.keys(), ids.stride_per_key(), ids.length_per_key(), strict=True)
        keys = tuple((key, bags, key in self._pooled or n) for key, bags, n in of_keys)
        cuts = (t.cut for t in self._tables if t.cut is not None)
        vectors = tuple(value.shape for cut in cuts for value in cut.values)
        parts = [*self._model.modules()]  # once: the walk takes longer than all else here
        found = (x for part in parts for x in part._parameters.values() if x is not None)
        parameters = tuple((id(x), x.data_ptr(), x.requires_grad) for x in found)
        frozen = tuple(t.frozen for t in self._tables)
        trains = tuple(part.training for part in parts)
        return keys, shapes, vectors, parameters, frozen, trains

    def new(self, form: Hashable, batch: Samples) -> StaticBatch | None:
        """Return a batch for a step to record, if the form of this one, which no recorded step
        takes, has come often enough.
        """
        if len(self._unfit) == FORMS_KEPT:
            self._unfit.clear()
        numbers_TF = self._unfit[form]
        numbers_TF.append(batch.sparse.length_per_key())
        if len(numbers_TF) % (WARM_UP + 1):
            return None
        return StaticBatch(form, batch, _room(numbers_TF), self._tables)

    def forget(self) -> None:
        """Forget the batches that no recorded step took."""
        self._unfit.clear()

    def read_ids(self, batch: Samples, weights: list[Tensor | None]) -> None:
        """Give batches no room from now on, if the model weighs the flat ids itself.

        Args:
            batch: A batch.
            weights: The weights with which it was looked up.
        """
        if batch.sparse.weights_or_none() is None and any(x is not None for x in weights):
            self._pooled.clear()


class _Unread(NamedTuple):
    """A step whose verdict is under way: its number and batch, the updates of each table before
    it, the integers whose reports are in the verdict, the verdict on the host, and the event at the
    end of its copy.
    """

    step: int
    batch: Samples
    updates: list[int]
    integers: list[FusedBatch]
    verdict: Tensor
    arrived: Any


class DeviceVerdict:
    """The verdict on the steps of a model, and the rates of its next update on the device.

    Args:
        tables: The tables of the model.
        device: Their device.
        dense: Optimisers whose rates the device reads, too.
        fault: What else than an id stops a step, as a sentence of an error.
        whole: Whether the device judges ids, too: lookups are part of what is recorded.

    `stopped` is the number on the device, int32 [1], `rates_G` has the rates of the param groups of
    `dense`, fp32, and `share` the factor of this rank's loss, fp64 []. `most_ids` is the largest
    number of ids that lookups of a step had.
    """

    def __init__(
        self,
        tables: list[ShardedTables],
        device: torch.device,
        dense: Sequence[Optimizer],
        fault: str,
        whole: bool = True,
    ) -> None:
        self.whole = whole
        self._tables = tables
        self._dense = dense
        self._fault = fault
        self.stopped = torch.zeros(1, dtype=torch.int32, device=device)
        groups = sum(len(one.param_groups) for one in dense)
        sizes = [4 * len(t.update.rules) for t in tables]
        sizes += [1, (groups + 1) // 2]
        self._header = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        *self._numbers, share, rates = torch.split(self._header, sizes)
        self.share = share[0]
        self.rates_G = rates.view(torch.float32)[:groups]
        self._written = b""  # what the header has
        self.most_ids = 0  # of the lookups of a step
        self._unread: deque[_Unread] = deque()
        for shared in tables if whole else ():
            shared.comm.side = SideStream()  # a graph has one stream

    def write_rates(self, share: float = 1.0) -> None:
        """Bring the rates of the next update to the device, and the factor of this rank's loss, if
        they are others than those of the last one.
        """
        numbers = [
            x
            for t in self._tables
            for rate, rule in zip(t.update.next_rates(), t.update.rules, strict=True)
            for x in rate_numbers(rate, rule.decay)
        ]
        rates = [float(group["lr"]) for one in self._dense for group in one.param_groups]
        values = np.zeros(len(self._header), np.float64)
        values[: len(numbers) + 1] = *numbers, share
        values[len(numbers) + 1 :].view(np.float32)[: len(rates)] = rates
        if values.tobytes() != self._written:
            self._written = values.tobytes()
            self._header.copy_(torch.from_numpy(values), non_blocking=True)

    @contextmanager
    def watch(self, counts_ids: bool = False, records: bool = False) -> Iterator[list[FusedBatch]]:
        """Let the device judge the ids of the lookups in this context, and count them if features
        have room for more. Yield the integers whose reports it writes.

        Args:
            counts_ids: Whether features have room for more ids.
            records: Whether the work is recorded, and not done now.
        """
        integers: list[FusedBatch] = []
        for shared, numbers in zip(self._tables, self._numbers, strict=True):
            shared.state.stopped = self.stopped if self.whole else None
            shared.state.unread = integers
            shared.state.counts_ids = counts_ids
            shared.state.records = records
            shared.update.device_rates = [
                DeviceRate(numbers_4, len(rate) if isinstance(rate, tuple) else 1, self.stopped)
                for numbers_4, rate in zip(
                    numbers.view(-1, 4), shared.update.next_rates(), strict=True
                )
            ]
        try:
            yield integers
        finally:
            for shared in self._tables:
                shared.state.stopped = shared.update.device_rates = None
                shared.state.counts_ids = shared.state.records = False

    def updates(self) -> list[int]:
        """Return the number of updates of each of the tables."""
        return [t.update.updates for t in self._tables]

    def restore(self, updates: list[int]) -> None:
        """Count updates from earlier numbers on: those since were recorded, and not made."""
        for shared, number in zip(self._tables, updates, strict=True):
            shared.update.updates = number

    def of(self, integers: list[FusedBatch]) -> Tensor:
        """Return the verdict on a step on the device, with the reports of its integers."""
        return (
            torch.cat([self.stopped, *(x.report for x in integers)]) if integers else self.stopped
        )

    def copy(
        self,
        step: int,
        batch: Samples,
        updates: list[int],
        integers: list[FusedBatch],
        recorded: Tensor | None = None,
    ) -> None:
        """Start to copy the verdict on a step to the host.

        Args:
            step: The number of the step.
            batch: Its batch.
            updates: The number of updates of each of the tables before the step.
            integers: The integers of its lookups.
            recorded: The verdict on the device, if what was recorded has written it.
        """
        self.most_ids = max(self.most_ids, sum(x.rows.rows_L.numel() for x in integers))
        (verdict,), arrived = start_to_host([self.of(integers) if recorded is None else recorded])
        self._unread.append(_Unread(step, batch, updates, integers, verdict, arrived))

    def settle(self, most: int) -> None:
        """Read verdicts until at most some are unread.

        Raises:
            IdError: An id of a batch is outside of its table.
            TrainingError: A step had another fault.
        """
        while len(self._unread) > most:
            unread = self._unread.popleft()
            if unread.arrived is not None:
                unread.arrived.synchronize()
            stopped, *reports = unread.verdict.tolist()
            if stopped:
                self._unread.clear()
                self.stopped.zero_()
                for shared, number in zip(self._tables, unread.updates, strict=True):
                    shared.updates = number
                self._raise(unread)
            left = iter(reports)
            for integers in unread.integers:
                integers.check([*islice(left, len(integers.report))])

    def _raise(self, unread: _Unread) -> None:
        """Raise the error of the step that has stopped."""
        for shared in self._tables:
            try:
                _, check = shared.state.rows_of(unread.batch.sparse, [True] * len(shared.members))
                check()
            except OutsideTable as error:
                raise error.at(f" (step {unread.step})") from None
        raise TrainingError(
            f"step {unread.step}: {self._fault}: lower the learning rate, or look for extreme "
            "values in the batch"
        )


def _once(tensor: Tensor) -> Tensor:
    """Return the first entry of a tensor that repeats it, such as lengths of 1 that are one number;
    any other tensor as it is.
    """
    return tensor[:1] if tensor.stride()[:1] == (0,) else tensor


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


def cuda_graph(pool: Any, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record work as a CUDA graph. Graphs may share the memory of a pool, because one runs after
    the other, and nobody reads what it leaves there but its result.
    """
    graph = torch.cuda.CUDAGraph()
    # where recording fails, torch does not make the stream from before the current one again
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
    ):
        result = work()
    return result, graph.replay


def renew_gradient_nodes(leaves: Iterable[Tensor]) -> None:
    """Let the next backward make new nodes that add up the gradients of leaves.

    A node belongs to the stream on which it was made, and lives as long as something holds it: the
    loss of the last step, which a loop still has, or DDP. A graph is recorded on a stream of its
    own, and cannot be where backward comes to a node of another stream.
    """
    for leaf in leaves:
        values = leaf.data
        # where the type changes, torch forgets the node
        other = torch.float32 if leaf.dtype == torch.float16 else torch.float16
        leaf.data = torch.empty(0, dtype=other, device="cpu")
        leaf.data = values
