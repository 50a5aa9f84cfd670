"""TorchRec's stable API of the jagged tensors: members and constructor arguments by name and
position, and what the additional ones do.
"""

import inspect

import pytest
import torch
from sparse.bags_by_hand import same
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree

from recapp.errors import DataError
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

KEYS = ["a", "b"]
LENGTHS = [2, 1, 0, 3]
OF_BAGS = "is_weighted device values_dtype weights_dtype lengths_dtype"
SYNC = "weights stride stride_per_key_per_rank inverse_indices"
STABLE = {
    JaggedTensor: {
        "__init__": "values weights lengths offsets",
        "empty": OF_BAGS,
        "from_dense": "values weights",
        "from_dense_lengths": "values lengths weights",
        "to_dense to_dense_weights device lengths lengths_or_none offsets offsets_or_none": "",
        "values weights weights_or_none": "",
        "to_padded_dense to_padded_dense_weights": "desired_length padding_value",
        "to": "device non_blocking",
        "record_stream": "stream",
    },
    KeyedJaggedTensor: {
        "__init__": (
            "keys values weights lengths offsets stride stride_per_key_per_rank stride_per_key "
            "length_per_key lengths_offset_per_key offset_per_key index_per_key jt_dict "
            "inverse_indices"
        ),
        "from_offsets_sync": f"keys values offsets {SYNC}",
        "from_lengths_sync": f"keys values lengths {SYNC}",
        "concat": "kjt_list",
        "empty": OF_BAGS,
        "empty_like": "kjt",
        "from_jt_dict": "jt_dict",
        "sync unsync device lengths lengths_or_none offsets offsets_or_none keys values": "",
        "weights weights_or_none stride stride_per_key stride_per_key_per_rank": "",
        "variable_stride_per_key inverse_indices inverse_indices_or_none _key_indices": "",
        "length_per_key length_per_key_or_none offset_per_key offset_per_key_or_none": "",
        "lengths_offset_per_key index_per_key flatten_lengths to_dict pin_memory": "",
        "dist_labels dist_tensors": "",
        "split": "segments",
        "permute": "indices indices_tensor",
        "__getitem__": "key",
        "record_stream": "stream",
        "to": "device non_blocking dtype",
        "dist_splits": "key_splits",
        "dist_init": (
            "keys tensors variable_stride_per_key num_workers recat stride_per_rank stagger"
        ),
    },
    KeyedTensor: {
        "__init__": "keys length_per_key values key_dim offset_per_key index_per_key",
        "from_tensor_list": "keys tensors key_dim cat_dim",
        "keys values key_dim device offset_per_key length_per_key _key_indices to_dict": "",
        "__getitem__": "key",
        "regroup": "keyed_tensors groups",
        "regroup_as_dict": "keyed_tensors groups keys",
        "record_stream": "stream",
        "to": "device non_blocking",
    },
}


@pytest.mark.parametrize("kind", STABLE)
def test_members_take_their_arguments_by_name_and_position(kind):
    for names, arguments in STABLE[kind].items():
        for name in names.split():
            signature = inspect.signature(getattr(kind, name))
            wanted = arguments.split()
            found = [n for n in signature.parameters if n != "self"][: len(wanted)]
            assert found == wanted, f"{kind.__name__}.{name}"


def two_keys(weights=None):
    return KeyedJaggedTensor(KEYS, torch.arange(6), weights, torch.tensor(LENGTHS))


def test_what_the_other_arguments_say_may_be_said_again():
    parts = two_keys().to_dict()
    kjt = KeyedJaggedTensor(
        KEYS, torch.arange(6), None, torch.tensor(LENGTHS), None, 2, None, [2, 2], [3, 3],
        [0, 2, 4], [0, 3, 6], {"a": 0, "b": 1}, parts,
    )  # fmt: skip
    assert same(kjt, two_keys()) and kjt.to_dict()["b"] is parts["b"]
    assert kjt.stride_per_key() == [2, 2] and kjt.lengths_offset_per_key() == [0, 2, 4]
    assert kjt.index_per_key() == kjt._key_indices() == {"a": 0, "b": 1}
    assert kjt.stride_per_key_per_rank() == [] and not kjt.variable_stride_per_key()
    assert kjt.inverse_indices_or_none() is None
    assert kjt.flatten_lengths() is kjt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride_per_key": [2, 3]}, r"stride_per_key is \[2, 3\], but .* it is \[2, 2\]"),
        ({"length_per_key": [2, 4]}, r"length_per_key is \[2, 4\]"),
        ({"lengths_offset_per_key": [0, 2]}, r"lengths_offset_per_key is \[0, 2\]"),
        ({"offset_per_key": [0, 3, 5]}, r"offset_per_key is \[0, 3, 5\]"),
        ({"index_per_key": {"a": 1, "b": 0}}, "index_per_key is .*leave it out"),
        ({"jt_dict": {}}, r"jt_dict is \[\], but .* it is \['a', 'b'\]"),
    ],
)
def test_what_is_said_again_in_another_way_is_refused(arguments, message):
    with pytest.raises(DataError, match=message) as caught:
        KeyedJaggedTensor(KEYS, torch.arange(6), lengths=torch.tensor(LENGTHS), **arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"offset_per_key is \[0, 1\], but .* it is \[0, 2\]"):
        KeyedTensor(["a"], [2], torch.zeros(1, 2), 1, [0, 1])
    with pytest.raises(DataError, match="index_per_key is"):
        KeyedTensor(["a"], [2], torch.zeros(1, 2), 1, [0, 2], {"b": 0})


def test_counts_are_forgotten_and_made_again():
    kjt = two_keys()
    kjt.offsets()
    assert kjt.length_per_key_or_none() == [3, 3] and kjt.offset_per_key_or_none() == [0, 3, 6]
    assert kjt.unsync() is kjt
    assert kjt.length_per_key_or_none() is None and kjt.offset_per_key_or_none() is None
    assert kjt.sync() is kjt and kjt.length_per_key_or_none() == [3, 3]
    assert kjt.lengths_or_none() is kjt.lengths() and kjt.offsets_or_none() is kjt.offsets()


def test_no_keys_need_no_lengths():
    kjt = KeyedJaggedTensor([], torch.empty(0))
    assert kjt.keys() == [] and kjt.stride() == 0 and kjt.to_dict() == {}
    empty = KeyedJaggedTensor.empty(True, None, torch.int64, torch.float64)
    assert (empty.values().dtype, empty.weights().dtype) == (torch.int64, torch.float64)
    assert empty.lengths().dtype == torch.int32 and empty.stride() == 0
    like = KeyedJaggedTensor.empty_like(two_keys(torch.rand(6)))
    assert like.keys() == [] and like.stride() == 2 and like.values().dtype == torch.int64
    assert len(like.weights()) == 0


def test_on_the_meta_device_keys_share_the_values():
    kjt = KeyedJaggedTensor.from_offsets_sync(
        ["a", "b", "c"], torch.empty(8, device="meta"), torch.empty(7, device="meta")
    )
    assert kjt.stride() == 2 and kjt.length_per_key() == [4, 2, 2]
    assert kjt["b"].values().shape == (2,) and "meta" in repr(kjt)
    assert kjt.permute([2, 0]).values().shape == (6,)


def test_a_tree_with_the_keys_in_another_order_is_taken_in_the_first_order():
    first = two_keys()
    other = first.permute([1, 0])
    values, weights, lengths = tree_flatten_spec(other, pytree.tree_flatten(first)[1])
    assert weights is None and torch.equal(lengths, first.lengths())
    assert torch.equal(values, first.values())
    wide = KeyedTensor(["x", "y"], [1, 2], torch.arange(6.0).view(2, 3))
    turned = KeyedTensor(["y", "x"], [2, 1], torch.cat([wide["y"], wide["x"]], 1))
    (leaf,) = tree_flatten_spec(turned, pytree.tree_flatten(wide)[1])
    assert torch.equal(leaf, wide.values())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strides", [(2, 2), (2, 1)])
def test_tensors_that_ranks_have_sent_make_one_again(weighted, strides):
    """Two ranks of two keys each; the parts of a key come to stand side by side."""
    sent = []
    for rank, stride in enumerate(strides):
        lengths = torch.tensor([1, 2, 0, 3][: 2 * stride])
        count = int(lengths.sum())
        weights = torch.rand(count) if weighted else None
        kjt = KeyedJaggedTensor(KEYS, torch.arange(count) + 10 * rank, weights, lengths)
        sent.append(kjt)
    assert sent[0].dist_labels() == ["lengths", "values"] + (["weights"] if weighted else [])
    assert sent[0].dist_splits([2]) == [[4], [6]] + ([[6]] if weighted else [])
    assert sent[0].dist_splits([1, 1])[:2] == [[2, 2], [3, 3]]
    tensors = [torch.cat(parts) for parts in zip(*(k.dist_tensors() for k in sent), strict=True)]
    bags = torch.arange(sum(2 * s for s in strides))
    by_rank = [
        part.split(s) for part, s in zip(bags.split([2 * s for s in strides]), strides, strict=True)
    ]
    recat = torch.cat([by_rank[rank][key] for key in range(2) for rank in range(2)])
    if strides == (2, 2):
        recat = torch.tensor([0, 2, 1, 3])  # of ranks and keys, where all strides are equal
    made = KeyedJaggedTensor.dist_init(KEYS, tensors, False, 2, recat, list(strides))
    for key in KEYS:
        bags_of = [k[key] for k in sent]
        assert made[key].values().tolist() == torch.cat([b.values() for b in bags_of]).tolist()
        assert made[key].lengths().tolist() == torch.cat([b.lengths() for b in bags_of]).tolist()
        if weighted:
            assert torch.equal(made[key].weights(), torch.cat([b.weights() for b in bags_of]))
    assert made.stride() == sum(strides)


def test_parts_that_cannot_be_joined_are_refused():
    tensors = two_keys().dist_tensors()
    with pytest.raises(DataError, match="there are 1, but lengths and values and perhaps weights"):
        KeyedJaggedTensor.dist_init(KEYS, tensors[:1], False, 1, None, [2])
    with pytest.raises(DataError, match="stride_per_rank is None: give the number of samples"):
        KeyedJaggedTensor.dist_init(KEYS, tensors, False, 1, None, None)


def test_lengths_by_key_and_sample_are_flat_afterwards():
    kjt = KeyedJaggedTensor(KEYS, torch.arange(6), None, torch.tensor(LENGTHS).view(2, 2))
    assert same(kjt, two_keys()) and kjt.lengths().shape == (4,)
    empty = KeyedJaggedTensor(KEYS, torch.tensor([]), lengths=torch.empty(2, 0, dtype=torch.int32))
    assert empty.stride() == 0 and len(empty.to_dict()["b"].lengths()) == 0
    with pytest.raises(DataError, match=r"lengths have the shape \[1, 4\]: give one flat list"):
        KeyedJaggedTensor(KEYS, torch.arange(6), None, torch.tensor([LENGTHS]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda kjt: kjt.dist_splits([1, 2]),
            r"key_splits \[1, 2\] sum to 3, but there are 2 keys",
        ),
        (
            lambda kjt: KeyedJaggedTensor.dist_init(
                KEYS, kjt.dist_tensors(), False, 1, torch.tensor([0, 2]), [2]
            ),
            r"recat is \[0, 2\], but there are 2 parts: give each of 0..1 once, or None",
        ),
        (
            lambda kjt: KeyedJaggedTensor.from_jt_dict({"a": kjt.values()}),
            r"jt_dict\['a'\] is a Tensor: give JaggedTensors",
        ),
        (
            lambda kjt: kjt["a"].to_padded_dense(-1),
            "desired_length is -1: rows have 0 entries or more",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(call, message):
    with pytest.raises(DataError, match=message):
        call(KeyedJaggedTensor(KEYS, torch.arange(6), lengths=torch.tensor(LENGTHS)))
