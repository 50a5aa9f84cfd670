"""Mean squares over whole rows of tables that are cut into column strips."""

import pytest
import torch

from recapp.engine.row_statistics import RowStatistics
from recapp.kernels.backend import backend
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm


@pytest.mark.parametrize("kernels", ["numba", "torch"])
def test_parts_of_a_row_meet_in_the_order_of_its_strips(kernels):
    """One table is cut in three strips of four columns, the other in two."""
    strips = {"t": 3, "u": 2}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4 * n, feature_names=[name])
        for name, n in strips.items()
    ]
    shardings = {
        name: TableSharding(
            tuple(Shard(0, range(10), range(4 * k, 4 * k + 4)) for k in range(n)),
        )
        for name, n in strips.items()
    }
    layout = make_layout(tables, ShardingPlan(shardings, 1))
    statistics = RowStatistics(layout, Comm(), backend(kernels, torch.device("cpu")), [2])
    row_U = torch.tensor([3, 7, 13, 17, 23, 27, 31, 41], dtype=torch.int32)
    pieces = statistics.find(0, row_U)
    # 2^60 + 2 - 2^60 is 0 in this order, 2 in another
    squares_U = [2.0**60, 5.0, 2.0, 7.0, -(2.0**60), 12.0, 1.0, 2.0]
    squares_KU = torch.tensor([squares_U, [6.0 * x for x in squares_U]], dtype=torch.float64)
    (mean_KU,) = statistics.mean_squares([pieces], [squares_KU], torch.float32)
    expected = [0, 2, 0, 2, 0, 2, 3 / 8, 3 / 8]
    assert mean_KU.tolist() == [expected, [6 * x for x in expected]]
