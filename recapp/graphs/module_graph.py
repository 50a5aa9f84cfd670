"""Forward and backward of a model on a GPU as two CUDA graphs, for users who own their loop:
`DistributedModelParallel(module, graph=True)`.

    model(batch)       the batch is copied to the recorded one; a graph runs the forward
    loss               yours, launched as ever
    loss.backward()    the gradients of the outputs are copied to the recorded ones; a graph runs
                       the backward and updates the tables
    optimizer.step()   yours, launched as ever

    calls of a form    1 to 3    launched one by one, as without graphs
                       4         launched so that it can be recorded: with room, and judged by the
                                 device
                       5         the two graphs are recorded, then they run
                       later     the two graphs run

`recapp/graphs/recorded_batch.py` says what a form is, and which batches fit a recorded one. Others
are launched, like calls in eval mode and under no_grad. Bits are those of the ordinary loop. The
Python of the model runs in the first five calls only, so it must not depend on values.

Backward of a call comes before the next training call, which overwrites what it left. Where it does
not, in the first calls, nothing is recorded.

Where lookups need the host (on several ranks, or with tables that choose among new keys), they are
cut out:

    model(batch)       lookups are launched, and copied to the recorded ones; a graph runs the rest
    loss.backward()    a graph runs the backward up to the vectors; launched: the average of dense
                       gradients over the ranks, in the place of DDP's, and the update of the tables

    training call      1         launched as without graphs, by DDP; then ranks agree to go on
                       later     what is not recorded is launched with the same messages, so a rank
                                 whose batch does not fit goes on beside the others

The host does not wait for the verdict on a call. An id that is an error, or a gradient of an output
that is not finite, stops tables at once: they stay those before that call, gradients of parameters
are zero, and `found_inf` is 1, which a fused optimiser of torch reads if it is set there
(`optimizer.found_inf = model.graph.found_inf`). One of the next two training calls raises the
error; so does the next call in eval mode or under no_grad, `finish` and `state_dict` of the model.

No GPU has run this file yet: the tests record calls without one, and repeat them on other batches.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from recapp.engine.cut_lookup import CutLookup
from recapp.engine.fused_integers import FusedBatch
from recapp.engine.sharded_collection import sharded_tables
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
from recapp.graphs.several_ranks import CutLookups, ranks_of_loop
from recapp.graphs.step_graph import MOST_GRAPHS, NOT_CUT, OTHER_IDS, note_launched, obstacle
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import Packed, copied, copy_each

CALLED_AGAIN = "the model is called again before backward"
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _Call(NamedTuple):
    """The arguments of a call, as a batch: tensors, ids, batches and constants."""

    leaves: list[Any]
    tree: TreeSpec

    @classmethod
    def of(cls, *arguments: Any) -> "_Call":
        """Return arguments in their parts."""
        return cls(*tree_flatten(arguments, lambda x: isinstance(x, KeyedJaggedTensor | Samples)))

    @property
    def ids(self) -> list[KeyedJaggedTensor]:
        """The ids among the arguments."""
        parts = [getattr(x, "sparse", x) for x in self.leaves]
        return [x for x in parts if isinstance(x, KeyedJaggedTensor)]

    @property
    def sparse(self) -> KeyedJaggedTensor:
        """The only ids."""
        (ids,) = self.ids
        return ids

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [x for leaf in self.leaves for x in _tensors(leaf)]

    def each(self, change: Callable[[Tensor], Tensor]) -> "_Call":
        """Return the arguments with `change` applied to each tensor."""
        return self._replace(leaves=[_changed(x, change) for x in self.leaves])

    def form(self) -> Hashable:
        """Return what arguments of one form have in common, but for their tensors."""
        constants = tuple((type(x), x) for x in self.leaves if isinstance(x, _CONSTANTS))
        return repr(self.tree), constants

    def why_not(self, device: torch.device) -> str:
        """Return the reason why the call cannot be recorded; empty if it can."""
        known = (Tensor, KeyedJaggedTensor, Samples, *_CONSTANTS)
        other = [type(x).__name__ for x in self.leaves if not isinstance(x, known)]
        if other or len(self.ids) != 1:
            given = other[0] if other else f"{len(self.ids)} KeyedJaggedTensors"
            return f"the model gets a {given}: it takes tensors, and one KeyedJaggedTensor"
        weights = self.sparse.weights_or_none()
        if weights is not None and weights.requires_grad:
            return "the sample weights need a gradient"
        away = [x.device for x in self.tensors() if x.device != device]
        return f"the model is on the {device}, and a tensor on the {away[0]}" if away else ""


def _tensors(leaf: Any) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    if isinstance(leaf, KeyedJaggedTensor):
        return leaf._tensors()
    return leaf.tensors() if isinstance(leaf, Samples) else []


def _changed(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if isinstance(leaf, KeyedJaggedTensor):
        return leaf._each(change)
    return leaf.each(change) if isinstance(leaf, Samples) else leaf


class _Step:
    """A call that is recorded, or will be; or one that is launched beside those of other ranks.

    Args:
        call: The arguments that it reads.
        model: The model, whose trained `parameters` it keeps.
        cuts: The lookups that it reads, if they are cut out.
        static: The memory of the arguments, if it is recorded.

    `forward` and `backward` run the graphs; None before they are recorded. `outputs` has what the
    model returned, in the parts of `tree`, and `learns` tells for each whether it has a gradient.
    `gradients` has memory for their gradients, None where the loss does not read an output; it is
    empty before a first backward. `result` has the gradients of what learns, and `verdict` is that
    on the step. `trains` tells for the tables whether they are updated. `integers` are those of the
    lookups.
    """

    def __init__(
        self,
        call: _Call,
        model: nn.Module,
        cuts: list[CutLookup],
        static: StaticBatch | None = None,
    ) -> None:
        self.call = call
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        self.cuts = cuts
        self.static = static
        self.forward: Callable[[], None] | None = None
        self.backward: Callable[[], None] | None = None
        self.outputs: list[Any] = []
        self.tree: Any = None
        self.learns: list[bool] = []
        self.gradients: list[Tensor | None] = []
        self.result: Packed | None = None
        self.verdict: Tensor | None = None
        self.trains: list[bool] = []
        self.integers: list[FusedBatch] = []


class _Pass(NamedTuple):
    """A forward whose backward has not run: the number of the call, its arguments, its step, and
    its lookups, if they are cut out.
    """

    number: int
    call: _Call
    step: _Step
    cuts: list[CutLookup]


class ModuleGraph:
    """Call a model, in training as two graphs where that is possible.

    Args:
        model: The model; on several ranks, with DDP around it.
        device: Its device.
        capture: Records work; None records a CUDA graph.

    Attributes:
        why_not: The reason why calls are launched, which is noted once; empty while they are
            recorded.
        calls: The number of training calls so far.
        found_inf: 1 on the device once it has stopped, else 0; fp32.
        cuts: Whether lookups need the host, so they are cut out of the graphs.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, capture: Capture | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._tables = sharded_tables(model)
        self._ranks = ranks_of_loop(model, model.parameters())
        self._lookups = CutLookups(self._tables)
        self._joins = self._reads_cuts = False
        self.calls = 0
        self.cuts = self._lookups.are_needed()
        self.found_inf = torch.zeros((), device=device)
        self._steps: list[_Step] = []
        self._open: _Pass | None = None
        self._forms = BatchForms(model, self._tables)
        away = "" if capture or device.type == "cuda" else f"the model is on the {device}"
        not_cut = NOT_CUT if self.cuts and self._forms.reads_rows else ""
        self.why_not = away or self._obstacle() or not_cut
        self._records = not self.why_not
        self._verdict = DeviceVerdict(
            *(self._tables, device, []),
            "the gradient of an output is not finite; the tables are those before that step",
            whole=self._records and not self.cuts,
        )
        if self.why_not:
            note_launched("graph=True", self.why_not)
            return
        self._capture = capture or partial(cuda_graph, torch.cuda.graph_pool_handle())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            IdError: An id is outside of its table, here or in one of the last calls.
            TrainingError: The gradient of an output was not finite in one of the last calls.
        """
        if not (self._records and self._model.training and torch.is_grad_enabled()):
            self._verdict.settle(0)
            return self._model(*args, **kwargs)
        self._close()
        self._verdict.settle(MOST_UNREAD - 1)
        self.calls += 1
        call = _Call.of(args, kwargs)
        launched = self._is_launched(call)
        cut: AbstractContextManager[list[CutLookup]] = nullcontext([])
        if self.cuts and not launched:
            cut = self._lookups.of(call.sparse, self._reads_cuts)
        with cut as cuts:
            step = None if launched else self._step_of(call, cuts)
            if step is None:
                self._verdict.settle(0)
                return self._launched(call)
            self._open = _Pass(self.calls, call, step, cuts)
            learned = self._learned(step, call)
            outputs = _Replay.apply(self, self._open, *learned)  # type: ignore[no-untyped-call]
        if self.cuts and not self._reads_cuts:
            self._reads_cuts = self._joins = bool(cuts) and all(one.is_read for one in cuts)
            self.why_not = self.why_not if self._joins else OTHER_IDS
        return tree_unflatten(outputs, step.tree)

    def finish(self) -> None:
        """Wait for the last calls whose backward has run, and raise their errors."""
        self._verdict.settle(0)

    def _obstacle(self) -> str:
        """Return the reason why calls of the model cannot be recorded; empty if they can."""
        if any(x._backward_hooks for x in self._model.parameters()):
            return "parameters have hooks"
        if self._lookups.are_needed() and not self.cuts:
            return "the host takes part in the lookups of the model"
        return obstacle(self._tables, [], self._ranks is not None)

    def _close(self) -> None:
        """End the pass of a call without backward: the next one overwrites what it left."""
        if self._open is not None:
            number, call, step, cuts = self._open
            self._verdict.copy(number, call, self._verdict.updates(), step.integers)
            if step.forward is None:
                step.outputs = []
                self._steps = [one for one in self._steps if one is not step]
            cuts.clear()
            self._open = None

    def _learned(self, step: _Step, call: _Call) -> list[Tensor]:
        """Return the tensors that the backward of a call has gradients of, and those by which it
        reaches the tables.
        """
        inputs = (x for x in call.tensors() if x.requires_grad)
        return [*step.parameters, *inputs, *(t.anchor for t in self._tables)]

    def _is_launched(self, call: _Call) -> bool:
        """Return whether a call is launched as without graphs, and note why."""
        why = self._obstacle() or call.why_not(self._device)
        for shared in self._tables:
            shared.update.finish_step()  # as any lookup does
        several = any(t.update.expected for t in self._tables)
        if self.cuts and self.calls == 2:  # all ranks go on in one way
            mine = why or self.why_not or (CALLED_AGAIN if several else "")
            self.why_not = next(filter(None, self._tables[0].comm.all_gather(mine)), "")
            self._joins = not self.why_not
        elif not self.cuts and (several or any(t.waiting_ahead for t in self._tables)):
            self._forms.forget()  # a loop with several calls for a step
            return True
        why = why or ("" if self._joins else self.why_not)
        if why:
            note_launched("graph=True", why)
        return bool(why) or (self.cuts and not self._joins)

    def _step_of(self, call: _Call, cuts: list[CutLookup]) -> _Step | None:
        """Return the step for a call; None where it is launched as without graphs."""
        kind = self._device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        form = call.form(), cast, self._forms.of(call)
        per_F = call.sparse.length_per_key()
        step = next((x for x in self._steps if x.static and x.static.takes(form, per_F)), None)
        if (
            step is None
            and not self.why_not
            and len(self._steps) < MOST_GRAPHS
            and (static := self._forms.new(form, call)) is not None
        ):
            assert isinstance(static.samples, _Call)
            step = _Step(static.samples, self._model, [one.copy() for one in cuts], static)
            self._steps.append(step)
        if step is None or (step.forward is None and step.gradients and not self._record(step)):
            return _Step(call, self._model, cuts) if self.cuts else None
        assert step.static is not None
        step.static.fill(call)
        for there, here in zip(step.cuts, cuts, strict=True):
            there.fill(here)
        return step

    def _launched(self, call: _Call) -> Any:
        """Call the model as without graphs, and learn what it does."""
        args, kwargs = tree_unflatten(call.leaves, call.tree)
        made = self._model(*args, **kwargs)
        other = [x for x in tree_leaves(made) if not isinstance(x, (Tensor, *_CONSTANTS))]
        if other:
            self.why_not = f"the model returns a {type(other[0]).__name__}: return tensors"
        if len(call.ids) == 1:
            lookups = [x for t in self._tables for x in t.update.expected]
            self._forms.read_ids(call, [x.weights_L for x in lookups])
        return made

    def _record(self, step: _Step) -> bool:
        """Record the forward and the backward of a step, and return whether that was possible."""
        updates = self._verdict.updates()
        renew_gradient_nodes([*step.parameters, *(t.anchor for t in self._tables)])
        if self._ranks is not None:
            self._ranks.take_over()
        try:
            _, forward = self._capture(lambda: self.forward(step, records=True))
            (step.result, step.verdict), step.backward = self._capture(
                lambda: (self.backward(step, step.gradients, True), self._verdict.of(step.integers))
            )
            step.outputs = [x.detach() if isinstance(x, Tensor) else x for x in step.outputs]
            step.trains = [
                n > before for n, before in zip(self._verdict.updates(), updates, strict=True)
            ]
            step.forward = forward
        except RuntimeError as error:  # of torch, such as too little memory
            self.why_not = " ".join(str(error).split())
            note_launched("graph=True", self.why_not)
            self._steps.remove(step)
        self._verdict.restore(updates)
        return step.forward is not None

    def forward(self, step: _Step, records: bool = False) -> None:
        """Call the model with the arguments of a step; or record the call, which is not done."""
        call = step.call.each(lambda x: x)  # which may keep what it computes
        args, kwargs = tree_unflatten(call.leaves, call.tree)
        if step.cuts:
            self._lookups.give(step.cuts, call.sparse)
        elif step.static is not None:
            step.static.lend()
        has_room = step.static is not None and step.static.has_room
        alone = self._ranks.alone() if self._ranks is not None else nullcontext()
        torch.clear_autocast_cache()
        watch = self._verdict.watch(has_room, records)
        with torch.enable_grad(), alone, watch as step.integers:
            made = self._model(*args, **kwargs)
        torch.clear_autocast_cache()
        step.outputs, step.tree = tree_flatten(made)
        step.learns = [isinstance(x, Tensor) and x.requires_grad for x in step.outputs]

    def backward(
        self, step: _Step, gradients: Sequence[Tensor | None], records: bool = False
    ) -> Packed:
        """Update the tables with the gradients of the outputs of a step, unless the device has
        stopped; or record the update, which is not done. Return the gradients of what learns; None
        where there are none.
        """
        stopped = self._verdict.stopped
        pairs = zip(step.outputs, gradients, strict=True)
        outputs, given = zip(*((x, g) for x, g in pairs if g is not None), strict=True)
        stopped.logical_or_(~torch.stack([g.isfinite().all() for g in given]).all())
        learned = self._learned(step, step.call)
        reached = [*learned, *(one.anchor for one in step.cuts)]
        with self._verdict.watch(records=records):
            found = torch.autograd.grad(outputs, reached, given, allow_unused=True)
        if step.static is not None and not step.cuts:
            step.static.take_back()
        made = Packed(found[: len(learned)], self._device)
        if not self.cuts:
            self._end(step, [], made)
        return made

    def _end(self, step: _Step, cuts: list[CutLookup], made: Packed) -> None:
        """Average the gradients of the dense part over the ranks, which stop together; update the
        tables whose lookups were cut out; and let nothing move the dense part after a stop.
        """
        if self._ranks is not None:
            gradients = [x for x in made.nested[: len(step.parameters)] if x is not None]
            self._ranks.join(gradients, self._verdict.stopped)
        with self._verdict.watch():
            for cut, read in zip(cuts, step.cuts, strict=True):
                cut.update(read.gradients)
        cuts.clear()  # who keeps an output does not keep them
        self.found_inf.copy_(self._verdict.stopped[0])
        made.memory.masked_fill_(self._verdict.stopped != 0, 0)

    def call_again(self, step: _Step) -> Any:
        """Run the forward of a step, and return its outputs, which nobody overwrites."""
        if step.forward is None:
            self.forward(step)
        else:
            for one in step.integers:
                one.expect()
            step.forward()
        return copied(step.outputs)

    def differentiate(self, one: _Pass, gradients: Sequence[Tensor | None]) -> Any:
        """Run the backward of a call, and return the gradients of what learns.

        Raises:
            RuntimeError: The call was differentiated before, another training call came between, or
                the loss reads other outputs than when the call was recorded.
        """
        if self._open is not one:
            raise RuntimeError(
                f"graph=True: backward of training call {one.number} of the model came twice, or "
                "after another training call, which overwrites what backward needs: call backward "
                "once, before the next call, or leave graph=True out"
            )
        self._open = None
        step = one.step
        updates = self._verdict.updates()
        self._verdict.write_rates()
        if step.backward is None or step.result is None:
            step.gradients = [None if g is None else torch.zeros_like(g) for g in gradients]
            made = self.backward(step, gradients)
            step.outputs = []
        else:
            if [g is None for g in step.gradients] != [g is None for g in gradients]:
                raise RuntimeError(
                    "graph=True: the loss reads other outputs of the model than when its call was "
                    "recorded: let it read the same ones in every step, or leave graph=True out"
                )
            to, of = ([x for x in each if x is not None] for each in (step.gradients, gradients))
            copy_each(to, of)
            step.backward()
            for shared, trains in zip(self._tables, step.trains, strict=True):
                if trains:
                    shared.update.count(self._verdict.stopped)
            made = step.result.copy()  # the next step overwrites what is here
        if self.cuts:
            self._end(step, one.cuts, made)
        self._verdict.copy(one.number, one.call, updates, step.integers, step.verdict)
        return made.nested


class _Replay(torch.autograd.Function):
    """The outputs of a call. Inputs: the graph, the pass, and all that learns."""

    @staticmethod
    def forward(ctx: Any, graph: ModuleGraph, one: _Pass, *learned: Tensor) -> tuple[Any, ...]:
        """Run the forward."""
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.one = one
        outputs = graph.call_again(one.step)
        pairs = zip(outputs, one.step.learns, strict=True)
        fixed = [x for x, learns in pairs if isinstance(x, Tensor) and not learns]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward, and update the tables."""
        return None, None, *ctx.graph.differentiate(ctx.one, gradients)
