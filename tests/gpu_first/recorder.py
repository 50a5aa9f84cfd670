"""Notes what a step gives a GPU to do, without a GPU: tensors of the CPU stand for those of the
device, and Triton's interpreter runs the kernels.

    operation        an operation of torch that launches kernels: no view, no empty memory
    launch           a launch of a Triton kernel
    wait             the host waits for a number of the device
    copy             a copy between host and device
    pin, stream      memory that is page-locked, a tensor that is recorded on a stream, in the step
    message          an exchange between ranks

Entries have names, shapes, numbers and places in memory. So two records tell whether another batch
gives the device the same work, and a record in which the host has no part runs again on what its
memory holds by then.

What this cannot see: one operation may be several kernels (a sort is about eight); `tolist`,
`numpy` and `torch.tensor(..., device=)` of code that does not go through
`recapp/sparse/transfer.py`; what code does only where a tensor's device is called "cuda".
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import ClassVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.language import constexpr
from triton.runtime.interpreter import InterpretedFunction

from recapp.kernels.links import Scratch
from recapp.models import linear_stack
from recapp.sparse import bags, transfer

ALLOCATES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("lift_fresh", "set_", "resize_"),
}
WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
SORTS = {"sort", "argsort", "msort", "topk", "_unique", "_unique2", "unique_dim"}
COUNTED = {
    "launches": "launch",
    "sorts": "sort",
    "waits": "wait",
    "copies": "copy",
    "operations": "operation",
    "messages": "message",
    "pins": "pin",
    "record_streams": "stream",
}
"""The kind of the entries that each count counts; a sort is an operation, too."""


@dataclass(frozen=True)
class Entry:
    """One thing that a step does; `again` does it once more."""

    kind: str
    name: str
    details: tuple = ()
    again: Callable[[], None] | None = field(default=None, compare=False, repr=False)


class Recorder(TorchDispatchMode):
    """Notes what happens within `recording`.

    Attributes:
        entries: What happened, in order.
    """

    _noting_now: ClassVar[list["Recorder"]] = []

    def __init__(self):
        super().__init__()
        self.entries = []
        self._paused = False
        self._number = {}  # of each memory, by its first use
        self._kept = []  # memory that is freed would be given again
        self._host = set()  # memory of the host

    def counts(self):
        """Return the number of entries of each kind."""
        kinds = Counter(e.kind for e in self.entries)
        kinds["sort"] = sum(e.kind == "operation" and e.name in SORTS for e in self.entries)
        return {count: kinds[kind] for count, kind in COUNTED.items()}

    def difference(self, other):
        """Return the first entry in which another record differs, as text; None for none."""
        for number, (mine, its) in enumerate(zip(self.entries, other.entries, strict=False)):
            if mine != its:
                return f"entry {number}: {mine} / {its}"
        if len(self.entries) != len(other.entries):
            return f"{len(self.entries)} entries / {len(other.entries)}"
        return None

    def differing(self, other):
        """Return the names of all entries in which another record differs."""
        pairs = zip_longest(self.entries, other.entries)
        return {(mine or its).name for mine, its in pairs if mine != its}

    def replay(self, without=()):
        """Do everything again, into the same memory.

        A CUDA graph does the same: what it reads was written there before. Recorders that note
        something meanwhile note one launch.

        Args:
            without: The names of entries in which the host has a part, and after which all goes on
                as in the record.

        Raises:
            ValueError: There are others, such as a wait: what follows may depend on them.
        """
        entries = [e for e in self.entries if e.again is not None or e.name not in without]
        for entry in entries:
            if entry.again is None:
                raise ValueError(f"the record has a {entry.kind} ({entry.name})")
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for other in Recorder._noting_now:
                other._note("launch", "graph")
                stack.enter_context(other._pause())
            for entry in entries:
                entry.again()

    @contextmanager
    def recording(self, comm=None):
        """While this lasts, note everything; messages of `comm`, too."""
        with ExitStack() as stack:
            other = [
                (bags.on_host, self._on_host),
                (linear_stack.on_gpu, lambda tensor: True),
                (transfer.to_host, self._to_host),
                (transfer.copy_to_device, self._to_device),
                (transfer.start_to_host, self._start_to_host),
            ]
            stack.enter_context(_replaced(other))
            for kind, name in (("stream", "record_stream"), ("pin", "pin_memory")):
                noted = self._noting(kind, name)
                stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
            run = self._launching(InterpretedFunction.run)
            stack.enter_context(mock.patch.object(InterpretedFunction, "run", run))
            stack.enter_context(mock.patch.object(Scratch, "on_device", self._from_locked))
            if comm is not None:
                swap = self._sending(comm.swap)
                stack.enter_context(mock.patch.object(comm, "swap", swap))
            stack.enter_context(self)
            Recorder._noting_now.append(self)
            stack.callback(Recorder._noting_now.remove, self)
            yield self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = _tensors((args, kwargs))
        if given and all(map(self._on_host, given)):
            for tensor in _tensors(out):
                self._keep_on_host(tensor)
            return out
        if self._paused or name in ALLOCATES or _is_view(func):
            return out
        if _waits(name, args, kwargs):
            self._note("wait", name)
            self._note("copy", name)
        made = _tensors(out)
        writes = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
        in_place = any(alias.is_write for alias in writes)  # such as all of a fused optimiser
        if any(t.numel() for t in (*made, *(given if in_place else ()))):
            before = {t.untyped_storage()._cdata for t in given}
            fresh = [t.untyped_storage()._cdata not in before for t in made]

            def again():
                for old, new, is_fresh in zip(
                    made, _tensors(func(*args, **kwargs)), fresh, strict=True
                ):
                    if is_fresh:
                        old.copy_(new)

            self._note("operation", name, self._details((args, kwargs, out)), again)
        return out

    def _note(self, kind, name, details=(), again=None):
        if not self._paused:
            self.entries.append(Entry(kind, name, details, again))

    def _details(self, thing):
        """Return something nested as tuples of what two records may differ in."""
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            self._kept.append(storage)
            number = self._number.setdefault(storage._cdata, len(self._number))
            form = str(thing.dtype), tuple(thing.shape), thing.stride()
            return (*form, f"memory {number} + {thing.storage_offset()}")
        if isinstance(thing, dict):
            return tuple((key, self._details(value)) for key, value in thing.items())
        if isinstance(thing, list | tuple):
            return tuple(map(self._details, thing))
        if isinstance(thing, constexpr):
            return self._details(thing.value)
        if thing is None or isinstance(thing, int | float | str):
            return thing
        return getattr(thing, "__name__", None) or str(thing)

    def _on_host(self, tensor):
        return tensor.untyped_storage()._cdata in self._host

    def _to_host(self, tensor):
        if not self._on_host(tensor):
            self._note("wait", "to_host")
            self._note("copy", "to_host")
            with self._pause():
                tensor = tensor.clone()
            self._keep_on_host(tensor)
        return tensor

    def _start_to_host(self, tensors):
        with self._pause():
            copies = [tensor.clone() for tensor in tensors]
        for copy in copies:
            self._note("copy", "start_to_host")
            self._keep_on_host(copy)
        return copies, None

    def _keep_on_host(self, tensor):
        self._kept.append(tensor)
        self._host.add(tensor.untyped_storage()._cdata)

    def _to_device(self, tensor, device):
        self._note("pin", "copy_to_device")
        self._note("copy", "copy_to_device")
        return tensor

    def _from_locked(self, name, numbers):
        with self._pause():
            there = torch.tensor(numbers)
            locked = there.clone()  # of a recorded step, and nobody writes to it
        again = partial(there.copy_, locked)
        self._note("copy", "on_device", self._details(there), again)
        return there

    def _noting(self, kind, name):
        def noted(tensor, *arguments):
            self._note(kind, name)
            return tensor

        return noted

    def _launching(self, run):
        def launched(function, *args, grid, warmup, **kwargs):
            def again():
                return run(function, *args, grid=grid, warmup=warmup, **kwargs)

            places = grid(inspect.getcallargs(function.fn, *args)) if callable(grid) else grid
            details = self._details((places, args, kwargs))
            self._note("launch", function.fn.__name__, details, again)
            with self._pause():
                return again()

        return launched

    def _sending(self, swap):
        def sent(buffer, *spans):
            self._note("message", "swap", self._details((buffer, spans)))
            with self._pause():
                return swap(buffer, *spans)

        return sent

    @contextmanager
    def _pause(self):
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before


@contextmanager
def _replaced(pairs):
    """While this lasts, modules of recapp have the second function of a pair for the first one."""
    try:
        _give({id(old): new for old, new in pairs})
        yield
    finally:
        _give({id(new): old for old, new in pairs})  # also modules that were imported meanwhile


def captured(step, memory):
    """Record a step, and take back what recording it has done to some tensors, as a CUDA graph does
    nothing while it is recorded. Return what the step returns, and the record.
    """
    before = [x.clone() for x in memory]
    recorder = Recorder()
    with recorder.recording():
        value = step()
    for x, old in zip(memory, before, strict=True):
        x.data.copy_(old)  # no change that a backward sees
    return value, recorder


def counted(way, step, memory):
    """Record a step in which the host neither waits, pins nor sends, as `captured` does. Return
    what it returns, and a function that repeats it. Both are counted in `captures` and `replays`.
    """
    value, recorder = captured(step, memory)
    counts = recorder.counts()
    assert counts["waits"] == counts["pins"] == counts["messages"] == 0
    way.captures += 1

    def replay():
        way.replays += 1
        recorder.replay()

    return value, replay


def _give(functions):
    for module in [m for name, m in sys.modules.items() if name.startswith("recapp.")]:
        for name, value in [*vars(module).items()]:
            if id(value) in functions:
                setattr(module, name, functions[id(value)])


def _tensors(thing):
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]


def _is_view(func):
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


def _waits(name, args, kwargs):
    """Return whether an operation reads a number of the device to go on."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return name in WAITS
