"""TorchRec's functions and modules for jagged tensors: equality, validation and conversion between
the classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.errors import DataError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor


class ComputeKJTToJTDict(nn.Module):
    """A module that splits a KeyedJaggedTensor by key."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return a jagged tensor for each key, as a view."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """A module that joins jagged tensors into a KeyedJaggedTensor."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return the entries as keys of one tensor, in order.

        Raises:
            DataError: Some entries have weights and others have none.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def regroup_kts(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Concatenate the vectors of keys in groups, as `KeyedTensor.regroup` does."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether two jagged tensors hold the same bags. As in TorchRec, values and weights are
    compared by `torch.allclose` and lengths exactly. An object of another class is never equal.
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return _same_parts(jt_1, jt_2)


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return whether two keyed jagged tensors hold the same keys in the same order with the same
    bags, by the comparison of `jt_is_equal`.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if kjt_1.keys() != kjt_2.keys() or kjt_1.stride() != kjt_2.stride():
        return False
    return kjt_1.stride_per_key() == kjt_2.stride_per_key() and _same_parts(kjt_1, kjt_2)


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor) -> None:
    """Check a keyed jagged tensor as its constructor does, and that all its values and weights
    belong to a bag. For a tensor on an accelerator this waits for the device.

    Raises:
        DataError: A check fails; the error is a ValueError, as in TorchRec.
    """
    if not isinstance(kjt, KeyedJaggedTensor):
        raise DataError(f"kjt is a {type(kjt).__name__}: give a KeyedJaggedTensor")
    weights = kjt.weights_or_none()
    KeyedJaggedTensor(
        kjt.keys(),
        kjt.values().cpu(),
        None if weights is None else weights.cpu(),
        kjt.lengths().cpu(),
        None if (offsets := kjt.offsets_or_none()) is None else offsets.cpu(),
        stride_per_key_per_rank=(
            kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        ),
    )
    held = kjt.without_slack()
    for name, tensor in (("values", kjt.values()), ("weights", weights)):
        if tensor is not None and len(tensor) != len(held.values()):
            raise DataError(
                f"there are {len(tensor)} {name}, but lengths sum to {len(held.values())}: the "
                "last ones belong to no bag"
            )


def _same_parts(
    one: JaggedTensor | KeyedJaggedTensor, other: JaggedTensor | KeyedJaggedTensor
) -> bool:
    """Return whether two tensors have the same values, weights and lengths."""
    if not torch.equal(one.lengths().long(), other.lengths().long()):
        return False
    return _close(one.values(), other.values()) and _close(
        one.weights_or_none(), other.weights_or_none()
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other)
