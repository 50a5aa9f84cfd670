"""The table of a model's layers and output shapes that a run prints before the first step.

The model runs once on a probe batch in which every sample has the id 0 of every feature. The
collections return zeros of the right shape instead of lookups, so ranks exchange nothing and the
tables may still be on the meta device. Any model is allowed: a layer may return any object, and a
model that fails on the probe batch ends the table, not the run.

The cost of a layer is counted while it runs, so it holds for any layer of torch: the matrix
products of linear, recurrent and convolutional layers, interactions and attention. A layer that
calls functions of another package has no number.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from recapp.models.product_counter import ProductCounter
from recapp.sparse.batch import Batch
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import TableCollection, collections_in, embedding_tables
from recapp.tables.config import TableLookup

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
        A record for each layer: layer (its name in the model), kind (class), output (shapes, with
        the symbols B for samples and L for ids), parameters (their number over all ranks), flops
        (multiplications and additions of the matrix products of a sample, forward; None if they
        cannot be counted). A last record, `all`, has the sums; it includes products outside of any
        layer. And the error that ended the list early; None if the model ran to its end.
    """
    collections = dict(collections_in(model))
    inside = tuple(f"{name}." for name in collections)
    like = next(
        (p for name, p in model.named_parameters() if not name.startswith(inside)), torch.empty(0)
    )
    read = [x.feature for collection in collections.values() for x in collection.lookups]
    batch = _made_up_batch(dense_in_features, list(dict.fromkeys([*features, *read])), like)
    records: list[dict[str, Any]] = []
    counter = ProductCounter()
    begun: dict[str, tuple[int, int]] = {}

    def begin(name: str) -> None:
        begun[name] = counter.operations, counter.unknown

    def spent(operations: int, unknown: int) -> int | None:
        if counter.unknown > unknown:
            return None
        return (counter.operations - operations) // PROBE_ROWS

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        parameters = _parameters(module)
        shapes = _shapes(output)
        if parameters or shapes != _shapes(inputs):
            records.append(
                {
                    "layer": name,
                    "kind": type(module).__name__.removeprefix("Sharded"),
                    "output": _folded(shapes),
                    "parameters": parameters,
                    "flops": spent(*begun[name]),
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
        # The probe's shape must not cause a compilation.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with counter:
                output = model(batch)
        # A model may fail on the probe batch and still run on real ones.
        except Exception as error:
            return records, f"{type(error).__name__}: {' '.join(str(error).split())}"
    records.append(
        {
            "layer": "all",
            "kind": type(model).__name__,
            "output": _folded(_shapes(output)),
            "parameters": _all_parameters(model, inside),
            "flops": spent(0, 0),
        }
    )
    return records, None


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
    runs = [(shape, len(list(equal))) for shape, equal in groupby(shapes)]
    return ", ".join(shape if n == 1 else f"{n} of {shape}" for shape, n in runs) or "-"


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
    own = collection.__dict__.get("forward")
    collection.__dict__["forward"] = lambda features: zeros
    try:
        yield
    finally:
        del collection.__dict__["forward"]
        if own is not None:
            collection.__dict__["forward"] = own


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
