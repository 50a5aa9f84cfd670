"""Checks of the settings of models.

The constructors of the models make them: rank 0 constructs a model on the meta device before the
ranks meet, so a wrong setting ends a command early.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from recapp.errors import ConfigError, suggest

ACTIVATION_NAMES = ("relu", "leaky_relu", "prelu", "dice", "sigmoid", "tanh", "gelu", "none")
"""The activations of a stack of layers."""


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
    setting: str,
    widths: Sequence[int],
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> None:
    """Check the settings of a stack of layers.

    Args:
        setting: The full name of the setting of the widths, for the message.
        widths: The output columns of each layer, first to last.
        activation: The name of the activation behind each layer.
        dropout: The share of outputs that training sets to 0.
        batch_norm: Whether batch normalisation stands before each activation.

    Raises:
        ConfigError: There is no layer, a width is not allowed, the activation does not exist,
            `dropout` is no share of at least 0 and less than 1, or `batch_norm` no truth value.
    """
    check_widths(setting, widths)
    if activation not in ACTIVATION_NAMES:
        known = suggest(str(activation), ACTIVATION_NAMES)
        raise ConfigError(f"model.activation={activation}: {known}")
    check_number("model.dropout", dropout, "share")
    check_truth("model.batch_norm", batch_norm)


NUMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: isinstance(value, int) and value >= 1, "a whole number of at least 1"),
    "share": (lambda value: 0 <= value < 1, "at least 0 and less than 1, such as 0.1"),
    "factor": (lambda value: 0 < value < 1e30, "a number above 0, such as 1"),
    "amount": (lambda value: value >= 0, "a number of at least 0"),
}
"""The kinds of numbers: what holds for one, and the same in words."""


def check_number(setting: str, value: Any, kind: str) -> None:
    """Check that a setting is a number of a kind.

    Args:
        setting: The setting's full name, for the message.
        value: Its value.
        kind: A kind of `NUMBERS`.

    Raises:
        ConfigError: The value is no such number.
    """
    fits, allowed = NUMBERS[kind]
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise ConfigError(f"{setting}={value}: must be {allowed}")


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
        different = ", ".join(map(str, sorted(set(dims))))
        raise ConfigError(
            f"tables.dim: the interaction of {model} takes vectors of one dim, and these have "
            f"{different}: leave out dataset.table_dims and tables.dim_rule, or list tables of one "
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


CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "cross": partial(check_choice, choices=("full", "low_rank", "mixture")),
    "structure": partial(check_choice, choices=("parallel", "stacked")),
    "bridge": partial(
        check_choice,
        choices=(
            "hadamard_product",
            "pointwise_addition",
            "concatenation",
            "attention_pooling",
        ),
    ),
    "numbers": partial(check_choice, choices=("vectors", "concat")),
    "form": partial(check_choice, choices=("serial", "parallel")),
    "residual": partial(check_choice, choices=("sum", "concat")),
    "top_layers": check_logit_layers,
    "ratio": partial(check_number, kind="factor"),
    "temperature": partial(check_number, kind="factor"),
    "sparsity": partial(check_number, kind="amount"),
    **dict.fromkeys(
        (
            "cross_layers",
            "exponential_layers",
            "linear_layers",
            "quadratic_layers",
            "transformer_layers",
            "rank",
            "experts",
            "rows",
            "heads",
            "width",
            "blocks",
            "expansion",
            "stack",
            "factorised",
            "compressed",
            "max_length",
            "position_dim",
            "feed_forward",
        ),
        partial(check_number, kind="count"),
    ),
    **dict.fromkeys(
        (
            "dropout",
            "first_dropout",
            "second_dropout",
            "exponential_dropout",
            "linear_dropout",
            "field_dropout",
        ),
        partial(check_number, kind="share"),
    ),
    **dict.fromkeys(("batch_norm", "layer_norm", "normalise"), check_truth),
}
"""The check of each setting that means the same in all models that have it, by its name."""


def check_settings(**settings: Any) -> None:
    """Check settings of a model by `CHECKS`.

    Args:
        settings: The settings by name.

    Raises:
        ConfigError: A value is not allowed; the message names the setting.
    """
    for name, value in settings.items():
        CHECKS[name](f"model.{name}", value)
