"""Answer, combine, and the way back: the only autograd function of the engine.

    out = A . exchange(S . rows)                  answers: one collective (counts and ids went
                                                  before, in `Requests`)
    rows learn from S^T . exchange(A^T . grad)    gradients: one collective; no gradient tensor of
                                                  a table ever exists

A rank sums a row's gradient over its own batch in sample order, owners add the ranks' sums in rank
order, then the row is updated once: so weights are equal bit for bit under every plan. `backward`
ends in the update of the stores. What can be done while a message travels is done then: bags of
local rows are summed, requested rows are brought together.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recapp.engine.requests import Requests
from recapp.kernels.ragged import gather

if TYPE_CHECKING:
    from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection


class Lookup(torch.autograd.Function):
    """[B, room + sum of dims] of a batch whose requests were exchanged.

    Inputs: an anchor that requires a gradient (else autograd would never call `backward` and the
    tables would silently not train), the sample weights (they may want a gradient), the collection
    and the batch's requests.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights_L: Tensor | None,
        collection: "ShardedEmbeddingBagCollection",
        requests: Requests,
    ) -> Tensor:
        """Answer what was asked, swap vectors, combine."""
        ctx.collection = collection
        ctx.requests = requests
        keep = weights_L is not None and weights_L.requires_grad
        out_BD, ctx.vectors_G = answer_and_combine(collection, requests, keep)
        return out_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        """Send gradients of the requested vectors to their owners, who update."""
        collection = ctx.collection
        requests = ctx.requests
        if requests.spent:
            raise RuntimeError(
                "the lookup was already differentiated: its rows were updated in that backward "
                "and would be updated twice"
            )
        requests.spent = True
        gradient = grad_BD.to(collection.dtype).contiguous().view(-1)
        collection.mark("autograd")
        weight_grad = (
            weights_gradient(collection, requests, gradient, ctx.vectors_G)
            if ctx.needs_input_grad[1]
            else None
        )
        collection.advance_ahead()
        if collection.comm.world == 1:
            requests.group()
            collection.learn(requests, gradient, requests.lessons)
        else:
            message = send_back(collection, requests, gradient)
            collection.learn(requests, message, requests.lessons)
            collection.messages.give_back(message)
        requests.release()
        collection.mark("update")
        return None, weight_grad, None, None


def answer_and_combine(
    c: "ShardedEmbeddingBagCollection", q: Requests, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """output_dist: [B, room + sum of dims], and the vector of each (slot, id) pair by group if they
    are kept.
    """
    message = c.messages.take(q.vectors.numel, c.payload, c.comm.device)
    if c.comm.world > 1:
        for g in range(q.vectors.answered):
            c.backend.pool(
                c.store(g).flat,
                c.store(g).width,
                c.store(g).width,
                q.served[g].answer,
                message,
                c.dtype,
            )
    c.mark("answer")
    sent = c.waits.sent(c.comm.swap(message, *q.vectors.answers()))
    out_BD = torch.empty(q.B, c.room + c.width, dtype=c.dtype, device=c.comm.device)
    kept: dict[int, Tensor] = {}
    for local in (True, False):
        for g, asked in enumerate(q.asked):
            if asked.local is local:
                width = c.store(g).width
                source, unit = (c.store(g).flat, width) if local else (message, 1)
                c.backend.pool(
                    source,
                    unit,
                    width,
                    asked.combine,
                    out_BD.view(-1),
                    c.dtype,
                    in_lines=c.in_lines_G[g],
                )
                if keep:
                    kept[g] = gather(source, unit, width, asked.combine.index_N, c.dtype)
        c.mark("combine")
        if local:
            c.wait("vectors", sent)
    c.messages.give_back(message)
    return out_BD, [kept[g] for g in sorted(kept)]


def send_back(c: "ShardedEmbeddingBagCollection", q: Requests, gradient: Tensor) -> Tensor:
    """Gradients of the asked vectors go to the owners: the message in which `served` finds them.

    A rank divides its own sum by the number of ranks before it leaves, as DDP does with dense
    gradients.
    """
    message = c.messages.take(q.vectors.numel, c.payload, c.comm.device)
    for g, asked in enumerate(q.asked):
        c.backend.pool(
            gradient, 1, c.store(g).width, asked.learn, message, c.dtype, 1 / c.comm.world
        )
        if asked.everywhere:
            spans = q.vectors.asked_WG1[:, g : g + 2].tolist()
            own = message[slice(*spans[c.comm.rank])]
            for rank, (first, last) in enumerate(spans):
                if rank != c.comm.rank:
                    message[first:last] = own
    c.mark("spread")
    sent = c.waits.sent(c.comm.swap(message, *q.vectors.requests()))
    q.group()
    c.mark("group")
    c.wait("gradients", sent)
    return message


def weights_gradient(
    c: "ShardedEmbeddingBagCollection", q: Requests, gradient: Tensor, vectors_G: list[Tensor]
) -> Tensor:
    """A sample weight's gradient is its bag's gradient times the vector it scaled, summed over the
    strips of its table.
    """
    parts = [torch.zeros(n, dtype=c.dtype, device=gradient.device) for n in q.rows.per_F]
    for routes, asked, vectors_PD in zip(c.routes, q.asked, vectors_G, strict=True):
        bags = asked.bags
        ends = asked.combine.offsets_M1
        assert ends is not None and bags.scale_M is not None
        bag_P = torch.repeat_interleave(
            torch.arange(asked.combine.bags, device=gradient.device),
            ends.diff().long(),
            output_size=len(vectors_PD),
        )
        grad_PD = gather(gradient, 1, routes.width, bags.where_M[bag_P], c.dtype)
        dot_P = (grad_PD * vectors_PD).sum(1) * bags.scale_M[bag_P]
        for feature, dot in zip(
            routes.features,
            torch.split(dot_P, [q.rows.per_F[f] for f in routes.features]),
            strict=True,
        ):
            parts[feature] += dot
    return torch.cat(parts)
