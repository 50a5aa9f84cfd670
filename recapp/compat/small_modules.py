"""Small modules of TorchRec: an activation, and the regrouping of keyed tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import DataType


class SwishLayerNorm(nn.Module):
    """x * sigmoid(LayerNorm(x)).

    Args:
        input_dims: The sizes of the last dimensions, over which to normalise; a number is one size.
        device: The device of the parameters.
    """

    def __init__(
        self,
        input_dims: int | list[int] | torch.Size,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Return the activations in the shape of the input."""
        gate: Tensor = self.norm(input)
        return input * gate


class KTRegroupAsDict(nn.Module):
    """Concatenates the vectors of keys in named groups: `KeyedTensor.regroup_as_dict` as a module.

    Args:
        groups: The keys of each group; a key may be in several.
        keys: A name for each group.
        emb_dtype: The type of the results; None keeps the type.
        multi_device: Ignored, because the module keeps no tensor on a device.

    Raises:
        ConfigError: The number of names differs from the number of groups.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ConfigError(
                f"there are {len(groups)} groups and {len(keys)} keys: name each group once"
            )
        self._groups = [list(group) for group in groups]
        self._keys = list(keys)
        self._dtype = None if emb_dtype is None else DataType(emb_dtype).dtype

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """Return the groups by name, with the errors of `KeyedTensor.regroup_as_dict`."""
        found = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        if self._dtype is None:
            return found
        return {key: group.to(self._dtype) for key, group in found.items()}
