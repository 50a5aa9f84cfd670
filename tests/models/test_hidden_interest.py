"""A hidden model of sequences: a click depends on whether the candidate is among the last items.

Half of the candidates are one of the sample's behaviours. Users click them with one probability and
others with another, so the best AUC is known. A mean of the behaviours has fewer columns than there
are items, and cannot tell.
"""

import pytest
import torch
from torch import nn

from recapp.metrics import click_metrics
from recapp.models.attention import BST, DIN
from recapp.models.layers import MLP
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig

ITEMS = 40
DIM = 4
MOST = 8
CLICKS = {True: 0.9, False: 0.2}
BEST = (
    0.5
    + (CLICKS[True] / sum(CLICKS.values()) - (1 - CLICKS[True]) / (2 - sum(CLICKS.values()))) / 2
)
"""The AUC of the two probabilities, if half of the samples have each."""


def samples(draw, count):
    """Return samples whose histories have up to `MOST` items, and half of them the candidate."""
    lengths = torch.randint(1, MOST + 1, (count,), generator=draw)
    history = torch.rand(count, ITEMS, generator=draw).argsort(1)  # of each sample, no item twice
    inside_B = torch.rand(count, generator=draw) < 0.5
    place = (torch.rand(count, generator=draw) * lengths).long()
    item = torch.where(inside_B, history.gather(1, place[:, None])[:, 0], history[:, MOST])
    rate_B = torch.where(inside_B, CLICKS[True], CLICKS[False])
    clicked_B = (torch.rand(count, generator=draw) < rate_B).float()
    kept = history[torch.arange(ITEMS) < lengths[:, None]]
    sparse = KeyedJaggedTensor(
        ["item", "history"],
        torch.cat([item, kept]),
        lengths=torch.cat([torch.ones_like(lengths), lengths]),
    )
    return Batch(torch.empty(count, 0), sparse, clicked_B)


class MeanOfHistory(nn.Module):
    """An MLP of the candidate and the mean of the behaviours."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=ITEMS,
                    embedding_dim=DIM,
                    feature_names=[name],
                    pooling="mean",
                )
                for name in ("item", "history")
            ]
        )
        self.top = MLP(2 * DIM, [64, 32, 1], last_relu=False)

    def forward(self, batch):
        return self.top(self.tables(batch.sparse).values())[:, 0]


def collections(dim):
    """Return the candidate's bag and the history's sequences, which share a table."""
    config = {"num_embeddings": ITEMS, "embedding_dim": dim}
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="items", feature_names=["item"], **config)]
    )
    sequences = EmbeddingCollection(
        [EmbeddingConfig(name="items", feature_names=["history"], **config)]
    )
    sequences.share("items", bags)
    return bags, sequences


def attention():
    return DIN(*collections(DIM), 0, attention_layers=[36], layers=[200, 80])


def transformer():
    return BST(
        *collections(2 * DIM),
        0,
        max_length=MOST,
        position_dim=2,
        heads=2,
        layers=[64, 32],
        dropout=0.0,
    )


def auc_after(model, steps=300, rate=0.01):
    draw = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        batch = samples(draw, 256)
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    auc = click_metrics(["auc"])["auc"]
    batch = samples(draw, 8192)
    with torch.no_grad():
        auc.update(model(batch), batch.labels_B)
    return float(auc.compute())


@pytest.mark.full
def test_attention_finds_the_candidate_in_the_history_and_a_mean_does_not():
    torch.manual_seed(1)
    assert auc_after(attention()) == pytest.approx(BEST, abs=0.02)
    assert auc_after(MeanOfHistory()) < BEST - 0.1


@pytest.mark.full
def test_a_transformer_finds_the_candidate_in_the_history():
    torch.manual_seed(1)
    assert auc_after(transformer(), steps=900) == pytest.approx(BEST, abs=0.02)
