"""A model's layers with the shapes of their outputs, for the print before the first step.

The model runs once on a made-up batch, with zeros of the right shape in place of its tables'
outputs, so that no id is looked up, nothing is exchanged between tables and they may still be on
the meta device. Every sample has one id, 0, of every feature. Any model is taken: a layer may
return whatever it likes, and a model that cannot run on such a batch ends the table, not the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from recapp.sparse.batch import Batch
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import TableCollection, collections_in
from recapp.tables.lookups import TableLookup

PROBE_ROWS = 61  # a prime that few layers have as a width: sizes equal to it are printed as B


def layer_table(
    model: nn.Module, dense_in_features: int, features: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], str | None]:
    """List the layers of a model in the order in which they run.

    Layers that have no parameters and keep their input's shape (activations, dropout) are left out.
    Where the model talks to other ranks, all ranks have to call this together.

    Args:
        model: A module forward(batch); it is left as it was.
        dense_in_features: Dense numbers of a sample, I.
        features: The features of a batch, by name; those that tables read need not be named.

    Returns:
        A record per layer: layer (its name in the model), kind (class), output (shapes, B samples
        and L ids symbolic), parameters (of all ranks). And why the records end early, None where
        the model has run to its end.
    """
    collections = dict(collections_in(model))
    inside = tuple(f"{name}." for name in collections)
    like = next(
        (p for name, p in model.named_parameters() if not name.startswith(inside)), torch.empty(0)
    )
    read = [x.feature for collection in collections.values() for x in collection.lookups]
    batch = _made_up_batch(dense_in_features, list(dict.fromkeys([*features, *read])), like)
    records: list[dict[str, Any]] = []

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        parameters = _parameters(module)
        shapes = _shapes(output)
        if parameters or shapes != _shapes(inputs):
            records.append(
                {
                    "layer": name,
                    "kind": type(module).__name__,
                    "output": _folded(shapes),
                    "parameters": parameters,
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
        stack.enter_context(_left_as_it_was(model, inside, like.device))
        # Nothing is to be compiled for the probe's shape.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model(batch)
        # Whatever somebody's model raises on this batch says nothing about real ones.
        except Exception as error:
            return records, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return records, None


def _made_up_batch(dense_in_features: int, features: list[str], like: Tensor) -> Batch:
    """Return a batch of zeros: every sample has one id of every feature."""
    dense_BI = like.new_zeros(PROBE_ROWS, dense_in_features)
    ids_L = torch.zeros(PROBE_ROWS * len(features), dtype=torch.int64, device=like.device)
    sparse = KeyedJaggedTensor(features, ids_L, lengths=torch.ones_like(ids_L), stride=PROBE_ROWS)
    return Batch(dense_BI, sparse, torch.zeros(PROBE_ROWS, device=like.device))


def _parameters(module: nn.Module) -> int:
    if isinstance(module, TableCollection):
        return sum(t.num_embeddings * t.embedding_dim for t in module.tables())
    return sum(p.numel() for p in module.parameters())


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
    """Return shapes as one text; of equal neighbours their number."""
    runs = [(shape, len(list(equal))) for shape, equal in groupby(shapes)]
    return ", ".join(shape if n == 1 else f"{n} of {shape}" for shape, n in runs) or "-"


def _zeros(lookups: Sequence[TableLookup], like: Tensor) -> KeyedTensor | dict[str, JaggedTensor]:
    """Return zeros of the shape of a collection's output; a bag of a sequence has one id."""
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
    """Make a collection return zeros of its output's shape while this lasts."""
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
    """Put a model into evaluation mode while this lasts, and undo what its layers change.

    In evaluation mode no layer draws random numbers (dropout) or notes what it sees (batch
    statistics); buffers and random numbers are put back for models that do so in any mode.

    Args:
        model: The model.
        inside: How the names of what lies in collections begin; that is not touched.
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
