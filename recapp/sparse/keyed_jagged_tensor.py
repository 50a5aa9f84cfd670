"""Several jagged features of one batch in one flat tensor: the input of embedding tables.

Keys-major: all bags of the first key, then all bags of the second. B, the stride, is the number of
samples; each key has B bags.

                    user 0          user 1
    user_features   101 102         201 202 203
    item_features   11              21 22

    values   101 102 | 201 202 203 || 11 | 21 22
    lengths        2 |           3 ||  1 |     2
    offsets  0         2              5    6      8

>>> keys = ["user_features", "item_features"]
>>> kjt = KeyedJaggedTensor(keys, [101, 102, 201, 202, 203, 11, 21, 22], lengths=[2, 3, 1, 2])
>>> kjt
KeyedJaggedTensor(2 keys, stride 2, 8 values int64 on cpu
  user_features: [101 102] [201 202 203]
  item_features: [11] [21 22]
)
>>> kjt["item_features"].values()
tensor([11, 21, 22])

A feature is a contiguous part of the flat tensors, so splitting by key copies nothing. The host
knows the number of values of each key (`length_per_key`): it is counted once, on CPU before a batch
moves to an accelerator, and passed on to every tensor that is made from this one.

Names and argument order are TorchRec's (`torchrec/sparse/jagged_tensor.py`). Suffixes: L values, F
keys, B stride, FB bags.

A batch of logs carries such a tensor between data set and model:

    dense_BI   float32 [B, I]          transformed numbers, no gaps
    sparse     KeyedJaggedTensor       raw ids as the logs have them; B bags per feature
    labels     name -> float32 [B]     what the model learns; none where rows are only scored
    weights    name -> float32 [B]     how much a row counts in the loss of that label
    row_numbers_B      int64 [B]       which row of the data set a sample is, where this is wanted

A batch moves as one: to a device, into page-locked memory, along with a stream. B may be 0: ranks
pad evaluation with empty batches.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from recapp.errors import DataError
from recapp.sparse.bags import (
    BagsOfKeys,
    InverseIndices,
    JaggedValues,
    Numbers,
    Strides,
    are_ones,
    bags_text,
    check_bags,
    check_total,
    check_values,
    concatenate,
    first_ones,
    offsets_of,
    on_host,
    values_text,
)
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_parts import (
    check_derived,
    check_inverse,
    check_keys,
    check_stride,
    check_strides,
    check_taken_bags,
    concatenate_inverse,
    concatenate_strides,
    concatenate_weights,
    in_segments,
    joined_parts,
    register_tree,
    sums_of,
)
from recapp.sparse.missing_ids import MISSING, MISSING_INT32
from recapp.sparse.transfer import copy_to_device, made_together, to_device, to_host

SHOWN_KEYS = 30


class KeyedJaggedTensor(BagsOfKeys, JaggedValues):
    """Bags of ids by feature, with or without a weight per id.

    Nothing is copied. Contents are checked on CPU; on an accelerator integer lengths are not
    checked, because reading them would wait for the device.

    Args:
        keys: F feature names, each once.
        values: [L, ...] of any dtype, keys-major; a Python list becomes int64 or float32. There may
            be more values than the bags hold, as in buffers of a fixed size; the first ones count.
        weights: One weight per value, or None.
        lengths: [F * B] or [F, B], the number of values of each bag; floats are allowed if they are
            whole numbers.
        offsets: [F * B + 1], cumulated lengths from 0 on; or [F * B], starts only, as for
            `nn.EmbeddingBag` (with one key these need `stride`). Give lengths or offsets, unless
            there are no keys.
        stride: B; needed only without keys.
        stride_per_key_per_rank: The number of bags of each key from each rank, [F, ranks], if keys
            have different numbers (`recapp/sparse/bags.py`). Then `inverse_indices` hold
            the bag of a key that each sample takes.
        stride_per_key: The number of bags of each key. This argument and the next five follow from
            the others. On CPU they are checked; on an accelerator `length_per_key` is trusted,
            which saves a read.
        length_per_key: The result of the method of this name.
        lengths_offset_per_key: The result of the method of this name.
        offset_per_key: The result of the method of this name.
        index_per_key: The result of the method of this name.
        jt_dict: The result of `to_dict`.
        inverse_indices: Keys, and the bag of each key that every sample takes, [keys, samples].

    Raises:
        DataError: Counts do not fit together (the message has the numbers), or a key occurs twice.
    """

    _jt_dict: dict[str, JaggedTensor] | None = None

    def __init__(
        self,
        keys: Sequence[str],
        values: Numbers,
        weights: Numbers | None = None,
        lengths: Numbers | None = None,
        offsets: Numbers | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> None:
        self._keys = check_keys(keys)
        self._values, self._weights = check_values(values, weights)
        if isinstance(lengths, Tensor) and lengths.dim() == 2 and len(lengths) == len(self._keys):
            lengths = lengths.flatten()
        if not self._keys and lengths is None and offsets is None:
            lengths = torch.zeros(0, dtype=torch.int64, device=self._values.device)
        of_ranks = stride_per_key_per_rank
        self._strides = None if of_ranks is None else check_strides(self._keys, of_ranks)
        bags = None if stride is None else len(self._keys) * stride
        self._lengths, self._offsets = check_bags(
            self._values,
            lengths,
            offsets,
            len(self._keys),
            bags if self._strides is None else sum(map(sum, self._strides)),
        )
        inverse = None if inverse_indices is None else check_inverse(inverse_indices)
        self._inverse_indices = inverse
        self._stride = check_stride(
            self._keys, self._lengths.shape[0], stride, self._strides, inverse
        )
        check_taken_bags(self._keys, self.stride_per_key(), inverse)
        self._length_per_key = None if length_per_key is None else list(length_per_key)
        if on_host(self._lengths):
            self._length_per_key = self._counted_per_key()
            check_derived(
                length_per_key=(length_per_key, self.length_per_key),
                offset_per_key=(offset_per_key, self.offset_per_key),
            )
        check_derived(
            stride_per_key=(stride_per_key, self.stride_per_key),
            lengths_offset_per_key=(lengths_offset_per_key, self.lengths_offset_per_key),
            index_per_key=(index_per_key, self.index_per_key),
            jt_dict=(None if jt_dict is None else [*jt_dict], self.keys),
        )
        self._jt_dict = None if jt_dict is None else dict(jt_dict)

    @classmethod
    def unchecked(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        stride: int,
        length_per_key: list[int] | None = None,
        offsets: Tensor | None = None,
        strides: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor from parts that are known to fit, such as neighbouring keys.

        Here a key may occur twice.

        Args:
            keys: The feature names.
            values: All values.
            weights: One weight per value, or None.
            lengths: The number of values of each bag.
            stride: The number of samples.
            length_per_key: The number of values of each key; None counts them on demand.
            offsets: Cumulated lengths, or None.
            strides: `stride_per_key_per_rank`, or None.
            inverse_indices: The inverse indices, or None.
        """
        kjt = cls.__new__(cls)
        kjt._keys = keys
        kjt._values = values
        kjt._weights = weights
        kjt._lengths = lengths
        kjt._offsets = offsets
        kjt._stride = stride
        kjt._length_per_key = length_per_key
        kjt._strides = strides
        kjt._inverse_indices = inverse_indices
        kjt._jt_dict = None
        return kjt

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Make a tensor without keys and samples, with the arguments of `JaggedTensor.empty`."""
        none = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor([], none.values(), none.weights_or_none(), none.lengths())

    @staticmethod
    def empty_like(
        kjt: "KeyedJaggedTensor", device: torch.device | str | None = None
    ) -> "KeyedJaggedTensor":
        """Make a tensor without keys that has the stride, device and dtypes of another.

        Args:
            kjt: The other tensor.
            device: A device on which to make a tensor of the same keys and shapes instead, with
                memory that nothing has been written to, as a target of copies.
        """
        if device is not None:
            return kjt._each(lambda t: torch.empty_like(t, device=device))
        weights = None if kjt._weights is None else kjt._weights[:0]
        strides = None if kjt._strides is None else list[list[int]]()
        return KeyedJaggedTensor.unchecked(
            [], kjt._values[:0], weights, kjt._lengths[:0], kjt._stride, [], None, strides
        )

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Numbers,
        lengths: Numbers,
        weights: Numbers | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor from lengths and count the values per key now.

        If the lengths are on an accelerator, this waits for it.
        """
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Numbers,
        offsets: Numbers,
        weights: Numbers | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor from offsets and count the values per key now.

        If the offsets are on an accelerator, this waits for it.
        """
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            None,
            offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor from a mapping of keys to jagged tensors, in its order.

        If the numbers of bags differ, `stride_per_key` has them.

        Raises:
            DataError: Only some entries have weights, integers and floats are mixed, or an entry is
                no JaggedTensor.
        """
        for key, jt in jt_dict.items():
            if not isinstance(jt, JaggedTensor):
                raise DataError(
                    f"jt_dict[{key!r}] is a {type(jt).__name__}: give JaggedTensors, which "
                    "JaggedTensor.from_dense makes of tensors"
                )
        parts = {key: jt.without_slack() for key, jt in jt_dict.items()}
        bags = [len(jt.lengths()) for jt in parts.values()]
        return KeyedJaggedTensor.unchecked(
            list(parts),
            concatenate("values", [jt.values() for jt in parts.values()]),
            concatenate_weights({key: jt.weights_or_none() for key, jt in parts.items()}),
            concatenate("lengths", [jt.lengths() for jt in parts.values()]),
            max(bags, default=0),
            [len(jt.values()) for jt in parts.values()],
            strides=[[n] for n in bags] if len(set(bags)) > 1 else None,
        )

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Return one tensor with the keys of all, in order. It ignores tensors without keys.

        Raises:
            DataError: The list is empty, strides differ, only some tensors have weights, inverse
                indices or strides per key, or a key is in two tensors.
        """
        if not kjt_list:
            raise DataError("the list of tensors is empty: give one KeyedJaggedTensor or more")
        full = [k for k in kjt_list if k._keys] or list(kjt_list[:1])
        check_keys([key for k in full for key in dict.fromkeys(k._keys)])
        strides = concatenate_strides([k._strides for k in full])
        inverse = concatenate_inverse([k._inverse_indices for k in full])
        samples = [k._stride for k in full]
        if len(set(samples)) > 1 and (strides is None or inverse is not None):
            raise DataError(
                f"strides differ: {samples}: every KeyedJaggedTensor needs one bag per key and "
                "sample"
            )
        parts = [k.without_slack() for k in full]
        return KeyedJaggedTensor.unchecked(
            [key for k in parts for key in k._keys],
            concatenate("values", [k._values for k in parts]),
            concatenate_weights({", ".join(k._keys): k._weights for k in parts}),
            concatenate("lengths", [k._lengths for k in parts]),
            max(samples),
            [n for k in parts for n in k.length_per_key()],
            strides=strides,
            inverse_indices=inverse,
        )

    def with_values(self, values: Tensor) -> "KeyedJaggedTensor":
        """Return the same bags with other values, such as rows instead of ids. Weights and lengths
        are not copied.

        Args:
            values: The values, [L, ...].

        Raises:
            DataError: There are fewer than the bags hold.
        """
        kjt = copy(self)
        kjt._values, _ = check_values(values, self._weights)
        if on_host(self._lengths):
            check_total(sum(self.length_per_key()), kjt._values, self._weights)
        return kjt

    def with_weights(self, weights: Tensor) -> "KeyedJaggedTensor":
        """Return the same bags with other weights. Values and lengths are not copied.

        Args:
            weights: One weight per value, [L, ...]; the tensor may require a gradient.

        Raises:
            DataError: There are fewer than the bags hold, or they are on another device.
        """
        kjt = copy(self)
        _, kjt._weights = check_values(self._values, weights)
        if on_host(self._lengths):
            check_total(sum(self.length_per_key()), self._values, kjt._weights)
        return kjt

    def make_room(self, length_per_key: Sequence[int]) -> None:
        """Replace the values of this tensor, and their weights, by zeros and room for more of them,
        as a target of copies.

        The first values of a key belong to its bags, and no bag has the others. Only sharded tables
        in a recorded step read such a tensor as a whole; `[key]` is right for all.

        Args:
            length_per_key: The number of values for which each key has room.
        """
        self._length_per_key = list(length_per_key)
        n = sum(length_per_key)
        self._values = self._values.new_zeros(n, *self._values.shape[1:])
        if self._weights is not None:
            self._weights = self._weights.new_zeros(n, *self._weights.shape[1:])

    def length_per_key(self) -> list[int]:
        """Return the number of values of each key, on the host.

        The first call waits for the device, unless the counts were made on the CPU before. On the
        meta device, which has nothing to count, the keys divide the values evenly.

        Raises:
            DataError: There are fewer values than the bags hold.
        """
        if self._length_per_key is None:
            self._length_per_key = self._counted_per_key()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the number of values of each key, or None if they are not counted yet."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the start of each key's values and the end of the last: F + 1 numbers on the
        host.
        """
        return [0, *accumulate(self.length_per_key())]

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key`, or None if the values are not counted yet."""
        return None if self._length_per_key is None else self.offset_per_key()

    def sync(self) -> "KeyedJaggedTensor":
        """Count the values per key now, and return this tensor."""
        self.length_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forget the counts per key, and return this tensor."""
        self._length_per_key = None
        return self

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Return this tensor, whose lengths are flat already."""
        return self

    def without_slack(self) -> "KeyedJaggedTensor":
        """Return the bags without slack, as views; the tensor itself if it has none."""
        total = sum(self.length_per_key())
        exact = not torch.compiler.is_exporting() and len(self._values) == total
        if exact and (self._weights is None or len(self._weights) == total):
            return self
        return self._segment(0, len(self._keys), self.offset_per_key(), self._inverse_indices)

    def padded(self) -> "KeyedJaggedTensor":
        """Return a tensor in which all keys have the same number of bags, with empty bags after
        those of shorter keys; the tensor itself if that is so already.
        """
        if self._strides is None:
            return self
        lengths = self._lengths
        longest = max(self.stride_per_key(), default=0)
        if longest:
            rows = list(torch.split(lengths, self.stride_per_key()))
            lengths = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flatten()
        return KeyedJaggedTensor.unchecked(
            self._keys, self._values, self._weights, lengths, longest, self.length_per_key()
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        return self._segment(self.index_of(key), 1, self.offset_per_key())._single()

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return a jagged tensor for each key: views.

        Args:
            compute_offsets: Whether to compute the offsets now; otherwise they are computed when
                they are asked for.
        """
        parts = self._jt_dict
        if parts is None:
            segments = self.split([1] * len(self._keys))
            parts = {one._keys[0]: one._single() for one in segments}
        if compute_offsets:
            for part in parts.values():
                part.offsets()
        return parts

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Return tensors of neighbouring keys: views, without inverse indices.

        Args:
            segments: The number of keys of each result; 0 gives a tensor without keys and with the
                same stride.

        Raises:
            DataError: The sum is not the number of keys.
        """
        if sum(segments) != len(self._keys) or any(n < 0 for n in segments):
            raise DataError(
                f"segments {list(segments)} sum to {sum(segments)}, but there are "
                f"{len(self._keys)} keys: give each key to one segment"
            )
        edge = self.offset_per_key()
        return [
            self._segment(first, n, edge)
            for first, n in zip(accumulate(segments, initial=0), segments, strict=False)
        ]

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Return the keys in another order, without inverse indices.

        Args:
            indices: Indices in `keys()`; they may omit and repeat keys. Consecutive indices cost no
                copy.
            indices_tensor: The same indices on the device of the lengths, if the caller has them
                there; None takes the lengths key by key.

        Raises:
            DataError: An index is out of range.
        """
        order = list(indices)
        count = len(self._keys)
        for index in order:
            if not 0 <= index < count:
                raise DataError(
                    f"index {index} belongs to no key: there are {count} keys, 0..{count - 1}"
                )
        if indices_tensor is not None and indices_tensor.shape != (len(order),):
            raise DataError(
                f"indices_tensor has the shape {list(indices_tensor.shape)}, but there are "
                f"{len(order)} indices: give the same indices as a tensor, or None"
            )
        first = order[0] if order else 0
        if order == list(range(first, first + len(order))):
            return self._segment(first, len(order), self.offset_per_key())
        per_key = self.length_per_key()
        values, weights = (
            None if t is None else in_segments(first_ones(sum(per_key), t), per_key, order)
            for t in (self._values, self._weights)
        )
        assert values is not None
        # Without the caller's indices nothing is copied to the device: a step may be recorded.
        lengths = self._lengths
        if lengths.stride() == (0,) and self._strides is None:
            lengths = lengths[:1].expand(len(order) * self._stride)  # one number, expanded
        elif indices_tensor is None or self._strides is not None:
            lengths = in_segments(lengths, self.stride_per_key(), order)
        else:
            in_order = lengths.reshape(count, self._stride).index_select(0, indices_tensor)
            lengths = in_order.flatten()
        return KeyedJaggedTensor.unchecked(
            [self._keys[i] for i in order],
            values,
            weights,
            lengths,
            self._stride,
            [per_key[i] for i in order],
            strides=None if self._strides is None else [self._strides[i] for i in order],
        )

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "KeyedJaggedTensor":
        """Return the bags on a device.

        Like a tensor's `to`, this returns the object itself if it is there already. Counts per key
        stay on the host.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
            dtype: The dtype of the copied weights; None keeps theirs.
        """
        moved = self._each(
            lambda t: copy_to_device(t, torch.device(device)) if non_blocking else t.to(device)
        )
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return (
            self
            if all(a is b for a, b in zip(self._tensors(), moved._tensors(), strict=True))
            else moved
        )

    def _tensors(self) -> list[Tensor]:
        inverse = [] if self._inverse_indices is None else [self._inverse_indices[1]]
        return super()._tensors() + inverse

    def _counted_per_key(self) -> list[int]:
        """Count the values of each key, and check that there are enough values."""
        count = len(self._keys)
        if self._lengths.is_meta:
            each, left = divmod(len(self._values), count or 1)
            return [each + (left if key == 0 else 0) for key in range(count)]
        if self._strides is None:
            counts = self._lengths.reshape(count, self._stride).sum(1)
        else:
            edges = to_device(self.lengths_offset_per_key(), self._lengths.device)
            counts = offsets_of(self._lengths)[edges].diff()
        per_key: list[int] = to_host(counts).tolist()
        check_total(sum(per_key), self._values, self._weights)
        return per_key

    def _segment(
        self, first: int, count: int, edge: list[int], inverse: InverseIndices | None = None
    ) -> "KeyedJaggedTensor":
        """Return the keys from `first` to `first + count`, as views.

        Args:
            first: The index of the first key.
            count: The number of keys.
            edge: `offset_per_key`.
            inverse: The inverse indices of the result.
        """
        last = first + count
        start = edge[first]
        size = edge[last] - edge[first]
        weights = None if self._weights is None else self._weights.narrow(0, start, size)
        return KeyedJaggedTensor.unchecked(
            self._keys[first:last],
            self._values.narrow(0, start, size),
            weights,
            self._lengths[self._bags_before(first) : self._bags_before(last)],
            self._stride,
            self.length_per_key()[first:last],
            strides=None if self._strides is None else self._strides[first:last],
            inverse_indices=inverse,
        )

    def _single(self) -> JaggedTensor:
        """Return the bags of the only key as a jagged tensor."""
        return JaggedTensor.unchecked(self._values, self._weights, self._lengths)

    @override
    def _each(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        weights, offsets = (
            None if t is None else change(t) for t in (self._weights, self._offsets)
        )
        per_key = self.length_per_key() if on_host(self._lengths) else self._length_per_key
        inverse = self._inverse_indices
        return KeyedJaggedTensor.unchecked(
            self._keys,
            change(self._values),
            weights,
            change(self._lengths),
            self._stride,
            per_key,
            offsets,
            self._strides,
            None if inverse is None else (inverse[0], change(inverse[1])),
        )

    def dist_labels(self) -> list[str]:
        """Return the names of `dist_tensors`."""
        return [
            "lengths",
            "values",
            *(["strides"] if self._strides is not None else []),
            *(["weights"] if self._weights is not None else []),
        ]

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """Return the number of entries that each part of the keys has in each of `dist_tensors`.

        Args:
            key_splits: The number of keys of each part.

        Raises:
            DataError: The sum is not the number of keys.
        """
        if sum(key_splits) != len(self._keys) or min(key_splits, default=0) < 0:
            raise DataError(
                f"key_splits {list(key_splits)} sum to {sum(key_splits)}, but there are "
                f"{len(self._keys)} keys: give each key to one part"
            )
        values = sums_of(self.length_per_key(), key_splits)
        return [
            sums_of(self.stride_per_key(), key_splits),
            values,
            *([list(key_splits)] if self._strides is not None else []),
            *([values] if self._weights is not None else []),
        ]

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors of this object, for a program that sends them itself."""
        kjt = self.without_slack()
        strides = to_device(self.stride_per_key(), self.device()) if self._strides else None
        parts = (kjt._lengths, kjt._values, strides, kjt._weights)
        return [t for t in parts if t is not None]

    @staticmethod
    def dist_init(
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: Sequence[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor from the `dist_tensors` of several ranks.

        Args:
            keys: The keys.
            tensors: The tensors that `dist_labels` names, each rank after rank.
            variable_stride_per_key: Whether strides are among the tensors.
            num_workers: The number of ranks.
            recat: The order of the parts of ranks and keys in the result; None keeps their order.
                If ranks have different strides, it is the order of bags.
            stride_per_rank: The number of samples of each rank; None if strides are among the
                tensors.
            stagger: The number of ranks whose strides stand side by side in the result.

        Raises:
            DataError: The number of tensors is wrong, there are no strides, or the order does not
                fit the parts.
        """
        return KeyedJaggedTensor(
            keys,
            **joined_parts(
                len(keys),
                tensors,
                variable_stride_per_key,
                num_workers,
                None if recat is None else recat.tolist(),
                stride_per_rank,
                stagger,
            ),
        ).sync()

    def __repr__(self) -> str:
        strides = f"stride {self._stride}"
        if self._strides is not None:
            strides = f"strides {self.stride_per_key()} for {self._stride} samples"
        head = f"KeyedJaggedTensor({len(self._keys)} keys, {strides}, {values_text(self._values)}"
        if not self._keys or self._lengths.is_meta:
            return f"{head})"
        parts = self.split([1] * len(self._keys))[:SHOWN_KEYS]
        lines = [
            f"  {part._keys[0]}: {bags_text(part._values, part._weights, part._lengths)}"
            for part in parts
        ]
        more = (
            [f"  ... {len(self._keys) - SHOWN_KEYS} more keys"]
            if len(self._keys) > SHOWN_KEYS
            else []
        )
        return "\n".join([head, *lines, *more, ")"])


register_tree(KeyedJaggedTensor)
# A file of tensors may hold this class, because exported programs keep their example inputs. The
# class is plain data.
torch.serialization.add_safe_globals([KeyedJaggedTensor])


def as_int64(ids: Tensor) -> Tensor:
    """Return ids of any integer type as int64; those that are missing are missing there, too."""
    if ids.dtype != torch.int32:
        return ids.long()
    return ids.long().masked_fill(ids == MISSING_INT32, MISSING)


LABEL = "label"
"""The name of a label that has no other name."""


@dataclass(slots=True, init=False)
class Batch:
    """Samples of one rank.

    Args:
        dense_BI: Transformed numbers, float32 [B, I].
        sparse: Raw ids, of stride B.
        labels_B: The labels by name, each float32 [B]. A single tensor is the only label, named
            `label`.
        weights: Weights of the samples in the loss of each label, by label name, each float32 [B].
            Without weights, samples weigh 1 in the loss of a label.
        row_numbers_B: The place of each sample in the data set: files in their order, rows in
            theirs, counted from 0, int64 [B]; None where nobody asked the reader for it.

    Raises:
        DataError: The parts have different B, or weights have no label.
    """

    dense_BI: Tensor
    sparse: KeyedJaggedTensor
    labels: dict[str, Tensor]
    weights: dict[str, Tensor]
    row_numbers_B: Tensor | None
    # the streams that use the memory, where that is of a slot (`recapp/transport/batch_slots.py`)
    streams: set[Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __init__(
        self,
        dense_BI: Tensor,
        sparse: KeyedJaggedTensor,
        labels_B: Tensor | Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        row_numbers_B: Tensor | None = None,
    ) -> None:
        self.dense_BI = dense_BI
        self.sparse = sparse
        self.labels = {LABEL: labels_B} if isinstance(labels_B, Tensor) else dict(labels_B)
        self.weights = dict(weights or {})
        self.row_numbers_B = row_numbers_B
        self.streams = None
        if strange := self.weights.keys() - self.labels.keys():
            raise DataError(
                f"a batch with weights of {min(strange)}, which is not one of its labels "
                f"({', '.join(self.labels)})"
            )
        counted = [("dense rows", self.rows), ("bags per feature", sparse.stride())]
        counted += [("labels", len(label_B)) for label_B in self.labels.values()]
        counted += [("weights", len(weight_B)) for weight_B in self.weights.values()]
        if row_numbers_B is not None:
            counted.append(("row numbers", len(row_numbers_B)))
        if len({count for _, count in counted}) > 1:
            *most, last = dict.fromkeys(f"{count} {what}" for what, count in counted)
            raise DataError(
                f"a batch of {', '.join(most)} and {last}: give all parts the same number of "
                "samples"
            )

    @property
    def rows(self) -> int:
        """The number of samples, B."""
        return len(self.dense_BI)

    @property
    def labels_B(self) -> Tensor:
        """The only label, [B]; NaN if the samples have none.

        Raises:
            DataError: There are several labels.
        """
        if len(self.labels) > 1:
            raise DataError(
                f"a batch has the labels {', '.join(self.labels)}, so labels_B could be any of "
                "them: name one, batch.labels[NAME]"
            )
        if not self.labels:
            return self.dense_BI.new_full((self.rows,), torch.nan, dtype=torch.float32)
        return next(iter(self.labels.values()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the samples on a device.

        Like a tensor's `to`, this returns the batch itself if it is there already.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
        """
        target = torch.device(device)
        there = self.each(lambda t: copy_to_device(t, target) if non_blocking else t.to(target))
        same = all(one is other for one, other in zip(there.tensors(), self.tensors(), strict=True))
        return self if same else there

    def pin_memory(self) -> Self:
        """Return the samples in page-locked memory. The host does not wait for copies from it to a
        GPU.
        """
        return self.each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has done the work that is queued on it now."""
        if self.streams is not None:
            self.streams.add(stream)
            return
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the samples."""
        numbers = () if self.row_numbers_B is None else (self.row_numbers_B,)
        return [
            self.dense_BI,
            *self.sparse._tensors(),
            *self.labels.values(),
            *self.weights.values(),
            *numbers,
        ]

    def packed(self, pinned: bool = False) -> Self:
        """Return a copy of the samples in one memory of the host, which moves at once. Lengths of 1
        are one number there, expanded.

        Args:
            pinned: Whether the memory is page-locked.
        """
        short = self.short()
        each = {id(tensor): tensor for tensor in short.tensors()}
        made = made_together([*each.values()], pinned)
        copies = dict(zip(each, made, strict=True))
        there = short.each(lambda tensor: copies[id(tensor)].copy_(tensor))
        return there.as_long_as(self)

    def short(self) -> Self:
        """Return the samples with one length if all are 1, for `as_long_as` elsewhere."""
        lengths = self.sparse.lengths()
        single = are_ones(lengths)
        return self.each(lambda tensor: tensor[:1] if single and tensor is lengths else tensor)

    def as_long_as(self, batch: Self) -> Self:
        """Return a copy of `batch.short()` as a copy of the batch. Lengths of 1 are one number,
        expanded, and so the host sees that they are equal.
        """
        sent = self.sparse.lengths()
        shape = batch.sparse.lengths().shape
        return self.each(lambda tensor: tensor.expand(shape) if tensor is sent else tensor)

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the samples with `change` applied to each tensor."""
        batch = copy(self)
        batch.streams = None
        batch.dense_BI = change(self.dense_BI)
        batch.sparse = self.sparse._each(change)
        batch.labels = {name: change(label_B) for name, label_B in self.labels.items()}
        batch.weights = {name: change(weight_B) for name, weight_B in self.weights.items()}
        if self.row_numbers_B is not None:
            batch.row_numbers_B = change(self.row_numbers_B)
        return batch
