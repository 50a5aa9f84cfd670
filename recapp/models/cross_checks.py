"""Checks of the settings of the cross networks. This file does not import torch, so that a command
can check settings before it starts ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from recapp.errors import ConfigError
from recapp.models.widths import (
    NUMBERS,
    check_choice,
    check_count,
    check_divides,
    check_factor,
    check_hidden,
    check_logit_layers,
    check_same_dim,
    check_share,
    check_truth,
    check_widths,
)

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
