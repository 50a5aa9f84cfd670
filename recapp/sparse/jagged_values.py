"""The tensors of bags of values: values, weights, lengths and offsets."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from recapp.errors import DataError
from recapp.sparse.bags import offsets_of


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
        held = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in held if tensor is not None]

    @abstractmethod
    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the bags with `change` applied to each tensor."""
