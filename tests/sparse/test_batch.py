"""A batch moves as one: to a device, into page-locked memory, through loader workers."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from recapp.errors import DataError
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING


def batch(rows: int) -> Batch:
    ids = torch.arange(2 * rows)
    ids[:1] = MISSING
    sparse = KeyedJaggedTensor(["C1", "C2"], ids, lengths=torch.ones(2 * rows, dtype=torch.int32))
    return Batch(torch.rand(rows, 3), sparse, torch.zeros(rows))


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_moves_as_one(rows):
    there = batch(rows).to("meta", non_blocking=True)
    assert (
        there.rows == rows
        and there.dense_BI.is_meta
        and there.sparse.values().is_meta
        and there.labels_B.is_meta
    )


def two_labels(rows: int) -> Batch:
    one = batch(rows)
    labels = {"click": torch.ones(rows), "buy": torch.zeros(rows)}
    return Batch(one.dense_BI, one.sparse, labels, {"buy": torch.full((rows,), 2.0)})


def test_labels_and_weights_go_by_name_and_move_with_the_batch():
    there = two_labels(3).to("meta")
    assert list(there.labels) == ["click", "buy"] and list(there.weights) == ["buy"]
    assert all(t.is_meta for t in (*there.labels.values(), *there.weights.values()))
    here = two_labels(3)
    assert here.to("cpu") is here
    again = pickle.loads(pickle.dumps(here))
    assert again.labels["click"].tolist() == [1, 1, 1] and again.weights["buy"].tolist() == [2] * 3


def test_a_label_alone_has_a_short_name_and_one_of_several_has_none():
    one = batch(2)
    assert one.labels["label"] is one.labels_B
    named = Batch(one.dense_BI, one.sparse, {"buy": one.labels_B})
    assert named.labels_B is one.labels_B
    with pytest.raises(DataError, match=r"labels click, buy, .*: name one, batch.labels\[NAME\]"):
        print(two_labels(2).labels_B)
    assert Batch(one.dense_BI, one.sparse, {}).labels_B.isnan().tolist() == [True, True]


def test_weights_of_no_label_and_uneven_weights_are_refused():
    one = batch(2)
    with pytest.raises(
        DataError, match=r"weights of buy, which is not one of its labels \(label\)"
    ):
        Batch(one.dense_BI, one.sparse, one.labels_B, {"buy": torch.ones(2)})
    with pytest.raises(DataError, match="2 bags per feature, 2 labels and 1 weights"):
        Batch(one.dense_BI, one.sparse, one.labels_B, {"label": torch.ones(1)})


def test_the_missing_id_is_the_least_int64():
    assert batch(1).sparse.values()[0].item() == torch.iinfo(torch.int64).min == MISSING


def test_parts_of_different_sizes_are_refused():
    whole = batch(3)
    with pytest.raises(DataError, match="a batch of 3 dense rows, 3 bags per feature and 2 labels"):
        Batch(whole.dense_BI, whole.sparse, whole.labels_B[:2])


def test_a_batch_survives_pickling_and_loader_workers():
    sent = [batch(3), batch(0)]
    for got, want in zip(DataLoader(sent, batch_size=None, num_workers=1), sent, strict=True):
        for again in (got, pickle.loads(pickle.dumps(want))):
            assert torch.equal(again.dense_BI, want.dense_BI) and torch.equal(
                again.sparse.values(), want.sparse.values()
            )
            assert again.sparse.length_per_key() == want.sparse.length_per_key()


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [1, 1, 2, 0, 1, 1], []])
def test_a_packed_batch_is_the_same_in_one_memory(lengths):
    rows = len(lengths) // 2
    one = two_labels(rows)
    one.sparse = KeyedJaggedTensor(["a", "b"], torch.arange(2 * rows), lengths=lengths, stride=rows)
    packed = one.packed()
    memories = {tensor.untyped_storage().data_ptr() for tensor in packed.tensors()}
    assert len(memories) == 1 and list(packed.labels) == ["click", "buy"]
    assert packed.sparse.length_per_key() == one.sparse.length_per_key()
    for there, here in zip(packed.tensors(), one.tensors(), strict=True):
        assert there.dtype == here.dtype and torch.equal(there, here) and there is not here
        assert there.data_ptr() % 16 == 0
    assert (0 in packed.sparse.lengths().stride()) is (lengths == [1] * 6)


def test_record_stream_reaches_all_three_parts(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: seen.append((stream, self.dtype))
    )
    batch(2).record_stream("s")
    assert seen == [
        ("s", torch.float32),
        ("s", torch.int64),
        ("s", torch.int32),
        ("s", torch.float32),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loader_pins_every_tensor_of_a_batch():
    (pinned,) = DataLoader([batch(3)], batch_size=None, pin_memory=True)
    assert isinstance(pinned, Batch)
    assert (
        pinned.dense_BI.is_pinned()
        and pinned.sparse.values().is_pinned()
        and pinned.labels_B.is_pinned()
    )


def test_row_numbers_move_with_the_samples_and_are_as_many():
    ids = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    given = (torch.zeros(3, 2), ids, torch.zeros(3), None)
    there = Batch(*given, torch.tensor([4, 0, 7])).to("meta")
    assert there.row_numbers_B.device.type == "meta"
    with pytest.raises(DataError, match="2 row numbers"):
        Batch(*given, torch.tensor([4, 0]))
