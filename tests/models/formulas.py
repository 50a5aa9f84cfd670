"""Formulas that several transcriptions of papers share, written with loops over samples, fields and
columns.
"""

import torch
from transcription import pooled


def fields_of(parameters, batch, features, inside="fields"):
    """Return the vectors of all fields, one [B, D] each: x_i v_i of each number, then the lookups.

    Args:
        parameters: Parameters by name.
        batch: The samples.
        features: The features that are looked up.
        inside: The path of the `FieldVectors`.
    """
    numbers_ID = parameters.get(f"{inside}.number_vectors_ID", ())
    vectors = [batch.dense_BI[:, [i]] * vector_D for i, vector_D in enumerate(numbers_ID)]
    collection = f"{inside}.embedding_bag_collection"
    return vectors + [pooled(parameters, batch, feature, collection) for feature in features]


def linear(parameters, name, input_BK, bias=True):
    """Return W x + b, column by column."""
    weight_WK = parameters[f"{name}.weight"]
    columns = [(input_BK * row_K).sum(-1) for row_K in weight_WK]
    if bias:
        columns = [c + b for c, b in zip(columns, parameters[f"{name}.bias"], strict=True)]
    return torch.stack(columns, -1)


def relu(values):
    """Return max(x, 0)."""
    return torch.where(values > 0, values, torch.zeros_like(values))


def tower(parameters, name, input_BK, activation=relu, last=False, step=2):
    """Return an MLP's output: `name.0`, `name.2`, ... with an activation between them.

    Args:
        parameters: Parameters by name.
        name: The path of the MLP.
        input_BK: The input.
        activation: The activation.
        last: Whether it follows the last layer, too.
        step: The number of modules of a layer.
    """
    places = sorted(
        int(key.split(".")[-2])
        for key in parameters
        if key.startswith(f"{name}.") and key.endswith(".weight") and parameters[key].dim() == 2
    )
    for place in places:
        input_BK = linear(parameters, f"{name}.{place}", input_BK)
        if place != places[-1] or last:
            input_BK = activation(input_BK)
    return input_BK


def layer_norm(values, gain, bias, added=1e-5):
    """Return (x - mean) / sqrt(variance + 1e-5) * gain + bias, over the last dimension."""
    mean = values.sum(-1, keepdim=True) / values.shape[-1]
    variance = ((values - mean) ** 2).sum(-1, keepdim=True) / values.shape[-1]
    return (values - mean) / torch.sqrt(variance + added) * gain + bias
