"""Counts the multiplications and additions of matrix products and attention while a model runs.

torch has such a counter (`torch.utils.flop_counter`), but its import takes seconds, because it
brings Triton.

Shapes: B batches, M rows, K inner columns, N columns; T queries, S keys, E their columns, V columns
of values.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _product(left_BMK: Tensor, right_KN: Tensor) -> int:
    return 2 * left_BMK.numel() * right_KN.shape[-1]


def _added_product(_: Tensor, left_BMK: Tensor, right_KN: Tensor) -> int:
    return _product(left_BMK, right_KN)


def _attention(query_TE: Tensor, key_SE: Tensor, value_SV: Tensor) -> int:
    return (
        2 * query_TE.shape[:-1].numel() * key_SE.shape[-2] * (key_SE.shape[-1] + value_SV.shape[-1])
    )


def _attention_backward(_: Tensor, query_TE: Tensor, key_SE: Tensor) -> int:
    """Return the operations of five products: scores and weights again, and three gradients."""
    return 5 * 2 * query_TE.numel() * key_SE.shape[-2]


COUNTED: Mapping[str, Callable[..., int]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::mv": lambda left_MK, right_K: 2 * left_MK.numel(),
    "aten::dot": lambda left_K, right_K: 2 * left_K.numel(),
    "aten::addmm": _added_product,
    "aten::baddbmm": _added_product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
}
"""The operations of each counted function of torch, from its tensors."""


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts operations in `operations`: two for a multiplication and addition."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and count its operations."""
        count = COUNTED.get(func._schema.name)
        if count is not None:
            tensors = [x for x in args if isinstance(x, Tensor)]
            self.operations += count(*tensors[:3])
        return func(*args, **(kwargs or {}))
