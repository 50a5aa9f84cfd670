"""Answer, combine, and the way back: the only autograd function of the engine.

    out = A . exchange(S . rows)                     answers: one collective (counts and ids went before, in `Requests`)
    rows learn from S^T . exchange(A^T . grad)       gradients: one collective; no gradient tensor of a table ever exists

A rank sums a row's gradient over its own batch in sample order, owners add the ranks' sums in rank order, then the row is updated once:
so weights are equal bit for bit under every plan. `backward` ends in the update of the stores.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recapp.distributed.message import matrix
from recapp.distributed.requests import Requests
from recapp.kernels.reference import pool

if TYPE_CHECKING:
    from recapp.distributed.embedding_bag import ShardedEmbeddingBagCollection


class Lookup(torch.autograd.Function):
    """[B, sum of dims] of a batch whose requests were exchanged.

    Inputs: an anchor that requires a gradient (else autograd would never call `backward` and the tables would silently not train), the
    sample weights (they may want a gradient), the collection and the batch's requests.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights_L: Tensor | None, collection: "ShardedEmbeddingBagCollection",
                requests: Requests) -> Tensor:
        """Answer what was asked, swap vectors, combine."""
        ctx.collection, ctx.requests = collection, requests
        keep = weights_L is not None and weights_L.requires_grad
        out_BD, ctx.vectors_G = answer_and_combine(collection, requests, keep)
        return out_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        """Send gradients of the requested vectors to their owners, who update."""
        collection, requests = ctx.collection, ctx.requests
        if requests.spent:
            raise RuntimeError("the lookup was already differentiated: its rows were updated in that backward and would be updated twice")
        requests.spent = True
        if (scale := mean_scale(collection, requests)) is not None:
            grad_BD = grad_BD * scale
        weight_grad = weights_gradient(collection, requests, grad_BD, ctx.vectors_G) if ctx.needs_input_grad[1] else None
        collection.learn(requests, *send_back(collection, requests, grad_BD))
        return None, weight_grad, None, None


def answer_and_combine(c: "ShardedEmbeddingBagCollection", q: Requests, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """output_dist: [B, sum of dims], and the vectors of each group if they are kept."""
    buffer = c.messages.take(q.vectors.numel, c.dtype, c.comm.device)
    for g in range(q.vectors.answered):
        store = c.store(g)
        places = q.vectors.served(buffer, g)
        answers = torch.split(store.pool(q.owned[g].answer).view(-1), [p.numel() for p in places])
        for place, part in zip(places, answers, strict=True):
            place.copy_(part)
    c.comm.swap(buffer, *q.vectors.answers())()
    pooled, kept = [], []
    for g, asked in enumerate(q.asked):
        if q.everywhere[g]:
            vectors_VD = c.store(g).pool(q.owned[g].answer)
        else:
            vectors_VD = matrix(q.vectors.asked(buffer, g), c.store(g).width)
        pooled.append(pool(vectors_VD, asked.combine).view(len(c.routes[g].features), q.B, c.store(g).width))
        if keep:
            kept.append(vectors_VD.clone())
    out_BD = torch.cat([pooled[g][i] for g, i in c.columns], 1)
    c.messages.give_back(buffer)
    scale = mean_scale(c, q)
    return (out_BD if scale is None else out_BD * scale), kept


def mean_scale(c: "ShardedEmbeddingBagCollection", q: Requests) -> Tensor | None:
    """[B, sum of dims]: one over the length of the whole bag where a table pools by mean."""
    if not c.any_mean:
        return None
    length_FB = torch.where(c.mean_F[:, None], q.lengths_FB.clamp(min=1), 1)
    return length_FB.to(c.dtype).reciprocal().T.repeat_interleave(c.dim_F, 1, output_size=c.width)


def send_back(c: "ShardedEmbeddingBagCollection", q: Requests, grad_BD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients go to the owners: touched rows of each group's store, ascending, and their summed gradients.

    A rank divides its own sum by the number of ranks before it leaves, as DDP does with dense gradients.
    """
    buffer = c.messages.take(q.vectors.numel, c.dtype, c.comm.device)
    for g, (asked, grad_MD) in enumerate(zip(q.asked, grads_by_group(c, grad_BD), strict=True)):
        vectors_VD = pool(grad_MD, asked.spread).div_(c.comm.world)
        if asked.by_rank_V is not None:
            vectors_VD = vectors_VD.index_select(0, asked.by_rank_V)
        places = q.vectors.asked(buffer, g)
        flat = vectors_VD.view(-1)
        parts = [flat] * len(places) if q.everywhere[g] else torch.split(flat, [p.numel() for p in places])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
    c.comm.swap(buffer, *q.vectors.requests())()
    grads = [pool(matrix(q.vectors.served(buffer, g), c.store(g).width), owned.learn) for g, owned in enumerate(q.owned)]
    c.messages.give_back(buffer)
    return [owned.row_U for owned in q.owned], grads


def grads_by_group(c: "ShardedEmbeddingBagCollection", grad_BD: Tensor) -> list[Tensor]:
    """The output's gradient, bag by bag as each group numbers them: [slots * B, width]."""
    column = dict(zip(c.columns, torch.split(grad_BD, [c.store(g).width for g, _ in c.columns], 1), strict=True))
    return [torch.cat([column[g, i] for i in range(len(group.slots))]) for g, group in enumerate(c.layout.groups)]


def weights_gradient(c: "ShardedEmbeddingBagCollection", q: Requests, grad_BD: Tensor, vectors_G: list[Tensor]) -> Tensor:
    """A sample weight's gradient is its bag's gradient times the vector it scaled, summed over the strips of its table."""
    parts = [torch.zeros(n, dtype=c.dtype, device=grad_BD.device) for n in q.per_F]
    for routes, asked, vectors_VD, grad_MD in zip(c.routes, q.asked, vectors_G, grads_by_group(c, grad_BD), strict=True):
        combine = asked.combine
        assert combine.offsets_M1 is not None
        bag_P = torch.repeat_interleave(torch.arange(len(grad_MD), device=grad_BD.device), combine.offsets_M1.diff().long())
        dot_P = (grad_MD[bag_P] * vectors_VD[combine.index_N]).sum(1)
        for feature, dot in zip(routes.features, torch.split(dot_P, [q.per_F[f] for f in routes.features]), strict=True):
            parts[feature] += dot
    return torch.cat(parts)
