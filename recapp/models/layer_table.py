"""The table of a model's layers and output shapes that a run prints before the first step.

The model runs once on a probe batch in which every sample has the id 0 of every feature. The
collections return zeros of the right shape instead of lookups, so ranks exchange nothing and the
tables may still be on the meta device. Any model is allowed: a layer may return any object, and a
model that fails on the probe batch ends the table, not the run.

The cost of a layer is counted while it runs, so it holds for any layer of torch: the matrix
products of linear, recurrent and convolutional layers, interactions and attention. A layer that
calls functions of another package has no number.

torch has such a counter (`torch.utils.flop_counter`), but its import takes seconds, because it
brings Triton. This one also counts the functions by which torch computes a whole layer at once: an
LSTM on a CPU or a GPU, a bilinear layer. Under `torch.inference_mode` a function that consists of
others is taken apart first.

Shapes: B batches, M rows, K inner columns, N columns; T queries, S keys, E their columns, V columns
of values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import TableCollection, collections_in, embedding_tables
from recapp.tables.config import TableLookup

Arguments = Sequence[Any]


def _product(left_BMK: Tensor, right_KN: Tensor) -> int:
    return 2 * left_BMK.numel() * right_KN.shape[-1]


def _added_product(arguments: Arguments, _: Any) -> int:
    return _product(arguments[1], arguments[2])


def _attention(arguments: Arguments, _: Any) -> int:
    query_TE, key_SE, value_SV = arguments[:3]
    rows = query_TE.shape[:-1].numel()
    return int(2 * rows * key_SE.shape[-2] * (key_SE.shape[-1] + value_SV.shape[-1]))


# The operations of each counted function of torch, from its arguments and its result.
COUNTED: Mapping[str, Callable[[Arguments, Any], int]] = {
    "aten::mm": lambda arguments, _: _product(*arguments[:2]),
    "aten::bmm": lambda arguments, _: _product(*arguments[:2]),
    "aten::mv": lambda arguments, _: 2 * int(arguments[0].numel()),
    "aten::dot": lambda arguments, _: 2 * int(arguments[0].numel()),
    "aten::addmm": _added_product,
    "aten::_addmm_activation": _added_product,
    "aten::addmv": lambda arguments, _: 2 * int(arguments[1].numel()),
    "aten::baddbmm": _added_product,
    "aten::addbmm": _added_product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    # five products: scores and weights again, and three gradients
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda arguments, _: (
        5 * 2 * int(arguments[1].numel()) * arguments[2].shape[-2]
    ),
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
}


# The namespaces of torch's own functions: those that are not in `COUNTED` multiply no matrices.
KNOWN = ("aten", "prim", "prims", "profiler")
# Functions of torch that multiply matrices and are not counted.
UNCOUNTED = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::convolution", "aten::_trilinear")


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts operations in `operations`: two for a multiplication and addition.
    `unknown` is the number of calls whose operations nobody knows: of other packages' functions, of
    recurrent layers, of convolutions.
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
        result = func(*args, **(kwargs or {}))
        if count is not None:
            self.operations += count(args, result)
        self.unknown += func.namespace not in KNOWN or func._schema.name in UNCOUNTED
        return result


PROBE_ROWS = 61  # a prime that is rarely a width, because sizes equal to it are printed as B


def layer_table(
    model: nn.Module, dense_in_features: int, features: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], str | None]:
    """List the layers of a model in the order in which they run.

    The list leaves out layers that have no parameters and keep the shape of their input
    (activations, dropout). If the model exchanges data with other ranks, all ranks must call this
    together.

    Args:
        model: A module with forward(batch); its state does not change.
        dense_in_features: The number of dense features of a sample, I.
        features: The names of further features in the batch; those of the tables are always there.

    Returns:
        A row for each layer: layer (its name in the model), kind (class), output (shapes, with
        the symbols B for samples and L for ids), parameters (their number over all ranks), flops
        (multiplications and additions of the matrix products of a sample, forward; None if they
        cannot be counted). A last row, `all`, has the sums; it includes products outside of any
        layer. And the error that ended the list early; None if the model ran to its end.
    """
    collections = dict(collections_in(model))
    inside = tuple(f"{name}." for name in collections)
    like = next(
        (p for name, p in model.named_parameters() if not name.startswith(inside)), torch.empty(0)
    )
    lookup_features = [x.feature for collection in collections.values() for x in collection.lookups]
    batch = _made_up_batch(
        dense_in_features, list(dict.fromkeys([*features, *lookup_features])), like
    )
    rows: list[dict[str, Any]] = []
    counter = ProductCounter()
    begun: dict[str, tuple[int, int]] = {}

    def begin(name: str) -> None:
        begun[name] = counter.operations, counter.unknown

    def flops_since(operations: int, unknown: int) -> int | None:
        if counter.unknown > unknown:
            return None
        return (counter.operations - operations) // PROBE_ROWS

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        parameters = _parameters(module)
        shapes = _shapes(output)
        if parameters or shapes != _shapes(inputs):
            rows.append(
                {
                    "layer": name,
                    "kind": type(module).__name__.removeprefix("Sharded"),
                    "output": _folded(shapes),
                    "parameters": parameters,
                    "flops": flops_since(*begun[name]),
                }
            )

    with ExitStack() as stack, torch.no_grad():
        for collection in collections.values():
            stack.enter_context(_zeros_as_output(collection, like))
        for name, module in model.named_modules():
            if name in collections or not (
                name.startswith(inside) or any(True for _ in module.children())
            ):
                hook = module.register_forward_hook(
                    lambda m, inputs, output, name=name: note(name, m, inputs, output)
                )
                stack.callback(hook.remove)
                first = module.register_forward_pre_hook(lambda m, inputs, name=name: begin(name))
                stack.callback(first.remove)
        stack.enter_context(_left_as_it_was(model, inside, like.device))
        # torch would compute a transformer's layer by one function, whose parts cannot be counted.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        # The probe's shape must not cause a compilation.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with counter:
                output = model(batch)
        # A model may fail on the probe batch and still run on real ones.
        except Exception as error:
            return rows, f"{type(error).__name__}: {' '.join(str(error).split())}"
    rows.append(
        {
            "layer": "all",
            "kind": type(model).__name__,
            "output": _folded(_shapes(output)),
            "parameters": _all_parameters(model, inside),
            "flops": flops_since(0, 0),
        }
    )
    return rows, None


def _made_up_batch(dense_in_features: int, features: list[str], like: Tensor) -> Batch:
    """Return a batch of zeros, in which every sample has one id of every feature."""
    dense_BI = like.new_zeros(PROBE_ROWS, dense_in_features)
    ids_L = torch.zeros(PROBE_ROWS * len(features), dtype=torch.int64, device=like.device)
    sparse = KeyedJaggedTensor(features, ids_L, lengths=torch.ones_like(ids_L), stride=PROBE_ROWS)
    return Batch(dense_BI, sparse, torch.zeros(PROBE_ROWS, device=like.device))


def _parameters(module: nn.Module) -> int:
    if isinstance(module, TableCollection):
        return sum(t.num_embeddings * t.embedding_dim for t in module.tables())
    return sum(p.numel() for p in module.parameters())


def _all_parameters(model: nn.Module, inside: tuple[str, ...]) -> int:
    """Return the number of weights of the dense part and of all tables; shared ones count once."""
    in_tables = sum(t.num_embeddings * t.embedding_dim for t in embedding_tables(model))
    dense = [p.numel() for name, p in model.named_parameters() if not name.startswith(inside)]
    return in_tables + sum(dense)


def _shapes(value: Any) -> list[str]:
    """Return the shapes of all tensors of an input or output, as text."""
    if isinstance(value, Tensor):
        return [" x ".join("B" if n == PROBE_ROWS else str(n) for n in value.shape) or "one number"]
    if isinstance(value, KeyedTensor):
        return _shapes(value.values())
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        return [" x ".join(["L", *map(str, value.values().shape[1:])])]
    if isinstance(value, Mapping):
        return [shape for part in value.values() for shape in _shapes(part)]
    if isinstance(value, tuple | list):
        return [shape for part in value for shape in _shapes(part)]
    return []


def _folded(shapes: Sequence[str]) -> str:
    """Return shapes as one text, in which equal neighbours become `n of shape`."""
    counted = [(shape, len(list(equal))) for shape, equal in groupby(shapes)]
    return ", ".join(shape if n == 1 else f"{n} of {shape}" for shape, n in counted) or "-"


def _zeros(lookups: Sequence[TableLookup], like: Tensor) -> KeyedTensor | dict[str, JaggedTensor]:
    """Return zeros in the shape of a collection's output; each sequence has one id."""
    if not all(x.columns for x in lookups):
        ones_B = torch.ones(PROBE_ROWS, dtype=torch.int64, device=like.device)
        return {
            x.output: JaggedTensor.unchecked(like.new_zeros(PROBE_ROWS, x.dim), None, ones_B)
            for x in lookups
        }
    columns = [x.columns for x in lookups]
    zeros_BD = like.new_zeros(PROBE_ROWS, sum(columns))
    return KeyedTensor([x.output for x in lookups], columns, zeros_BD)


@contextmanager
def _zeros_as_output(collection: Any, like: Tensor) -> Iterator[None]:
    """Make a collection return zeros in the shape of its output during the `with` block."""
    zeros = _zeros(collection.lookups, like)
    forward = collection.__dict__.get("forward")
    collection.__dict__["forward"] = lambda features: zeros
    try:
        yield
    finally:
        del collection.__dict__["forward"]
        if forward is not None:
            collection.__dict__["forward"] = forward


@contextmanager
def _left_as_it_was(
    model: nn.Module, inside: tuple[str, ...], device: torch.device
) -> Iterator[None]:
    """Put a model into evaluation mode during the `with` block, and then restore its state.

    In evaluation mode layers draw no random numbers (dropout) and update no batch statistics. For
    models that do so in any mode, this restores the buffers and the state of the generators.

    Args:
        model: The model.
        inside: The prefixes of names inside collections; these are left alone.
        device: The device of the model.
    """
    training = [m for m in model.modules() if m.training]
    buffers = {
        buffer: buffer.clone()
        for name, buffer in model.named_buffers()
        if not name.startswith(inside) and not buffer.is_meta
    }
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module in training:
            module.training = True
        for buffer, before in buffers.items():
            buffer.copy_(before)
