"""A LightningModule of somebody's own, with pooled bags and sequences, as a script has it:

python own_lightning.py DIR script      Lightning runs this file for a second rank
python own_lightning.py DIR notebook    as a notebook, where a function is run on ranks
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recapp import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingStrategy,
    HybridOptimizer,
    KeyedJaggedTensor,
    run_ranks,
)

META = torch.device("meta")
ITEMS = EmbeddingBagConfig(
    name="items", num_embeddings=400, embedding_dim=8, feature_names=["item"]
)
SEEN = EmbeddingConfig(name="seen", num_embeddings=300, embedding_dim=4, feature_names=["seen"])


class Clicks(lightning.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if not hasattr(self, "bags"):
            torch.manual_seed(0)
            self.bags = EmbeddingBagCollection(tables=[ITEMS], device=META)
            self.sequences = EmbeddingCollection(tables=[SEEN], device=META)
            self.hidden = torch.nn.Linear(12, self.hparams.width)
            self.score = torch.nn.Linear(self.hparams.width, 1)

    def forward(self, ids):
        seen_BD = self.sequences(ids)["seen"].to_padded_dense(3).sum(1)
        hidden = self.hidden(torch.cat([self.bags(ids).values(), seen_BD], 1))
        return self.score(torch.relu(hidden)).squeeze(1)

    def training_step(self, batch, index):
        ids, labels = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self(ids), labels)

    def configure_optimizers(self):
        dense = torch.optim.Adam(p for p in self.parameters() if p.requires_grad)
        return HybridOptimizer(dense, self.trainer.strategy.sparse_groups())


class Watched(Clicks):
    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), batch_size=2)


BATCHES = [
    (
        KeyedJaggedTensor(["item", "seen"], [i, i + 1, 7, 3 * i, 2, 5], lengths=[2, 1, 1, 2]),
        torch.tensor([1.0, 0.0]),
    )
    for i in range(20)
]


def loader():
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def fitted(folder, devices=1, kind=Clicks, callbacks=(), validated=False, **strategy):
    """A trainer that has trained; its module in `trainer.lightning_module`."""
    trainer = lightning.Trainer(
        strategy=EmbeddingShardingStrategy(**strategy),
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        callbacks=[*callbacks, ModelCheckpoint(str(folder), filename="end")],
        enable_progress_bar=False,
    )
    module = kind()
    if validated:  # first, so the plan is made before the training
        trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), loader() if validated else None)
    return trainer


def main(folder):
    trainer = fitted(folder, devices=2)
    if trainer.global_rank == 0:
        again = Clicks.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        logits = again(BATCHES[3][0]).tolist()
        Path(folder, "said.json").write_text(json.dumps(logits))


if __name__ == "__main__":
    if sys.argv[2] == "notebook":
        sys.ps1 = ">>> "
        torch.set_num_threads(4)
        torch.relu(torch.randn(4_000_000)).sum()  # threads that no fork has
        try:
            fitted(sys.argv[1], devices=2)
        except Exception as error:
            print(error, file=sys.stderr)
        run_ranks(main, sys.argv[1])
    else:
        main(sys.argv[1])
