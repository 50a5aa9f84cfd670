"""Checks of the widths of layers. This file does not import torch, so that a command can check
widths before it starts ranks.
"""

from collections.abc import Sequence

from recapp.errors import ConfigError


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


def check_dlrm(bottom_layers: Sequence[int], top_layers: Sequence[int]) -> None:
    """Check the widths of a DLRM, `recapp.models.published_dlrm.DLRM`.

    Args:
        bottom_layers: The widths of the bottom MLP.
        top_layers: The widths of the top MLP; the last must be 1.

    Raises:
        ConfigError: There is no layer, or a width is not allowed.
    """
    check_widths("model.bottom_layers", bottom_layers)
    if check_widths("model.top_layers", top_layers)[-1] != 1:
        raise ConfigError(
            f"model.top_layers={list(top_layers)}: the last layer is the logit and must be 1, "
            "e.g. [256,128,1]"
        )
