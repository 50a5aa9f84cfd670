"""The number of bags of each key of a KeyedJaggedTensor, and the bag that each sample takes.

Usually every key has a bag per sample. If many samples have the same ids (one user, many items), a
key may have fewer bags than there are samples, and `inverse_indices` hold the bag that each sample
takes (TorchRec: variable batch per key, VBE):

    user  [101 102] [7]        inverse indices  0 0 0 1     four samples, two users
    item  [1] [2] [3] [4]                       0 1 2 3

TorchRec counts the bags of a key by the rank that they come from (`stride_per_key_per_rank`); here
only the sum over ranks matters.

Suffixes: S samples.
"""

from itertools import accumulate

from torch import Tensor

from recapp.errors import DataError
from recapp.sparse.bags import UnknownKeyError

Strides = list[list[int]]
"""The bags of each key from each rank."""

InverseIndices = tuple[list[str], Tensor]
"""Keys, and the bag that each sample takes, [keys, S]."""


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
