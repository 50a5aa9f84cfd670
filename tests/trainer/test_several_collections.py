"""A model with several collections of tables: found by walking it, trained and looked ahead to."""

from pathlib import Path

import pytest
import torch
from runs import compose, fit, make_logs

from recapp.models.published_dlrm import DLRM
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.embedding_bag import EmbeddingBagCollection


class WideDLRM(DLRM):
    """A DLRM beside a linear part, whose tables have one column and a collection of their own."""

    def __init__(self, embedding_bag_collection, **settings):
        super().__init__(embedding_bag_collection, **settings)
        wide = [
            EmbeddingBagConfig(
                name=f"wide_{t.name}",
                num_embeddings=t.num_embeddings,
                embedding_dim=1,
                feature_names=t.feature_names,
                id_rule=t.id_rule,
            )
            for t in embedding_bag_collection.embedding_bag_configs()
        ]
        self.wide = EmbeddingBagCollection(wide, device=torch.device("meta"), seed=3)

    def forward(self, batch):
        return super().forward(batch) + self.wide(batch.sparse).values().sum(1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return make_logs(Path(tmp_path_factory.mktemp("logs")) / "logs")


def trained(logs, folder, look_ahead):
    folder.mkdir()
    config = compose(
        logs,
        f"model._target_={__name__}.WideDLRM",
        f"engine.look_ahead={look_ahead}",
        "trainer.max_steps=5",
    )
    seen, trainer, _ = fit(config, folder)
    (shared,) = trainer.strategy.sharded_tables()
    blocks = [(b.table, b.tensor, b.data.clone()) for b in shared.blocks()]
    return seen, shared, blocks


def test_all_tables_train_and_looking_ahead_changes_no_bit(logs, tmp_path):
    _seen, shared, blocks = trained(logs, tmp_path / "ahead", 1)
    assert [len(m.lookups) for m in shared.members] == [26, 26] and len(shared.tables()) == 52
    assert shared.updates == 5
    _, _, others = trained(logs, tmp_path / "not_ahead", 0)
    assert [x[:2] for x in blocks] == [x[:2] for x in others]
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(blocks, others, strict=True))
    assert any(
        name.startswith("wide_") and tensor != "weight" and bool(data.any())
        for name, tensor, data in blocks
    )
