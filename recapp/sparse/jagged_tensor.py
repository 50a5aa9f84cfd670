"""A jagged tensor: rows of different lengths, one after the other in a flat tensor. A row is called
a bag.

    values   101 102 | 201 202 203 | 301          three users and the ids they clicked on
    lengths        2 |           3 |   1          one entry per bag
    offsets  0         2             5     6      where each bag starts, and where the last one ends

Lengths determine offsets, and offsets determine lengths; the tensor derives the missing one on
demand. No id is padded or copied to make a batch.

>>> users = JaggedTensor([101, 102, 201, 202, 203, 301], lengths=[2, 3, 1])
>>> users
JaggedTensor(3 bags, 6 values int64 on cpu: [101 102] [201 202 203] [301])
>>> users.to_padded_dense()
tensor([[101, 102,   0],
        [201, 202, 203],
        [301,   0,   0]])

There may be more values than the bags hold, as in buffers of a fixed size; the first ones count.
Such a tensor needs lengths: offsets alone that end before the values do are the starts of bags, and
the last bag has all values that are left.

>>> JaggedTensor([101, 102, 201, 202, 203, 301], offsets=[0, 2, 5])
JaggedTensor(3 bags, 6 values int64 on cpu: [101 102] [201 202 203] [301])

Names and argument order are TorchRec's (`torchrec/sparse/jagged_tensor.py`). Suffixes: L values, B
bags, B1 bags + 1, N longest bag.

The output of embedding tables is a `KeyedTensor`, several dense features side by side:

               user (2 wide)   item (3 wide)
    sample 0    .1  .2          .3  .4  .5        values [B, 5], length_per_key [2, 3]
    sample 1    .6  .7          .8  .9  .0

>>> pooled = KeyedTensor(["user", "item"], [2, 3], torch.arange(10.).view(2, 5))
>>> pooled["item"]
tensor([[2., 3., 4.],
        [7., 8., 9.]])
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import TreeSpec, register_pytree_node

from recapp.errors import DataError
from recapp.sparse.bags import (
    JaggedValues,
    Numbers,
    UnknownKeyError,
    as_counts,
    as_tensor,
    bags_text,
    check_bags,
    check_distinct,
    check_total,
    check_values,
    concatenate,
    first_ones,
    on_host,
    values_text,
)
from recapp.sparse.keyed_parts import check_derived
from recapp.sparse.transfer import to_host


class JaggedTensor(JaggedValues):
    """Bags of values, with or without a weight per value.

    Nothing is copied. Contents are checked on CPU; on an accelerator integer lengths are not
    checked, because reading them would wait for the device. Offsets without lengths do wait: their
    last one is read.

    Args:
        values: [L, ...] of any dtype, bag after bag; a Python list becomes int64 or float32. There
            may be more values than the lengths hold; the first ones count.
        weights: One weight per value, or None.
        lengths: [B], the number of values of each bag; floats are allowed if they are whole
            numbers.
        offsets: [B + 1], cumulated lengths from 0 on; or [B], the starts of the bags alone, if
            there are values behind the last start. Give lengths or offsets.

    Raises:
        DataError: Counts do not fit together.
    """

    _may_have_slack = True  # also of stored tensors that are older than slack

    def __init__(
        self,
        values: Numbers,
        weights: Numbers | None = None,
        lengths: Numbers | None = None,
        offsets: Numbers | None = None,
    ) -> None:
        self._values, self._weights = check_values(values, weights)
        bags = _bags(self._values, lengths, offsets)
        self._lengths, self._offsets = check_bags(self._values, lengths, offsets, bags=bags)
        if on_host(self._lengths):
            check_total(int(self._lengths.sum()), self._values, self._weights)

    @classmethod
    def unchecked(
        cls,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        offsets: Tensor | None = None,
        may_have_slack: bool = False,
    ) -> "JaggedTensor":
        """Make a jagged tensor from parts that are known to fit, such as a slice of a checked
        tensor.

        Args:
            values: See the class, also for `weights`, `lengths` and `offsets`.
            weights: One weight per value, or None.
            lengths: The number of values of each bag.
            offsets: Cumulated lengths, or None.
            may_have_slack: Whether there may be more values than the bags hold.
        """
        jagged = cls.__new__(cls)
        jagged._values = values
        jagged._weights = weights
        jagged._lengths = lengths
        jagged._offsets = offsets
        jagged._may_have_slack = may_have_slack
        return jagged

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """Make a jagged tensor without bags.

        Args:
            is_weighted: Whether the tensor has weights (an empty tensor of weights).
            device: The device of the tensors.
            values_dtype: The dtype of the values; None takes torch's default.
            weights_dtype: The dtype of the weights; None takes torch's default.
            lengths_dtype: The dtype of lengths and offsets.
        """
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            weights,
            torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | str | None = None) -> "JaggedTensor":
        """Make a jagged tensor without bags that has the device and dtypes of another.

        Args:
            jt: The other tensor.
            device: A device on which to make a tensor of the same shapes instead, with memory that
                nothing has been written to, as a target of copies.
        """
        if device is not None:
            return jt._each(lambda t: torch.empty_like(t, device=device))
        weights = None if jt._weights is None else jt._weights[:0]
        return JaggedTensor.unchecked(jt._values[:0], weights, jt._lengths[:0])

    @staticmethod
    def from_dense(
        values: Sequence[Numbers], weights: Sequence[Numbers] | None = None
    ) -> "JaggedTensor":
        """Make a bag from each element of a list; lengths are int32.

        Args:
            values: B tensors or lists, each [n, ...]; n may be 0.
            weights: B tensors or lists of the same lengths.

        Raises:
            DataError: A bag has another number of weights than of values.
        """
        bags = [as_tensor("values", bag) for bag in values]
        sizes = [len(bag) for bag in bags]
        values_L = concatenate("values", bags)
        lengths_B = torch.tensor(sizes, dtype=torch.int32, device=values_L.device)
        if weights is None:
            return JaggedTensor(values_L, None, lengths_B)
        weighted = [as_tensor("weights", bag, dtype=torch.get_default_dtype()) for bag in weights]
        if [len(bag) for bag in weighted] != sizes:
            raise DataError(
                f"weights have {[len(bag) for bag in weighted]} entries per bag, values {sizes}: "
                "give one weight per value"
            )
        return JaggedTensor(values_L, concatenate("weights", weighted), lengths_B)

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Numbers, weights: Tensor | None = None
    ) -> "JaggedTensor":
        """Make a bag from the first `lengths[b]` columns of each row b of a padded matrix.

        Args:
            values: [B, N, ...].
            lengths: [B], at most N each.
            weights: [B, N], or None.

        Raises:
            DataError: The number of lengths is not B, or a length is above N (checked on CPU).
        """
        lengths_B = as_counts("lengths", lengths, values.device)
        if values.dim() < 2 or len(lengths_B) != len(values):
            raise DataError(
                f"values have the shape {list(values.shape)} and there are {len(lengths_B)} "
                "lengths: give values [B, N] and B lengths"
            )
        mask_BN = torch.arange(values.shape[1], device=values.device) < lengths_B[:, None]
        return JaggedTensor(
            values[mask_BN], None if weights is None else weights[mask_BN], lengths_B
        )

    def without_slack(self) -> "JaggedTensor":
        """Return the bags without slack, as views; the tensor itself if it has none.

        On an accelerator this reads the lengths, unless the tensor is known to have no slack.
        """
        if not self._may_have_slack or self._lengths.is_meta:
            return self
        total = int(to_host(self._lengths.sum()))
        check_total(total, self._values, self._weights)
        weights = None if self._weights is None else first_ones(total, self._weights)
        values = first_ones(total, self._values)
        if values is self._values and weights is self._weights:
            self._may_have_slack = False
            return self
        return JaggedTensor.unchecked(values, weights, self._lengths, self._offsets)

    def to_dense(self) -> list[Tensor]:
        """Return B tensors, one per bag: views of the values. This reads the lengths."""
        return list(torch.split(self.without_slack()._values, self._lengths.tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return B tensors of weights, one per bag: views; None without weights. This reads the
        lengths.
        """
        weights = self.without_slack()._weights
        return None if weights is None else list(torch.split(weights, self._lengths.tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Return the bags as rows of a matrix, [B, N, ...].

        Args:
            desired_length: N; longer bags are cut. None takes the length of the longest bag (read
                from the device).
            padding_value: The number that fills shorter bags.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as rows of a matrix, like `to_padded_dense`; None without weights."""
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """Return the bags on a device."""
        return self._each(lambda t: t.to(device, non_blocking=non_blocking))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "JaggedTensor":
        weights, offsets = (
            None if t is None else change(t) for t in (self._weights, self._offsets)
        )
        return JaggedTensor.unchecked(
            change(self._values), weights, change(self._lengths), offsets, self._may_have_slack
        )

    def _padded(self, data_L: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths_B = self._lengths
        if desired_length is not None and desired_length < 0:
            raise DataError(f"desired_length is {desired_length}: rows have 0 entries or more")
        size = (
            desired_length
            if desired_length is not None
            else int(lengths_B.max())
            if len(lengths_B)
            else 0
        )
        if torch.compiler.is_exporting():  # appends a value: a program may run without any
            data_L = torch.cat([data_L, data_L.new_zeros(1, *data_L.shape[1:])])
        elif not len(data_L) or not size:
            return data_L.new_full((len(lengths_B), size, *data_L.shape[1:]), padding_value)
        # Unlike a boolean mask, a gather never makes the host read from the device. For padding its
        # index stays inside of the values.
        column_N = torch.arange(size, device=data_L.device)
        index_BN = (self.offsets()[:-1, None] + column_N).clamp(max=data_L.shape[0] - 1)
        padded_BN = (column_N >= lengths_B[:, None]).reshape(
            lengths_B.shape[0], size, *[1] * (data_L.dim() - 1)
        )
        return data_L[index_BN].masked_fill(padded_BN, padding_value)

    def __repr__(self) -> str:
        head = f"{len(self._lengths)} bags, {values_text(self._values)}"
        return f"JaggedTensor({head}: {bags_text(self._values, self._weights, self._lengths)})"


def _bags(values_L: Tensor, lengths: Numbers | None, offsets: Numbers | None) -> int | None:
    """Return the number of bags; None if offsets are full, or cannot be read."""
    if lengths is not None:
        return len(as_counts("lengths", lengths, values_L.device))
    if offsets is None:
        return None
    offsets_N = as_counts("offsets", offsets, values_L.device)
    if not len(offsets_N) or offsets_N.is_meta or torch.compiler.is_exporting():
        return None
    return len(offsets_N) if int(to_host(offsets_N[-1:])[0]) < len(values_L) else None


def _flatten(jagged: JaggedTensor) -> tuple[list[Any], None]:
    return [jagged.values(), jagged.weights_or_none(), jagged.lengths()], None


def _unflatten(leaves: Any, _: None) -> JaggedTensor:
    values, weights, lengths = leaves
    return JaggedTensor.unchecked(values, weights, lengths, may_have_slack=True)


register_pytree_node(
    JaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="recapp.sparse.jagged_tensor.JaggedTensor",
)


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


def _flatten_keyed(
    tensor: KeyedTensor,
) -> tuple[list[Any], tuple[tuple[str, ...], tuple[int, ...], int]]:
    return [tensor.values()], (
        tuple(tensor.keys()),
        tuple(tensor.length_per_key()),
        tensor.key_dim(),
    )


def _unflatten_keyed(
    leaves: Any, context: tuple[tuple[str, ...], tuple[int, ...], int]
) -> KeyedTensor:
    # While torch maps a tree, leaves may have any type: so there is no check here.
    keyed = KeyedTensor.__new__(KeyedTensor)
    keyed._keys = list(context[0])
    keyed._length_per_key = list(context[1])
    keyed._key_dim = context[2]
    (keyed._values,) = leaves
    keyed._with_room = None
    return keyed


def _flatten_keyed_as(tensor: KeyedTensor, spec: TreeSpec) -> list[Any]:
    """Return the leaves of a tensor with its blocks in the order of the tensor with which a graph
    was traced.
    """
    keys = list(spec.context[0])
    return [tensor.values() if keys == tensor.keys() else KeyedTensor.regroup([tensor], [keys])[0]]


register_pytree_node(
    KeyedTensor,
    _flatten_keyed,
    _unflatten_keyed,
    serialized_type_name="recapp.sparse.jagged_tensor.KeyedTensor",
)
register_pytree_flatten_spec(KeyedTensor, _flatten_keyed_as)
