"""A training script of somebody's own: a plain LightningDataModule under the Strategy, on ranks
that were started from outside.

    RANK=0 WORLD_SIZE=2 ... python plain_data_script.py DIR -> DIR/mine.ckpt, DIR/rank0.json
"""

import json
import sys
from pathlib import Path

import torch
from engine.engine_cases import batch_of, make_tables
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from recapp.optim.rules import sgd
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.tables.collections import EmbeddingBagCollection
from recapp.trainer.strategy import EmbeddingShardingStrategy

STEPS = 5


class PlainData(LightningDataModule):
    """Has a train loader, and nothing that recapp's own has beside it."""

    def train_dataloader(self):
        assert self.trainer is not None
        first = STEPS * self.trainer.global_rank
        batches = [(batch_of(make_tables(), 4, first + i), torch.ones(4)) for i in range(STEPS)]
        return DataLoader(batches, batch_size=None)


class Model(LightningModule):
    """Tables and one linear layer."""

    def configure_model(self):
        tables = make_tables()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"), seed=1)
        self.head = torch.nn.Linear(sum(t.embedding_dim * len(t.feature_names) for t in tables), 1)

    def training_step(self, batch, batch_idx):
        ids, labels_B = batch
        return torch.nn.functional.mse_loss(self.head(self.tables(ids).values())[:, 0], labels_B)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.1)


def planned(problem):
    """Rows over both ranks, modes left open."""
    return plan_by_rules(problem.tables, problem.topology, [PlanRule("row_wise")], name="rows")


def main(folder):
    strategy = EmbeddingShardingStrategy(planned, sgd(0.1))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), datamodule=PlainData())
    trainer.save_checkpoint(folder / "mine.ckpt")
    found = {
        "steps": trainer.global_step,
        "modes": sorted({sharding.mode for sharding in strategy.plan.tables.values()}),
        "problem": strategy.problem is not None,
        "updates": [c.updates for c in strategy.sharded_tables()],
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
