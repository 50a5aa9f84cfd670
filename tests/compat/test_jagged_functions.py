"""What TorchRec has beside its jagged tensors, at its paths."""

import pytest
import torch
from recapp.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from recapp import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recapp.errors import DataError
from recapp.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    jt_is_equal,
    kjt_is_equal,
    regroup_kts,
)


def made(values=(1, 2, 3), lengths=(1, 0, 2, 0), keys=("a", "b"), weights=None):
    return KeyedJaggedTensor(
        list(keys), torch.tensor(values), weights, torch.tensor(lengths, dtype=torch.int32)
    )


def test_modules_take_apart_and_put_together():
    parts = ComputeKJTToJTDict()(made())
    assert parts["b"].values().tolist() == [2, 3]
    assert kjt_is_equal(ComputeJTDictToKJT()(parts), made())


@pytest.mark.parametrize(
    "other",
    [
        made(values=(1, 2, 4)),
        made(lengths=(1, 1, 1, 0)),
        made(keys=("b", "a")),
        made(keys=("a",)),
        made(weights=torch.ones(3)),
        made(values=(1, 2, 3, 4)),
        made().to_dict(),
        None,
    ],
)
def test_another_tensor_is_not_equal(other):
    assert kjt_is_equal(made(), made()) and kjt_is_equal(made().to("cpu"), made())
    assert not kjt_is_equal(made(), other) and not kjt_is_equal(other, made())


def test_bags_by_offsets_equal_bags_by_lengths():
    one = JaggedTensor([1.0, 2.0], [0.5, 0.5], [1, 1])
    assert jt_is_equal(one, JaggedTensor([1.0, 2.0], [0.5, 0.5], offsets=[0, 1, 2]))
    assert not jt_is_equal(one, JaggedTensor([1.0, 2.0], [0.5, 0.6], [1, 1]))
    assert not jt_is_equal(one, JaggedTensor([1.0, 2.0], None, [1, 1]))
    assert not jt_is_equal(one, JaggedTensor([1.0, 2.0], [0.5, 0.5], [2]))
    assert not jt_is_equal(one, [1.0, 2.0])


def test_blocks_are_regrouped():
    tensor = KeyedTensor(["x", "y"], [1, 2], torch.arange(6.0).view(2, 3))
    (group,) = regroup_kts([tensor], [["y", "x"]])
    assert torch.equal(group, torch.cat([tensor["y"], tensor["x"]], 1))


@pytest.mark.parametrize(
    ("kjt", "message"),
    [
        (made(values=(1, 2, 3, 4)), "there are 4 values, but lengths sum to 3"),
        (made(weights=torch.ones(5)), "there are 5 weights, but lengths sum to 3"),
        (
            KeyedJaggedTensor.unchecked(["a"], torch.arange(2), None, torch.tensor([3]), 1),
            "lengths sum to 3, but there are 2 values",
        ),
        (
            KeyedJaggedTensor.unchecked(["a", "a"], torch.arange(2), None, torch.tensor([1, 1]), 1),
            "key 'a' is given twice",
        ),
        ({"a": 1}, "kjt is a dict: give a KeyedJaggedTensor"),
    ],
)
def test_what_is_not_valid_is_a_value_error(kjt, message):
    validate_keyed_jagged_tensor(made())
    with pytest.raises(ValueError, match=message) as caught:
        validate_keyed_jagged_tensor(kjt)
    assert isinstance(caught.value, DataError) and "\n" not in str(caught.value)
