"""A batch reaches a device in one copy, from buffers that are used again; on the CPU, with streams
that are not there. On a GPU: test_steps_on_gpu.py.
"""

import copy
import pickle
import random
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_tables, same_bits, sharded, whole_tensors
from engine.streams import Streams, watched
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING
from recapp.trainer.lookahead import LookAhead
from recapp.transport.batch_slots import MOST_SLOTS, BatchSlots, _Slot
from recapp.transport.communicator import Comm

CPU = torch.device("cpu")


def slots_of(streams):
    return BatchSlots(CPU, streams.make(streams.copies))


class Copies(TorchDispatchMode):
    """The copies that go out on the stream of copies, in bytes."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::copy_" and self.streams.current is self.streams.copies:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def single(rows, dtype=torch.int64, start=0):
    ids = torch.arange(start, start + 3 * rows)
    ids[:1] = MISSING
    sparse = KeyedJaggedTensor(
        ["a", "b", "c"], ids, lengths=torch.ones(3 * rows, dtype=dtype), stride=rows
    )
    return Batch(torch.rand(rows, 5), sparse, torch.rand(rows))


def bags(rows, ids=torch.int64, weight=None):
    lengths = torch.arange(2 * rows) % 4
    values = torch.arange(int(lengths.sum())).to(ids)
    weights = None if weight is None else torch.rand(len(values)).to(weight)
    sparse = KeyedJaggedTensor(["a", "b"], values, weights, lengths, stride=rows)
    labels = {"click": torch.rand(rows), "buy": torch.rand(rows)}
    dense = torch.rand(rows, 3).to(weight or torch.float32)
    return Batch(dense, sparse, labels, {"buy": torch.rand(rows)}, torch.arange(rows))


def of_offsets():
    sparse = KeyedJaggedTensor(["a"], [1, 2, 3], offsets=torch.tensor([0, 2, 2, 3]))
    sparse.offsets()
    return Batch(torch.rand(3, 8).T[:3], sparse, {})


def of_variable_stride():
    inverse = (["a", "b"], torch.tensor([[0, 0, 1], [0, 0, 0]]))
    sparse = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=inverse,
    )
    return Batch(torch.rand(3, 2), sparse, torch.rand(3))


def with_slack():
    sparse = KeyedJaggedTensor(["a"], torch.arange(9), lengths=torch.tensor([2, 0, 1]))
    return Batch(torch.zeros(3, 0), sparse, torch.rand(3))


KINDS = {
    "one id a bag": lambda: single(4),
    "one id a bag, int32 lengths": lambda: single(4, torch.int32),
    "bags": lambda: bags(6),
    "no rows": lambda: bags(0),
    "no rows of single ids": lambda: single(0),
    "int32 ids and float64 weights": lambda: bags(6, torch.int32, torch.float64),
    "bfloat16 weights": lambda: bags(5, torch.int64, torch.bfloat16),
    "offsets, no label, strided numbers": of_offsets,
    "bags that samples take": of_variable_stride,
    "slack": with_slack,
}


def assert_same(there, batch):
    assert there is not batch and type(there) is Batch
    for one, other in zip(there.tensors(), batch.tensors(), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    assert there.labels.keys() == batch.labels.keys()
    assert there.weights.keys() == batch.weights.keys()
    assert there.sparse.keys() == batch.sparse.keys()
    assert there.sparse.stride() == batch.sparse.stride()
    assert there.sparse.length_per_key_or_none() == batch.sparse.length_per_key()
    assert there.sparse.stride_per_key() == batch.sparse.stride_per_key()


def test_every_kind_of_batch_arrives_whole_in_one_copy_and_in_one_memory():
    streams = Streams()
    slots = slots_of(streams)
    for _ in range(2):
        for kind in KINDS.values():
            batch = kind()
            with Copies(streams) as copies:
                there = slots.to_device(batch)
            assert len(copies.sizes) == 1
            assert_same(there, batch)
            memories = {t.untyped_storage().data_ptr() for t in there.tensors() if t.numel()}
            assert len(memories) <= 1 and all(t.data_ptr() % 16 == 0 for t in there.tensors())
            del there
    assert len(slots._slots) == 1


def test_a_batch_in_one_memory_is_not_packed_again():
    slots = slots_of(Streams())
    for kind in KINDS.values():
        there = kind().packed()
        with mock.patch.object(Batch, "packed", side_effect=AssertionError):
            assert_same(slots.to_device(there), there)


def test_lengths_of_one_are_one_number():
    streams = Streams()
    slots = slots_of(streams)
    with Copies(streams) as copies:
        for batch in (single(100), single(100, start=7), single(90), bags(90), single(100)):
            assert_same(there := slots.to_device(batch), batch)
            assert (there.sparse.lengths().stride() == (0,)) is all(batch.sparse.lengths() == 1)
    sent = copies.sizes
    assert sent[0] == sent[1] == sent[4] > sent[2] and sent[3] > sent[2] + 200 * 8


def test_a_batch_that_somebody_keeps_stays_as_it_is():
    slots = slots_of(Streams())
    batches = [single(4, start=n) for n in range(2 * MOST_SLOTS)]
    assert all(map(assert_same_all, [slots.to_device(b) for b in batches], batches))
    label = slots.to_device(batches[3]).labels_B  # a part is enough
    for batch in batches:
        slots.to_device(batch)
    assert torch.equal(label, batches[3].labels_B)


def assert_same_all(there, batch):
    assert_same(there, batch)
    return True


def test_the_host_waits_only_if_it_is_far_ahead():
    streams = Streams(passes=lambda event: False)
    slots = slots_of(streams)
    with mock.patch.object(streams.Event, "synchronize") as waits:
        for n in range(MOST_SLOTS):
            slots.to_device(single(4, start=n))
        assert not waits.called and len(slots._slots) == MOST_SLOTS
        slots.to_device(single(4))
    assert waits.call_count == 1 and len(slots._slots) == MOST_SLOTS


def test_a_larger_batch_takes_a_larger_slot():
    slots = slots_of(Streams())
    for rows in (4, 400, 3, 401):
        assert_same(slots.to_device(batch := single(rows)), batch)
    assert len(slots._slots) == 1


def test_what_cannot_be_packed_moves_by_itself():
    one = single(4)
    assert BatchSlots(CPU).to_device(one) is one  # no streams
    trained = Batch(
        one.dense_BI,
        one.sparse.with_weights(torch.rand(12, requires_grad=True)),
        one.labels_B,
    )
    slots = slots_of(Streams())
    assert slots.to_device(trained) is trained
    there = one.to("meta")
    assert BatchSlots(torch.device("meta"), slots.copies).to_device(there) is there


def test_a_copy_of_a_batch_has_memory_and_streams_of_its_own():
    slots = slots_of(Streams())
    there = slots.to_device(single(4))
    assert there.streams
    for other in (copy.deepcopy(there), pickle.loads(pickle.dumps(there)), there.each(torch.clone)):
        assert other.streams is None
        assert_same(other, there)


# ---- the order of the streams

STEPS = 8


def samples(comm, tables):
    batches = []
    for step in range(STEPS):
        sparse = batch_of(tables, 5 + step % 3, 100 * step + comm.rank)
        rows = sparse.stride()
        torch.manual_seed(step)
        batches.append(Batch(torch.rand(rows, 2), sparse, torch.rand(rows)))
    return batches


def trained(comm, tables, to_device, depth):
    collection = sharded(comm, tables, "mixed", "rowwise_adagrad", backend="torch")
    head = Head(collection)
    seen = {}
    kept = []
    batches = samples(comm, tables)
    loader = (
        LookAhead(batches, depth, lambda: [collection.shared], to_device, comm.side)
        if depth
        else map(to_device, batches)
    )
    for step, batch in enumerate(loader):
        loss = head(batch.sparse).square().sum() * batch.labels_B.sum() + batch.dense_BI.sum()
        loss.backward()
        seen[f"loss {step}"] = loss.detach().clone()
        if step % 5 == 2:
            kept.append(batch)
    collection.shared.forget_ahead()
    seen |= {f"dense of {n}": batch.dense_BI.clone() for n, batch in enumerate(kept)}
    return seen | {f"{t} of {n}": data for (n, t), data in whole_tensors(comm, collection).items()}


def unordered(comm, depth, spoil=None):
    """What the watch finds, what differs from a run without streams, and the number of slots."""
    tables = make_tables()[:2]
    plain = trained(comm, tables, lambda batch: batch, depth)
    draw = random.Random(depth)
    make = _Slot.__init__
    with watched(comm) as watch, ExitStack() as stack:
        streams = watch.streams
        streams.passes = lambda event: draw.random() < 0.5
        slots = slots_of(streams)

        def packed(batch, pinned, pack=Batch.packed):
            """Pack as the host does, which no stream orders."""
            with _disable_current_modes():
                made = pack(batch, pinned)
            watch.touch(streams.host, set(), {watch.memory(made.dense_BI)}, "packing")
            for stream in streams.all:  # a launch comes after what the host has done
                stream._wait(streams.host.reached)
            return made

        def made(slot, *arguments):
            with _disable_current_modes():
                make(slot, *arguments)

        stack.enter_context(mock.patch.object(Batch, "packed", packed))
        stack.enter_context(mock.patch.object(_Slot, "__init__", made))
        if spoil is not None:
            stack.enter_context(mock.patch.object(_Slot, *spoil))
        found = trained(comm, tables, slots.to_device, depth)
    differ = [name for name in plain if not same_bits(plain[name], found[name])]
    return sorted(watch.found), differ, len(slots._slots)


@pytest.mark.parametrize(
    "depth", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(3, marks=pytest.mark.full)]
)
def test_no_stream_touches_a_slot_before_its_turn(depth):
    found, differ, count = unordered(Comm(), depth)
    assert (found, differ) == ([], []) and count <= MOST_SLOTS


@pytest.mark.full
def test_nor_on_ranks(ranks):
    assert [found[:2] for found in ranks.run(unordered, 2, 1)] == [([], [])] * 2


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(
            ("is_done", lambda slot: True),
            "copies does not wait for compute",
            marks=pytest.mark.full,
        ),
        (("is_left", lambda slot: slot.take() or True), "copies does not wait for compute"),
    ],
)
def test_the_watch_finds_a_slot_that_is_used_too_early(spoil, told):
    found, _, _ = unordered(Comm(), 1, spoil)
    assert any(told in line for line in found)
