"""A model that holds TorchRec's managed collisions trains under Lightning, looked ahead to or not,
and goes on from its checkpoint under another plan.
"""

import pytest
import torch
from runs import compose, fit

from recapp.models.published_dlrm import DLRM
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.unsharded_collection import EmbeddingBagCollection

ROWS = 128


class ManagedDLRM(DLRM):
    """A DLRM beside a linear part, whose tables have managed collisions."""

    def __init__(self, embedding_bag_collection, **settings):
        from recapp.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from recapp.modules.mc_modules import (
            LRU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )

        super().__init__(embedding_bag_collection, **settings)
        wide = [
            EmbeddingBagConfig(
                name=f"wide_{t.name}",
                num_embeddings=ROWS,
                embedding_dim=1,
                feature_names=t.feature_names,
            )
            for t in embedding_bag_collection.tables()
        ]
        modules = {
            t.name: MCHManagedCollisionModule(ROWS, "meta", LRU_EvictionPolicy(), 1) for t in wide
        }
        self.wide = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(wide, device=torch.device("meta")),
            ManagedCollisionCollection(modules, wide),
        )

    def forward(self, batch):
        pooled, _ = self.wide(batch.sparse)
        return super().forward(batch) + pooled.values().sum(1)


def trained(logs, folder, look_ahead, steps, plan, ckpt_path=None):
    folder.mkdir()
    config = compose(
        logs,
        f"model._target_={__name__}.ManagedDLRM",
        f"engine.look_ahead={look_ahead}",
        f"trainer.max_steps={steps}",
        f"+plan={plan}",
    )
    _, trainer, _ = fit(config, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    return shared, {
        (b.table, b.tensor): b.data[:].clone()
        for b in shared.blocks()
        if b.table.startswith("wide_")
    }


@pytest.mark.full
def test_managed_tables_train_ahead_or_not_and_go_on_under_another_plan(logs, tmp_path):
    shared, whole = trained(logs, tmp_path / "whole", 1, 6, "table_wise")
    rows = {table: len(data) for (table, tensor), data in whole.items() if tensor == "keys"}
    assert len(rows) == 26 and ROWS // 2 < max(rows.values()) <= ROWS
    assert sum(changes.evicted for changes in shared.stored.changes().values())
    _, other = trained(logs, tmp_path / "not_ahead", 0, 6, "row_wise")
    trained(logs, tmp_path / "half", 1, 3, "table_wise")
    stopped = tmp_path / "half" / "checkpoints" / "last.ckpt"
    _, rest = trained(logs, tmp_path / "rest", 1, 6, "row_wise", ckpt_path=stopped)
    for found in (other, rest):
        assert found.keys() == whole.keys()
        assert all(torch.equal(data, whole[name]) for name, data in found.items())
