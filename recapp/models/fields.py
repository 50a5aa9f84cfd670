"""The vectors of a sample's fields: the input of models that know fields and not columns.

    numbers="vectors"    v1 * x1, v2 * x2, ..., pooled vectors    a field for each number and lookup
    numbers="concat"     x1, x2, ... | pooled vectors             the numbers as columns

With `vectors`, each number has a learnt vector, which the number scales (DeepFM, arXiv 1703.04247,
and AutoInt, arXiv 1810.11921, treat numbers in this way). With `concat`, numbers stay columns (the
cross networks DCN, arXiv 1708.05123).

Shapes: B batch, I dense features, F fields, D columns of a field's vector, K columns of all inputs.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.models.layers import FieldDropout, Layer, learnt_vectors
from recapp.models.model_checks import check_same_dim, check_settings
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection

Numbers = Literal["vectors", "concat"]


class FieldVectors(Layer):
    """The inputs of a model: a vector for each field, or all inputs as columns.

    Args:
        embedding_bag_collection: The tables. Each vector of a concatenation is a field.
        dense_in_features: The number of dense features I.
        numbers: Whether numbers become fields (`vectors`) or stay columns (`concat`).
        model: The name of the model, for messages.
        dropout: The share of the vectors of a sample that training sets to 0, each as a whole;
            numbers and their vectors stay.

    Attributes:
        count: The number of fields F; numbers count under `vectors` only.
        dim: The columns D of a field's vector; 0 if the dims differ.
        columns: The columns K of `flat`.

    Raises:
        ConfigError: `vectors` is asked for, and the lookups have different dims or there is none;
            or the share is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        numbers: Numbers = "vectors",
        model: str = "the model",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_in_features = dense_in_features
        lookups = embedding_bag_collection.lookups
        dims = [x.dim for x in lookups for _ in range(x.columns // x.dim)]
        check_settings(numbers=numbers)
        if numbers == "vectors":
            check_same_dim(model, dims)
        self.dim = dims[0] if len(set(dims)) == 1 else 0
        self.count = len(dims)
        self.columns = sum(dims) + dense_in_features
        self.dropout = FieldDropout(dropout, dims) if dropout else None
        self.number_vectors_ID: nn.Parameter | None = None
        if numbers == "vectors" and dense_in_features:
            self.count += dense_in_features
            self.columns = self.count * self.dim
            self.number_vectors_ID = learnt_vectors(dense_in_features, self.dim)

    def forward(self, batch: Batch) -> Tensor:
        """Return the vectors of all fields, [B, F, D]: numbers first, then the lookups.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        return self.flat(batch).view(-1, self.count, self.dim)

    def flat(self, batch: Batch) -> Tensor:
        """Return all inputs as columns, [B, K]: numbers first, then the lookups.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, self.dense_in_features)
        pooled: KeyedTensor = self.embedding_bag_collection(batch.sparse)
        # Tables may have another dtype than the model, whose numbers have its own.
        vectors_BK = pooled.values().to(dense_BI.dtype)
        if self.dropout is not None:
            vectors_BK = self.dropout(vectors_BK)
        if not self.dense_in_features:
            return vectors_BK
        if self.number_vectors_ID is None:
            return torch.cat([dense_BI, vectors_BK], 1)
        scaled_BID = dense_BI.unsqueeze(2) * self.number_vectors_ID
        return torch.cat([scaled_BID.flatten(1), vectors_BK], 1)


def numbers_of(batch: Batch, dense_in_features: int) -> Tensor:
    """Return the numbers of a batch, [B, I].

    Args:
        batch: The samples.
        dense_in_features: The number of dense features I for which the model was made.

    Raises:
        ConfigError: The batch has another number of dense features.
    """
    dense_BI = batch.dense_BI
    if dense_BI.dim() != 2 or dense_BI.shape[1] != dense_in_features:
        raise ConfigError(
            f"the model was made for {dense_in_features} dense features and got a batch of shape "
            f"{list(dense_BI.shape)}: dataset.dense must be the one it was made with"
        )
    return dense_BI
