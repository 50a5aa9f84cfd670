"""Field-aware vectors: a vector of each field for each field, [B, F, F, D].

A row of a table has the vectors of its id for all F fields side by side, so tables have F D columns
(Juan et al., RecSys 2016). A number has such vectors, too, times its value.

Shapes: B batch, F fields, D columns of a vector.
"""

from torch import Tensor, nn

from recapp.models.fields import FieldVectors
from recapp.models.fm_checks import check_field_aware
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class FieldAwareVectors(nn.Module):
    """The vectors of each field for each field.

    Attributes:
        count: The number of fields, F.
        dim: The columns of a vector, D.

    Args:
        embedding_bag_collection: The vectors of ids: all tables have F D columns.
        dense_in_features: The number of dense features of a sample.

    Raises:
        ConfigError: The columns of the tables are no multiple of F.
    """

    def __init__(self, embedding_bag_collection: BagCollection, dense_in_features: int) -> None:
        super().__init__()
        self.side_by_side = FieldVectors(embedding_bag_collection, dense_in_features)
        self.count = self.side_by_side.count
        lookups = self.count - dense_in_features
        dims = [self.side_by_side.dim] * lookups
        self.dim = check_field_aware(dims, dense_in_features)

    def forward(self, batch: Batch) -> Tensor:
        """Return the vector of field i for field j at [:, i, j], [B, F, F, D]."""
        rows_BFK: Tensor = self.side_by_side(batch)
        return rows_BFK.view(-1, self.count, self.count, self.dim)
