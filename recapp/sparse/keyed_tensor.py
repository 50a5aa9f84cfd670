"""Several dense features side by side in one tensor: the output of embedding tables.

               user (2 wide)   item (3 wide)
    sample 0    .1  .2          .3  .4  .5        values [B, 5], length_per_key [2, 3]
    sample 1    .6  .7          .8  .9  .0

>>> pooled = KeyedTensor(["user", "item"], [2, 3], torch.arange(10.).view(2, 5))
>>> pooled["item"]
tensor([[2., 3., 4.],
        [7., 8., 9.]])

Names and argument order are TorchRec's (`torchrec/sparse/jagged_tensor.py`).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import TreeSpec, register_pytree_node

from recapp.errors import DataError
from recapp.sparse.bags import UnknownKeyError, check_distinct
from recapp.sparse.keyed_parts import check_derived


class KeyedTensor:
    """Named blocks along one dimension of a tensor.

    Args:
        keys: The distinct names of the blocks.
        length_per_key: The widths of the blocks.
        values: All blocks; nothing is copied.
        key_dim: The dimension along which the blocks lie.
        offset_per_key: The start of each block and the end of the last. It follows from the widths,
            and `index_per_key` from the keys; both are checked.
        index_per_key: The index of each key.
        room: The number of free entries before the first block, along `key_dim`; `prepend` writes
            there.

    Raises:
        DataError: The widths do not sum to the size of the dimension or are not one per key, or a
            key occurs twice.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        *,
        room: int = 0,
    ) -> None:
        if len(keys) != len(length_per_key):
            raise DataError(
                f"there are {len(keys)} keys and {len(length_per_key)} lengths: give one length "
                "per key"
            )
        check_distinct(keys)
        if not 0 <= key_dim < values.dim():
            raise DataError(
                f"key_dim is {key_dim}, but values have {values.dim()} dimensions: give one from "
                f"0 to {values.dim() - 1}"
            )
        if room + sum(length_per_key) != values.shape[key_dim]:
            raise DataError(
                f"length_per_key {list(length_per_key)} sum to {sum(length_per_key)}, but "
                f"dimension {key_dim} of values {list(values.shape)} is {values.shape[key_dim]}"
            )
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._key_dim = key_dim
        check_derived(
            offset_per_key=(offset_per_key, self.offset_per_key),
            index_per_key=(index_per_key, self._key_indices),
        )
        self._with_room = values if room else None
        self._values = (
            values.narrow(key_dim, room, values.shape[key_dim] - room) if room else values
        )

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Make a block from each tensor.

        Args:
            keys: Names of the blocks.
            tensors: Tensors of one shape, except for `cat_dim`.
            key_dim: The dimension whose sizes are the widths.
            cat_dim: The dimension along which they are concatenated.

        Raises:
            DataError: The number of tensors is not the number of keys, or is 0.
        """
        if len(keys) != len(tensors) or not tensors:
            raise DataError(
                f"there are {len(keys)} keys and {len(tensors)} tensors: give one tensor per key, "
                "and one or more"
            )
        return KeyedTensor(
            keys, [t.shape[key_dim] for t in tensors], torch.cat(list(tensors), cat_dim), key_dim
        )

    @staticmethod
    def regroup(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Arrange blocks of several keyed tensors in groups.

        Args:
            keyed_tensors: Tensors of one key_dim. A key that a group names is in one of them only.
            groups: The keys of each result; a key may be in several groups.

        Returns:
            A tensor per group with the blocks of its keys side by side; an empty group gives a
            tensor of width 0.

        Raises:
            UnknownKeyError: No tensor holds a key.
            DataError: There is no keyed tensor, several tensors hold a key, or key_dims differ.
        """
        if not keyed_tensors:
            raise DataError("the list of keyed tensors is empty: regroup needs one or more")
        dims = sorted({t.key_dim() for t in keyed_tensors})
        if len(dims) > 1:
            raise DataError(f"key_dims differ: {dims}: regroup needs keyed tensors of one key_dim")
        holders: dict[str, list[int]] = {}
        for index, tensor in enumerate(keyed_tensors):
            for key in tensor._keys:
                holders.setdefault(key, []).append(index)
        return [_group(keyed_tensors, holders, group) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"],
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
    ) -> dict[str, Tensor]:
        """Arrange blocks like `regroup`, and name each group.

        Args:
            keyed_tensors: See `regroup`.
            groups: See `regroup`.
            keys: A name for each group.

        Raises:
            DataError: The number of names is not the number of groups.
        """
        if len(groups) != len(keys):
            raise DataError(
                f"there are {len(groups)} groups and {len(keys)} keys: give each group one key"
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def wait(self) -> "KeyedTensor":
        """Return this tensor, which is complete.

        TorchRec's sharded collections return an awaitable of a keyed tensor.
        """
        return self

    def keys(self) -> list[str]:
        """Return the names of the blocks, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Return all blocks in one tensor."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the blocks lie."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Return the widths of the blocks."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the start of each block and the end of the last: one number more than keys."""
        return [0, *accumulate(self._length_per_key)]

    def _key_indices(self) -> dict[str, int]:
        """Return the index of each key, under the name in TorchRec's stable API."""
        return {key: index for index, key in enumerate(self._keys)}

    def size_in_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._values.nbytes

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise UnknownKeyError(key, self._keys)
        index = self._keys.index(key)
        return self._values.narrow(
            self._key_dim, sum(self._length_per_key[:index]), self._length_per_key[index]
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Return a tensor for each key: views."""
        return dict(
            zip(
                self._keys,
                torch.split(self._values, self._length_per_key, self._key_dim),
                strict=True,
            )
        )

    def prepend(self, first: Tensor) -> Tensor:
        """Return `first` followed by all blocks, along the dimension of the keys.

        If `room` has exactly the size of `first`, it is written there and the blocks are not
        copied. That works once; afterwards, or without room, all blocks are copied.
        """
        wide = self._with_room
        self._with_room = None
        whole = first.shape[self._key_dim] + self._values.shape[self._key_dim]
        if wide is None or wide.dtype != first.dtype or wide.shape[self._key_dim] != whole:
            return torch.cat([first, self._values.to(first.dtype)], self._key_dim)
        joined = _WriteFirst.apply(first, wide, self._key_dim)  # type: ignore[no-untyped-call]
        assert isinstance(joined, Tensor)
        return joined

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """Return the blocks on a device."""
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            self._values.to(device, non_blocking=non_blocking),
            self._key_dim,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has done the work that is queued on it now."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        widths = ", ".join(
            f"{key} {length}" for key, length in zip(self._keys, self._length_per_key, strict=True)
        )
        kind = str(self._values.dtype).removeprefix("torch.")
        return (
            f"KeyedTensor({list(self._values.shape)} {kind} on {self._values.device}, key_dim "
            f"{self._key_dim}: {widths or 'no keys'})"
        )


class _WriteFirst(torch.autograd.Function):
    """Write a tensor over the first entries of another.

    The gradient of the written tensor is that part of the result's gradient. The gradient of the
    other tensor is the whole of the result's, because its overwritten part is never read.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, wide: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.length = first.shape[dim]
        wide.narrow(dim, 0, ctx.length).copy_(first)
        ctx.mark_dirty(wide)
        return wide

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad.narrow(ctx.dim, 0, ctx.length), grad, None


def _group(
    keyed_tensors: Sequence[KeyedTensor], holders: dict[str, list[int]], group: Sequence[str]
) -> Tensor:
    """Return the blocks of one group side by side.

    Args:
        keyed_tensors: The tensors that hold the blocks.
        holders: The indices of the tensors that hold each key.
        group: The keys.
    """
    if not group:
        first = keyed_tensors[0]
        return first.values().narrow(first.key_dim(), 0, 0)
    parts = []
    for key in group:
        if key not in holders:
            raise UnknownKeyError(key, list(holders))
        if len(holders[key]) > 1:
            raise DataError(
                f"key {key!r} is in keyed tensors {holders[key]}: give the keys of the keyed "
                "tensors different names"
            )
        parts.append(keyed_tensors[holders[key][0]][key])
    return (
        parts[0]
        if len(parts) == 1
        else torch.cat(parts, keyed_tensors[holders[group[0]][0]].key_dim())
    )


def _flatten(tensor: KeyedTensor) -> tuple[list[Any], tuple[tuple[str, ...], tuple[int, ...], int]]:
    return [tensor.values()], (
        tuple(tensor.keys()),
        tuple(tensor.length_per_key()),
        tensor.key_dim(),
    )


def _unflatten(leaves: Any, context: tuple[tuple[str, ...], tuple[int, ...], int]) -> KeyedTensor:
    # While torch maps a tree, leaves may have any type: so there is no check here.
    keyed = KeyedTensor.__new__(KeyedTensor)
    keyed._keys = list(context[0])
    keyed._length_per_key = list(context[1])
    keyed._key_dim = context[2]
    (keyed._values,) = leaves
    keyed._with_room = None
    return keyed


def _flatten_as(tensor: KeyedTensor, spec: TreeSpec) -> list[Any]:
    """Return the leaves of a tensor with its blocks in the order of the tensor with which a graph
    was traced.
    """
    keys = list(spec.context[0])
    return [tensor.values() if keys == tensor.keys() else KeyedTensor.regroup([tensor], [keys])[0]]


register_pytree_node(
    KeyedTensor, _flatten, _unflatten, serialized_type_name="recapp.sparse.keyed_tensor.KeyedTensor"
)
register_pytree_flatten_spec(KeyedTensor, _flatten_as)
