"""Keys with different numbers of bags (TorchRec: variable batch per key), and inverse indices."""

import pickle

import pytest
import torch
from sparse.bags_by_hand import same
from torch.utils import _pytree as pytree

from recapp.errors import DataError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor

KEYS = ["user", "item"]
STRIDES = [[1, 1], [2, 2]]
INVERSE = (KEYS, torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]]))
LENGTHS = [2, 1, 1, 0, 3, 1]


def made(strides=STRIDES, inverse=INVERSE, weighted=False, lengths=LENGTHS, **more):
    weights = torch.arange(8.0) if weighted else None
    return KeyedJaggedTensor(
        KEYS,
        torch.arange(10, 18),
        weights,
        torch.tensor(lengths),
        stride_per_key_per_rank=strides,
        inverse_indices=inverse,
        **more,
    )


def alike(one, other):
    """Equal with all that `same` does not look at."""
    mine = one.inverse_indices_or_none()
    theirs = other.inverse_indices_or_none()
    return (
        same(one, other)
        and one.stride_per_key_per_rank() == other.stride_per_key_per_rank()
        and (mine is None) == (theirs is None)
        and (mine is None or (mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])))
    )


def test_each_key_has_its_bags():
    kjt = made()
    assert kjt.stride() == 4 and kjt.stride_per_key() == [2, 4]
    assert kjt.stride_per_key_per_rank() == STRIDES and kjt.variable_stride_per_key()
    assert kjt.inverse_indices()[0] == KEYS
    assert kjt.length_per_key() == [3, 5] and kjt.lengths_offset_per_key() == [0, 2, 6]
    assert kjt["user"].lengths().tolist() == [2, 1] and kjt["item"].lengths().tolist() == [
        1,
        0,
        3,
        1,
    ]
    assert kjt.to_dict()["item"].values().tolist() == [13, 14, 15, 16, 17]
    assert "strides [2, 4] for 4 samples" in repr(kjt) and "user: [10 11] [12]" in repr(kjt)
    by_tensor = made(strides=torch.tensor(STRIDES, dtype=torch.int32))
    assert alike(by_tensor, kjt)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(
        KEYS,
        kjt.values(),
        kjt.offsets(),
        stride_per_key_per_rank=STRIDES,
        inverse_indices=INVERSE,
    )
    assert alike(by_offsets, kjt)
    by_lengths = KeyedJaggedTensor.from_lengths_sync(
        KEYS, kjt.values(), kjt.lengths(), None, None, STRIDES, INVERSE
    )
    assert alike(by_lengths, kjt)


def test_without_inverse_indices_the_longest_key_counts_the_samples():
    kjt = made(inverse=None)
    assert kjt.stride() == 4 and kjt.inverse_indices_or_none() is None
    with pytest.raises(DataError, match="has no inverse indices: make it with inverse_indices="):
        kjt.inverse_indices()


@pytest.mark.parametrize("weighted", [False, True])
def test_keys_are_taken_apart_and_put_together(weighted):
    kjt = made(weighted=weighted)
    user, none, item = kjt.split([1, 0, 1])
    assert user.stride_per_key() == [2] and item.stride_per_key() == [4] and none.keys() == []
    assert user.stride() == 4, "parts keep the samples of the whole"
    turned = kjt.permute([1, 0, 1])
    assert turned.stride_per_key() == [4, 2, 4] and turned.length_per_key() == [5, 3, 5]
    assert turned.split([1, 1, 1])[1]["user"].values().tolist() == [10, 11, 12]
    assert turned.inverse_indices_or_none() is None
    joined = KeyedJaggedTensor.concat([user, item])
    assert alike(joined, made(weighted=weighted, inverse=None))
    parts = [
        KeyedJaggedTensor.unchecked(
            k.keys(), k.values(), k.weights_or_none(), k.lengths(), 4, strides=[s],
            inverse_indices=([k.keys()[0]], index[None]),
        )
        for k, s, index in zip((user, item), STRIDES, INVERSE[1], strict=True)
    ]  # fmt: skip
    assert alike(KeyedJaggedTensor.concat(parts), kjt)


def test_a_mapping_of_different_numbers_of_bags_is_one():
    kjt = KeyedJaggedTensor.from_jt_dict(
        {"a": JaggedTensor([1], lengths=[1]), "b": JaggedTensor([2], lengths=[1, 0])}
    )
    assert kjt.stride_per_key_per_rank() == [[1], [2]] and kjt.stride() == 2
    assert kjt["b"].lengths().tolist() == [1, 0]


@pytest.mark.parametrize("inverse", [INVERSE, None])
@pytest.mark.parametrize("strides", [STRIDES, None])
def test_moves_trees_and_pickles_give_the_same_back(strides, inverse):
    lengths = LENGTHS if strides else [2, 1, 1, 0, 3, 0, 0, 1]
    kjt = made(strides, inverse, lengths=lengths)
    leaves, spec = pytree.tree_flatten(kjt)
    assert alike(pytree.tree_unflatten(leaves, spec), kjt)
    stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert alike(pytree.tree_unflatten(leaves, stored), kjt)
    assert alike(pickle.loads(pickle.dumps(kjt)), kjt)
    assert kjt.to("cpu") is kjt and kjt.to("meta").stride() == 4
    moved = pytree.tree_map(lambda t: None if t is None else t.clone(), kjt)
    assert alike(moved, kjt)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(kjt)[0]]
    assert len(paths) == len(leaves) == (4 if inverse else 3)
    if inverse:
        assert kjt.to("meta").inverse_indices()[1].is_meta and paths[3] == "._inverse_indices"


def test_a_batch_counts_its_samples_by_inverse_indices():
    batch = Batch(torch.zeros(4, 1), made(), torch.zeros(4))
    assert batch.rows == 4


def test_empty_bags_stand_behind_those_of_shorter_keys():
    kjt = made()
    padded = kjt.padded()
    assert padded.lengths().tolist() == [2, 1, 0, 0, 1, 0, 3, 1] and padded.stride() == 4
    assert padded.values() is kjt.values() and padded.padded() is padded
    none = KeyedJaggedTensor(["a"], [], lengths=[], stride_per_key_per_rank=[[0]])
    assert none.padded().stride() == 0 and none.length_per_key() == [0]


def test_values_behind_the_last_bag_do_not_count():
    longer = KeyedJaggedTensor(
        KEYS,
        torch.arange(10, 30),
        None,
        torch.tensor(LENGTHS),
        stride_per_key_per_rank=STRIDES,
        inverse_indices=INVERSE,
    )
    assert alike(longer.without_slack(), made())


@pytest.mark.parametrize("weighted", [False, True])
def test_tensors_that_ranks_have_sent_make_one_again(weighted):
    sent = [made(weighted=weighted), made(weighted=weighted)]
    assert sent[0].dist_labels() == ["lengths", "values", "strides", *(["weights"] * weighted)]
    assert sent[0].dist_splits([1, 1])[:3] == [[2, 4], [3, 5], [1, 1]]
    tensors = [torch.cat(parts) for parts in zip(*(k.dist_tensors() for k in sent), strict=True)]
    recat = torch.tensor([0, 2, 1, 3])
    joined = KeyedJaggedTensor.dist_init(KEYS, tensors, True, 2, recat, None)
    assert joined.stride_per_key_per_rank() == [[2, 2], [4, 4]]
    assert joined["user"].values().tolist() == [10, 11, 12] * 2
    assert joined["item"].lengths().tolist() == [1, 0, 3, 1] * 2
    lengths = torch.ones(28, dtype=torch.int64)
    values = torch.arange(28)
    staggered = KeyedJaggedTensor.dist_init(
        KEYS, [lengths, values, torch.arange(8)], True, 4, None, None, stagger=2
    )
    assert staggered.stride_per_key_per_rank() == [[0, 4, 2, 6], [1, 5, 3, 7]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made([[2]]), r"stride_per_key_per_rank is \[\[2\]\], but there are 2 keys"),
        (lambda: made([[2], [1, 2]]), "give a list for each key, with one number per rank"),
        (lambda: made([2, 4]), r"is \[2, 4\]: give a list for each key, with one number per rank"),
        (lambda: made([[-1], [7]]), "a key has a whole number of bags, 0 or more"),
        (lambda: made([[2.0], [4.0]]), "a key has a whole number of bags, 0 or more"),
        (lambda: made([[2], [5]]), "there are 6 bags, but stride_per_key_per_rank sums to 7"),
        (lambda: made(stride=3), "stride is 3, but by inverse_indices or the longest key there"),
        (lambda: made(stride_per_key=[2, 3]), r"stride_per_key is \[2, 3\], but"),
        (lambda: made(inverse=(KEYS,)), "inverse_indices: give a tuple of keys and a tensor"),
        (
            lambda: made(inverse=(KEYS, torch.zeros(1, 4, dtype=torch.int64))),
            r"inverse_indices have 2 keys and a tensor \[1, 4\]: give a tensor \[keys, samples\]",
        ),
        (lambda: made(inverse=(KEYS, [[0], [1]])), "inverse_indices have 2 keys and a tensor list"),
        (
            lambda: made(inverse=(KEYS, torch.zeros(2, 4))),
            "inverse_indices are torch.float32: give integers",
        ),
        (
            lambda: made(inverse=(KEYS, torch.tensor([[0, 2], [0, 1]]))),
            "inverse_indices of key 'user' run from 0 to 2, but it has 2 bags",
        ),
        (
            lambda: made(inverse=(["user", "user"], INVERSE[1])),
            "key 'user' is given twice",
        ),
        (
            lambda: KeyedJaggedTensor.concat(
                [made(inverse=None), KeyedJaggedTensor(["c"], [1], lengths=[1, 0, 0, 0])]
            ),
            "stride_per_key_per_rank: only some of the tensors have them",
        ),
        (
            lambda: KeyedJaggedTensor.concat(
                [
                    made(),
                    KeyedJaggedTensor(["c"], [1], lengths=[1], stride_per_key_per_rank=[[1, 0]]),
                ]
            ),
            "inverse_indices: only some of the tensors have them",
        ),
        (
            lambda: KeyedJaggedTensor.concat(
                [
                    made(inverse=None),
                    KeyedJaggedTensor(["c"], [1], lengths=[1], stride_per_key_per_rank=[[1]]),
                ]
            ),
            r"stride_per_key_per_rank have \[1, 2\] ranks",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
