"""Models that get several collections of tables from the settings, as a user's package has them."""

import torch
from torch import nn


class Watch(nn.Module):
    """Attention of an item over the items that a user watched, beside wide weights."""

    def __init__(self, embedding_bag_collection, embedding_collection, wide, dense_in_features):
        super().__init__()
        self.bags = embedding_bag_collection
        self.watched = embedding_collection
        self.wide = wide
        dim = self.watched.lookups[0].dim
        self.score = nn.Linear(dense_in_features + 3 * dim, 1)

    def forward(self, batch):
        """Return a logit for each sample, [B]."""
        bags = self.bags(batch.sparse)
        item_BD = bags["item"]
        watched = self.watched(batch.sparse)["history"]
        lengths_B = watched.lengths().long()
        steps = int(lengths_B.max()) if len(lengths_B) else 0
        watched_BTD = watched.to_padded_dense(max(steps, 1))
        there_BT = torch.arange(watched_BTD.shape[1], device=lengths_B.device) < lengths_B[:, None]
        weight_BT = (watched_BTD @ item_BD[:, :, None]).squeeze(2).exp() * there_BT
        weight_BT = weight_BT / weight_BT.sum(1, keepdim=True).clamp(min=1e-6)
        mixed_BD = (watched_BTD * weight_BT[:, :, None]).sum(1)
        deep_BK = torch.cat([batch.dense_BI, bags["user"], item_BD, mixed_BD], 1)
        return (self.score(deep_BK) + self.wide(batch.sparse).values().sum(1, keepdim=True))[:, 0]


class MeanWatched(nn.Module):
    """The mean of what a user watched, beside pooled vectors."""

    def __init__(self, embedding_bag_collection, embedding_collection, dense_in_features):
        super().__init__()
        self.bags = embedding_bag_collection
        self.watched = embedding_collection
        lookups = (*self.bags.lookups, *self.watched.lookups)
        self.score = nn.Linear(dense_in_features + sum(x.dim for x in lookups), 1)

    def forward(self, batch):
        """Return a logit for each sample, [B]."""
        watched = self.watched(batch.sparse)["history"]
        sum_BD = torch.segment_reduce(watched.values(), "sum", lengths=watched.lengths().long())
        mean_BD = sum_BD / watched.lengths().clamp(min=1)[:, None]
        return self.score(
            torch.cat([batch.dense_BI, self.bags(batch.sparse).values(), mean_BD], 1)
        )[:, 0]
