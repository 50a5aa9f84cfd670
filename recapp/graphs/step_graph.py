"""Training steps on a GPU as CUDA graphs. On one rank forward, loss, backward, the update of the
tables and the dense optimiser's step start with one launch, and the host waits for nothing.

    step = StepGraph(model, loss, optimizer)
    for batch in batches:
        value = step(batch)
    step.finish()

    a form of batches comes for the fourth time    the step is recorded; the batch is trained
    a batch that fits a recorded step              its tensors are copied to those of the recorded
                                                   one, new rates to theirs; the graph runs; the
                                                   result is copied out
    another batch                                  the same kernels, launched one by one: same bits

Batches of one form have as many samples, and features of bags may have any number of ids. Where
the batches before had as many (one id a bag, or another fixed number), the recorded one fits those
that have as many. Otherwise it has room behind the ids of each feature, and the device counts those
that are there: it reads no others. After three batches that do not fit, the fourth is recorded with
more room. At most `MOST_GRAPHS` steps are recorded; they share their memory.

Where a batch has room, the flat values of all features are no use: a model that reads ids itself
takes those of `batch.sparse[key]`, of which there may be more than its bags hold. For a model that
weighs ids itself, no batch has room. Batches with tensors that need a gradient are not recorded.

Where lookups need the host (messages of several ranks, decisions on keys, concatenations), they are
done before the model runs, and only what is between lookup and update is recorded
(`recapp/graphs/several_ranks.py`): the average of dense gradients over the ranks, in the place of
DDP's, the update and the dense optimiser follow, launched one by one. Tables with a limit of rows
need the host from the first step on whose keys may exceed it.

Nobody waits for the verdict on a batch, so it stops the step itself, dense optimiser included, and
all later ones (`recapp/graphs/recorded_batch.py`). The host reads it up to `MOST_UNREAD` steps
later, and raises the error of that step.

No GPU has run this file yet: the tests record steps without one, and repeat them on other batches.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from recapp.console import note_once
from recapp.engine.cut_lookup import CutLookup
from recapp.engine.fused_integers import FusedBatch
from recapp.engine.sharded_collection import sharded_tables
from recapp.engine.sharded_tables import ShardedTables
from recapp.graphs.recorded_batch import (
    MOST_UNREAD,
    BatchForms,
    Capture,
    DeviceVerdict,
    Samples,
    StaticBatch,
    cuda_graph,
    renew_gradient_nodes,
)
from recapp.graphs.several_ranks import CutLookups, OfRanks, ranks_of_loop
from recapp.optim.optimizer import parts_of
from recapp.sparse.transfer import copied

MOST_GRAPHS = 3
NOT_CUT = "the host takes part in lookups whose rows the model reads (need_indices)"
OTHER_IDS = (
    "the model looks up other ids than those of the batch, where lookups come before the model: "
    "make these ids first, and give it a batch of them"
)


class _Left(NamedTuple):
    """What a recorded step leaves in its memory: its result; and, where lookups are cut, those of
    its batch, which have the gradients of their vectors, and the gradients of the dense part.
    """

    result: Any
    cuts: Sequence[CutLookup] = ()
    dense: Mapping[nn.Parameter, Tensor] = {}


class _Recorded(NamedTuple):
    """A recorded step: the batch that it reads, what it leaves, the function that runs it, and the
    integers whose reports are in the verdict that it writes.
    """

    static: StaticBatch
    left: _Left
    replay: Callable[[], None]
    integers: list[FusedBatch]
    verdict: Tensor


class StepGraph:
    """Run the training steps of a rank, as graphs where that is possible.

    Args:
        model: The model, sharded.
        loss: Returns the loss of a batch from the model and the batch, a scalar; or a tuple of the
            loss and an output, whose tensors may be in tuples, lists and dicts.
        optimizer: The optimiser, one of torch's with `fused=True`, or a `HybridOptimizer` or one of
            TorchRec's wrappers whose step is that of such ones. Its param groups stay as they are;
            each step brings their rates to the device.
        capture: Records a step; None records a CUDA graph.
        setting: The setting that notes name.
        ranks: What makes several ranks train like one; None takes what the DDP does that wraps the
            dense part, as `DistributedModelParallel` makes it.

    Attributes:
        why_not: The reason why steps are launched one by one, which is noted once; empty while they
            are recorded. Where the device could not stop a step, steps are those of an ordinary
            loop, and errors of ids are raised at once.
        steps: The number of steps so far.
        copies: Whether results are copied out of the memory of a recorded step, for callers who
            keep them beyond the next call.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Any],
        optimizer: Optimizer,
        capture: Capture | None = None,
        setting: str = "StepGraph",
        ranks: OfRanks | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.tables = sharded_tables(model)
        self.steps = 0
        self.copies = True
        self._cuts = CutLookups(self.tables)
        self._has_trained = False
        self._setting = setting
        device = next(model.parameters()).device
        self._dense = parts_of(optimizer)
        ranks = ranks or ranks_of_loop(model, _parameters(self._dense))
        self.why_not = (
            "" if capture or device.type == "cuda" else f"the model is on the {device}"
        ) or obstacle(self.tables, self._dense, ranks is not None)
        self._stops = not self.why_not
        self.ranks = ranks if self._stops else None
        self._forms = BatchForms(model, self.tables)
        self.cuts = self._stops and self._cuts.are_needed(None if self._forms.reads_rows else 0)
        if self.why_not:
            note_launched(setting, self.why_not)
            return
        self._capture = capture or partial(cuda_graph, torch.cuda.graph_pool_handle())
        self._graphs: list[_Recorded] = []
        self._verdict = DeviceVerdict(
            *(self.tables, device, self._dense),
            "the loss is not finite; the weights are those before that step",
            whole=not self.cuts,
        )
        if self.cuts and self._forms.reads_rows:
            self._give_up(NOT_CUT)
        self._found_inf = torch.zeros((), device=device)
        for one in self._dense:
            one.found_inf = self._found_inf  # type: ignore[attr-defined]

    def __call__(self, batch: Samples) -> Any:
        """Train on a batch that is on the device, and return what `loss` has returned.

        Raises:
            IdError: An id of one of the last batches is outside of its table. Nothing was trained
                since.
            TrainingError: The loss of one of the last batches was not finite. Nothing was trained
                since.
        """
        self.steps += 1
        if not self._stops:
            return self._step(batch)
        self._verdict.settle(MOST_UNREAD - 1)
        if self._verdict.whole and self._cuts.are_needed(
            max(self._verdict.most_ids, batch.sparse.values().numel())
        ):
            self._verdict.settle(0)  # from here on the host adds keys, and judges ids
            self.cuts = True
            self._verdict.whole = self._has_trained = False
            self._graphs.clear()
        cut = self._cuts.of(batch.sparse, self._has_trained) if self.cuts else nullcontext(())
        with cut as cuts:
            self._verdict.write_rates(self.ranks.share() if self.ranks and cuts else 1.0)
            return self._train(batch)

    def finish(self) -> None:
        """Wait for the last steps, and raise their errors, as a call does."""
        if self._stops:
            self._verdict.settle(0)

    def _train(self, batch: Samples) -> Any:
        """Train on a batch by the recorded step that it fits; by one that is recorded now, or
        launch by launch, if there is none.
        """
        updates = self._verdict.updates()
        form = self._forms.of(batch), () if self.cuts else _constants(self._dense)
        per_F = batch.sparse.length_per_key()
        recorded = next((one for one in self._graphs if one.static.takes(form, per_F)), None)
        can_record = not self.why_not and len(self._graphs) < MOST_GRAPHS
        can_record = can_record and not any(x.requires_grad for x in batch.tensors())
        if recorded is None and can_record and (static := self._forms.new(form, batch)):
            return self._recorded(static, batch)
        if recorded is None:
            with self._verdict.watch() as integers:
                result = self._step(batch)
            self._verdict.copy(self.steps, batch, updates, integers)
            self._forms.read_ids(batch, [one.rows.weights_L for one in integers])
            return result
        left = recorded.left
        recorded.static.fill(batch)
        for there, here in zip(left.cuts, self._cuts.waiting(), strict=True):
            there.fill(here)
        for one in recorded.integers:
            one.expect()
        recorded.replay()
        if self.cuts:
            with self._verdict.watch():
                self._update([cut.gradients for cut in left.cuts], left.dense)
        else:
            for shared in self.tables:
                shared.update.count(self._verdict.stopped)
        self._verdict.copy(self.steps, batch, updates, recorded.integers, recorded.verdict)
        return copied(left.result) if self.copies else left.result

    def _step(self, batch: Samples) -> Any:
        """Train on a batch, unless the device has stopped."""
        result = self._computed(batch)
        self._has_trained = True
        cuts = self._cuts.waiting()
        if self.cuts and not (cuts and all(cut.is_read for cut in cuts)):
            self.cuts = False
            self._give_up(OTHER_IDS)
        self._update([cut.gradients for cut in cuts], _gradients(self._dense))
        return result

    def _computed(self, batch: Samples) -> Any:
        """Compute the gradients of a batch, and whether its loss is finite."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.ranks.alone() if self.ranks else nullcontext():
            result = self.loss(self.model, batch)
            loss = result if isinstance(result, Tensor) else result[0]
            if self._stops:
                self._verdict.stopped.logical_or_(~loss.detach().isfinite())
            if self.ranks is not None:  # lookups tell the share of their batch
                cut = bool(self._cuts.waiting())
                loss = loss * (self._verdict.share.to(loss.dtype) if cut else self.ranks.share())
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
        if self.ranks is not None:
            self.ranks.join([*dense.values()], self._verdict.stopped)
        for cut, of_cut in zip(self._cuts.waiting(), gradients, strict=True):
            cut.update(of_cut)
        for parameter, gradient in dense.items():
            parameter.grad = gradient
        with self._rates_on_device() if self._stops else nullcontext():
            self.optimizer.step()

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Let the dense optimiser read its rates, and whether it has stopped, on the device."""
        self._found_inf.copy_(self._verdict.stopped[0])
        groups = [group for one in self._dense for group in one.param_groups]
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, self._verdict.rates_G.unbind(), strict=True):
            # torch warns of what is capturable and is not captured
            captured = rate.is_cuda and torch.cuda.is_current_stream_capturing()
            group.update(lr=rate, capturable=captured)
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def _recorded(self, static: StaticBatch, batch: Samples) -> Any:
        """Train on a batch, then record the same step for other batches of its form."""
        before = self._verdict.updates()
        with self._verdict.watch(static.has_room) as integers:
            result = self._step(batch) if self.cuts else self._step_with(static).result
        self._verdict.copy(self.steps, batch, before, integers)
        updates = self._verdict.updates()
        cuts = [cut.copy() for cut in self._cuts.waiting()] if self.cuts else []
        record = (
            partial(self._computed_with, static, cuts) if cuts else partial(self._step_with, static)
        )
        renew_gradient_nodes([*self.model.parameters(), *(t.anchor for t in self.tables)])
        if self.ranks is not None:
            self.ranks.take_over()
        try:
            with self._verdict.watch(static.has_room, records=True) as integers:
                (left, verdict), replay = self._capture(
                    lambda: (record(), self._verdict.of(integers))
                )
            self._graphs.append(_Recorded(static, left, replay, integers, verdict))
        except RuntimeError as error:  # of torch, such as too little memory
            self._give_up(" ".join(str(error).split()))
        self._verdict.restore(updates)
        return result

    def _step_with(self, static: StaticBatch) -> _Left:
        """Train on a recorded batch, with memory of its own."""
        static.lend()
        result = self._step(static.samples.each(lambda x: x))  # which may keep what it computes
        static.take_back()
        return _Left(result)

    def _computed_with(self, static: StaticBatch, cuts: list[CutLookup]) -> _Left:
        """Compute the gradients of a recorded batch, from vectors with memory of their own."""
        batch = static.samples.each(lambda x: x)
        self._cuts.give(cuts, batch.sparse)
        return _Left(self._computed(batch), cuts, _gradients(self._dense))

    def _give_up(self, why: str) -> None:
        """Launch steps one by one from now on, and note why."""
        self.why_not = why
        note_launched(self._setting, why)


def note_launched(setting: str, why: str) -> None:
    """Note once why steps are launched one by one.

    Args:
        setting: The setting that asks for graphs.
        why: The reason.
    """
    note_once(f"{setting}: steps are launched one by one, without a CUDA graph: {why}")


def obstacle(tables: list[ShardedTables], dense: Sequence[Optimizer], averages: bool) -> str:
    """Return the reason why the device cannot stop a step; empty if it can.

    Args:
        tables: The tables of the model.
        dense: The optimisers of the dense part; of several that one calls, each (`parts_of`).
        averages: Whether the step averages dense gradients over the ranks.
    """
    for shared in tables:
        if shared.comm.world > 1 and not averages:
            return "no DDP as that of DistributedModelParallel averages gradients over the ranks"
        if why := shared.why_unstoppable():
            return why
    for one in dense:
        unfused = [group for group in one.param_groups if not group.get("fused")]
        if unfused or not hasattr(one, "_step_supports_amp_scaling"):  # so reads found_inf
            given = f"(fused={unfused[0].get('fused')})" if unfused else ""
            return (
                f"{type(one).__name__}{given} cannot be stopped by the device: make a "
                "torch.optim.Adam, AdamW, SGD or Adagrad with fused=True"
            )
    return ""


def _constants(dense: Sequence[Optimizer]) -> Hashable:
    """Return what else than learning rates a step of the dense part is recorded with: a schedule
    may change it.
    """
    return repr(
        [
            (name, x)
            for one in dense
            for group in one.param_groups
            for name, x in group.items()
            if name not in ("params", "lr")
        ]
    )


def _gradients(dense: Sequence[Optimizer]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of the dense part."""
    return {p: p.grad for p in _parameters(dense) if p.grad is not None}


def _parameters(dense: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [p for one in dense for group in one.param_groups for p in group["params"]]
