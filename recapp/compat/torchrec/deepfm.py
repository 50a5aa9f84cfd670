"""TorchRec's DeepFM: its two terms as modules, and its example model `SimpleDeepFMNN`, with
TorchRec's constructors and parameter names.

    DeepFM(dense_module)([a_BND, b_BMC])          any module over all columns side by side
    FactorizationMachine()([a_BND, b_BMC])        the sum over all pairs of columns, [B, 1]

The published model, with weights of ids and one product for each pair of vectors, is `model=deepfm`
(`recapp/models/fm.py`).

Shapes: B batch, I dense features, D columns of a vector, F features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.compat.torchrec.dlrm import check_one_dim
from recapp.models.fm import fm_term
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import BagCollection


def _columns(embeddings: Sequence[Tensor]) -> Tensor:
    """Return the columns of all tensors side by side, [B, columns]."""
    return torch.cat([vectors.flatten(1) for vectors in embeddings], 1)


class DeepFM(nn.Module):
    """The deep term of DeepFM: a module over all embeddings side by side.

    Args:
        dense_module: A module from [B, columns] to its output.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the output of the module for embeddings [B, ...] of any widths."""
        output: Tensor = self.dense_module(_columns(embeddings))
        return output


class FactorizationMachine(nn.Module):
    """The sum of the products of all pairs of columns, as in TorchRec. A published factorisation
    machine adds products of vectors.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Return the sums, [B, 1], for embeddings [B, ...] of any widths."""
        return fm_term(_columns(embeddings).unsqueeze(2)).unsqueeze(1)


class SparseArch(nn.Module):
    """The tables: ids to pooled vectors.

    Args:
        embedding_bag_collection: The tables.
    """

    def __init__(self, embedding_bag_collection: BagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled vectors by feature."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Two linear layers with ReLU: dense features to a vector.

    Args:
        in_features: The number of dense features I.
        hidden_layer_size: The width of the first layer.
        embedding_dim: The width of the second layer, D.
    """

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the vectors, [B, D]."""
        vectors_BD: Tensor = self.model(features)
        return vectors_BD


class FMInteractionArch(nn.Module):
    """Concatenates the dense vector, a deep term and the factorisation machine.

    Args:
        fm_in_features: The columns of the dense vector and of all pooled vectors.
        sparse_feature_names: The features of the pooled vectors.
        deep_fm_dimension: The width of the deep term.
    """

    def __init__(
        self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int
    ) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU())
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """Return [B, D + deep_fm_dimension + 1]; without features, the dense vectors.

        Args:
            dense_features: The output of `DenseArch`, [B, D].
            sparse_features: The pooled vectors.
        """
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], 1)


class OverArch(nn.Module):
    """A linear layer and a sigmoid: the probability of a click, [B, 1].

    Args:
        in_features: The columns of the input.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """Return the probabilities, [B, 1]."""
        probabilities_B1: Tensor = self.model(features)
        return probabilities_B1


class SimpleDeepFMNN(nn.Module):
    """Probabilities of clicks from dense features and ids, by the terms of DeepFM.

    Args:
        num_dense_features: The number of dense features I.
        embedding_bag_collection: The tables, all of width D.
        hidden_layer_size: The width of the hidden layer over the dense features.
        deep_fm_dimension: The width of the deep term.

    Raises:
        ConfigError: The widths of the tables differ.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: BagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        dim = check_one_dim("SimpleDeepFMNN", embedding_bag_collection)
        names = [x.output for x in embedding_bag_collection.lookups]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch(dim * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return probabilities, [B, 1].

        Args:
            dense_features: The dense features, [B, I].
            sparse_features: The ids, with stride B.
        """
        vectors_BD = self.dense_arch(dense_features)
        interactions = self.inter_arch(vectors_BD, self.sparse_arch(sparse_features))
        probabilities_B1: Tensor = self.over_arch(interactions)
        return probabilities_B1
