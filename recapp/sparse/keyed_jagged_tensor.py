"""Several jagged features of one batch in one flat tensor: what goes into the embedding tables.

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

A feature is a run of the flat tensors, so taking keys apart copies nothing. How many values each
key has is known on the host (`length_per_key`): counted once, on CPU before a batch moves to an
accelerator, and handed on to everything made of it.

Names and argument order are TorchRec's (`torchrec/sparse/jagged_tensor.py`). Suffixes: L values, F
keys, B stride, FB bags.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from recapp.errors import DataError
from recapp.sparse.bags import (
    Numbers,
    UnknownKeyError,
    bags_text,
    check_bags,
    check_distinct,
    check_total,
    check_values,
    concatenate,
    offsets_of,
    on_host,
    values_text,
)
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.transfer import copy_to_device, to_device, to_host

SHOWN_KEYS = 30


class KeyedJaggedTensor:
    """Bags of ids by feature, with a weight per id or without.

    Nothing is copied. Contents are checked on CPU; on an accelerator integer lengths are not
    checked, because reading them would wait for the device.

    Args:
        keys: F feature names, each once.
        values: [L, ...] of any dtype, keys-major; a Python list makes int64 or float32.
        weights: One per value (same first dimension), or None.
        lengths: [F * B], values per bag; floats if they are whole numbers.
        offsets: [F * B + 1], cumulated lengths from 0 to L, or [F * B], starts only, as
            `nn.EmbeddingBag` takes them. One of lengths and offsets is needed.
        stride: B; needed only where there are no keys to count by.

    Raises:
        DataError: Counts that do not fit together, with the numbers; a key that is there twice.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Numbers,
        weights: Numbers | None = None,
        lengths: Numbers | None = None,
        offsets: Numbers | None = None,
        stride: int | None = None,
    ) -> None:
        self._keys = _check_keys(keys)
        self._values, self._weights = check_values(values, weights)
        self._lengths, self._offsets = check_bags(
            self._values, lengths, offsets, len(self._keys), stride
        )
        self._stride = _check_stride(self._keys, len(self._lengths), stride)
        self._length_per_key: list[int] | None = None
        if on_host(self._lengths):
            check_total(sum(self.length_per_key()), self._values)

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
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor of parts that are known to fit, such as a run of keys.

        Keys may repeat.
        """
        made = cls.__new__(cls)
        made._keys = keys
        made._values = values
        made._weights = weights
        made._lengths = lengths
        made._offsets = offsets
        made._stride = stride
        made._length_per_key = length_per_key
        return made

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Numbers,
        lengths: Numbers,
        weights: Numbers | None = None,
        stride: int | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor by lengths and count the values per key now.

        Where the lengths are on an accelerator, this waits for it.
        """
        return KeyedJaggedTensor(keys, values, weights, lengths, None, stride)._counted()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Numbers,
        offsets: Numbers,
        weights: Numbers | None = None,
        stride: int | None = None,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor by offsets and count the values per key now.

        Where the offsets are on an accelerator, this waits for it.
        """
        return KeyedJaggedTensor(keys, values, weights, None, offsets, stride)._counted()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Make a key of each entry of a mapping, in its order.

        Raises:
            DataError: The numbers of bags differ, or only some have weights.
        """
        keys = list(jt_dict)
        parts = list(jt_dict.values())
        strides = {key: len(jt.lengths()) for key, jt in jt_dict.items()}
        if len(set(strides.values())) > 1:
            raise DataError(
                f"bags per key differ: {strides}: every key needs one bag per sample, empty ones "
                "included"
            )
        weights = _concatenate_weights({key: jt.weights_or_none() for key, jt in jt_dict.items()})
        values = concatenate("values", [jt.values() for jt in parts])
        lengths = concatenate("lengths", [jt.lengths() for jt in parts])
        per_key = [len(jt.values()) for jt in parts]
        return KeyedJaggedTensor.unchecked(
            keys, values, weights, lengths, next(iter(strides.values()), 0), per_key
        )

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Return the keys of all, one behind the other. Those without keys do not count.

        Raises:
            DataError: There is none, strides differ, only some have weights, or a key is in two of
                them.
        """
        if not kjt_list:
            raise DataError("there is nothing to concatenate: give one KeyedJaggedTensor or more")
        parts = [k for k in kjt_list if k._keys] or list(kjt_list[:1])
        strides = [k._stride for k in parts]
        if len(set(strides)) > 1:
            raise DataError(
                f"strides differ: {strides}: every KeyedJaggedTensor needs one bag per key and "
                "sample"
            )
        _check_keys([key for k in parts for key in dict.fromkeys(k._keys)])
        weights = _concatenate_weights({", ".join(k._keys): k._weights for k in parts})
        counts = [k._length_per_key for k in parts]
        per_key = None if any(c is None for c in counts) else [n for c in counts for n in c or []]
        values = concatenate("values", [k._values for k in parts])
        lengths = concatenate("lengths", [k._lengths for k in parts])
        return KeyedJaggedTensor.unchecked(
            [key for k in parts for key in k._keys], values, weights, lengths, strides[0], per_key
        )

    def keys(self) -> list[str]:
        """Return the feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Return all values, keys-major, [L, ...]."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the number of values of each bag, keys-major, [F * B]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return where each bag starts, and L at the end, [F * B + 1]."""
        if self._offsets is None:
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def weights(self) -> Tensor:
        """Return one weight per value, [L, ...].

        Raises:
            DataError: There are none.
        """
        if self._weights is None:
            raise DataError(
                "this KeyedJaggedTensor has no weights: make it with weights=..., or ask "
                "weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return one weight per value, [L, ...], or None."""
        return self._weights

    def stride(self) -> int:
        """Return the number of samples, B."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """Return the number of values of each key, on the host.

        The first call waits for the device, unless the counts came along from the CPU.
        """
        if self._length_per_key is None:
            self._length_per_key = to_host(
                self._lengths.reshape(len(self._keys), self._stride).sum(1)
            ).tolist()
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where each key's values start, and L at the end: F + 1 numbers on the host."""
        return [0, *accumulate(self.length_per_key())]

    def device(self) -> torch.device:
        """Return the device that the values are on."""
        return self._values.device

    def index_of(self, key: str) -> int:
        """Return the index of a key in `keys()`.

        Raises:
            UnknownKeyError: There is no such key.
        """
        try:
            return self._keys.index(key)
        except ValueError:
            raise UnknownKeyError(key, self._keys) from None

    def __getitem__(self, key: str) -> JaggedTensor:
        return self._run(self.index_of(key), 1, self.offset_per_key())._single()

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return a jagged tensor for each key: views."""
        return {part._keys[0]: part._single() for part in self.split([1] * len(self._keys))}

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Return runs of keys: views.

        Args:
            segments: How many keys each run takes; 0 gives one without keys and of the same stride.

        Raises:
            DataError: Segments that do not sum to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(n < 0 for n in segments):
            raise DataError(
                f"segments {list(segments)} sum to {sum(segments)}, but there are "
                f"{len(self._keys)} keys: give each key to one segment"
            )
        edge = self.offset_per_key()
        return [
            self._run(first, n, edge)
            for first, n in zip(accumulate(segments, initial=0), segments, strict=False)
        ]

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Return keys in another order.

        Args:
            indices: Indices in `keys()`; they may leave keys out and repeat them. Consecutive ones
                cost no copy.
            indices_tensor: The same indices on the device of the lengths, where they are there
                already; None copies them there.

        Raises:
            DataError: An index that is no key's.
        """
        taken = list(indices)
        count = len(self._keys)
        for index in taken:
            if not 0 <= index < count:
                raise DataError(
                    f"index {index} is no key's: there are {count} keys, 0..{count - 1}"
                )
        if indices_tensor is not None and indices_tensor.shape != (len(taken),):
            raise DataError(
                f"indices_tensor has the shape {list(indices_tensor.shape)}, but there are "
                f"{len(taken)} indices: give the same indices as a tensor, or None"
            )
        first = taken[0] if taken else 0
        if taken == list(range(first, first + len(taken))):
            return self._run(first, len(taken), self.offset_per_key())
        per_key = self.length_per_key()
        if indices_tensor is None:
            indices_tensor = to_device(taken, self._lengths.device)
        values = torch.split(self._values, per_key)
        lengths = self._lengths.reshape(count, self._stride)
        weights = None if self._weights is None else torch.split(self._weights, per_key)
        return KeyedJaggedTensor.unchecked(
            [self._keys[i] for i in taken],
            torch.cat([values[i] for i in taken]),
            None if weights is None else torch.cat([weights[i] for i in taken]),
            lengths.index_select(0, indices_tensor).flatten(),
            self._stride,
            [per_key[i] for i in taken],
        )

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "KeyedJaggedTensor":
        """Return the bags on a device.

        As with tensors, that is the object itself where they are there already. Counts per key stay
        on the host.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
            dtype: The dtype of the weights there; None leaves it.
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

    def pin_memory(self) -> "KeyedJaggedTensor":
        """Return the bags in page-locked memory, from which copies to a GPU need not wait."""
        return self._each(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _tensors(self) -> list[Tensor]:
        return [
            t for t in (self._values, self._weights, self._lengths, self._offsets) if t is not None
        ]

    def _counted(self) -> "KeyedJaggedTensor":
        """Return this tensor after its counts per key were read and checked."""
        check_total(sum(self.length_per_key()), self._values)
        return self

    def _run(self, first: int, count: int, edge: list[int]) -> "KeyedJaggedTensor":
        """Return the keys from `first` to `first + count`, as views; `edge` is `offset_per_key`."""
        last = first + count
        start = edge[first]
        size = edge[last] - edge[first]
        weights = None if self._weights is None else self._weights.narrow(0, start, size)
        return KeyedJaggedTensor.unchecked(
            self._keys[first:last],
            self._values.narrow(0, start, size),
            weights,
            self._lengths[first * self._stride : last * self._stride],
            self._stride,
            self.length_per_key()[first:last],
        )

    def _single(self) -> JaggedTensor:
        """Return the bags of the only key as a jagged tensor."""
        return JaggedTensor.unchecked(self._values, self._weights, self._lengths)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        """Return a keyed jagged tensor with `change` applied to each of its tensors."""
        weights, offsets = (
            None if t is None else change(t) for t in (self._weights, self._offsets)
        )
        per_key = self.length_per_key() if on_host(self._lengths) else self._length_per_key
        return KeyedJaggedTensor.unchecked(
            self._keys,
            change(self._values),
            weights,
            change(self._lengths),
            self._stride,
            per_key,
            offsets,
        )

    def __repr__(self) -> str:
        head = (
            f"KeyedJaggedTensor({len(self._keys)} keys, stride {self._stride}, "
            f"{values_text(self._values)}"
        )
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


def _check_keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise DataError(f"keys are the text {keys!r}: give a list of names, [{keys!r}]")
    names = list(keys)
    check_distinct(names)
    return names


def _check_stride(keys: Sequence[str], bags: int, stride: int | None) -> int:
    count = len(keys)
    if stride is not None and bags != count * stride:
        raise DataError(
            f"there are {bags} bags, but {count} keys of stride {stride} have {count * stride}: "
            "give one length per key and sample"
        )
    if not count and bags:
        raise DataError(f"there are {bags} bags but no keys: name the key of every {bags} bags")
    if count and bags % count:
        raise DataError(
            f"{bags} bags are no multiple of {count} keys ({', '.join(keys)}): give each key one "
            "length per sample"
        )
    return bags // count if count else stride or 0


def _concatenate_weights(weights: Mapping[str, Tensor | None]) -> Tensor | None:
    with_weights = [key for key, w in weights.items() if w is not None]
    if not with_weights:
        return None
    without = [key for key, w in weights.items() if w is None]
    if without:
        raise DataError(
            f"{with_weights[0]} has weights, {without[0]} has none: give all of them weights "
            "(ones change nothing), or none"
        )
    return concatenate("weights", [w for w in weights.values() if w is not None])


_Context = tuple[tuple[str, ...], int]
"""The keys and the stride, which a tree keeps beside the tensors."""


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Any], _Context]:
    return [kjt.values(), kjt.weights_or_none(), kjt.lengths()], (tuple(kjt.keys()), kjt.stride())


def _flatten_with_keys(kjt: KeyedJaggedTensor) -> tuple[list[tuple[KeyEntry, Any]], _Context]:
    leaves, context = _flatten(kjt)
    return list(zip(_LEAVES, leaves, strict=True)), context


def _unflatten(leaves: Any, context: _Context) -> KeyedJaggedTensor:
    values, weights, lengths = leaves
    return KeyedJaggedTensor.unchecked(list(context[0]), values, weights, lengths, context[1])


def _context_from_json(stored: Any) -> _Context:
    keys, stride = stored
    return tuple(keys), stride


_LEAVES = (GetAttrKey("_values"), GetAttrKey("_weights"), GetAttrKey("_lengths"))

register_pytree_node(
    KeyedJaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="recapp.sparse.keyed_jagged_tensor.KeyedJaggedTensor",
    to_dumpable_context=list,
    from_dumpable_context=_context_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
# A file of tensors may hold one: exported programs keep their example inputs. It is plain data.
torch.serialization.add_safe_globals([KeyedJaggedTensor])
