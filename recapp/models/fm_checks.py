"""Checks of the family of factorisation machines, before ranks start. This file does not import
torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.errors import ConfigError
from recapp.models.widths import (
    NUMBERS,
    check_choice,
    check_same_dim,
    check_tower,
    check_truth,
    check_widths,
)

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
