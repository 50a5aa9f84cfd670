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
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from recapp.errors import DataError
from recapp.sparse.bags import (
    JaggedValues,
    Numbers,
    as_counts,
    as_tensor,
    bags_text,
    check_bags,
    check_total,
    check_values,
    concatenate,
    first_ones,
    on_host,
    values_text,
)
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
