"""Checks of the settings of the cross networks. This file does not import torch, so that a command
can check settings before it starts ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.models.widths import check_divides, check_same_dim, check_share, check_widths

CROSSES = ("full", "low_rank", "mixture")
"""The maps of a cross layer of DCN-V2."""
STRUCTURES = ("parallel", "stacked")
"""Where the tower of a cross network is."""
BRIDGES = ("hadamard_product", "pointwise_addition", "concatenation", "attention_pooling")
"""How EDCN joins its two networks after a layer."""
NUMBERS = ("vectors", "concat")
"""What numbers become."""


def _whole(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{setting}={value}: must be a whole number of at least 1")


def _positive(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ConfigError(f"{setting}={value}: must be a number above 0, such as 1")


def _one_of(known: Sequence[str], setting: str, value: Any) -> None:
    if value not in known:
        raise ConfigError(f"{setting}={value}: {suggest(str(value), known)}")


def _truth(setting: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{setting}={value}: must be true or false")


def _tower(setting: str, value: Any) -> None:
    if not (isinstance(value, list | tuple) and not value):  # without layers, there is no tower
        check_widths(setting, value)


def _top(setting: str, value: Any) -> None:
    if check_widths(setting, value)[-1] != 1:
        raise ConfigError(
            f"{setting}={list(value)}: the last layer is the logit and must be 1, e.g. [256,128,1]"
        )


CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "cross": partial(_one_of, CROSSES),
    "structure": partial(_one_of, STRUCTURES),
    "bridge": partial(_one_of, BRIDGES),
    "numbers": partial(_one_of, NUMBERS),
    "cross_layers": _whole,
    "exponential_layers": _whole,
    "linear_layers": _whole,
    "quadratic_layers": _whole,
    "rank": _whole,
    "experts": _whole,
    "rows": _whole,
    "heads": _whole,
    "layers": _tower,
    "bottom_layers": check_widths,
    "top_layers": _top,
    "temperature": _positive,
    "dropout": check_share,
    "exponential_dropout": check_share,
    "linear_dropout": check_share,
    "batch_norm": _truth,
    "layer_norm": _truth,
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
