"""Checks of the widths of layers. This file does not import torch, so that a command can check
widths before it starts ranks.
"""

from collections.abc import Sequence
from typing import Any

from recapp.errors import ConfigError, suggest

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
