"""Linear layers and their ReLUs as one function for training.

    x_BK - Linear - ReLU - Linear - ReLU - Linear - y_BO        one node of autograd's graph

On CPUs the arithmetic is torch's, and so are the bits. Three things are faster than in autograd:
there are fewer calls between the products; a ReLU's backward works in place; and large results get
rows of whole cache lines. A product that writes rows of 367 or 429 numbers without gaps takes up to
1.6 times as long.

On GPUs each layer is a node of its own, so that ranks average its gradients while others are
computed. A kernel computes the layer, its bias and its ReLU, and columns of zeros fill up the
input and the weight for tensor cores.

Where a graph of gradients is made (`create_graph`), backward computes the results again and uses
functions that autograd can differentiate, so second derivatives are right. For several gradients at
once (`is_grads_batched`, `vectorize=True`), backward uses functions that return new tensors.

Shapes: B batch, K columns of the input, O columns of the output.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

LINE = 16  # the numbers of a cache line, in fp32
VECTOR = 8  # those of a vector register; gaps between rows of whole registers gain nothing
# the columns above which gaps are small beside the rows; a logit for each sample would take 16
# times the memory
WIDE = 4 * LINE
LARGE = 2**18  # the numbers from which a result is larger than the cache of a core
WHOLE = 8  # columns that tensor cores of GPUs take at once: 16 bytes in 16 bits


def run_layers(layers: Iterable[nn.Module], x_BK: Tensor) -> Tensor:
    """Return the output of layers that run one after another, with plain linear layers and the ReLU
    behind each in one function.

    Args:
        layers: The layers, of any kind.
        x_BK: The input, which `may_run_layers` allows.
    """
    linears: list[nn.Linear] = []
    with_relu: list[bool] = []
    for layer in layers:
        if linears and not with_relu[-1] and _is_plain(layer, nn.ReLU):
            with_relu[-1] = True
            continue
        is_linear = _is_plain(layer, nn.Linear, Linear) and x_BK.dim() == 2
        if linears and (not is_linear or on_gpu(x_BK)):
            x_BK = _stacked(x_BK, linears, with_relu)
            linears = []
            with_relu = []
        if is_linear:
            assert isinstance(layer, nn.Linear)
            linears.append(layer)
            with_relu.append(False)
        else:
            x_BK = layer(x_BK)
    return _stacked(x_BK, linears, with_relu)


def may_run_layers(x_BK: Tensor) -> bool:
    """Return whether `run_layers` can take an input now: a tensor of torch's own, on a CPU or a GPU
    of CUDA. It cannot while torch records, compiles or transforms functions (`torch.func`,
    derivatives in forward), or on a CPU changes dtypes.
    """
    device = x_BK.device.type
    return (
        not torch.compiler.is_compiling()
        and type(x_BK) in (Tensor, nn.Parameter)
        and device in ("cpu", "cuda")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch.is_grad_enabled()
        and (on_gpu(x_BK) or not torch.is_autocast_enabled(device))
    )


def on_gpu(x: Tensor) -> bool:
    """Return whether layers shape their work on a tensor for a GPU."""
    return x.is_cuda


def whole_columns(columns: int) -> int:
    """Return the columns of a matrix for tensor cores: a multiple of `WHOLE`."""
    return -(-columns // WHOLE) * WHOLE


def are_several(grad: Tensor) -> bool:
    """Return whether a backward computes for several gradients at once, which looks like one:
    `is_grads_batched`, `vectorize=True` of `torch.autograd.functional`, or `torch.func.vmap`.
    """
    return (
        torch._C._functorch.is_legacy_batchedtensor(grad)
        or torch._C._are_functorch_transforms_active()
    )


def _is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a layer is of these classes themselves, and nobody listens to its calls."""
    return type(layer) in kinds and not (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def _stacked(x_BK: Tensor, linears: Sequence[nn.Linear], with_relu: Sequence[bool]) -> Tensor:
    if not linears:
        return x_BK
    parameters = [p for layer in linears for p in (layer.weight, layer.bias)]
    if on_gpu(x_BK):
        x_BK, *parameters = _in_autocast([x_BK, *parameters])
        x_BK, parameters[0] = _filled_up(x_BK, parameters[0])
    inputs = [x_BK, tuple(with_relu), *parameters]
    return _Stack.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def _in_autocast(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors in the type to which autocast would change them; a bias may be None."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _filled_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return an input and a weight with whole columns for tensor cores; the input may have them."""
    zeros = whole_columns(weight.shape[1]) - weight.shape[1]
    if not zeros:
        return x, weight
    if x.shape[-1] == weight.shape[1]:
        x = functional.pad(x, (0, zeros))
    return x, functional.pad(weight, (0, zeros))


def _gains_by_gaps(rows: int, columns: int) -> bool:
    return columns > WIDE and columns % VECTOR != 0 and rows * columns >= LARGE


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None, rows: int = 0) -> Tensor:
    """Return left x right + bias. Rows of a large result begin at cache lines, unless autograd
    records or `left` is several gradients: neither can follow results in memory that was there
    before.

    Args:
        left: The left matrix.
        right: The right matrix.
        bias: What is added to each row.
        rows: The rows that decide whether the result is large; 0 takes those of the result.
    """
    height = len(left)
    columns = right.shape[1]
    plain = on_gpu(left) or not _gains_by_gaps(rows or height, columns)
    if plain or torch.is_grad_enabled() or are_several(left):
        return left.mm(right) if bias is None else torch.addmm(bias, left, right)
    stride = -(-columns // LINE) * LINE
    # not a slice of a wider tensor: autograd forbids to change such a slice in place
    room = torch.empty_strided((height, columns), (stride, 1), dtype=left.dtype)
    if bias is None:
        return torch.mm(left, right, out=room)
    return torch.addmm(bias, left, right, out=room)


class Linear(nn.Linear):
    """torch's linear layer. Training on CPUs is faster where rows are not whole registers.

    On GPUs columns of zeros fill up x and W to a multiple of `WHOLE` columns, because a product
    over 13 or 479 columns is not one for tensor cores. The weights stay as they are. The input may
    have these columns already.
    """

    __call__: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b."""
        if on_gpu(input):
            return functional.linear(*_filled_up(input, self.weight), self.bias)
        if (
            self.training
            and may_run_layers(input)
            and input.dim() == 2
            and any(_gains_by_gaps(len(input), n) for n in self.weight.shape)
        ):
            return _stacked(input, [self], [False])
        return super().forward(input)


class _Stack(torch.autograd.Function):
    """Computes linear layers, each with or without a ReLU behind it.

    Inputs: x, whether a ReLU follows each layer, and the weights and biases in turn; a bias may be
    None.
    """

    @staticmethod
    def forward(ctx: Any, x_BK: Tensor, with_relu: tuple[bool, ...], *parameters: Tensor) -> Tensor:
        weights = parameters[::2]
        biases = parameters[1::2]
        results = _results(x_BK, with_relu, weights, biases)
        ctx.with_relu = with_relu
        # without a ReLU the last result is not read again, so the caller may change it in place
        last = results[-1] if with_relu[-1] else None
        ctx.save_for_backward(*results[:-1], last, *weights, *biases)
        return results[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(ctx.with_relu)
        tensors = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        results: Sequence[Tensor] = tensors[: layers + 1]
        weights = tensors[layers + 1 : 2 * layers + 1]
        if torch.is_grad_enabled():
            # the derivatives of this gradient also pass through the results
            results = _results(results[0], ctx.with_relu, weights, tensors[2 * layers + 1 :])
        needs = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(needs)
        for place in reversed(range(layers)):
            if ctx.with_relu[place]:
                if torch.is_grad_enabled() or are_several(grad):
                    grad = torch.ops.aten.threshold_backward(grad, results[place + 1], 0)
                else:  # in place, but the first gradient belongs to the layers behind
                    room = grad if place < layers - 1 else torch.empty_like(grad)
                    grad = torch.ops.aten.threshold_backward.grad_input(
                        grad, results[place + 1], 0, grad_input=room
                    )
            at = 2 + 2 * place
            if needs[at]:
                grads[at] = _product(grad.t(), results[place], rows=len(grad)).contiguous()
            grads[at + 1] = grad.sum(0) if needs[at + 1] else None
            if place or needs[0]:
                grad = _product(grad, weights[place])
        grads[0] = grad if needs[0] else None
        return tuple(grads)


def _results(
    x_BK: Tensor,
    with_relu: Sequence[bool],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the input, and the result of each layer."""
    results = [x_BK]
    for weight, bias, relu in zip(weights, biases, with_relu, strict=True):
        if relu and bias is not None and on_gpu(x_BK) and not torch.is_grad_enabled():
            results.append(torch._addmm_activation(bias, results[-1], weight.t()))  # one kernel
            continue
        result = _product(results[-1], weight.t(), bias)
        results.append(result.relu_() if relu else result)
    return results
