"""The model of a HugeCTR program: the names of tensors connect its layers.

    DenseLayer(Layer_t.ReLU, ["fc1"], ["relu1"])  ->  Layer  ->  plain values in the settings
    plain values, the collection of tables        ->  LayerGraph(batch) -> logits

Ranks build `LayerGraph` from the settings of their run, as they build any model. Evaluation, export
and a resumed run do the same: none of them runs the program again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recapp.compat.hugectr.layers import KINDS, LOSS, Layer, Shape, layer_made
from recapp.compat.hugectr.words import Layer_t, NamedEnum, plain
from recapp.console import note_once
from recapp.errors import ConfigError, alike, listed, meant, suggest
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection, ModuleByName

SWITCHES = ("compute_config", "dense_layer_switches")
"""Parameters that change how HugeCTR computes, not the result."""
REGULARISERS = ("use_regularizer", "regularizer_type", "lambda")
OTHER_PARAMETERS = (
    "SeqLength",
    "act_type",
    "activations",
    "batchsize",
    "biases",
    "indices",
    "max_sequence_len",
    "num_attention_heads",
    "num_outputs",
    "pos_type",
    "target_weight_vec",
    "transpose_b",
    "use_bias",
    "vector_size",
)
"""Parameters of layers that recapp does not have."""
PARAMETERS = sorted(
    {name for kind in KINDS.values() for name in kind.parameters}
    | {*SWITCHES, *REGULARISERS, *OTHER_PARAMETERS}
)


class DenseLayer:
    """A dense layer or the loss of a program.

    Args:
        layer_type: The type of the layer.
        bottom_names: The names of its input tensors.
        top_names: The names of its output tensors.
        parameters: The parameters of HugeCTR's layer book: `num_output`, `axis` and so on.

    Raises:
        ConfigError: recapp does not have the type, HugeCTR does not have a parameter, or the names
            are no list of names.
    """

    def __init__(
        self,
        layer_type: NamedEnum,
        bottom_names: Sequence[str],
        top_names: Sequence[str],
        **parameters: Any,
    ) -> None:
        if not isinstance(layer_type, Layer_t):
            raise ConfigError(f"DenseLayer: layer_type={layer_type}: must be a Layer_t")
        for argument, names in (("bottom_names", bottom_names), ("top_names", top_names)):
            is_list = isinstance(names, list | tuple) and all(isinstance(x, str) for x in names)
            if not is_list or not names:
                raise ConfigError(
                    f"DenseLayer: {argument}={names}: must be a list of names of tensors"
                )
        where = f"layer {layer_type.name} ({', '.join(top_names)})"
        if layer_type.name not in KINDS:
            raise ConfigError(
                f"{where}: recapp does not have this layer of HugeCTR; {listed(KINDS)}"
            )
        if parameters.get("use_regularizer"):
            raise ConfigError(
                f"{where}: use_regularizer=True: recapp has no regularisers: leave it out"
            )
        names_of_type = KINDS[layer_type.name].parameters
        for name in parameters:
            if name not in PARAMETERS:
                raise ConfigError(f"{where}: unknown parameter {name}; {suggest(name, PARAMETERS)}")
            if name not in names_of_type:
                note_once(f"{where}: {name} has no effect on this layer")
        values = {name: plain(value) for name, value in parameters.items() if name in names_of_type}
        self.layer = Layer(layer_type.name, tuple(bottom_names), tuple(top_names), values)


def to_plain(layer: Layer) -> dict[str, Any]:
    """Return a layer as plain values, as settings keep it."""
    fields = {"type": layer.type, "bottoms": list(layer.bottoms), "tops": list(layer.tops)}
    return fields | ({"parameters": dict(layer.parameters)} if layer.parameters else {})


def connected(
    inputs: Mapping[str, Shape], layers: Sequence[Layer]
) -> tuple[dict[str, Shape], list[Any]]:
    """Return the shapes of all tensors, and for each layer a function that makes its module.

    Args:
        inputs: The shapes of the model's inputs: label, dense, vectors of tables.
        layers: The layers in the order of `Model.add`.

    Raises:
        ConfigError: Layers do not connect, or shapes do not fit; the error names the layer, the
            tensor and the shapes.
    """
    shapes = dict(inputs)
    makers = []
    for k, layer in enumerate(layers):
        for name in layer.bottoms:
            if name not in shapes:
                raise ConfigError(_not_there(layer, name, list(shapes), layers[k:]))
        for name in layer.tops:
            if name in shapes:
                raise ConfigError(
                    f"{layer.label}: another layer makes a tensor {name} already: "
                    "rename one of them"
                )
        output_shapes, maker = layer_made(layer, [shapes[name] for name in layer.bottoms])
        shapes |= dict(zip(layer.tops, output_shapes, strict=True))
        makers.append(maker)
    _check_ends(layers)
    return shapes, makers


def _not_there(layer: Layer, name: str, known: Sequence[str], later: Sequence[Layer]) -> str:
    if any(name in other.tops for other in later):
        return f"{layer.label}: reads {name}, which a later layer makes: add that layer first"
    close = alike(name, known)
    return (
        f"{layer.label}: reads {name}, which no layer before it makes; "
        f"{meant(close) if close else listed(known)}"
    )


def _check_ends(layers: Sequence[Layer]) -> None:
    losses = [layer for layer in layers if layer.type == LOSS]
    if len(losses) != 1:
        names = ", ".join(layer.tops[0] for layer in losses) or "none"
        raise ConfigError(f"the model has {len(losses)} losses ({names}): must be one {LOSS}")
    input_names = {name for layer in layers for name in layer.bottoms}
    for layer in layers:
        if layer.type != LOSS and not input_names & set(layer.tops):
            raise ConfigError(
                f"{layer.label}: no layer reads {layer.tops[0]}: such a layer learns nothing: "
                "leave it out"
            )


class LayerGraph(nn.Module):
    """Click logits from the layers of a HugeCTR program; the `model` of `recapp.train`.

    Args:
        embedding_bag_collection: The tables.
        dense_in_features: The number of dense features of a sample.
        dense: The name of the tensor of dense features.
        label: The name of the label.
        layers: The layers as plain values. One of them is the loss, whose first input is the tensor
            of logits.

    Raises:
        ConfigError: Layers do not connect, or shapes do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        dense: str,
        label: str,
        layers: Sequence[Mapping[str, Any]],
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense = dense
        records = [
            Layer(
                values["type"],
                tuple(values["bottoms"]),
                tuple(values["tops"]),
                dict(values.get("parameters") or {}),
            )
            for values in layers
        ]
        vectors = {x.output: (1, x.columns) for x in embedding_bag_collection.lookups}
        inputs = {label: (1,), dense: (dense_in_features,), **vectors}
        _, makers = connected(inputs, records)
        self._logits = next(layer.bottoms[0] for layer in records if layer.type == LOSS)
        computed = [(layer, make) for layer, make in zip(records, makers, strict=True)]
        computed = [(layer, make) for layer, make in computed if layer.type != LOSS]
        self._steps = [layer for layer, _ in computed]
        self.layers = ModuleByName({layer.tops[0]: make() for layer, make in computed})

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B].

        Args:
            batch: Samples with `dense_in_features` dense features.
        """
        # tables come first, so that backward reaches them last
        pooled = self.embedding_bag_collection(batch.sparse)
        tensors = {name: vectors[:, None] for name, vectors in pooled.to_dict().items()}
        tensors[self.dense] = batch.dense_BI
        for layer in self._steps:
            module = self.layers[layer.tops[0]]
            outputs = module(*(tensors[name] for name in layer.bottoms))
            tensors |= zip(
                layer.tops, outputs if isinstance(outputs, tuple) else (outputs,), strict=True
            )
        logits_B1: Tensor = tensors[self._logits]
        return logits_B1.squeeze(1)


def parameter_counts(layers: Sequence[Layer], makers: Sequence[Any]) -> list[int]:
    """Return the number of parameters of each layer, without allocating them.

    Raises:
        ConfigError: A parameter of a layer has a value that is not allowed.
    """
    with torch.device("meta"):
        modules = [make() for make in makers]
    return [sum(p.numel() for p in module.parameters()) for module in modules]
