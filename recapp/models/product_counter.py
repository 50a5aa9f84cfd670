"""Counts the multiplications and additions of matrix products, attention, recurrent layers and
convolutions while a model runs.

torch has such a counter (`torch.utils.flop_counter`), but its import takes seconds, because it
brings Triton. This one also counts the functions by which torch computes a whole layer at once: a
transformer's layer and its attention in evaluation, an LSTM on a CPU or a GPU, a bilinear layer.
Under `torch.inference_mode` a function that consists of others is taken apart first.

Shapes: B batches, M rows, K inner columns, N columns; T queries, S keys, E their columns, V columns
of values.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Sequence[Any]


def _product(left_BMK: Tensor, right_KN: Tensor) -> int:
    return 2 * left_BMK.numel() * right_KN.shape[-1]


def _added_product(arguments: Arguments, _: Any) -> int:
    return _product(arguments[1], arguments[2])


def _attention(arguments: Arguments, _: Any) -> int:
    query_TE, key_SE, value_SV = arguments[:3]
    rows = query_TE.shape[:-1].numel()
    return int(2 * rows * key_SE.shape[-2] * (key_SE.shape[-1] + value_SV.shape[-1]))


def _attention_backward(arguments: Arguments, _: Any) -> int:
    """Return the operations of five products: scores and weights again, and three gradients."""
    _, query_TE, key_SE = arguments[:3]
    return int(5 * 2 * query_TE.numel() * key_SE.shape[-2])


def _whole_attention(query_BTE: Tensor, key_BSE: Tensor, projection_EE: Tensor) -> int:
    """Return the operations of attention with its projections: of queries, keys, values, result."""
    columns = query_BTE.shape[-1]
    queries = query_BTE.numel() // columns
    keys = key_BSE.numel() // columns
    projections = 4 * (queries + keys) * projection_EE.numel()
    return projections + 4 * queries * key_BSE.shape[1] * columns


def _heads(arguments: Arguments, _: Any) -> int:
    return _whole_attention(arguments[0], arguments[1], arguments[7])


def _transformer_layer(arguments: Arguments, _: Any) -> int:
    source_BTE = arguments[0]
    towers = arguments[14].numel() + arguments[16].numel()
    tower = 2 * source_BTE.shape[:-1].numel() * towers
    return _whole_attention(source_BTE, source_BTE, arguments[5]) + int(tower)


def _recurrent(input_TBK: Tensor, weights: Sequence[Tensor]) -> int:
    """Return the operations of layers that multiply each weight matrix once for each step."""
    steps = input_TBK.shape[:-1].numel()
    return int(2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _convolution(arguments: Arguments, found: Tensor) -> int:
    """Each number of the result is a product with the filters of its group; if transposed, each
    number of the input is.
    """
    input_BK, weight, *_ = arguments
    transposed = arguments[6]
    return int(2 * (input_BK if transposed else found).numel() * weight[0].numel())


def _trilinear(arguments: Arguments, _: Any) -> int:
    """Three tensors, stretched to one shape, are multiplied, and the products added up."""
    shapes = []
    for tensor, stretched in zip(arguments[:3], arguments[3:6], strict=True):
        shape = list(tensor.shape)
        for place in sorted(stretched):
            shape.insert(place, 1)
        shapes.append(shape)
    return int(2 * prod(max(sizes) for sizes in zip(*shapes, strict=True)))


COUNTED: Mapping[str, Callable[[Arguments, Any], int]] = {
    "aten::mm": lambda given, _: _product(*given[:2]),
    "aten::bmm": lambda given, _: _product(*given[:2]),
    "aten::mv": lambda given, _: 2 * int(given[0].numel()),
    "aten::dot": lambda given, _: 2 * int(given[0].numel()),
    "aten::addmm": _added_product,
    "aten::_addmm_activation": _added_product,
    "aten::addmv": lambda given, _: 2 * int(given[1].numel()),
    "aten::baddbmm": _added_product,
    "aten::addbmm": _added_product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_native_multi_head_attention": _heads,
    "aten::_transformer_encoder_layer_fwd": _transformer_layer,
    "aten::mkldnn_rnn_layer": lambda given, _: _recurrent(given[0], given[1:3]),
    "aten::_cudnn_rnn": lambda given, _: _recurrent(given[0], given[1]),
    "aten::convolution": _convolution,
    "aten::_trilinear": _trilinear,
}
"""The operations of each counted function of torch, from its arguments and its result."""
KNOWN = ("aten", "prim", "prims", "profiler")
"""The namespaces of torch's own functions: those that are not in `COUNTED` multiply no matrices."""


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts operations in `operations`: two for a multiplication and addition.
    `unknown` is the number of calls of other packages' functions, whose operations nobody knows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.unknown = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and count its operations."""
        count = COUNTED.get(func._schema.name)
        if count is None:
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        found = func(*args, **(kwargs or {}))
        if count is not None:
            self.operations += count(args, found)
        self.unknown += func.namespace not in KNOWN
        return found
