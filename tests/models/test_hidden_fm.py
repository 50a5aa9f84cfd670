"""Clicks drawn from a random factorisation machine, whose best possible AUC is known: the FM finds
it, and logistic regression cannot.
"""

from itertools import combinations

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.models.fm import FM, FwFM, LogisticRegression
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

FEATURES = ("a", "b", "c")
ROWS = 12
SAMPLES = 6_000
STEPS = 50


def drawn(seed):
    """Return samples and their true logits: a number and three ids, vectors of two columns."""
    hidden = torch.Generator().manual_seed(0)
    weights = torch.randn(1 + 3 * ROWS, generator=hidden) / 4
    vectors = torch.randn(1 + 3 * ROWS, 2, generator=hidden)
    draw = torch.Generator().manual_seed(seed)
    number_B = torch.randn(SAMPLES, generator=draw)
    ids_BF = torch.randint(ROWS, (SAMPLES, 3), generator=draw)
    places_BF = 1 + ids_BF + ROWS * torch.arange(3)
    fields = [number_B[:, None] * vectors[0], *(vectors[places_BF[:, f]] for f in range(3))]
    logits_B = number_B * weights[0] + weights[places_BF].sum(1)
    logits_B = logits_B + sum((v * w).sum(1) for v, w in combinations(fields, 2))
    clicks_B = torch.bernoulli(logits_B.sigmoid(), generator=draw)
    sparse = KeyedJaggedTensor(
        list(FEATURES), ids_BF.T.flatten(), lengths=torch.ones(3 * SAMPLES, dtype=torch.int64)
    )
    return Batch(number_B[:, None], sparse, clicks_B), logits_B


def tables(dim, **more):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[name], **more
            )
            for name in FEATURES
        ]
    )


def auc(scores_B, clicks_B):
    """Return the share of pairs of a click and none that the scores order rightly."""
    ranks_B = torch.empty(len(scores_B), dtype=torch.float64)
    ranks_B[scores_B.argsort()] = torch.arange(1.0, len(scores_B) + 1, dtype=torch.float64)
    clicks = float(clicks_B.sum())
    above = float(ranks_B[clicks_B > 0].sum()) - clicks * (clicks + 1) / 2
    return above / clicks / (len(scores_B) - clicks)


def trained(model):
    """Return the model after some full-batch steps of Adam."""
    train, _ = drawn(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(train), train.labels["label"]).backward()
        optimizer.step()
    return model


def wide():
    return tables(1, init_range=0.0)


@pytest.mark.parametrize(
    ("made", "finds_it"),
    [
        (lambda: FM(tables(2), wide(), 1), True),
        (lambda: FwFM(tables(2), wide(), 1), True),
        (lambda: LogisticRegression(wide(), 1), False),
    ],
    ids=["FM", "FwFM", "logistic regression"],
)
def test_only_models_with_products_find_a_hidden_fm(made, finds_it):
    torch.manual_seed(0)
    test, true_B = drawn(2)
    clicks_B = test.labels["label"]
    best = auc(true_B, clicks_B)
    reached = auc(trained(made())(test).detach(), clicks_B)
    if finds_it:
        assert best - 0.01 < reached < best
    else:
        assert reached < best - 0.1
