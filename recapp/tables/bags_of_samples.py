"""From bags to samples, for batches with fewer bags of a feature than samples (TorchRec: variable
batch per key, VBE). Each bag is looked up once, and the samples that share the bag take its vector.

    bags of user     [101 102] [7]      vectors v0 v1
    inverse indices  0 0 0 1            output  v0 v0 v0 v1     four samples

Every bag is requested, answered and sent once, however many samples take it, and learns from the
sum of their gradients. The engine gets the same number of bags of every feature: empty bags, which
cost no message, follow the bags of shorter features (`KeyedJaggedTensor.padded`).

`F.embedding` takes the vectors, because it sums gradients in a fixed order on GPUs as well.

Suffixes: B bags, S samples, D columns, L ids.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.errors import ConfigError, suggest
from recapp.sparse.bags import offsets_of
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import to_host
from recapp.tables.config import PoolingType, TableLookup


def samples_of(features: KeyedJaggedTensor) -> int:
    """Return the number of samples of a batch."""
    inverse = features.inverse_indices_or_none()
    return features.stride() if inverse is None else inverse[1].shape[1]


def check_samples(features: KeyedJaggedTensor, lookups: Sequence[TableLookup]) -> None:
    """Check that a batch tells the bag of each feature that every sample takes.

    Args:
        features: The ids of a batch.
        lookups: The lookups.

    Raises:
        ConfigError: The ids are no KeyedJaggedTensor, features have different numbers of bags
            without inverse indices, or a feature has no inverse indices.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise ConfigError(
            f"features are a {type(features).__name__}: give a KeyedJaggedTensor, which "
            "KeyedJaggedTensor.from_jt_dict makes of a dict of JaggedTensors"
        )
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        for x in lookups:
            if x.feature not in inverse[0]:
                raise ConfigError(
                    f"inverse_indices have no key {x.feature!r}, which table {x.table.name} reads: "
                    f"{suggest(x.feature, inverse[0])}"
                )
        return
    if not features.variable_stride_per_key():
        return
    bags = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    read = {
        x.feature: bags[x.feature]
        for x in lookups
        if x.pooling is not PoolingType.NONE and x.feature in bags
    }
    if len(set(read.values())) > 1:
        raise ConfigError(
            f"features have different numbers of bags, {read}, and no inverse_indices, which "
            "name the bag of each sample: give the KeyedJaggedTensor inverse_indices (split and "
            "permute do not keep them)"
        )


def pooled_of_samples(
    lookups: Sequence[TableLookup], values_BD: Tensor, features: KeyedJaggedTensor, room: int = 0
) -> KeyedTensor:
    """Return the output of a bag collection.

    Args:
        lookups: The lookups of the collection.
        values_BD: The vectors of the bags, [B, room + columns].
        features: The ids that were looked up.
        room: The columns before the first vector.

    Returns:
        [S, columns], keyed by output.
    """
    outputs = [x.output for x in lookups]
    columns = [x.columns for x in lookups]
    inverse = features.inverse_indices_or_none()
    if inverse is not None and lookups:
        index_FS = dict(zip(inverse[0], inverse[1].long(), strict=True))
        parts = torch.split(values_BD[:, room:], columns, 1)
        pooled = [
            F.embedding(index_FS[x.feature], part_BD)
            for x, part_BD in zip(lookups, parts, strict=True)
        ]
        return KeyedTensor(outputs, columns, torch.cat(pooled, 1))
    if features.variable_stride_per_key() and lookups:
        bags = features.stride_per_key()[features.index_of(lookups[0].feature)]
        if bags != len(values_BD):
            return KeyedTensor(outputs, columns, values_BD[:bags, room:])
    return KeyedTensor(outputs, columns, values_BD, room=room)


def sequences_of_samples(
    feature: str,
    vectors_LD: Tensor,
    indices_L: Tensor | None,
    lengths_B: Tensor,
    features: KeyedJaggedTensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the vectors, indices and lengths of one lookup of sequences, by sample; by bag without
    inverse indices.

    Args:
        feature: The feature of the lookup.
        vectors_LD: A vector for each id.
        indices_L: The row of each vector, for a dynamic table its key; or None.
        lengths_B: The number of ids of each bag, with the empty bags at the end.
        features: The ids that were looked up.
    """
    if features.variable_stride_per_key():
        lengths_B = lengths_B[: features.stride_per_key()[features.index_of(feature)]]
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        return vectors_LD, indices_L, lengths_B
    index_S = inverse[1][inverse[0].index(feature)].long()
    lengths_S = lengths_B[index_S]
    total = sum(to_host(lengths_S.sum(0, keepdim=True)).tolist())
    sample_L = torch.repeat_interleave(lengths_S, output_size=total)
    nth_L = torch.arange(total, device=sample_L.device) - offsets_of(lengths_S)[sample_L]
    at_L = offsets_of(lengths_B)[index_S[sample_L]] + nth_L
    of_samples_L = None if indices_L is None else indices_L.index_select(0, at_L)
    return F.embedding(at_L, vectors_LD), of_samples_L, lengths_S
