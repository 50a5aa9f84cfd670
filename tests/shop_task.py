"""A task of two labels and two outputs, with a model of its own, as a user's package has them."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.metrics import AUC, LogLoss
from recapp.tasks.measures import Measure
from recapp.tasks.task import Output, Task


class ShopTask(Task):
    """Clicks and orders, each a logit."""

    outputs = (
        Output("click", label="clicked", column="click_score"),
        Output("order", label="ordered", column="order_score"),
    )
    known = (
        Measure("click_auc", "AUC of clicks", "max", output="click", shown=True),
        Measure("order_loss", "log loss of orders", "min", output="order", shown=True),
    )
    best = "order_loss"

    def __init__(self, names=None, order_weight=1.0):
        super().__init__(names)
        self.factors = {"click": 1.0, "order": order_weight}

    def loss(self, outputs, batch):
        """Return the sum of both mean cross entropies."""
        return sum(
            factor
            * binary_cross_entropy_with_logits(
                outputs[name], self.labels(batch)[name], reduction="sum"
            )
            / max(batch.rows, 1)
            for name, factor in self.factors.items()
        )

    def make_metric(self, name, sync_on_compute):
        """Return a fresh metric."""
        kind = AUC if name == "click_auc" else LogLoss
        return kind(sync_on_compute=sync_on_compute)


class TwoTowers(nn.Module):
    """A linear layer for each output."""

    def __init__(self, embedding_bag_collection, dense_in_features):
        super().__init__()
        self.bags = embedding_bag_collection
        width = dense_in_features + sum(x.dim for x in self.bags.lookups)
        self.heads = nn.ModuleDict({name: nn.Linear(width, 1) for name in ("click", "order")})

    def forward(self, batch):
        """Return both logits by name."""
        both = torch.cat([batch.dense_BI, self.bags(batch.sparse).values()], 1)
        return {name: head(both).squeeze(1) for name, head in self.heads.items()}
