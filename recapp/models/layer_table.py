"""A model's layers with the shapes of their outputs, for the print before the first step.

The model runs once on a made-up batch, with zeros of the right shape in place of its tables'
outputs, so that no id is looked up, nothing is exchanged between ranks and tables may still be on
the meta device.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recapp.sparse.batch import Batch
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.collections import TableCollection, collections_in
from recapp.tables.lookups import TableLookup

PROBE_ROWS = 2  # with a batch of one, B could not be told apart from dimensions of size 1


def layer_table(model: nn.Module, dense_in_features: int) -> list[dict[str, Any]]:
    """List the layers of a model in the order in which they run.

    Layers that have no parameters and keep their input's shape (activations, dropout) are left out.

    Args:
        model: A module forward(batch) -> logits_B; it is left as it was.
        dense_in_features: Dense numbers of a sample, I.

    Returns:
        A record per layer: layer (its name in the model), kind (class), output (shape, B symbolic),
        parameters (of all ranks).
    """
    collections = dict(collections_in(model))
    inside = tuple(f"{name}." for name in collections)
    layers = {
        name: m
        for name, m in model.named_modules()
        if name in collections or not (name.startswith(inside) or any(True for _ in m.children()))
    }
    like = next(
        (p for name, p in model.named_parameters() if not name.startswith(inside)), torch.empty(0)
    )
    records: list[dict[str, Any]] = []

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        values = output.values() if isinstance(output, KeyedTensor) else output
        parameters = _parameters(module)
        if parameters or not isinstance(inputs[0], Tensor) or inputs[0].shape != values.shape:
            records.append(
                {
                    "layer": name,
                    "kind": type(module).__name__,
                    "output": _shape(values),
                    "parameters": parameters,
                }
            )

    with ExitStack() as stack, torch.no_grad():
        for collection in collections.values():
            stack.enter_context(_zeros_as_output(collection, like))
        for name, module in layers.items():
            hook = module.register_forward_hook(
                lambda m, inputs, output, name=name: note(name, m, inputs, output)
            )
            stack.callback(hook.remove)
        stack.enter_context(_evaluating(model))
        # Nothing is to be compiled for the probe's shape.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        dense_BI = torch.zeros(PROBE_ROWS, dense_in_features, dtype=like.dtype, device=like.device)
        nothing = torch.empty(0, dtype=torch.int64)
        sparse = KeyedJaggedTensor([], nothing, lengths=nothing, stride=PROBE_ROWS)
        model(Batch(dense_BI, sparse, torch.zeros(PROBE_ROWS, device=like.device)))
    return records


def _parameters(module: nn.Module) -> int:
    if isinstance(module, TableCollection):
        return sum(t.num_embeddings * t.embedding_dim for t in module.tables())
    return sum(p.numel() for p in module.parameters())


def _shape(values: Tensor) -> str:
    """Return an output's shape as text, with B for the batch."""
    return " x ".join(["B", *map(str, values.shape[1:])])


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
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode while this lasts.

    So no layer changes its state by what it sees (batch statistics) or draws random numbers
    (dropout).
    """
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
