"""A model that holds TorchRec's managed collisions trains under Lightning, looked ahead to or not,
and goes on from its checkpoint under another plan.
"""

import pytest
import torch
from runs import compose, fit

from recapp.models.published_dlrm import DLRM
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

ROWS = 64


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
    _, trainer, module = fit(config, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    rows = {
        b.table: b.data[:].clone()
        for b in shared.blocks()
        if b.tensor == "weight" and b.table.startswith("wide_")
    }
    buffers = {name: data.clone() for name, data in module.named_buffers() if "_mch_" in name}
    return rows, buffers


@pytest.mark.full
def test_managed_tables_train_ahead_or_not_and_go_on_under_another_plan(logs, tmp_path):
    rows, slots = trained(logs, tmp_path / "whole", 1, 6, "table_wise")
    ids = [data for name, data in slots.items() if name.endswith("_mch_sorted_raw_ids")]
    assert len(rows) == len(ids) == 26 and max(int((x < 2**63 - 1).sum()) for x in ids) == ROWS - 1
    others = trained(logs, tmp_path / "not_ahead", 0, 6, "row_wise")
    trained(logs, tmp_path / "half", 1, 3, "table_wise")
    stopped = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = trained(logs, tmp_path / "rest", 1, 6, "row_wise", ckpt_path=stopped)
    for run in (others, rest):
        for tensors, wanted in zip(run, (rows, slots), strict=True):
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(data, wanted[name]) for name, data in tensors.items())
