"""A model with several collections of tables, of bags and of sequences: found by walking it,
trained, looked ahead to, stored and resumed.
"""

import pytest
import torch
from runs import compose, fit

from recapp.models.published_dlrm import DLRM
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig


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


class SequenceDLRM(DLRM):
    """A DLRM beside sequences of three features, one of them of a table that the DLRM has, too."""

    def __init__(self, embedding_bag_collection, **settings):
        super().__init__(embedding_bag_collection, **settings)
        first, second, third = embedding_bag_collection.tables()[:3]
        tables = [
            EmbeddingConfig(
                name=t.name if t is third else f"sequence_{t.name}",
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim if t is third else 3,
                feature_names=t.feature_names,
                id_rule=t.id_rule,
            )
            for t in (first, second, third)
        ]
        self.sequences = EmbeddingCollection(tables, device=torch.device("meta"), seed=3)
        weight = embedding_bag_collection.embedding_bags[third.name].weight
        self.sequences.embeddings[third.name].weight = weight

    def forward(self, batch):
        logits = super().forward(batch)
        for jagged in self.sequences(batch.sparse).values():
            bag_L = torch.repeat_interleave(jagged.lengths())
            logits = logits.index_add(0, bag_L, jagged.values().tanh().sum(1))
        return logits


def trained(logs, folder, look_ahead, model="WideDLRM", steps=5, plan="mixed", ckpt_path=None):
    folder.mkdir()
    config = compose(
        logs,
        f"model._target_={__name__}.{model}",
        f"engine.look_ahead={look_ahead}",
        f"trainer.max_steps={steps}",
        f"+plan={plan}",
    )
    seen, trainer, _ = fit(config, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    blocks = [(b.table, b.tensor, b.data.clone()) for b in shared.blocks()]
    return seen, shared, blocks


@pytest.mark.full
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


def tables_of(blocks):
    """Whole tensors by table and name: on one rank blocks are strips of columns."""
    held = {}
    for table, tensor, data in blocks:
        held.setdefault((table, tensor), []).append(data)
    return {
        (table, tensor): strips[0] if tensor == "sum" else torch.cat(strips, 1)
        for (table, tensor), strips in held.items()
    }


def test_bags_and_sequences_train_alike_ahead_or_not_and_go_on_under_another_plan(logs, tmp_path):
    _, shared, blocks = trained(logs, tmp_path / "whole", 1, "SequenceDLRM", 6)
    assert [len(m.lookups) for m in shared.members] == [26, 3] and len(shared.tables()) == 28
    assert shared.updates == 6
    whole = tables_of(blocks)
    _, _, blocks = trained(logs, tmp_path / "not_ahead", 0, "SequenceDLRM", 6)
    assert all(torch.equal(data, whole[key]) for key, data in tables_of(blocks).items())
    trained(logs, tmp_path / "half", 1, "SequenceDLRM", 3, "table_wise")
    stopped = tmp_path / "half" / "checkpoints" / "last.ckpt"
    _, _, blocks = trained(
        logs, tmp_path / "rest", 1, "SequenceDLRM", 6, "column_wise", ckpt_path=stopped
    )
    rest = tables_of(blocks)
    assert rest.keys() == whole.keys()
    assert all(torch.equal(data, whole[key]) for key, data in rest.items())
