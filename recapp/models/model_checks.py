"""Checks of the settings of models: widths of layers, cross networks, factorisation machines, and
models with attention, gates, mixers and sequences.

A command makes them before it starts ranks, and the constructors of the models make them, too. This
file does not import torch. Functions have the names of the model's settings as arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.tables.config import TableLookup

ACTIVATION_NAMES = ("relu", "leaky_relu", "prelu", "dice", "sigmoid", "tanh", "gelu", "none")
"""The activations of a stack of layers."""


NUMBERS = ("vectors", "concat")
"""The forms of numbers in models of fields (`recapp/models/fields.py`)."""


def check_widths(setting: str, widths: Sequence[int]) -> list[int]:
    """Check the widths of a stack of layers, and return them as a list.

    Args:
        setting: The setting's full name, for the message.
        widths: The output columns of each layer, first to last.

    Raises:
        ConfigError: There is no layer, or a width is no whole number of at least 1.
    """
    if not isinstance(widths, list | tuple) or not widths:
        raise ConfigError(f"{setting}={widths}: must be a list of at least one width, e.g. [64,16]")
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigError(
                f"{setting}={list(widths)}: {width} is no width; each must be a whole number of at "
                "least 1"
            )
    return list(widths)


def check_tower(
    setting: str, widths: Sequence[int], activation: str = "relu", dropout: float = 0.0
) -> None:
    """Check the settings of a stack of layers.

    Args:
        setting: The full name of the setting of the widths, for the message.
        widths: The output columns of each layer, first to last.
        activation: The name of the activation behind each layer.
        dropout: The share of outputs that training sets to 0.

    Raises:
        ConfigError: There is no layer, a width is not allowed, the activation does not exist, or
            `dropout` is no share of at least 0 and less than 1.
    """
    check_widths(setting, widths)
    if activation not in ACTIVATION_NAMES:
        found = suggest(str(activation), ACTIVATION_NAMES)
        raise ConfigError(f"model.activation={activation}: {found}")
    check_share("model.dropout", dropout)


def check_share(setting: str, share: float) -> None:
    """Check a share of at least 0 and less than 1, such as a dropout.

    Raises:
        ConfigError: The value is not a number of at least 0 and less than 1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"{setting}={share}: must be at least 0 and less than 1, such as 0.1")


def check_same_dim(model: str, dims: Sequence[int]) -> None:
    """Check that all vectors of an interaction have one dim.

    Args:
        model: The name of the model, for the message.
        dims: The dim of each vector.

    Raises:
        ConfigError: The dims differ, or there is no vector.
    """
    if not dims:
        raise ConfigError(
            f"{model} has no vectors: it needs a sparse column whose ids are pooled; name one in "
            "dataset.sparse"
        )
    if len(set(dims)) > 1:
        found = ", ".join(map(str, sorted(set(dims))))
        raise ConfigError(
            f"tables.dim: the interaction of {model} takes vectors of one dim, and these have "
            f"{found}: leave out dataset.table_dims and tables.dim_rule, or list tables of one "
            "embedding_dim"
        )


def check_divides(setting: str, parts: int, width_of: str, width: int) -> None:
    """Check that a number of parts, such as attention heads, divides a width.

    Args:
        setting: The setting with the number of parts.
        parts: The number of parts.
        width_of: The name of the width.
        width: The width.

    Raises:
        ConfigError: The number does not divide the width, or is below 1.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or width % parts:
        fits = [n for n in range(1, width + 1) if width % n == 0]
        raise ConfigError(
            f"{setting}={parts}: must divide {width_of}={width}: {', '.join(map(str, fits))} do"
        )


def check_count(setting: str, value: Any) -> None:
    """Check that a setting is a whole number of at least 1.

    Raises:
        ConfigError: The value is not a whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{setting}={value}: must be a whole number of at least 1")


def check_choice(setting: str, value: Any, choices: Sequence[str]) -> None:
    """Check that a setting is one of some words.

    Raises:
        ConfigError: The value is not one of the words.
    """
    if value not in choices:
        raise ConfigError(f"{setting}={value}: {suggest(str(value), choices)}")


def check_hidden(setting: str, layers: Sequence[int]) -> None:
    """Check the widths of hidden layers, which may be none.

    Raises:
        ConfigError: A width is not allowed.
    """
    if not isinstance(layers, list | tuple) or layers:
        check_widths(setting, layers)


def check_factor(setting: str, value: Any) -> None:
    """Check that a setting is a number above 0.

    Raises:
        ConfigError: The value is not a number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ConfigError(f"{setting}={value}: must be a number above 0, such as 1")


def check_truth(setting: str, value: Any) -> None:
    """Check that a setting is true or false.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{setting}={value}: must be true or false")


def check_logit_layers(setting: str, layers: Sequence[int]) -> None:
    """Check the widths of layers whose last is the logit.

    Raises:
        ConfigError: A width is not allowed, or the last is not 1.
    """
    if check_widths(setting, layers)[-1] != 1:
        raise ConfigError(
            f"{setting}={list(layers)}: the last layer is the logit and must be 1, e.g. [256,128,1]"
        )


def check_dlrm(bottom_layers: Sequence[int], top_layers: Sequence[int]) -> None:
    """Check the widths of a DLRM, `recapp.models.published_dlrm.DLRM`.

    Args:
        bottom_layers: The widths of the bottom MLP.
        top_layers: The widths of the top MLP; the last must be 1.

    Raises:
        ConfigError: There is no layer, or a width is not allowed.
    """
    check_widths("model.bottom_layers", bottom_layers)
    check_logit_layers("model.top_layers", top_layers)


CROSSES = ("full", "low_rank", "mixture")
"""The maps of a cross layer of DCN-V2."""
STRUCTURES = ("parallel", "stacked")
"""Where the tower of a cross network is."""
BRIDGES = ("hadamard_product", "pointwise_addition", "concatenation", "attention_pooling")
"""How EDCN joins its two networks after a layer."""


CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "cross": partial(check_choice, choices=CROSSES),
    "structure": partial(check_choice, choices=STRUCTURES),
    "bridge": partial(check_choice, choices=BRIDGES),
    "numbers": partial(check_choice, choices=NUMBERS),
    "cross_layers": check_count,
    "exponential_layers": check_count,
    "linear_layers": check_count,
    "quadratic_layers": check_count,
    "rank": check_count,
    "experts": check_count,
    "rows": check_count,
    "heads": check_count,
    "layers": check_hidden,
    "bottom_layers": check_widths,
    "top_layers": check_logit_layers,
    "temperature": check_factor,
    "dropout": check_share,
    "exponential_dropout": check_share,
    "linear_dropout": check_share,
    "batch_norm": check_truth,
    "layer_norm": check_truth,
}
"""The check of each setting of the cross networks, by its name."""


def check_crosses(arguments: Mapping[str, Any], dims: Sequence[int] = ()) -> None:
    """Check the settings of a cross network.

    Args:
        arguments: The settings by name; those of `CHECKS` are checked.
        dims: The dim of each vector; they must be equal if numbers become vectors.

    Raises:
        ConfigError: A value is not allowed; the message names the setting.
    """
    for name, check in CHECKS.items():
        if name in arguments:
            check(f"model.{name}", arguments[name])
    if dims and arguments.get("numbers") == "vectors":
        check_same_dim("a cross network with model.numbers=vectors", dims)


def check_edcn(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
    """Check the settings of an EDCN.

    Args:
        arguments: The settings by name.
        dims: The dim of each vector.

    Raises:
        ConfigError: A value is not allowed, or the dims differ.
    """
    check_crosses(arguments)
    check_same_dim("EDCN", dims)


def check_fcn(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
    """Check the settings of an FCN, whose heads have two halves.

    Args:
        arguments: The settings by name.
        dims: The dim of each vector.

    Raises:
        ConfigError: A value is not allowed, or the dims do not fit.
    """
    check_crosses(arguments)
    check_same_dim("FCN", dims)
    heads = arguments.get("heads", 1)
    if dims[0] % (2 * heads):
        raise ConfigError(
            f"model.heads={heads}: FCN cuts each vector into 2 halves for each head, so tables.dim="
            f"{dims[0]} must be a multiple of {2 * heads}"
        )


def check_qnn_alpha(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
    """Check the settings of a QNN-alpha.

    Args:
        arguments: The settings by name.
        dims: The dim of each vector.

    Raises:
        ConfigError: A value is not allowed, or the dims do not fit.
    """
    check_crosses(arguments)
    check_same_dim("QNN-alpha", dims)
    check_divides("model.heads", arguments.get("heads", 1), "tables.dim", dims[0])


Arguments = Mapping[str, Any]
"""The settings of a model, without `_target_`."""


def check_nothing(arguments: Arguments, dims: Sequence[int]) -> None:
    """Check nothing: a logistic regression has no settings and no vectors."""


def check_pairs(arguments: Arguments, dims: Sequence[int]) -> None:
    """Check a model without an MLP, whose vectors have one dim.

    Raises:
        ConfigError: The dims differ, or `normalise` is no truth value.
    """
    check_same_dim("this model", dims)
    check_truth("model.normalise", arguments.get("normalise", False))


def check_deep(arguments: Arguments, dims: Sequence[int]) -> None:
    """Check a model with an MLP, whose vectors have one dim.

    Raises:
        ConfigError: The dims differ, `normalise` is no truth value, or a setting of the MLP is not
            allowed.
    """
    check_same_dim("this model", dims)
    check_truth("model.normalise", arguments.get("normalise", False))
    _check_mlp(arguments)


def check_wide_and_deep(arguments: Arguments, dims: Sequence[int]) -> None:
    """Check a Wide & Deep model, which takes vectors of any dims unless numbers have some, too.

    Raises:
        ConfigError: The dims differ and may not, `numbers` is unknown, or a setting of the MLP is
            not allowed.
    """
    numbers = arguments.get("numbers")
    check_choice("model.numbers", numbers, NUMBERS)
    if numbers == "vectors":
        check_same_dim("Wide & Deep", dims)
    _check_mlp(arguments)


def check_xdeepfm(arguments: Arguments, dims: Sequence[int]) -> None:
    """Check an xDeepFM.

    Raises:
        ConfigError: The dims differ, or a setting of the CIN or of the MLP is not allowed.
    """
    check_same_dim("xDeepFM", dims)
    check_widths("model.cin_layers", arguments.get("cin_layers", ()))
    _check_mlp(arguments)


def check_field_aware(dims: Sequence[int], numbers: int) -> int:
    """Check the dims of field-aware tables, and return the columns of one vector.

    Args:
        dims: The dim of each lookup; its row holds a vector for each field.
        numbers: The number of dense features, which are fields, too.

    Raises:
        ConfigError: The dims differ, or are no multiple of the number of fields.
    """
    check_same_dim("this model", dims)
    fields = len(dims) + numbers
    if dims[0] % fields:
        raise ConfigError(
            f"tables.dim={dims[0]}: a row of this model has a vector for each of the {fields} "
            f"fields (numbers and lookups), so tables.dim must be a multiple of {fields}, e.g. "
            f"{4 * fields} for vectors of 4 columns"
        )
    return dims[0] // fields


def _check_mlp(arguments: Arguments) -> None:
    check_tower(
        "model.layers",
        arguments.get("layers", ()),
        arguments.get("activation", "relu"),
        arguments.get("dropout", 0.0),
    )
    check_truth("model.batch_norm", arguments.get("batch_norm", False))


def check_autoint(
    attention_layers: int, width: int, heads: int, deep_layers: Sequence[int], dropout: float
) -> None:
    """Check the settings of AutoInt, `recapp.models.autoint.AutoInt`.

    Raises:
        ConfigError: The heads do not divide the width, or another setting is not allowed.
    """
    check_count("model.attention_layers", attention_layers)
    check_count("model.width", width)
    check_divides("model.heads", heads, "model.width", width)
    check_hidden("model.deep_layers", deep_layers)
    check_share("model.dropout", dropout)


def check_masknet(
    form: str, block_layers: Sequence[int], ratio: float, layers: Sequence[int], dropout: float
) -> None:
    """Check the settings of MaskNet, `recapp.models.masknet.MaskNet`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_choice("model.form", form, ("serial", "parallel"))
    check_widths("model.block_layers", block_layers)
    check_factor("model.ratio", ratio)
    check_hidden("model.layers", layers)
    check_share("model.dropout", dropout)


def check_finalmlp(
    first_layers: Sequence[int],
    second_layers: Sequence[int],
    heads: int,
    gate_layers: Sequence[int],
    first_dropout: float,
    second_dropout: float,
) -> None:
    """Check the settings of FinalMLP, `recapp.models.finalmlp.FinalMLP`.

    Raises:
        ConfigError: The heads do not divide the last width of an MLP, or another setting is not
            allowed.
    """
    check_share("model.first_dropout", first_dropout)
    check_share("model.second_dropout", second_dropout)
    for setting, layers in (("first_layers", first_layers), ("second_layers", second_layers)):
        check_tower(f"model.{setting}", layers)
        check_divides("model.heads", heads, f"model.{setting}[{len(layers) - 1}]", layers[-1])
    check_hidden("model.gate_layers", gate_layers)


def check_finalnet(
    first_layers: Sequence[int],
    second_layers: Sequence[int],
    residual: str,
    activation: str,
    first_dropout: float,
    second_dropout: float,
) -> None:
    """Check the settings of FinalNet, `recapp.models.finalnet.FinalNet`.

    Raises:
        ConfigError: A width is odd under `residual=concat`, or another setting is not allowed.
    """
    check_choice("model.residual", residual, ("sum", "concat"))
    check_share("model.first_dropout", first_dropout)
    check_share("model.second_dropout", second_dropout)
    check_tower("model.first_layers", first_layers, activation)
    check_hidden("model.second_layers", second_layers)
    for setting, layers in (("first_layers", first_layers), ("second_layers", second_layers)):
        odd = [width for width in layers if width % 2]
        if odd and residual == "concat":
            raise ConfigError(
                f"model.{setting}={list(layers)}: {odd[0]} is odd, and model.residual=concat makes "
                "the two halves of a layer's columns: use even widths, or model.residual=sum"
            )


def check_wukong(
    bottom_layers: Sequence[int],
    stack: int,
    factorised: int,
    compressed: int,
    rank: int,
    block_layers: Sequence[int],
    layers: Sequence[int],
    dropout: float,
) -> None:
    """Check the settings of Wukong, `recapp.models.wukong.Wukong`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    counts = {"stack": stack, "factorised": factorised, "compressed": compressed, "rank": rank}
    for setting, count in counts.items():
        check_count(f"model.{setting}", count)
    check_hidden("model.bottom_layers", bottom_layers)
    check_hidden("model.block_layers", block_layers)
    check_hidden("model.layers", layers)
    check_share("model.dropout", dropout)


def check_rankmixer(
    tokens: int,
    width: int,
    blocks: int,
    expansion: int,
    experts: int,
    sparsity: float,
    numbers: str,
) -> None:
    """Check the settings of RankMixer, `recapp.models.rankmixer.RankMixer`.

    Raises:
        ConfigError: The tokens do not divide the width, or another setting is not allowed.
    """
    counts = {"width": width, "blocks": blocks, "expansion": expansion, "experts": experts}
    for setting, count in counts.items():
        check_count(f"model.{setting}", count)
    check_divides("model.tokens", tokens, "model.width", width)
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or sparsity < 0:
        raise ConfigError(f"model.sparsity={sparsity}: must be a number of at least 0")
    check_choice("model.numbers", numbers, NUMBERS)


def check_din(
    attention_layers: Sequence[int], layers: Sequence[int], activation: str, dropout: float
) -> None:
    """Check the settings of DIN, `recapp.models.din.DIN`.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_tower("model.attention_layers", attention_layers, activation)
    check_tower("model.layers", layers, activation, dropout)


def check_bst(
    max_length: int,
    position_dim: int | None,
    transformer_layers: int,
    feed_forward: int | None,
    layers: Sequence[int],
    dropout: float,
) -> None:
    """Check the settings of BST, `recapp.models.bst.BST`. Its heads must divide the columns of a
    step, which the constructor checks.

    Raises:
        ConfigError: A setting is not allowed.
    """
    check_count("model.max_length", max_length)
    check_count("model.transformer_layers", transformer_layers)
    for setting, count in {"position_dim": position_dim, "feed_forward": feed_forward}.items():
        if count is not None:
            check_count(f"model.{setting}", count)
    check_tower("model.layers", layers, dropout=dropout)


def check_step(item: int, position: int, heads: int) -> None:
    """Check that the heads of a BST divide the columns of a step.

    Args:
        item: The columns of an item.
        position: The columns of a position.
        heads: The number of heads.

    Raises:
        ConfigError: The number of heads does not divide the columns of a step, or is below 1.
    """
    step = f"the {item} columns of an item + model.position_dim={position}, together "
    check_divides("model.heads", heads, step.strip(), item + position)


def pair_history(
    target: Sequence[TableLookup],
    sequences: Sequence[TableLookup],
    history: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the column of the candidate that each sequence is compared with.

    Args:
        target: The lookups that pool.
        sequences: The lookups that do not.
        history: The setting `model.history`, the column for each sequence; None pairs columns of
            one table.

    Raises:
        ConfigError: A name does not exist, the vectors of a pair have different dims, or no pair or
            several are possible.
    """
    if history is None:
        history = {x.output: _reader_of(x, target) for x in sequences}
    elif not history:
        raise ConfigError(
            "model.history={}: names no sequence: use null, or {SEQUENCE: COLUMN} for one or more"
        )
    columns = {x.output: x.columns for x in target}
    dims = {x.output: x.dim for x in sequences}
    for name, column in history.items():
        said = f"model.history={{{name}: {column}}}"
        if name not in dims:
            raise ConfigError(f"{said}: {name} is no sequence; {suggest(name, list(dims))}")
        if column not in columns:
            found = suggest(column, list(columns))
            raise ConfigError(f"{said}: {column} is no column that pools its ids; {found}")
        if dims[name] != columns[column]:
            raise ConfigError(
                f"{said}: their vectors have {dims[name]} and {columns[column]} columns: let them "
                f"share a table, tables.shared={{{name}: {column}}}, or give their tables one dim"
            )
    return dict(history)


def _reader_of(sequence: TableLookup, target: Sequence[TableLookup]) -> str:
    """Return the only column that reads the table of a sequence."""
    same = [x.output for x in target if x.table.name == sequence.table.name]
    if len(same) == 1:
        return same[0]
    name = sequence.output
    found = f"{' and '.join(same)} read" if same else "no column that pools its ids reads"
    raise ConfigError(
        f"model.history=null: {found} the table of the sequence {name}: name the column with "
        f"which it is compared, model.history={{{name}: COLUMN}}, and let both read one table, "
        f"tables.shared={{{name}: COLUMN}}"
    )
