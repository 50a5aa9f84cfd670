"""HugeCTR's dense layers, and the model of a HugeCTR program, whose layers are connected by the
names of tensors.

    DenseLayer(Layer_t.ReLU, ["fc1"], ["relu1"])  ->  GraphLayer  ->  plain values in the settings
    GraphLayer, shapes of the bottoms  ->  shapes of the tops, a function that makes the module
    plain values, the collection of tables        ->  LayerGraph(batch) -> logits

Ranks build `LayerGraph` from the settings of their run, as they build any model. Evaluation, export
and a resumed run do the same: none of them runs the program again.

Shapes leave out the batch; it is always the first dimension, and messages print it as None.
Formulas are those of HugeCTR's layer book. `Default` start values are those of the published DLRM,
as in HugeCTR.

Shapes: B batch, K columns, F vectors or numbers, D columns of a vector, P pairs.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.compat.hugectr.words import Layer_t, NamedEnum, NotNegative, Switch, checked, plain
from recapp.console import note_once
from recapp.errors import ConfigError, alike, listed, meant, suggest
from recapp.models.layers import DotInteraction, published_linear
from recapp.settings.values import Natural, Positive
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection, ModuleByName


def initialise(values: Tensor, how: str, fan_in: int, fan_out: int) -> None:
    """Draw start values as HugeCTR's `Initializer_t` does; `Default` keeps the values."""
    if values.is_meta:
        return
    both = fan_in + fan_out
    draw: Mapping[str, Callable[[], object]] = {
        "Uniform": lambda: nn.init.uniform_(values, -1 / both, 1 / both),
        "XavierNorm": lambda: nn.init.normal_(values, 0.0, math.sqrt(2 / both)),
        "XavierUniform": lambda: nn.init.uniform_(
            values, -math.sqrt(6 / both), math.sqrt(6 / both)
        ),
        "Zero": lambda: nn.init.zeros_(values),
    }
    if how in draw:
        draw[how]()


def linear(inputs: int, outputs: int, how: str, bias_how: str | None) -> nn.Linear:
    """Return a linear layer.

    Args:
        inputs: The number of columns of its input.
        outputs: The number of columns of its output.
        how: The `Initializer_t` of its weights.
        bias_how: The `Initializer_t` of its bias; None makes a layer without bias.
    """
    module = published_linear(inputs, outputs, bias_how is not None)
    initialise(module.weight, how, inputs, outputs)
    if bias_how is not None:
        initialise(module.bias, bias_how, 0, outputs)
    return module


class Apply(nn.Module):
    """A layer without parameters.

    Args:
        function: The function that computes the outputs of the layer from its inputs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    @override
    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def reshaped(shape: Sequence[int], slots: Sequence[int] | None, values: Tensor) -> Tensor:
    """Return the values of each sample in another shape.

    Args:
        shape: The shape, without the batch.
        slots: The vectors to keep before the reshape; None keeps all.
        values: The values.
    """
    vectors = values if slots is None else values[:, list(slots)]
    return vectors.reshape(-1, *shape)


def fm_order2(columns: int, values_BK: Tensor) -> Tensor:
    """Return the second-order term of a factorisation machine for each of D columns:
    [B, F D] -> [B, D]. It is ((the sum of F vectors)^2 - the sum of their squares) / 2.

    Args:
        columns: The columns of a vector, D.
        values_BK: The F vectors of each sample as one row.
    """
    vectors_BFD = values_BK.reshape(len(values_BK), -1, columns)
    return 0.5 * (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1))


class Interaction(nn.Module):
    """Concatenates a vector [B, D], the dot products of all pairs of this vector and F vectors
    [B, F, D], and a column of zeros, as HugeCTR does: [B, D + F (F + 1) / 2 + 1].

    Args:
        vectors: The number of vectors, F.
    """

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.dots = DotInteraction(vectors + 1)

    @override
    def forward(self, bottom_BD: Tensor, vectors_BFD: Tensor) -> Tensor:
        dots_BP = self.dots(torch.cat([bottom_BD[:, None], vectors_BFD], 1))
        return torch.cat([bottom_BD, dots_BP, bottom_BD.new_zeros(len(bottom_BD), 1)], 1)


class WeightMultiply(nn.Module):
    """Multiplies each of F inputs with its own weight vector: [B, F] -> [B, F D].

    Args:
        numbers: The number of inputs, F.
        columns: The columns of a vector, D.
        how: The `Initializer_t` of the weights.
    """

    def __init__(self, numbers: int, columns: int, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numbers, columns))
        initialise(self.weight, "XavierUniform" if how == "Default" else how, numbers, columns)

    @override
    def forward(self, numbers_BF: Tensor) -> Tensor:
        return (numbers_BF[:, :, None] * self.weight).flatten(1)


class MultiCross(nn.Module):
    """Cross layers. With a projection a layer is that of DCN v2, x' = x0 (U (V x) + b) + x; without
    one it is that of DCN v1, x' = x0 (w . x) + b + x.

    Args:
        columns: The columns of the input, K.
        count: The number of layers.
        width: The columns of the projection; 0 selects DCN v1.
        how: The `Initializer_t` of weights.
        bias_how: The `Initializer_t` of biases; `Default` is 0.
    """

    def __init__(self, columns: int, count: int, width: int, how: str, bias_how: str) -> None:
        super().__init__()
        self.down = nn.ModuleList(linear(columns, width or 1, how, None) for _ in range(count))
        self.up = nn.ModuleList(
            linear(width, columns, how, None) for _ in range(count if width else 0)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(columns)) for _ in range(count))
        for bias in self.bias:
            initialise(bias, bias_how, 0, columns)

    @override
    def forward(self, first_BK: Tensor) -> Tensor:
        x_BK = first_BK
        for k, (down, bias) in enumerate(zip(self.down, self.bias, strict=True)):
            small = down(x_BK)
            if len(self.up):
                x_BK = first_BK * (self.up[k](small) + bias) + x_BK
            else:
                x_BK = first_BK * small + bias + x_BK
        return x_BK


Shape = tuple[int, ...]
LOSS = "BinaryCrossEntropyLoss"


def shape_text(shape: Sequence[int]) -> str:
    """Return the shape of a tensor as HugeCTR's summary prints it: (None, 26, 128)."""
    return f"({', '.join(['None', *map(str, shape)])})"


@dataclass(frozen=True)
class GraphLayer:
    """A layer of a program, as plain values.

    Args:
        type: The name of its `Layer_t`.
        bottoms: The names of its input tensors.
        tops: The names of its output tensors.
        parameters: The parameters that the program sets.
    """

    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the name of the layer in errors."""
        return f"layer {self.type} ({', '.join(self.tops)})"

    def __getitem__(self, name: str) -> Any:
        return self.parameters.get(name, KINDS[self.type].parameters[name])

    def whole(self, name: str) -> int:
        """Return a parameter that must be a whole number of at least 1.

        Raises:
            ConfigError: The parameter is not such a number.
        """
        return int(checked(self.label, name, self[name], Positive))

    def refusal(self, shapes: Sequence[Shape], requirement: str) -> ConfigError:
        """Return the error for inputs of wrong shapes.

        Args:
            shapes: The shapes of the inputs.
            requirement: The shapes that the layer takes, in words.
        """
        pairs = zip(self.bottoms, shapes, strict=True)
        read = " and ".join(f"{name} {shape_text(shape)}" for name, shape in pairs)
        return ConfigError(f"{self.label}: reads {read}: {requirement}")


Made = tuple[list[Shape], Callable[[], nn.Module]]
"""The shapes of the outputs of a layer, and the function that makes its module."""


@dataclass(frozen=True)
class LayerKind:
    """A type of layer.

    Args:
        make: A function that checks the input shapes of a layer and returns its output shapes and
            a function that makes its module.
        least: The smallest number of inputs.
        most: The largest number of inputs; None for any number.
        parameters: The default of each parameter.
        outputs: The number of outputs; None if parameters set the number.
    """

    make: Callable[[GraphLayer, list[Shape]], Made]
    least: int = 1
    most: int | None = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | None = 1


def layer_made(layer: GraphLayer, shapes: list[Shape]) -> Made:
    """Return the output shapes of a layer and a function that makes its module.

    Args:
        layer: The layer.
        shapes: The shapes of its inputs, in order.

    Raises:
        ConfigError: The number of inputs or outputs, a shape or a parameter is wrong.
    """
    kind = KINDS[layer.type]
    parameters = {
        name: checked(layer.label, name, value, PARAMETER_TYPES.get(name, Any))
        for name, value in layer.parameters.items()
    }
    layer = replace(layer, parameters=parameters)
    count = len(shapes)
    if count < kind.least or (kind.most is not None and count > kind.most):
        many = "or more" if kind.most is None else f"to {kind.most}"
        limits = str(kind.least) if kind.least == kind.most else f"{kind.least} {many}"
        raise ConfigError(
            f"{layer.label}: {count} bottom_names ({', '.join(layer.bottoms)}): takes {limits}"
        )
    if kind.outputs is not None and len(layer.tops) != kind.outputs:
        raise ConfigError(
            f"{layer.label}: {len(layer.tops)} top_names: {layer.type} makes {kind.outputs}"
        )
    return kind.make(layer, shapes)


Start = Literal["Default", "Uniform", "XavierNorm", "XavierUniform", "Zero"]
"""The members of `Initializer_t`."""
PARAMETER_TYPES: Mapping[str, Any] = {
    "num_output": Natural,
    "out_dim": Natural,
    "num_layers": Natural,
    "projection_dim": Natural,
    "leading_dim": Natural,
    "time_step": Natural,
    "selected": Switch,
    "factor": NotNegative,
    "eps": NotNegative,
    "elu_alpha": float,
    "dropout_rate": float,
    "weight_init_type": Start,
    "bias_init_type": Start,
    "gamma_init_type": Start,
    "beta_init_type": Start,
    "ranges": list[tuple[int, int]],
    "selected_slots": list[int],
    "shape": list[int],
    "weight_dims": Annotated[tuple[Positive, Positive], ", [F, D]"],
}
"""The allowed values of each parameter; those of `axis` depend on the inputs."""
INITIALISERS = {"weight_init_type": "Default", "bias_init_type": "Default"}


def _starts(layer: GraphLayer) -> tuple[str, str]:
    return layer["weight_init_type"], layer["bias_init_type"]


# ---- output shapes and modules


def _same(module: Callable[[GraphLayer], nn.Module]) -> Callable[[GraphLayer, list[Shape]], Made]:
    return lambda layer, shapes: ([shapes[0]], lambda: module(layer))


def _elementwise(
    function: Callable[[Any, Any], Any], layer: GraphLayer, shapes: list[Shape]
) -> Made:
    for k, shape in enumerate(shapes):
        if shape != shapes[0]:
            pair = GraphLayer(layer.type, (layer.bottoms[0], layer.bottoms[k]), layer.tops)
            raise pair.refusal([shapes[0], shape], "takes tensors of one shape")
    return [shapes[0]], lambda: Apply(lambda *parts: reduce(function, parts))


def _concat(layer: GraphLayer, shapes: list[Shape]) -> Made:
    axis = layer["axis"]
    first = shapes[0]
    if type(axis) is not int or not 1 <= axis <= len(first):
        raise ConfigError(
            f"{layer.label}: axis={axis}: {layer.bottoms[0]} is {shape_text(first)}, so 1 to "
            f"{len(first)} is allowed"
        )
    rest = first[: axis - 1] + first[axis:]
    for k, shape in enumerate(shapes):
        if len(shape) != len(first) or shape[: axis - 1] + shape[axis:] != rest:
            pair = GraphLayer(layer.type, (layer.bottoms[0], layer.bottoms[k]), layer.tops)
            raise pair.refusal(
                [first, shape], f"along axis={axis} they must differ in that dimension alone"
            )
    joined = sum(shape[axis - 1] for shape in shapes)
    return [(*first[: axis - 1], joined, *first[axis:])], lambda: Apply(
        lambda *parts: torch.cat(parts, axis)
    )


def _inner_product(layer: GraphLayer, shapes: list[Shape]) -> Made:
    shape = shapes[0]
    if len(shape) not in (1, 2) or not shape[-1]:
        raise layer.refusal(shapes, "takes two or three dimensions, the last of at least 1")
    outputs = layer.whole("num_output")
    return [(*shape[:-1], outputs)], lambda: linear(shape[-1], outputs, *_starts(layer))


def _interaction(layer: GraphLayer, shapes: list[Shape]) -> Made:
    bottom, vectors = shapes
    if len(bottom) != 1 or len(vectors) != 2 or bottom[0] != vectors[1]:
        raise layer.refusal(
            shapes, "takes a vector (None, D) and vectors (None, F, D) of the same D"
        )
    count = vectors[0]
    columns = bottom[0] + count * (count + 1) // 2 + 1
    return [(columns,)], lambda: Interaction(count)


def _loss(layer: GraphLayer, shapes: list[Shape]) -> Made:
    if shapes != [(1,), (1,)]:
        raise layer.refusal(shapes, "takes one logit and one label of each sample, (None, 1)")
    return [()], nn.Identity


def _reshape(layer: GraphLayer, shapes: list[Shape]) -> Made:
    shape = shapes[0]
    slots = layer["selected_slots"] if layer["selected"] else None
    if slots is not None and (
        len(shape) != 2 or not slots or not all(0 <= slot < shape[0] for slot in slots)
    ):
        raise layer.refusal(shapes, f"selected_slots={list(slots)}: must be vectors of it")
    total = math.prod(shape) if slots is None else len(slots) * shape[1]
    batch_shape = layer["shape"]
    if batch_shape and (layer["leading_dim"] or layer["time_step"]):
        raise ConfigError(
            f"{layer.label}: shape={list(batch_shape)} together with leading_dim or time_step: "
            "both set the shape of the output: give only one of them"
        )
    if batch_shape:
        output_shape = tuple(batch_shape[1:])
    elif layer["time_step"]:
        output_shape = (layer["time_step"], layer["leading_dim"] or 0)
    else:
        output_shape = (layer["leading_dim"] or total,)
    if (
        not output_shape
        or math.prod(output_shape) != total
        or (batch_shape and batch_shape[0] != -1)
    ):
        raise layer.refusal(
            shapes,
            f"{total} numbers of a sample make no {shape_text(output_shape)}; "
            "samples stay samples here",
        )
    return [output_shape], lambda: Apply(partial(reshaped, output_shape, slots))


def _slice(layer: GraphLayer, shapes: list[Shape]) -> Made:
    shape = shapes[0]
    ranges = layer["ranges"]
    if len(ranges) != len(layer.tops):
        raise ConfigError(
            f"{layer.label}: {len(ranges)} ranges and {len(layer.tops)} top_names: give one name "
            "for each range"
        )
    for first, last in ranges:
        if not 0 <= first < last <= shape[-1]:
            raise layer.refusal(shapes, f"range ({first}, {last}) leaves its last dimension")
    return [(*shape[:-1], last - first) for first, last in ranges], lambda: Apply(
        lambda values: tuple(values[..., first:last] for first, last in ranges)
    )


def _reduction(function: Callable[..., Any], layer: GraphLayer, shapes: list[Shape]) -> Made:
    shape = shapes[0]
    axis = layer["axis"]
    if type(axis) is not int or not 1 <= axis <= len(shape):
        raise layer.refusal(shapes, f"axis={axis}: 1 to {len(shape)} is allowed")
    return [(*shape[: axis - 1], 1, *shape[axis:])], lambda: Apply(
        partial(function, dim=axis, keepdim=True)
    )


def _fm_order2(layer: GraphLayer, shapes: list[Shape]) -> Made:
    columns = layer.whole("out_dim")
    if len(shapes[0]) != 1 or shapes[0][0] % columns:
        raise layer.refusal(shapes, f"takes (None, F x out_dim), and out_dim={columns}")
    return [(columns,)], lambda: Apply(partial(fm_order2, columns))


def _weight_multiply(layer: GraphLayer, shapes: list[Shape]) -> Made:
    dims = layer["weight_dims"]
    if len(dims) != 2 or shapes[0] != (dims[0],):
        raise layer.refusal(
            shapes, f"takes (None, F), and weight_dims={list(dims)}: must be [F, D]"
        )
    numbers, columns = dims
    how = layer["weight_init_type"]
    return [(numbers * columns,)], lambda: WeightMultiply(numbers, columns, how)


def _multi_cross(layer: GraphLayer, shapes: list[Shape]) -> Made:
    if len(shapes[0]) != 1:
        raise layer.refusal(shapes, "takes (None, K)")
    count = layer.whole("num_layers")
    width = layer["projection_dim"]
    return [shapes[0]], lambda: MultiCross(shapes[0][0], count, width, *_starts(layer))


def _batch_norm(layer: GraphLayer, shapes: list[Shape]) -> Made:
    if len(shapes[0]) != 1:
        raise layer.refusal(shapes, "takes (None, K)")
    columns = shapes[0][0]
    if layer["factor"] > 1:
        raise ConfigError(
            f"{layer.label}: factor={layer['factor']}: must be at most 1, the share of a batch in "
            "the running mean and variance"
        )

    def module() -> nn.Module:
        norm = nn.BatchNorm1d(columns, eps=layer["eps"], momentum=layer["factor"])
        initialise(norm.weight, layer["gamma_init_type"], 0, columns)
        initialise(norm.bias, layer["beta_init_type"], 0, columns)
        return norm

    return [shapes[0]], module


def _dropout(layer: GraphLayer) -> nn.Module:
    rate = layer["dropout_rate"]
    if not 0 <= rate < 1:
        raise ConfigError(f"{layer.label}: dropout_rate={rate}: must be at least 0 and below 1")
    return nn.Dropout(rate)


KINDS: Mapping[str, LayerKind] = {
    "Add": LayerKind(partial(_elementwise, operator.add), least=2, most=None),
    "BatchNorm": LayerKind(
        _batch_norm,
        parameters={
            "factor": 1.0,
            "eps": 1e-5,
            "gamma_init_type": "Default",
            "beta_init_type": "Default",
        },
    ),
    LOSS: LayerKind(_loss, least=2, most=2),
    "Concat": LayerKind(_concat, most=None, parameters={"axis": 1}),
    "Dropout": LayerKind(_same(_dropout), parameters={"dropout_rate": 0.5}),
    "ELU": LayerKind(
        _same(lambda layer: nn.ELU(layer["elu_alpha"])), parameters={"elu_alpha": 1.0}
    ),
    "ElementwiseMultiply": LayerKind(partial(_elementwise, operator.mul), least=2, most=None),
    "FmOrder2": LayerKind(_fm_order2, parameters={"out_dim": 0}),
    "InnerProduct": LayerKind(_inner_product, parameters={"num_output": 1, **INITIALISERS}),
    "Interaction": LayerKind(_interaction, least=2, most=2),
    "MultiCross": LayerKind(
        _multi_cross, parameters={"num_layers": 0, "projection_dim": 0, **INITIALISERS}
    ),
    "ReLU": LayerKind(_same(lambda _: nn.ReLU())),
    "ReduceMean": LayerKind(partial(_reduction, torch.mean), parameters={"axis": 1}),
    "ReduceSum": LayerKind(partial(_reduction, torch.sum), parameters={"axis": 1}),
    "Reshape": LayerKind(
        _reshape,
        parameters={
            "leading_dim": 0,
            "time_step": 0,
            "shape": (),
            "selected": False,
            "selected_slots": (),
        },
    ),
    "Sigmoid": LayerKind(_same(lambda _: nn.Sigmoid())),
    "Slice": LayerKind(_slice, parameters={"ranges": ()}, outputs=None),
    "Sub": LayerKind(partial(_elementwise, operator.sub), least=2, most=2),
    "WeightMultiply": LayerKind(
        _weight_multiply, parameters={"weight_dims": (), "weight_init_type": "Default"}
    ),
}
"""The types of layers that recapp has."""


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
        self.layer = GraphLayer(layer_type.name, tuple(bottom_names), tuple(top_names), values)


def to_plain(layer: GraphLayer) -> dict[str, Any]:
    """Return a layer as plain values, as settings keep it."""
    fields = {"type": layer.type, "bottoms": list(layer.bottoms), "tops": list(layer.tops)}
    return fields | ({"parameters": dict(layer.parameters)} if layer.parameters else {})


def connected(
    inputs: Mapping[str, Shape], layers: Sequence[GraphLayer]
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


def _not_there(
    layer: GraphLayer, name: str, known: Sequence[str], later: Sequence[GraphLayer]
) -> str:
    if any(name in other.tops for other in later):
        return f"{layer.label}: reads {name}, which a later layer makes: add that layer first"
    close = alike(name, known)
    return (
        f"{layer.label}: reads {name}, which no layer before it makes; "
        f"{meant(close) if close else listed(known)}"
    )


def _check_ends(layers: Sequence[GraphLayer]) -> None:
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
            GraphLayer(
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


def parameter_counts(layers: Sequence[GraphLayer], makers: Sequence[Any]) -> list[int]:
    """Return the number of parameters of each layer, without allocating them.

    Raises:
        ConfigError: A parameter of a layer has a value that is not allowed.
    """
    with torch.device("meta"):
        modules = [make() for make in makers]
    return [sum(p.numel() for p in module.parameters()) for module in modules]
