"""Row-wise Adagrad as a torch optimiser, for `apply_optimizer_in_backward` and for dense parameters
that need the same arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from recapp.errors import ConfigError
from recapp.optim.optimizer import run_closure


class RowWiseAdagrad(Optimizer):
    """Adagrad with one number of state per row, the sum of its mean squared gradients.

        s_r += mean of g_r^2;   w_r -= lr * g_r / (sqrt(s_r) + eps)

    The last dimension is the columns; all others are rows. `apply_optimizer_in_backward` with this
    class selects the row rule `rowwise_adagrad`, which computes the same for the rows that a batch
    touches. Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; name and defaults are those of
    `torchrec.optim.RowWiseAdagrad`.

    Args:
        params: The parameters, or param groups.
        lr: The learning rate.
        eps: The number that keeps the divisor above 0.

    Raises:
        ConfigError: `lr` or `eps` is below 0.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ConfigError(f"RowWiseAdagrad(lr={lr}, eps={eps}): both must be at least 0")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then update every parameter that has a gradient."""
        loss = run_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p[..., :1], dtype=torch.float32)
                state["sum"] += gradient.float().pow(2).mean(-1, keepdim=True)
                root = state["sum"].sqrt().add_(group["eps"]).to(p.dtype)
                p.addcdiv_(gradient, root.expand_as(p), value=-group["lr"])
        return loss
