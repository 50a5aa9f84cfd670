"""Row rules written for one dense table, from their papers and from FBGEMM's formulas: what the
expressions are compared with. State is that of the touched rows; rows that no id touched rest.
"""

import torch

from recapp.optim.named_rules import RULES


def sgd(w, g, s, t, lr, weight_decay=0.0):
    w -= lr * weight_decay * w + lr * g


def momentum_sgd(w, g, s, t, lr, momentum=0.9, weight_decay=0.0):
    m = s["momentum_buffer"]
    m.mul_(momentum).add_(g)
    w -= lr * weight_decay * w + lr * m


def adagrad(w, g, s, t, lr, eps=1e-10, initial_accumulator=0.0, weight_decay=0.0):
    s["sum"] += g**2
    w -= lr * weight_decay * w + lr * g / (s["sum"].sqrt() + eps)


def rowwise_adagrad(w, g, s, t, lr, eps=1e-8, initial_accumulator=0.0, weight_decay=0.0):
    s["sum"] += (g**2).mean(1, keepdim=True)
    w -= lr * weight_decay * w + lr * g / (s["sum"].sqrt() + eps)


def moments(g, s, t, beta1, beta2, second):
    m = s["exp_avg"]
    v = s["exp_avg_sq"]
    m.mul_(beta1).add_((1 - beta1) * g)
    v.mul_(beta2).add_((1 - beta2) * second)
    return m / (1 - beta1**t), v / (1 - beta2**t)


def adam(w, g, s, t, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    moments(g, s, t, beta1, beta2, g**2)
    rate = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)  # eps as torch.optim.SparseAdam has it
    w -= lr * weight_decay * w + rate * s["exp_avg"] / (s["exp_avg_sq"].sqrt() + eps)


def partial_row_wise_adam(w, g, s, t, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    m, v = moments(g, s, t, beta1, beta2, (g**2).mean(1, keepdim=True))
    w -= lr * weight_decay * w + lr * m / (v.sqrt() + eps)


def trusted(w, update, lr):
    of_w, of_update = (x.norm(dim=1, keepdim=True) for x in (w, update))
    ratio = torch.where((of_w > 0) & (of_update > 0), of_w / of_update, 1.0)
    w -= lr * ratio * update


def lamb(w, g, s, t, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    m, v = moments(g, s, t, beta1, beta2, g**2)
    trusted(w, m / (v.sqrt() + eps) + weight_decay * w, lr)


def partial_row_wise_lamb(w, g, s, t, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    m, v = moments(g, s, t, beta1, beta2, (g**2).mean(1, keepdim=True))
    trusted(w, m / (v.sqrt() + eps) + weight_decay * w, lr)


def lars_sgd(w, g, s, t, lr, momentum=0.9, eta=0.001, weight_decay=0.0):
    of_w, of_g = (x.norm(dim=1, keepdim=True) for x in (w, g))
    local = torch.where((of_w > 0) & (of_g > 0), eta * of_w / (of_g + weight_decay * of_w), 1.0)
    m = s["momentum_buffer"]
    m.mul_(momentum).add_(lr * local * (g + weight_decay * w))
    w -= m


def ftrl(w, g, s, t, lr, beta=0.0, l1=0.0, l2=0.0, initial_accumulator=0.1):
    """As McMahan et al. have it; their z is that of the rule over lr."""
    n = s["accumulator"]
    z = s["linear"] / lr
    before = n.sqrt()
    n += g**2
    z += g - (n.sqrt() - before) / lr * w
    s["linear"].copy_(z * lr)
    shrunk = z.sign() * (z.abs() - l1).clamp(min=0)
    w.copy_(-shrunk / ((beta + n.sqrt()) / lr + l2))


DENSE = {
    each.__name__: each
    for each in (
        sgd,
        momentum_sgd,
        adagrad,
        rowwise_adagrad,
        adam,
        partial_row_wise_adam,
        lamb,
        partial_row_wise_lamb,
        lars_sgd,
        ftrl,
    )
}
CASES = (
    ("sgd", {"lr": 0.3, "weight_decay": 0.1}),
    ("momentum_sgd", {"lr": 0.3, "momentum": 0.8}),
    ("momentum_sgd", {"lr": 0.3, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.3, "initial_accumulator": 0.1}),
    ("adagrad", {"lr": 0.3, "eps": 1e-4, "weight_decay": 0.1}),
    ("rowwise_adagrad", {"lr": 0.3, "initial_accumulator": 0.2}),
    ("rowwise_adagrad", {"lr": 0.3, "weight_decay": 0.1}),
    ("adam", {"lr": 0.1, "beta1": 0.8, "weight_decay": 0.1}),
    ("partial_row_wise_adam", {"lr": 0.1, "beta2": 0.95}),
    ("partial_row_wise_adam", {"lr": 0.1, "weight_decay": 0.1}),
    ("lamb", {"lr": 0.1, "beta1": 0.8}),
    ("lamb", {"lr": 0.1, "weight_decay": 0.1}),
    ("partial_row_wise_lamb", {"lr": 0.1}),
    ("partial_row_wise_lamb", {"lr": 0.1, "weight_decay": 0.1}),
    ("lars_sgd", {"lr": 0.5, "eta": 0.1, "weight_decay": 0.1}),
    ("lars_sgd", {"lr": 0.5, "eta": 0.1, "momentum": 0.5}),
    ("ftrl", {"lr": 0.3}),
    ("ftrl", {"lr": 0.3, "beta": 1.0, "l1": 0.02, "l2": 0.1, "initial_accumulator": 0.0}),
)
"""Names and fields of rules: each expression occurs that is not one of torch's own optimisers."""


def rule_of_case(case):
    name, fields = case
    return RULES[name](**fields)


class DenseRule(torch.optim.Optimizer):
    """A rule of `CASES` on the rows that have sparse gradients."""

    def __init__(self, params, rule):
        super().__init__(params, {})
        (self.name, self.fields) = next(case for case in CASES if rule_of_case(case) == rule)
        self.updates = 0
        for p in self.param_groups[0]["params"]:
            for name, kind, start in rule.starts():
                shape = (len(p), p.shape[1] if kind == "element" else 1)
                self.state[p][name] = torch.full(shape, start, dtype=p.dtype)

    @torch.no_grad()
    def step(self):
        self.updates += 1
        for p in self.param_groups[0]["params"]:
            gradient = p.grad.coalesce()
            (rows,) = gradient.indices()
            w = p[rows].clone()
            state = {name: held[rows] for name, held in self.state[p].items()}
            DENSE[self.name](w, gradient.values(), state, self.updates, **self.fields)
            p[rows] = w
            for name, held in state.items():
                self.state[p][name][rows] = held
