"""The stream beside the one that computes, on the CPU: streams that are not there say who waits for
whom, and a watch finds what two of them touch unordered. On a GPU: test_steps_on_gpu.py."""

import sys
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_tables, same_bits, sharded, whole_tensors
from engine.streams import Streams, watched
from engine.test_dynamic_tables import tables as dynamic_tables
from torch.utils._python_dispatch import TorchDispatchMode

from recapp.kernels import reference
from recapp.metrics import click_metrics
from recapp.sparse import keyed_jagged_tensor, transfer
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables import ids
from recapp.trainer.lookahead import LookAhead
from recapp.transport import step_messages
from recapp.transport.communicator import Comm, SideStream, side_stream

STEPS = 5


def batches(tables, rank, steps=STEPS, **changes):
    return [
        batch_of(tables, 5 + 2 * rank + step, 100 * step + rank, **changes) for step in range(steps)
    ]


def copied(kjt):
    values, weights, lengths = (
        None if t is None else t.clone()
        for t in (kjt.values(), kjt.weights_or_none(), kjt.lengths())
    )
    return KeyedJaggedTensor.unchecked(
        kjt.keys(), values, weights, lengths, kjt.stride(), kjt.length_per_key()
    )


def trained(comm, collection, tables, depth, learns=False, **changes):
    """Losses, a validation and tables of some steps whose batches are copied before they are
    used; where sample weights learn, their gradients, too.
    """
    head = Head(collection)
    seen = {}
    plain = batches(tables, comm.rank, **changes)
    for step, features in enumerate(plain if learns else ()):
        seen[f"weights {step}"] = features.weights().requires_grad_()
    loader = (
        LookAhead(plain, depth, lambda: [collection.shared], copied, comm.side)
        if depth
        else map(copied, plain)
    )
    for step, features in enumerate(loader):
        loss = head(features).square().sum()
        loss.backward()
        seen[f"loss {step}"] = loss.detach().clone()
        if step == 2:
            with torch.no_grad():
                seen["validation"] = head(copied(batch_of(tables, 4, comm.rank)))
            # looked up with a gradient and never learned from
            head(copied(batch_of(tables, 3, comm.rank + 70)))
    collection.shared.forget_ahead()
    seen |= {name: x.grad for name, x in seen.items() if x.requires_grad}
    return seen | {
        f"{tensor} of {table}": data
        for (table, tensor), data in whole_tensors(comm, collection).items()
    }


def unordered(
    comm, kind, depth, spoil=None, mode="unique", weighted=False, backend="torch", learns=False
):
    """What the watch finds, and what differs from a run without streams."""
    tables = make_tables(id_rule="drop" if kind == "random" else "error")
    plain = trained(
        comm,
        sharded(comm, tables, kind, "rowwise_adagrad", backend=backend, mode=mode),
        tables,
        depth,
        learns,
        weighted=weighted,
    )
    collection = sharded(comm, tables, kind, "rowwise_adagrad", backend=backend, mode=mode)
    with watched(comm, spoil) as watch:
        found = trained(comm, collection, tables, depth, learns, weighted=weighted)
    return sorted(watch.found), [name for name in plain if not same_bits(plain[name], found[name])]


@pytest.mark.parametrize(
    "depth", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mixed", "unique"),
        pytest.param("mixed", "pooled", marks=pytest.mark.full),
        *(
            pytest.param(kind, "unique", marks=pytest.mark.full)
            for kind in ("column_wise", "random")
        ),
    ],
)
def test_no_memory_is_touched_by_two_streams_unordered_and_results_stay(ranks, kind, mode, depth):
    for weighted in (False, True):
        assert ranks.run(unordered, 2, kind, depth, None, mode, weighted) == [([], [])] * 2


@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_on_one_rank(depth):
    assert unordered(Comm(), "table_wise", depth) == ([], [])


def without_waiting(side):
    side.hand_over = lambda made, mark=None: None


def without_recording(side):
    hand_over = side.hand_over
    side.hand_over = lambda made, mark=None: hand_over((), mark)


def without_following(side):
    side.follow = lambda: None


@pytest.mark.parametrize(
    ("spoil", "depth", "told"),
    [
        (without_waiting, 1, "on compute does not wait for side"),
        (without_recording, 1, "memory that side may be given again"),
        (without_following, 0, "on side does not wait for compute"),
    ],
)
def test_the_watch_finds_what_is_left_out(spoil, depth, told):
    found, _ = unordered(Comm(), "table_wise", depth, spoil)
    assert any(told in line for line in found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_that_come_and_go_have_no_side_stream(dynamic):
    comm = Comm()
    comm.side = Streams().make()  # as a GPU's
    sharded(comm, [*make_tables()[:2], *dynamic_tables(dynamic)[2:]], backend="torch")
    assert comm.side.overlaps is not dynamic


@pytest.mark.parametrize("settings", [{}, {"seen": 2}, {"max_rows": 64}])
def test_beside_compute_they_would_be_touched_unordered(settings):
    """Which is why they have none."""
    comm = Comm()
    tables = dynamic_tables(True, **settings)
    collection = sharded(comm, tables, rule="adagrad", backend="torch")
    plain = batches(tables, 0)
    with watched(comm) as watch:
        for features in LookAhead(plain, 1, lambda: [collection.shared], copied, comm.side):
            collection(features).values().square().sum().backward()
    assert any("on side does not wait for compute" in line for line in watch.found)


def test_who_waits_for_whom():
    streams = Streams()
    side = streams.make()
    side.follow()
    with side.beside():
        side.follow()  # at home already
        with side.beside():
            assert streams.current is streams.side
        assert streams.current is streams.side
        before = side.mark()
        streams.side.reached["side"] = 7
    assert streams.current is streams.compute
    side.hand_over((), before)
    assert streams.compute.reached["side"] == 0
    side.hand_over(())
    assert streams.compute.reached["side"] == 7
    assert streams.told == [
        "side waits for compute",
        "compute waits for side",
        "compute waits for side",
    ]


def test_ahead_of_its_turn_nothing_waits_for_what_computes():
    """Else the host, which waits for the side, would wait for the step."""
    comm = Comm()
    tables = make_tables()
    collection = sharded(comm, tables, backend="torch")
    with watched(comm) as watch:
        head = Head(collection)
        told = watch.streams.told
        for step, features in enumerate(
            LookAhead(batches(tables, 0), 1, lambda: [collection.shared], copied, comm.side)
        ):
            if step == 0:
                assert told.count("side waits for compute") == 1  # when the epoch began
            head(features).sum().backward()
    assert told.count("side waits for compute") == 1
    assert told.count("compute waits for side") == 2 * STEPS  # a batch, and its exchange


class Recorded:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_memory_is_recorded_wherever_it_lies_in_a_batch():
    class Moved:
        def __init__(self, part):
            self.part = part
            self.name = "x"

        def to(self, device):
            return self

    parts = [Recorded() for _ in range(5)]
    streams = Streams()
    streams.make().hand_over(
        {
            "a": parts[0],
            "b": [parts[1], (parts[2], 7, "text", None)],
            "c": Moved(parts[3]),
            "d": iter([parts[4]]),
        }
    )
    assert all(part.streams == [streams.compute] for part in parts)


def test_on_the_cpu_there_is_no_stream():
    side = side_stream(torch.device("cpu"))
    assert type(side) is SideStream and not side.overlaps and type(Comm().side) is SideStream


# ---- what waits for a device

WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_consecutive",
    "equal",
    "histc",
    "is_nonzero",
}


class Waits(TorchDispatchMode):
    """Operations that would wait for a GPU, by name, and who asked for them: the innermost line of
    recapp.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        kwargs = kwargs or {}
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        sizeless = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITING or masks or sizeless:
            self.note(name)
        return func(*args, **kwargs)

    def note(self, name):
        frame = sys._getframe(2)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("recapp."):
            frame = frame.f_back
        if frame is not None:
            self.found[f"{name} in {frame.f_globals['__name__']}.{frame.f_code.co_name}"] += 1


class Fetched(torch.Tensor):
    """What `to_host` has brought: it may be read."""


def as_on_a_device(waits, stack):
    """Functions of `transfer` take the way of a GPU, and reading numbers without them is noted, as
    is making tensors of a list.
    """
    fetched = Counter()
    reads = {"tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy, "cpu": torch.Tensor.cpu}

    def to_host(tensor):
        fetched[sys._getframe(1).f_code.co_name] += 1
        return tensor.clone().as_subclass(Fetched)

    for name, read in reads.items():

        def noted(tensor, *args, name=name, read=read):
            if not isinstance(tensor, Fetched):
                waits.note(name)
            return read(tensor.as_subclass(torch.Tensor), *args)

        stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
    for module in (transfer, step_messages, reference, ids, keyed_jagged_tensor):
        stack.enter_context(mock.patch.object(module, "to_host", to_host))
    stack.enter_context(mock.patch.object(transfer, "on_host", lambda tensor: False))
    for name, make in {"tensor": torch.tensor, "from_numpy": torch.from_numpy}.items():

        def made(*args, name=name, make=make, **kwargs):
            if sys._getframe(1).f_globals["__name__"] != "recapp.sparse.transfer":
                waits.note(name)
            return make(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch, name, made))
    return fetched


def waited_for(comm, kind, rule="rowwise_adagrad", **changes):
    """In one step in the midst of training: operations that wait, and what is fetched of whom."""
    tables = make_tables(**changes)
    collection = sharded(comm, tables, kind, rule, backend="torch")
    head = Head(collection)
    plain = batches(tables, comm.rank)
    for features in plain:
        features.length_per_key()  # known on the host, as when a batch comes from there
        head(features).sum().backward()
    waits = Waits()
    with watched(comm) as watch, ExitStack() as stack:
        fetched = as_on_a_device(waits, stack)
        stack.enter_context(waits)
        head(plain[1]).sum().backward()
    assert not watch.found
    return dict(waits.found), dict(fetched)


def test_a_step_waits_for_sizes_alone(ranks):
    for waits, fetched in ranks.run(waited_for, 2, "row_wise"):
        groups = 3
        assert waits == {}
        # Distinct rows here and at the owner, of whom they are, what is asked in return, and
        # whether ids are right.
        assert fetched == {
            "true_indices": 2 * groups,
            "route_rows": groups,
            "arrived": 1,
            "_check_outside": 1,
        }


def test_a_step_of_one_rank_waits_for_distinct_rows_alone():
    waits, fetched = waited_for(Comm(), "table_wise")
    assert (waits, fetched) == (
        {},
        {"true_indices": 3, "route_rows": 3, "_check_outside": 1, "arrived": 1},
    )


def test_hashed_ids_need_no_later_check(ranks):
    for waits, fetched in ranks.run(waited_for_hashed, 2):
        assert waits == {} and "_check_outside" not in fetched


def waited_for_hashed(comm):
    return waited_for(comm, "row_wise", id_rule="hash")


@pytest.mark.parametrize(("rule", "found"), [("rowwise_adagrad", True), ("sgd", False)])
def test_strips_that_have_to_agree_wait_for_the_rows_of_each_piece(ranks, rule, found):
    for waits, fetched in ranks.run(waited_for, 2, "column_wise", rule):
        assert waits == {} and ("find_pieces" in fetched) is found


def test_metrics_and_loss_wait_for_nothing():
    waits = Waits()
    metrics = click_metrics()
    logits_B = torch.randn(50)
    labels_B = (torch.rand(50) > 0.5).float()
    with ExitStack() as stack:
        as_on_a_device(waits, stack)
        stack.enter_context(waits)
        for metric in metrics.values():
            metric.update(logits_B, labels_B)
        torch.nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum")
    assert waits.found == {}


# ---- the way down and up


def test_places_of_a_mask_are_the_same_with_and_without_a_device(monkeypatch):
    masks = [torch.rand(n) < share for n in (0, 1, 5, 200) for share in (0, 0.3, 2)]
    plain = [transfer.true_indices(mask) for mask in masks]
    monkeypatch.setattr(transfer, "on_host", lambda tensor: False)
    monkeypatch.setattr(transfer, "to_host", lambda tensor: tensor)
    assert all(
        torch.equal(a, transfer.true_indices(mask)) and a.dtype == torch.int64
        for a, mask in zip(plain, masks, strict=True)
    )


class Copied:
    """A tensor of the host, as `copy_to_device` sees it."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.told = []

    def pin_memory(self):
        self.told.append("locked")
        return self

    def to(self, device, non_blocking):
        self.told.append((str(device), non_blocking))
        return self


def test_on_the_way_to_a_gpu_memory_is_locked_and_nobody_waits():
    tensor = Copied()
    transfer.copy_to_device(tensor, torch.device("cuda", 1))
    assert tensor.told == ["locked", ("cuda:1", True)]
    tensor = Copied()
    transfer.copy_to_device(tensor, torch.device("cpu"))
    assert tensor.told == [("cpu", True)]


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.arange(3)
    batch = Batch(
        torch.zeros(2, 1), KeyedJaggedTensor(["a"], [1, 2], lengths=[1, 1]), torch.zeros(2)
    )
    assert (
        transfer.to_host(tensor) is tensor
        and transfer.copy_to_device(tensor, tensor.device) is tensor
    )
    assert batch.to("cpu", non_blocking=True) is batch
    assert transfer.to_device(tensor.numpy(), tensor.device).data_ptr() == tensor.data_ptr()
    assert transfer.to_device([3, 1], tensor.device).tolist() == [3, 1]
