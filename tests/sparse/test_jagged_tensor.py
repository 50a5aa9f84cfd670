"""Jagged tensors: bags cut by lengths or offsets, and what is refused."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from recapp.errors import DataError
from recapp.sparse.jagged_tensor import JaggedTensor

USERS = ([101, 102, 201, 202, 203, 301], [2, 3, 1])
BAGS = st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=5)


def users(**kwargs) -> JaggedTensor:
    return JaggedTensor(torch.tensor(USERS[0]), lengths=torch.tensor(USERS[1]), **kwargs)


def bags(jagged: JaggedTensor) -> list[list]:
    return [bag.tolist() for bag in jagged.to_dense()]


def test_lengths_cut_the_values_into_three_users():
    assert bags(users()) == [[101, 102], [201, 202, 203], [301]]
    assert users().offsets().tolist() == [0, 2, 5, 6]


@pytest.mark.parametrize(
    "offsets",
    [[0, 2, 5, 6], torch.tensor([0, 2, 5, 6], dtype=torch.int32), np.array([0, 2, 5, 6])],
)
def test_offsets_say_the_same_as_lengths(offsets):
    jagged = JaggedTensor(USERS[0], offsets=offsets)
    assert jagged.lengths().tolist() == USERS[1]
    assert jagged.offsets().tolist() == [0, 2, 5, 6]
    assert bags(jagged) == bags(users())


@pytest.mark.parametrize(
    "weights", [None, [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
)
def test_the_first_values_count_where_there_are_more(weights):
    exact = JaggedTensor(USERS[0][:5], weights and weights[:5], [2, 3])
    for counts in ({"lengths": [2, 3]}, {"lengths": [2, 3], "offsets": [0, 2, 5]}):
        jagged = JaggedTensor(USERS[0], weights, **counts)
        assert jagged.values().tolist() == USERS[0], "the buffer is not cut"
        assert jagged.offsets().tolist() == [0, 2, 5]
        assert bags(jagged) == bags(exact)
        assert jagged.to_padded_dense().tolist() == exact.to_padded_dense().tolist()
        tree = pytree.tree_map(lambda t: t, jagged)
        for held in (
            jagged.without_slack(),
            tree.without_slack(),
            jagged.to("cpu").without_slack(),
        ):
            assert held.values().tolist() == USERS[0][:5]
            assert held.weights_or_none() is None or len(held.weights()) == 5
        if weights:
            assert [bag.tolist() for bag in jagged.to_dense_weights()] == [
                [1.0, 2.0],
                [3.0, 4.0, 5.0],
            ]


@pytest.mark.parametrize("offsets", [[0, 2, 5], torch.tensor([0, 2, 5]), np.array([0, 2, 5])])
def test_offsets_that_end_before_the_values_are_starts(offsets, capsys):
    jagged = JaggedTensor(USERS[0], offsets=offsets)
    assert bags(jagged) == bags(users()) and jagged.offsets().tolist() == [0, 2, 5, 6]
    assert bags(JaggedTensor(USERS[0], lengths=USERS[1], offsets=offsets)) == bags(users())
    assert bags(JaggedTensor(USERS[0], offsets=[0])) == [USERS[0]]
    weights = [0.5] * len(USERS[0])
    assert len(JaggedTensor(USERS[0], weights, offsets=offsets).to_dense_weights()[2]) == 1
    with pytest.raises(DataError, match="6 values in bags: give one weight per value"):
        JaggedTensor(USERS[0], weights[:5], offsets=offsets)
    assert capsys.readouterr().err == ""


def test_tensors_without_slack_are_the_object_itself():
    jagged = users()
    assert jagged.without_slack() is jagged


def test_empty_has_no_bags_and_the_types_that_are_asked_for():
    empty = JaggedTensor.empty(True, "cpu", torch.int64, torch.float64, torch.int16)
    kinds = (empty.values().dtype, empty.weights().dtype, empty.lengths().dtype)
    assert kinds == (torch.int64, torch.float64, torch.int16)
    assert len(empty.lengths()) == 0 and bags(empty) == []
    assert JaggedTensor.empty().weights_or_none() is None


def test_what_is_there_is_returned_and_offsets_once_they_were_asked_for():
    jagged = users()
    assert jagged.lengths_or_none() is jagged.lengths() and jagged.offsets_or_none() is None
    jagged.offsets()
    assert jagged.offsets_or_none().tolist() == [0, 2, 5, 6]
    assert jagged.to_dense_weights() is None and jagged.to_padded_dense_weights() is None


def test_lengths_of_a_list_of_bags_are_int32():
    assert JaggedTensor.from_dense([[1, 2], []]).lengths().dtype == torch.int32


def test_lengths_and_offsets_together_are_taken_if_they_agree():
    assert bags(JaggedTensor(USERS[0], lengths=[2, 3, 1], offsets=[0, 2, 5, 6])) == bags(users())
    with pytest.raises(
        DataError, match="3 lengths and 3 bags by offsets contradict each other: give only one"
    ):
        JaggedTensor(USERS[0], lengths=[2, 3, 1], offsets=[0, 3, 5, 6])
    with pytest.raises(DataError, match="2 lengths and 3 bags by offsets"):
        JaggedTensor(USERS[0], lengths=[2, 4], offsets=[0, 2, 5, 6])


def test_lists_make_int64_ids_and_float32_weights():
    jagged = JaggedTensor([1, 2], [1, 2], [1, 1])
    assert (jagged.values().dtype, jagged.weights().dtype, jagged.lengths().dtype) == (
        torch.int64,
        torch.float32,
        torch.int64,
    )
    assert JaggedTensor([], lengths=[0, 0]).values().dtype == torch.int64
    assert JaggedTensor([0.5], lengths=[1]).values().dtype == torch.float32


def test_tensors_are_not_copied():
    values = torch.tensor(USERS[0])
    weights = torch.rand(6)
    lengths = torch.tensor(USERS[1], dtype=torch.int32)
    jagged = JaggedTensor(values, weights, lengths)
    assert jagged.values() is values and jagged.weights() is weights and jagged.lengths() is lengths
    assert jagged.to_dense()[1].data_ptr() == values[2:].data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.complex64,
    ],
)
def test_values_may_have_any_dtype_and_further_dimensions(dtype):
    values = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    jagged = JaggedTensor(values, lengths=[1, 0, 2])
    assert [bag.shape for bag in jagged.to_dense()] == [(1, 2), (0, 2), (2, 2)]
    padded = jagged.to_padded_dense()
    assert padded.shape == (3, 2, 2) and padded.dtype == dtype
    assert torch.equal(padded[2], values[1:]) and not padded[1].any() and not padded[0, 1].any()


@pytest.mark.parametrize(
    "lengths",
    [
        [2.0, 3.0, 1.0],
        torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64),
        np.array([2.0, 3.0, 1.0]),
    ],
)
def test_float_lengths_that_are_whole_become_integers(lengths):
    jagged = JaggedTensor(USERS[0], lengths=lengths)
    assert jagged.lengths().dtype == torch.int64 and bags(jagged) == bags(users())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "neither lengths nor offsets are given"),
        (
            {"lengths": [2, 3, 2]},
            "lengths sum to 7, but there are 6 values: give at least 7 values;",
        ),
        ({"lengths": [2, -1, 5]}, r"lengths\[1\] is -1: a bag has 0 values or more"),
        ({"lengths": [2, 2.5, 1.5]}, r"lengths\[1\] is 2.5: give whole numbers"),
        ({"lengths": [2.0, float("nan"), 4.0]}, r"lengths\[1\] is nan"),
        ({"lengths": [2.0, float("inf"), 4.0]}, r"lengths\[1\] is inf"),
        ({"lengths": [True, False]}, "lengths are torch.bool: give integers"),
        (
            {"lengths": torch.tensor([[2, 3, 1]])},
            r"lengths have the shape \[1, 3\]: give one flat list",
        ),
        (
            {"lengths": [[2, 3], [1]]},
            "lengths: expected sequence of length 2.*flat list of numbers",
        ),
        ({"lengths": ["two"]}, "lengths: .*give a tensor or a flat list of numbers"),
        (
            {"lengths": torch.tensor([2, 3, 1], device="meta")},
            "lengths are on meta, values on cpu: put them on one device",
        ),
        (
            {"offsets": [0, 2, 7]},
            "3 offsets run from 0 to 7, but there are 6 values: give offsets that rise from 0 to 6 "
            "or less",
        ),
        ({"offsets": [1, 2, 6]}, "3 offsets run from 1 to 6, but there are 6 values"),
        ({"offsets": [0, 4, 2, 6]}, "4 offsets fall from 4 to 2"),
        (
            {"weights": [1.0, 2.0], "lengths": [2, 3, 1]},
            "there are 2 weights and 6 values in bags: give one weight per value",
        ),
        (
            {"weights": torch.rand(6, device="meta"), "lengths": [2, 3, 1]},
            "weights are on meta, values on cpu",
        ),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_the_numbers(kwargs, message):
    with pytest.raises(DataError, match=message) as caught:
        JaggedTensor(USERS[0], **kwargs)
    assert "\n" not in str(caught.value)


def test_a_single_number_is_no_jagged_tensor():
    with pytest.raises(DataError, match="values are the single number 5: give a tensor or a list"):
        JaggedTensor(torch.tensor(5), lengths=[1])


@pytest.mark.parametrize(
    "jagged",
    [
        JaggedTensor([], lengths=[]),
        JaggedTensor([], offsets=[]),
        JaggedTensor([], offsets=[0]),
        JaggedTensor.from_dense([]),
    ],
)
def test_no_bags_are_ordinary(jagged):
    assert (
        len(jagged.lengths()) == 0 and jagged.offsets().tolist() == [0] and jagged.to_dense() == []
    )
    assert jagged.to_padded_dense().shape == (0, 0) and jagged.to_padded_dense(3).shape == (0, 3)
    assert "no bags" in repr(jagged)


def test_empty_bags_are_ordinary():
    jagged = JaggedTensor([], lengths=[0, 0])
    assert bags(jagged) == [[], []]
    assert jagged.to_padded_dense(2, 7).tolist() == [[7, 7], [7, 7]]


@given(BAGS, st.none() | st.integers(0, 6), st.integers(-3, 3))
def test_padded_rows_are_the_bags_cut_and_filled(plain, desired_length, padding):
    jagged = JaggedTensor.from_dense([torch.tensor(bag, dtype=torch.int64) for bag in plain])
    size = (
        desired_length
        if desired_length is not None
        else max((len(bag) for bag in plain), default=0)
    )
    assert jagged.to_padded_dense(desired_length, padding).tolist() == [
        (bag + [padding] * size)[:size] for bag in plain
    ]


@given(BAGS)
def test_from_dense_and_to_dense_are_inverse(plain):
    jagged = JaggedTensor.from_dense(plain, [[v / 2 for v in bag] for bag in plain])
    assert bags(jagged) == plain
    assert [bag.tolist() for bag in jagged.to_dense_weights()] == [
        [v / 2 for v in bag] for bag in plain
    ]


@given(BAGS)
def test_from_dense_lengths_undoes_padding(plain):
    jagged = JaggedTensor.from_dense(plain, plain)
    again = JaggedTensor.from_dense_lengths(
        jagged.to_padded_dense(5), jagged.lengths(), jagged.to_padded_dense_weights(5)
    )
    assert bags(again) == plain and torch.equal(again.weights(), jagged.weights())


def test_from_dense_lengths_refuses_other_counts():
    with pytest.raises(DataError, match=r"values have the shape \[2, 3\] and there are 3 lengths"):
        JaggedTensor.from_dense_lengths(torch.zeros(2, 3), [1, 1, 1])
    with pytest.raises(DataError, match="lengths sum to 5, but there are 4 values"):
        JaggedTensor.from_dense_lengths(torch.zeros(2, 3), [4, 1])


def test_from_dense_refuses_weights_of_other_lengths():
    with pytest.raises(DataError, match=r"weights have \[1, 1\] entries per bag, values \[2, 0\]"):
        JaggedTensor.from_dense([[1, 2], []], [[0.5], [0.5]])


def test_asking_for_weights_that_are_not_there_says_what_to_do():
    assert users().weights_or_none() is None
    with pytest.raises(DataError, match="has no weights: make it with weights="):
        users().weights()


def test_padding_passes_gradients_to_the_values_it_shows():
    values = torch.arange(6.0, requires_grad=True)
    JaggedTensor(values, lengths=[2, 3, 1]).to_padded_dense(2).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 1, 0, 1]


def test_repr_shows_the_bags_and_cuts_long_ones():
    assert (
        repr(users())
        == "JaggedTensor(3 bags, 6 values int64 on cpu: [101 102] [201 202 203] [301])"
    )
    assert "[1:0.5] [] [2:1 3:0.25]" in repr(JaggedTensor([1, 2, 3], [0.5, 1, 0.25], [1, 0, 2]))
    long = repr(JaggedTensor(torch.arange(1000), lengths=[500] + [50] * 10))
    assert (
        "[0 1 2 3 4 5 6 7 ... 492 more] [500 " in long
        and long.endswith("... 5 more bags)")
        and len(long) < 400
    )
    assert repr(users().to("meta")) == "JaggedTensor(3 bags, 6 values int64 on meta: not read)"


def test_a_tree_map_reaches_the_tensors_and_gives_back_a_jagged_tensor():
    doubled = pytree.tree_map(
        lambda t: t * 2, JaggedTensor([1, 2], lengths=[1, 1], weights=[3.0, 4.0])
    )
    assert (
        isinstance(doubled, JaggedTensor)
        and doubled.values().tolist() == [2, 4]
        and doubled.weights().tolist() == [6, 8]
    )
    leaves, spec = pytree.tree_flatten(users())
    assert bags(pytree.tree_unflatten(leaves, spec)) == bags(users())
    assert spec == pytree.tree_flatten(JaggedTensor([], offsets=[0]))[1]


def test_it_survives_pickling():
    assert bags(pickle.loads(pickle.dumps(users()))) == bags(users())


def test_contents_on_an_accelerator_are_not_read():
    """Reading a meta tensor raises, so what works there waits for no device."""
    jagged = JaggedTensor(
        torch.empty(6, device="meta"), lengths=torch.empty(3, dtype=torch.int64, device="meta")
    )
    assert jagged.offsets().shape == (4,) and jagged.to_padded_dense(2).shape == (3, 2)
    assert jagged.to("meta").values().is_meta and jagged.device() == torch.device("meta")


def test_bytes_are_those_of_the_tensors_that_exist():
    jagged = JaggedTensor(torch.tensor([1, 2, 3]), torch.ones(3), torch.tensor([2, 1]))
    assert jagged.size_in_bytes() == 3 * 8 + 3 * 4 + 2 * 8
    jagged.offsets()
    assert jagged.size_in_bytes() == 3 * 8 + 3 * 4 + 2 * 8 + 3 * 8


def test_a_tensor_like_another_has_its_types_and_its_shapes_where_a_device_is_named():
    jagged = JaggedTensor(torch.tensor([1, 2, 3]), torch.ones(3), torch.tensor([2, 1]))
    none = JaggedTensor.empty_like(jagged)
    assert bags(none) == [] and none.weights().dtype == torch.float32
    target = JaggedTensor.empty_like(jagged, device="cpu")
    assert target.values().shape == (3,) and target.values() is not jagged.values()
    assert target.lengths().shape == (2,)
