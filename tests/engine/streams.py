"""Streams that are not there: they keep track of what comes after what, and a watch tells where two
of them touch the same memory with nothing between. What the host waits for does not count, so code
must be right without it.
"""

import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from recapp.kernels.reference import TorchBackend
from recapp.transport import communicator
from recapp.transport.communicator import GpuSideStream

KERNELS = (
    "route_rows",
    "write_row_requests",
    "link_rows",
    "route_bags",
    "write_bag_requests",
    "serve",
    "group_rows",
    "pool",
    "row_squares",
)


class Event:
    """A point in the work of a stream. The host may ask whether it has passed, or wait: then every
    later work of any stream comes after it.
    """

    def __init__(self, stream, streams):
        self.stream = stream.name
        self.reached = dict(stream.reached)
        self.streams = streams

    def query(self):
        passed = self.streams.passes(self)
        if passed:
            self.synchronize()
        return passed

    def synchronize(self):
        for stream in self.streams.all:
            stream._wait(self.reached)


class Stream:
    """How far it is itself, and how far each other stream is for certain when its next work
    begins.
    """

    def __init__(self, name, streams):
        self.name = name
        self.reached = defaultdict(int)
        self.streams = streams
        self.told = streams.told

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")
        self._wait(other.reached)

    def record_event(self):
        return Event(self, self.streams)

    def wait_event(self, event):
        self.told.append(f"{self.name} waits for {event.stream}")
        self._wait(event.reached)

    def _wait(self, reached):
        for name, n in reached.items():
            self.reached[name] = max(self.reached[name], n)


class Streams:
    """A side stream, one that computes, one of messages, one of copies, and the host, which is
    none. `passes(event)` says whether the GPU is there when the host asks.
    """

    Event = Event

    def __init__(self, passes=lambda event: True):
        self.told = []
        self.passes = passes
        self.all = [Stream(name, self) for name in ("side", "compute", "net", "copies", "host")]
        self.side, self.compute, self.net, self.copies, self.host = self.all
        self.current = self.compute

    @contextmanager
    def use(self, stream):
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    def make(self, stream=None):
        return GpuSideStream(stream or self.side, lambda: self.current, self.use)


class Watch(TorchDispatchMode):
    """`found`: what touches memory without having waited, and side's memory that compute uses while
    the allocator does not know.
    """

    def __init__(self, streams):
        super().__init__()
        self.streams = streams
        self.found = set()
        self._written = {}
        self._read = defaultdict(dict)
        self._home = {}
        self._recorded = defaultdict(set)
        self._kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            return out
        given = {self.memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        arguments = func._schema.arguments
        changed = {
            self.memory(kwargs[a.name] if a.name in kwargs else args[i])
            for i, a in enumerate(arguments)
            if a.alias_info is not None
            and a.alias_info.is_write
            and (i < len(args) or a.name in kwargs)
        }
        made = {self.memory(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)} - given
        # else it makes views
        if made or changed or not isinstance(out, torch.Tensor | list | tuple):
            for memory in made:
                self._home[memory] = self.streams.current.name
            self.touch(self.streams.current, given - changed, made | changed, str(func))
        return out

    def memory(self, tensor):
        """A number for it that is not given again while the watch lasts."""
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage._cdata

    def touch(self, stream, read, written, what):
        stream.reached[stream.name] += 1
        now = stream.name, stream.reached[stream.name]
        for memory in read | written:
            others = [self._written[memory]] if memory in self._written else []
            others += list(self._read[memory].items()) if memory in written else []
            late = {name for name, n in others if stream.reached[name] < n}
            self.found |= {f"{what} on {stream.name} does not wait for {name}" for name in late}
            if (
                self._home.get(memory) == "side"
                and stream.name == "compute"
                and "compute" not in self._recorded[memory]
            ):
                self.found.add(f"{what} on compute uses memory that side may be given again")
            if memory in written:
                self._written[memory] = now
                self._read[memory].clear()
            else:
                self._read[memory][now[0]] = now[1]

    def launched(self, launch):
        """A launch of a Triton kernel, which has written what is another afterwards."""

        def call(kernel, grid, arguments, *constants):
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            with _disable_current_modes():
                before = [x.clone() for x in tensors]
                launch(kernel, grid, arguments, *constants)
                same = [
                    x.view(torch.uint8).equal(y.view(torch.uint8)) if x.dim() else x.equal(y)
                    for x, y in zip(tensors, before, strict=True)
                ]
            written = {self.memory(x) for x, equal in zip(tensors, same, strict=True) if not equal}
            read = {self.memory(x) for x in tensors} - written
            self.touch(self.streams.current, read, written, kernel._kernel.fn.__name__)

        return call

    def record(self, tensor, stream):
        self._recorded[self.memory(tensor)].add(stream.name)

    def swap(self, start):
        """A collective as NCCL runs it: behind the stream that starts it, on one of its own."""

        def swapped(buffer, send, recv):
            net = self.streams.net
            home = self.streams.current
            wait = start(buffer, send, recv)
            net._wait(home.reached)
            self.touch(net, set(), {self.memory(buffer)}, "a message")
            arrived = net.record_event()

            def waited():
                wait()
                if self.streams.current is not home:
                    self.found.add(
                        f"a message of {home.name} is waited for on {self.streams.current.name}"
                    )
                self.streams.current._wait(arrived.reached)

            return waited

        return swapped


@contextmanager
def watched(comm, spoil=None):
    """While this lasts `comm` has a side stream, and everything is watched; `spoil(side)` may break
    it before.
    """
    streams = Streams()
    watch = Watch(streams)
    side = streams.make()
    if spoil is not None:
        spoil(side)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(comm, "side", side))
        stack.enter_context(mock.patch.object(comm, "swap", watch.swap(comm.swap)))
        stack.enter_context(mock.patch.object(communicator, "on_host", lambda tensor: False))
        stack.enter_context(
            mock.patch.object(
                torch.Tensor, "record_stream", lambda tensor, stream: watch.record(tensor, stream)
            )
        )
        if "recapp.kernels.triton_launch" in sys.modules:  # who uses Triton has imported it
            from recapp.kernels.triton_launch import Launch

            call = watch.launched(Launch.__call__)
            stack.enter_context(mock.patch.object(Launch, "__call__", call))
        stack.enter_context(watch)
        yield watch


@contextmanager
def late_compute(comm):
    """While this lasts `comm` has a side stream, and an update of rows happens as late as it may on
    a GPU: when compute has something else to do with rows or messages, or when side waits for it.
    Yields what has it happen now.
    """
    streams = Streams()
    side = streams.make()
    queued = []

    def now():
        while queued:
            queued.pop(0)()

    def in_turn(function):
        def called(*args, **kwargs):
            if streams.current is streams.compute:
                now()
            return function(*args, **kwargs)

        return called

    update = TorchBackend.update

    def later(*args, **kwargs):
        queued.append(lambda: update(*args, **kwargs))
        if not comm.side.overlaps:
            now()  # on one stream nothing is late

    with ExitStack() as stack:
        for name in KERNELS:
            kernel = in_turn(getattr(TorchBackend, name))
            stack.enter_context(mock.patch.object(TorchBackend, name, kernel))
        stack.enter_context(mock.patch.object(TorchBackend, "update", later))
        stack.enter_context(mock.patch.object(comm, "side", side))
        stack.enter_context(mock.patch.object(comm, "swap", in_turn(comm.swap)))
        stack.enter_context(mock.patch.object(side, "follow", in_turn(side.follow)))
        nothing = mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)
        stack.enter_context(nothing)
        yield now
