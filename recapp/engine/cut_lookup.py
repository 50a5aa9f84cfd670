"""A step whose lookups are done before its model runs, and whose tables are updated behind it: what
is between them has fixed shapes and no messages, so it can be recorded, on any number of ranks.

    lookups    ids are exchanged, vectors looked up
    model      reads their values (`shares`), computes the loss, leaves the gradients of the vectors
    update     gradients go back to the owners, which update their rows

`recapp/graphs/step_graph.py` records the part in the middle.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recapp.engine.requests import Requests
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import copy_each


class CutLookup:
    """The vectors of a batch between their lookup and the model.

    Args:
        features: The ids of the batch. A collection that is called with other ids looks them up.
        requests: The finished requests of the batch.
        parts: The vectors, by which autograd reaches the tables.

    Attributes:
        anchor: The tensor by which autograd reaches the end of the model's backward.
        values: The values of the vectors.
        lengths: Beside vectors that are not sums of bags, the lengths of the bags.
        is_read: Whether the model has read them.
        gradients: The gradients of the vectors, once the backward of the model has run; None for
            those without influence on the loss.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor,
        requests: Requests,
        parts: Sequence[Tensor],
    ) -> None:
        self.features = features
        self.requests = requests
        self.parts = parts
        self.anchor = torch.zeros(0, device=parts[0].device, requires_grad=True)
        self.values = [part.detach() for part in parts]
        self.lengths = [requests.rows.lengths_FB] if requests.state.outputs.ragged else []
        self.gradients: Sequence[Tensor | None] = [None] * len(parts)
        self.is_read = False

    def copy(self) -> "CutLookup":
        """Return the same vectors, and lengths, in memory of their own, for a recorded step."""
        requests = copy(self.requests)
        requests.rows = replace(requests.rows, lengths_FB=requests.rows.lengths_FB.clone())
        return CutLookup(self.features, requests, [value.clone() for value in self.values])

    def fill(self, other: "CutLookup") -> None:
        """Take the values of another batch, whose model is a recorded one."""
        copy_each([*self.values, *self.lengths], [*other.values, *other.lengths])
        other.requests.called_by |= self.requests.called_by
        other.is_read = True

    def read(self) -> Sequence[Tensor]:
        """Return the vectors for the model, whose backward ends here."""
        self.is_read = True
        vectors: Sequence[Tensor] = _Read.apply(self.anchor, self)  # type: ignore[no-untyped-call]
        return vectors

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring the gradients of the vectors to the tables, which are updated, if the model has
        read them. Every rank calls it.

        Args:
            gradients: A gradient for each vector; None for zeros.
        """
        if not self.is_read:  # the model has looked up other ids, by itself
            self.requests.release()
            return
        known = [(p, x) for p, x in zip(self.parts, gradients, strict=True) if x is not None]
        known = known or [(self.parts[0], torch.zeros_like(self.parts[0]))]
        torch.autograd.backward([p for p, _ in known], [x for _, x in known])


class _Read(torch.autograd.Function):
    """The values of cut vectors. Its backward keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cut: CutLookup) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        return tuple(value.detach() for value in cut.values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.cut.gradients = gradients
        return None, None
