"""Functions that the jagged tensors share: convert numbers to tensors, check that counts fit
together, show bags as text.

These functions read a tensor's contents on CPU only: on an accelerator a read would wait for the
device in every step. Float counts are the exception: they must be read, and no training step makes
them.

There may be more values than the bags hold, as in buffers of a fixed size. The first ones count, as
in TorchRec; the others are called slack.

The number of bags of each key of a KeyedJaggedTensor, and the bag that each sample takes.

Usually every key has a bag per sample. If many samples have the same ids (one user, many items), a
key may have fewer bags than there are samples, and `inverse_indices` hold the bag that each sample
takes (TorchRec: variable batch per key, VBE):

    user  [101 102] [7]        inverse indices  0 0 0 1     four samples, two users
    item  [1] [2] [3] [4]                       0 1 2 3

TorchRec counts the bags of a key by the rank that they come from (`stride_per_key_per_rank`); here
only the sum over ranks matters.

Suffixes: S samples.

The tensors of bags of values: values, weights, lengths and offsets.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.console import note_once
from recapp.errors import DataError, suggest

Numbers = Tensor | Sequence[int] | Sequence[float]

SHOWN_BAGS = 6
SHOWN_VALUES = 8


class UnknownKeyError(DataError, KeyError):
    """A key that a keyed tensor does not hold; the message lists close matches.

    Args:
        key: The unknown key.
        known: The keys that the tensor holds.
    """

    def __init__(self, key: object, known: Sequence[str]) -> None:
        super().__init__(f"unknown key {key!r}: {suggest(str(key), known)}")

    def __str__(self) -> str:
        return str(self.args[0])


def as_tensor(
    name: str, data: Numbers, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return numbers as a tensor.

    Args:
        name: The name of the numbers in error messages.
        data: A tensor, which is returned unchanged, or a list.
        device: The device of a tensor from a list.
        dtype: The dtype of a tensor from a list; None takes int64 or float32 by the list's
            contents, int64 if it is empty.

    Raises:
        DataError: The list cannot become a tensor.
    """
    if isinstance(data, Tensor):
        return data
    if dtype is None and not len(data):
        dtype = torch.int64
    try:
        return torch.as_tensor(data, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: {str(error).splitlines()[0]}: give a tensor or a flat list of numbers"
        ) from error


def as_counts(name: str, data: Numbers, device: torch.device) -> Tensor:
    """Return lengths or offsets as a flat tensor of integers.

    Args:
        name: The name of the numbers in error messages.
        data: Integers, or floats that are whole numbers.
        device: The device on which they must be.

    Raises:
        DataError: The shape, device or dtype is another, or a number is not whole.
    """
    counts_N = as_tensor(name, data, device)
    if counts_N.dim() != 1:
        raise DataError(
            f"{name} have the shape {list(counts_N.shape)}: give one flat list, keys after each "
            "other"
        )
    if counts_N.device != device:
        raise DataError(
            f"{name} are on {counts_N.device}, values on {device}: put them on one device"
        )
    if counts_N.dtype == torch.bool or counts_N.is_complex():
        raise DataError(f"{name} are {counts_N.dtype}: give integers")
    if not counts_N.is_floating_point():
        return counts_N
    if counts_N.is_meta:
        return counts_N.long()
    odd_N = ~counts_N.isfinite() | (counts_N != counts_N.round())
    if bool(odd_N.any()):
        first = int(odd_N.nonzero()[0])
        raise DataError(f"{name}[{first}] is {counts_N[first].item():g}: give whole numbers")
    return counts_N.long()


def check_values(values: Numbers, weights: Numbers | None) -> tuple[Tensor, Tensor | None]:
    """Return values and their weights as tensors.

    `check_total` checks their number against the lengths.

    Raises:
        DataError: An argument is a scalar, or the weights are on another device.
    """
    values_L = as_tensor("values", values)
    if not values_L.dim():
        raise DataError(
            f"values are the single number {values_L.item()}: give a tensor or a list, one entry "
            "per id"
        )
    if weights is None:
        return values_L, None
    weights_L = as_tensor("weights", weights, values_L.device, torch.get_default_dtype())
    if not weights_L.dim():
        raise DataError(
            f"there are 1 weights and {values_L.shape[0]} values: give one weight per value"
        )
    if weights_L.device != values_L.device:
        raise DataError(
            f"weights are on {weights_L.device}, values on {values_L.device}: put them on one "
            "device"
        )
    return values_L, weights_L


def check_bags(
    values_L: Tensor,
    lengths: Numbers | None,
    offsets: Numbers | None,
    keys: int = 1,
    bags: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return lengths as a tensor, and offsets if they are given.

    Their contents are checked on CPU.

    Args:
        values_L: The values of all bags.
        lengths: [bags], or None.
        offsets: [bags + 1], or None; or the starts of bags only, [bags], if their count tells so.
        keys: The number of keys; if `bags` is None, the number of bags is a multiple of it.
        bags: The number of bags, if it is known.

    Raises:
        DataError: Counts do not fit; the message has the numbers.
    """
    if lengths is None and offsets is None:
        raise DataError("neither lengths nor offsets are given: give one of them")
    offsets_N1 = (
        None
        if offsets is None
        else _full_offsets(values_L, as_counts("offsets", offsets, values_L.device), keys, bags)
    )
    if lengths is None:
        assert offsets_N1 is not None
        return offsets_N1.diff(), offsets_N1
    lengths_N = as_counts("lengths", lengths, values_L.device)
    if offsets_N1 is not None:
        same = len(offsets_N1) == len(lengths_N) + 1
        if not same or (
            on_host(lengths_N) and not torch.equal(offsets_N1.diff().long(), lengths_N.long())
        ):
            raise DataError(
                f"{len(lengths_N)} lengths and {len(offsets_N1) - 1} bags by offsets contradict "
                "each other: give only one of them"
            )
    if on_host(lengths_N) and bool((lengths_N < 0).any()):
        first = int((lengths_N < 0).nonzero()[0])
        raise DataError(f"lengths[{first}] is {int(lengths_N[first])}: a bag has 0 values or more")
    return lengths_N, offsets_N1


def check_distinct(keys: Sequence[str]) -> None:
    """Check that keys are distinct.

    Raises:
        DataError: They are not; the message names a duplicate key.
    """
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if list(keys).count(key) > 1)
        raise DataError(f"key {twice!r} is given twice: give every key a name of its own")


def check_total(total: int, values_L: Tensor, weights_L: Tensor | None) -> None:
    """Check that there are at least as many values, and weights, as the bags hold.

    Raises:
        DataError: There are fewer; the message has both numbers. An exported program makes this
            check at run time.
    """
    if torch.compiler.is_exporting():
        for tensor_L in (values_L,) if weights_L is None else (values_L, weights_L):
            fits = total <= tensor_L.shape[0]
            torch._check(fits, lambda: "lengths sum to more")  # type: ignore[no-untyped-call]
        return
    if total > len(values_L):
        raise DataError(
            f"lengths sum to {total}, but there are {len(values_L)} values: give at least "
            f"{total} values; the bags have the first {total}"
        )
    if weights_L is not None and total > len(weights_L):
        raise DataError(
            f"there are {len(weights_L)} weights and {total} values in bags: give one weight per "
            "value"
        )


def first_ones(total: int, tensor_L: Tensor) -> Tensor:
    """Return the first `total` entries, or the tensor itself if it is known to have no more."""
    if not torch.compiler.is_exporting() and len(tensor_L) == total:
        return tensor_L
    return tensor_L.narrow(0, 0, total)


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor's contents can be read without waiting for a device. During an export
    there are no contents.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_exporting()


def are_ones(lengths: Tensor) -> bool:
    """Return whether each bag of a batch on the CPU has one id; False without bags."""
    return lengths.numel() > 0 and all(bool(end == 1) for end in lengths.aminmax())


def offsets_of(lengths_N: Tensor) -> Tensor:
    """Return the start of each bag and the end of the last: int64, [bags + 1]."""
    return F.pad(lengths_N.cumsum(0), (1, 0))


def concatenate(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of tensors.

    It ignores empty tensors: an empty float tensor would turn ids into floats.

    Args:
        name: The name of the tensors in error messages.
        parts: The tensors.

    Raises:
        DataError: Some tensors have integers and some floats.
    """
    full = [p for p in parts if len(p)]
    if len({p.is_floating_point() for p in full}) > 1:
        raise DataError(
            f"{name} are of the dtypes {', '.join(sorted({str(p.dtype) for p in full}))}: convert "
            "them to one first"
        )
    if len(full) > 1:
        return torch.cat(full)
    return (
        full[0] if full else parts[0] if parts else torch.empty(0, dtype=torch.int64, device="cpu")
    )


def values_text(values_L: Tensor) -> str:
    """Return a text such as `6 values int64 on cpu`."""
    each = f" of {list(values_L.shape[1:])}" if values_L.dim() > 1 else ""
    return (
        f"{len(values_L)} values{each} {str(values_L.dtype).removeprefix('torch.')} on "
        f"{values_L.device}"
    )


def bags_text(values_L: Tensor, weights_L: Tensor | None, lengths_B: Tensor) -> str:
    """Return a text with the first bags and the first values of each.

    An example is `[101 102] [] [301:0.5]`, with a weight after the colon.
    """
    if values_L.is_meta or lengths_B.is_meta:
        return "not read"
    shown = []
    start = 0
    for length in lengths_B[:SHOWN_BAGS].tolist():
        take = slice(start, start + min(length, SHOWN_VALUES))
        numbers = [_number(v) for v in values_L[take].tolist()]
        if weights_L is not None:
            numbers = [
                f"{v}:{_number(w)}" for v, w in zip(numbers, weights_L[take].tolist(), strict=True)
            ]
        more = [f"... {length - SHOWN_VALUES} more"] if length > SHOWN_VALUES else []
        shown.append(f"[{' '.join(numbers + more)}]")
        start += length
    if len(lengths_B) > SHOWN_BAGS:
        shown.append(f"... {len(lengths_B) - SHOWN_BAGS} more bags")
    return " ".join(shown) or "no bags"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _full_offsets(values_L: Tensor, offsets_N: Tensor, keys: int, bags: int | None) -> Tensor:
    """Return checked offsets. If they are starts only, the number of values is appended.

    The count of offsets tells whether they are starts only. If it cannot tell, offsets are full, as
    in TorchRec.
    """
    count = len(offsets_N)
    rows = len(values_L)
    if not count:
        return F.pad(offsets_N, (1, 0))
    if count % keys == 0 if bags is None and keys > 1 else count == bags:
        offsets_N = F.pad(offsets_N, (0, 1), value=rows)
    if not on_host(offsets_N):
        return offsets_N
    first = int(offsets_N[0])
    last = int(offsets_N[-1])
    falls = offsets_N.diff() < 0
    if bool(falls.any()):
        index = int(falls.nonzero()[0])
        fault = f"fall from {int(offsets_N[index])} to {int(offsets_N[index + 1])}"
    elif first or last > rows:
        fault = f"run from {first} to {last}"
    else:
        if last < rows and bags is None and keys == 1:
            note_once(
                "offsets end before the values do: the values behind them belong to no bag; where "
                "they are the starts of bags alone, append the number of values"
            )
        return offsets_N
    raise DataError(
        f"{count} offsets {fault}, but there are {rows} values: give offsets that rise from 0 to "
        f"{rows} or less"
    )


# The bags of each key from each rank.
Strides = list[list[int]]

# Keys, and the bag that each sample takes, [keys, S].
InverseIndices = tuple[list[str], Tensor]


class BagsOfKeys:
    """The part of a KeyedJaggedTensor that knows its keys and their bags."""

    _keys: list[str]
    _stride: int
    # Files of exported programs may hold tensors that are older than these attributes.
    _strides: Strides | None = None
    _inverse_indices: InverseIndices | None = None

    def keys(self) -> list[str]:
        """Return the feature names, in order."""
        return self._keys

    def stride(self) -> int:
        """Return the number of samples, B.

        If keys have different numbers of bags, this is the number of inverse indices per key, or
        without inverse indices the largest number of bags.
        """
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key."""
        if self._strides is None:
            return [self._stride] * len(self._keys)
        return [sum(of_ranks) for of_ranks in self._strides]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of bags of each key from each rank; an empty list if every key has one
        per sample.
        """
        return self._strides or []

    def variable_stride_per_key(self) -> bool:
        """Return whether the tensor was made with a number of bags for each key."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Return keys, and the bag of each key that every sample takes, [keys, samples].

        Raises:
            DataError: The tensor has no inverse indices.
        """
        if self._inverse_indices is None:
            raise DataError(
                "this KeyedJaggedTensor has no inverse indices: make it with inverse_indices=..., "
                "or ask inverse_indices_or_none()"
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the inverse indices, or None."""
        return self._inverse_indices

    def lengths_offset_per_key(self) -> list[int]:
        """Return the start of each key's bags and the number of all bags: F + 1 numbers."""
        return [0, *accumulate(self.stride_per_key())]

    def index_per_key(self) -> dict[str, int]:
        """Return the index of each key in `keys()`."""
        return {key: index for index, key in enumerate(self._keys)}

    def _key_indices(self) -> dict[str, int]:
        """Return the index of each key, under the name in TorchRec's stable API."""
        return self.index_per_key()

    def index_of(self, key: str) -> int:
        """Return the index of a key in `keys()`.

        Raises:
            UnknownKeyError: There is no such key.
        """
        try:
            return self._keys.index(key)
        except ValueError:
            raise UnknownKeyError(key, self._keys) from None

    def _bags_before(self, key: int) -> int:
        """Return the number of bags of all keys before `key`."""
        return key * self._stride if self._strides is None else sum(map(sum, self._strides[:key]))


class JaggedValues:
    """The part of a JaggedTensor or KeyedJaggedTensor that holds its flat tensors.

    Suffixes: L values, N bags.
    """

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """Return all values, [L, ...], including slack; those of a KeyedJaggedTensor key by key."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the number of values of each bag, [N]; of a KeyedJaggedTensor key by key."""
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the number of values of each bag, [N]; never None here."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the start of each bag and the end of the last, [N + 1]."""
        if self._offsets is None:
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets, [N + 1], or None if they have not been derived yet."""
        return self._offsets

    def weights(self) -> Tensor:
        """Return one weight per value, [L, ...].

        Raises:
            DataError: The tensor has no weights.
        """
        if self._weights is None:
            raise DataError(
                f"this {type(self).__name__} has no weights: make it with weights=..., or ask "
                "weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return one weight per value, [L, ...], or None."""
        return self._weights

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Return the bytes of the tensors that exist; offsets do once they were asked for."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def pin_memory(self) -> Self:
        """Return the bags in page-locked memory. The host does not wait for copies from it to a
        GPU.
        """
        return self._each(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has done the work that is queued on it now."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _tensors(self) -> list[Tensor]:
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in parts if tensor is not None]

    @abstractmethod
    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the bags with `change` applied to each tensor."""
