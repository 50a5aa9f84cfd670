"""Models of shapes that other people's have, each a file's worth of `model=`: what `recapp.train`
must take whatever it is made of.
"""

import torch
from torch import nn

from recapp import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig

META = torch.device("meta")
SEQUENCES = ("C1", "C2")


def sequences(dim=4):
    """Tables of a model's own whose bags are not pooled."""
    return EmbeddingCollection(
        [
            EmbeddingConfig(
                name=f"own_{feature}",
                num_embeddings=500,
                embedding_dim=dim,
                feature_names=[feature],
                id_rule="hash",
            )
            for feature in SEQUENCES
        ],
        device=META,
    )


class Own(nn.Module):
    """The tables of the settings, pooled, beside what a model adds."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__()
        self.bags = embedding_bag_collection
        self.width = dense_in_features + sum(x.dim for x in self.bags.lookups)

    def pooled(self, batch):
        return torch.cat([batch.dense_BI, self.bags(batch.sparse).values()], 1)


class TwoCollections(Own):
    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        wide = EmbeddingBagConfig(
            name="wide", num_embeddings=300, embedding_dim=1, feature_names=["C3"], id_rule="hash"
        )
        self.wide = EmbeddingBagCollection([wide], device=META)
        self.deep = nn.Linear(self.width, 1)

    def forward(self, batch):
        return (self.deep(self.pooled(batch)) + self.wide(batch.sparse).values()).squeeze(1)


class Sequences(Own):
    """Means over sequences, with lengths that the model reads from the batch."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.sequences = sequences()
        self.score = nn.Linear(self.width + 4 * len(SEQUENCES), 1)

    def forward(self, batch):
        parts = [self.pooled(batch)]
        found = self.sequences(batch.sparse)
        for feature in SEQUENCES:
            lengths_B = batch.sparse[feature].lengths()
            bag_L = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B.long())
            sum_BD = torch.zeros(len(lengths_B), 4).index_add(0, bag_L, found[feature].values())
            parts.append(sum_BD / lengths_B.clamp(min=1)[:, None])
        return self.score(torch.cat(parts, 1)).squeeze(1)


class Recurrent(Own):
    """A GRU over sequences, whose layer returns a tuple."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.sequences = sequences()
        self.gru = nn.GRU(4, 6, batch_first=True)
        self.score = nn.Linear(self.width + 6, 1)

    def forward(self, batch):
        found = self.sequences(batch.sparse)
        steps_BTD = torch.stack([found[f].to_padded_dense(1)[:, 0] for f in SEQUENCES], 1)
        _, last_1BD = self.gru(steps_BTD)
        return self.score(torch.cat([self.pooled(batch), last_1BD[0]], 1)).squeeze(1)


class Attention(Own):
    """Attention over sequences with a mask of the ids that are there."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.sequences = sequences()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.score = nn.Linear(self.width + 4, 1)

    def forward(self, batch):
        found = self.sequences(batch.sparse)
        steps_BTD = torch.stack([found[f].to_padded_dense(1)[:, 0] for f in SEQUENCES], 1)
        missing_BT = torch.stack([batch.sparse[f].lengths() == 0 for f in SEQUENCES], 1)
        all_missing_B1 = missing_BT.all(1, keepdim=True)
        mixed_BTD, _ = self.attention(
            steps_BTD, steps_BTD, steps_BTD, key_padding_mask=missing_BT & ~all_missing_B1
        )
        return self.score(torch.cat([self.pooled(batch), mixed_BTD.mean(1)], 1)).squeeze(1)


class TwoHeads(Own):
    """Two outputs, of which the loss reads one; the other is read by nobody in training."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.click = nn.Linear(self.width, 1)
        self.stay = nn.Linear(self.width, 1)

    def both(self, batch):
        pooled = self.pooled(batch)
        return self.click(pooled).squeeze(1), self.stay(pooled).squeeze(1)

    def forward(self, batch):
        return self.both(batch)[0]


class NoTables(nn.Module):
    """A model of the numbers alone."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__()
        self.score = nn.Linear(dense_in_features, 1)

    def forward(self, batch):
        return self.score(batch.dense_BI).squeeze(1)


class NamedOutput(NoTables):
    """A model that gives its only output by name."""

    def forward(self, batch):
        return {"logit": super().forward(batch)}


class TablesOnly(nn.Module):
    """A model without one dense parameter."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__()
        self.bags = embedding_bag_collection

    def forward(self, batch):
        return self.bags(batch.sparse).values().sum(1)


class Frozen(Own):
    """A part that does not train, such as one that was trained elsewhere."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.features = nn.Sequential(nn.Linear(self.width, 5), nn.ReLU()).requires_grad_(False)
        self.score = nn.Linear(5, 1)

    def forward(self, batch):
        return self.score(self.features(self.pooled(batch))).squeeze(1)


class Shared(Own):
    """One layer under two names, run twice."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        self.down = nn.Linear(self.width, 6)
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.score = nn.Linear(6, 1)

    def forward(self, batch):
        x = torch.relu(self.first(torch.relu(self.down(self.pooled(batch)))))
        return self.score(torch.relu(self.second(x))).squeeze(1)


class Compiled(Own):
    """A part that the model compiles itself."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__(embedding_bag_collection, dense_in_features)
        layers = nn.Sequential(nn.Linear(self.width, 5), nn.Tanh(), nn.Linear(5, 1))
        self.layers = torch.compile(layers, backend="eager")

    def forward(self, batch):
        return self.layers(self.pooled(batch)).squeeze(1)


MODELS = (
    TwoCollections,
    Sequences,
    Recurrent,
    Attention,
    TwoHeads,
    NoTables,
    NamedOutput,
    TablesOnly,
    Frozen,
    Shared,
    Compiled,
)
