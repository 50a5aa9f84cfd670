"""Keyed tensors: blocks side by side, regrouped, with room before the first block."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from recapp.errors import DataError
from recapp.sparse.bags import UnknownKeyError
from recapp.sparse.jagged_tensor import KeyedTensor


def pooled(keys=("user", "item"), widths=(2, 3), rows=2) -> KeyedTensor:
    return KeyedTensor(keys, widths, torch.randn(rows, sum(widths)))


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), min_size=1),
    st.integers(0, 3),
    st.sampled_from([0, 1]),
)
def test_blocks_are_views_of_their_widths(widths, rows, key_dim):
    blocks = {
        key: torch.randn((rows, width) if key_dim else (width, rows))
        for key, width in widths.items()
    }
    tensor = KeyedTensor.from_tensor_list(list(blocks), list(blocks.values()), key_dim, key_dim)
    assert (
        tensor.keys() == list(widths)
        and tensor.length_per_key() == list(widths.values())
        and tensor.key_dim() == key_dim
    )
    assert tensor.offset_per_key()[-1] == sum(widths.values()) == tensor.values().shape[key_dim]
    for key, block in blocks.items():
        assert torch.equal(tensor[key], block) and torch.equal(tensor.to_dict()[key], block)
        assert (
            tensor[key].untyped_storage().data_ptr() == tensor.values().untyped_storage().data_ptr()
        )


def test_values_are_not_copied():
    values = torch.randn(2, 5)
    assert KeyedTensor(["a", "b"], [2, 3], values).values() is values


@pytest.mark.parametrize("rows", [0, 2])
def test_regroup_puts_blocks_of_several_side_by_side(rows):
    one = pooled(rows=rows)
    two = pooled(("price", "time"), (1, 4), rows)
    groups = KeyedTensor.regroup(
        [one, two], [["item", "price"], ["time"], ["user", "item", "time"]]
    )
    assert [g.shape for g in groups] == [(rows, 4), (rows, 4), (rows, 9)]
    assert torch.equal(groups[0], torch.cat([one["item"], two["price"]], 1)) and torch.equal(
        groups[1], two["time"]
    )
    assert torch.equal(groups[2], torch.cat([one["user"], one["item"], two["time"]], 1))


def test_an_empty_group_has_width_0():
    user, none = KeyedTensor.regroup([pooled()], [["user"], []])
    assert none.shape == (len(user), 0) and none.dtype == user.dtype


def test_groups_are_named_as_asked():
    tensor = pooled()
    named = KeyedTensor.regroup_as_dict([tensor], [["item", "user"], ["user"]], ["both", "one"])
    assert list(named) == ["both", "one"]
    assert torch.equal(named["one"], tensor["user"])
    assert torch.equal(named["both"], torch.cat([tensor["item"], tensor["user"]], 1))


def test_waiting_gives_the_tensor_itself():
    there = pooled()
    assert there.wait() is there


def test_regroup_passes_gradients():
    values = torch.ones(2, 5, requires_grad=True)
    tensor = KeyedTensor(["user", "item"], [2, 3], values)
    (group,) = KeyedTensor.regroup([tensor], [["item"]])
    group.sum().backward()
    assert values.grad.tolist() == [[0, 0, 1, 1, 1]] * 2


def with_room(room):
    """Return a keyed tensor of [3, room + 5] that needs a gradient; its blocks are at the end."""
    wide = torch.arange(3.0 * (room + 5)).view(3, room + 5).requires_grad_()
    return wide, KeyedTensor(["user", "item"], [2, 3], wide * 1, room=room)


def test_what_stands_before_the_blocks_is_written_where_there_is_room_for_it():
    wide, tensor = with_room(4)
    first = torch.randn(3, 4, requires_grad=True)
    weights = torch.randn(3, 9)
    assert torch.equal(tensor.values(), wide[:, 4:]) and torch.equal(tensor["item"], wide[:, 6:])
    memory = tensor.values().data_ptr()
    joined = tensor.prepend(first * 2)
    assert (
        torch.equal(joined, torch.cat([first * 2, wide[:, 4:]], 1))
        and joined[:, 4:].data_ptr() == memory
    )
    (joined * weights).sum().backward()
    assert torch.equal(first.grad, 2 * weights[:, :4]) and torch.equal(
        wide.grad[:, 4:], weights[:, 4:]
    )


@pytest.mark.parametrize(
    ("room", "first"),
    [(0, torch.ones(3, 4)), (3, torch.ones(3, 4)), (4, torch.ones(3, 4, dtype=torch.float64))],
)
def test_without_room_for_just_that_it_is_a_copy(room, first):
    wide, tensor = with_room(room)
    joined = tensor.prepend(first)
    assert torch.equal(joined, torch.cat([first, wide[:, room:].to(first.dtype)], 1))
    joined.sum().backward()
    assert torch.equal(wide.grad, torch.cat([torch.zeros(3, room), torch.ones(3, 5)], 1))


def test_the_room_is_used_once():
    _, tensor = with_room(1)
    one = tensor.prepend(torch.ones(3, 1))
    two = tensor.prepend(torch.zeros(3, 1))
    assert (
        one[:, 0].tolist() == [1] * 3
        and two[:, 0].tolist() == [0] * 3
        and torch.equal(one[:, 1:], two[:, 1:])
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedTensor(["a", "b"], [2], torch.zeros(1, 2)), "there are 2 keys and 1 lengths"),
        (
            lambda: KeyedTensor(["a", "b"], [2, 2], torch.zeros(1, 5)),
            r"length_per_key \[2, 2\] sum to 4, but dimension 1 of values \[1, 5\] is 5",
        ),
        (lambda: KeyedTensor(["a", "a"], [1, 1], torch.zeros(1, 2)), "key 'a' is given twice"),
        (
            lambda: KeyedTensor(["a"], [2], torch.zeros(2)),
            "key_dim is 1, but values have 1 dimensions",
        ),
        (lambda: KeyedTensor.from_tensor_list(["a"], []), "there are 1 keys and 0 tensors"),
        (
            lambda: KeyedTensor.regroup([pooled(), pooled()], [["user"]]),
            r"key 'user' is in keyed tensors \[0, 1\]",
        ),
        (lambda: KeyedTensor.regroup([], [[]]), "the list of keyed tensors is empty"),
        (
            lambda: KeyedTensor.regroup_as_dict([pooled()], [["user"]], ["a", "b"]),
            "there are 1 groups and 2 keys",
        ),
        (
            lambda: KeyedTensor.regroup(
                [pooled(), KeyedTensor(["x"], [2], torch.zeros(2, 2), 0)], [["x"]]
            ),
            r"key_dims differ: \[0, 1\]",
        ),
        (
            lambda: KeyedTensor.regroup([pooled()], [["usr"]]),
            "unknown key 'usr': did you mean user",
        ),
        (lambda: pooled()["itm"], "unknown key 'itm': did you mean item"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_an_unknown_key_is_a_key_error_too():
    with pytest.raises(KeyError):
        pooled()["x"]
    assert issubclass(UnknownKeyError, DataError)


def test_trees_pickles_and_moves_give_the_same_back():
    tensor = pooled()
    leaves, spec = pytree.tree_flatten(tensor)
    for again in (
        pytree.tree_unflatten(leaves, spec),
        pickle.loads(pickle.dumps(tensor)),
        tensor.to("cpu", non_blocking=True),
    ):
        assert again.keys() == tensor.keys() and again.length_per_key() == tensor.length_per_key()
        assert again.key_dim() == 1 and torch.equal(again.values(), tensor.values())
    assert pytree.tree_map(lambda t: t.shape, tensor).values() == (2, 5)


def test_repr_shows_the_blocks():
    assert repr(pooled()) == "KeyedTensor([2, 5] float32 on cpu, key_dim 1: user 2, item 3)"


def test_bytes_are_those_of_the_values():
    assert KeyedTensor(["a", "b"], [1, 2], torch.zeros(4, 3)).size_in_bytes() == 4 * 3 * 4
