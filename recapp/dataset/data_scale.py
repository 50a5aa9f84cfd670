"""A data set at a fraction of its size, so that a run made for large machines fits a small one.

    dataset.scale=1/1000   batch_size       65,536       -> 64, a multiple of dataset.lanes
                           val_batch_size   65,536       -> 64
                           generate.rows    41,250,000   -> 41,250, in a directory of their own

Settings, checkpoints and `resolved.yaml` keep the numbers as they were written, with the scale;
whoever reads one of these numbers takes it from `scaled`.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from recapp.settings.dependent_settings import check_scale


def scaled(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a data set with `dataset.scale` applied; applied twice it does no
    more.

    Tables keep their sizes, and files that exist are read to their end.

    Args:
        dataset: The group `dataset` of a command, checked.
    """
    found = dict(dataset)
    scale = check_scale(found.get("scale", 1))
    if scale == 1:
        return found
    for key in ("batch_size", "val_batch_size"):
        if found.get(key) is not None:
            lanes = max(int(found["lanes"]), 1)
            found[key] = max(round(found[key] * scale / lanes), 1) * lanes
    if generate := found.get("generate"):
        found["generate"] = {**generate, "rows": max(round(generate["rows"] * scale), 1)}
        found["path"] = f"{found['path']}_{scale.numerator}_{scale.denominator}"
    return found | {"scale": Fraction(1)}


def scale_in_words(dataset: Mapping[str, Any]) -> str | None:
    """Return what `dataset.scale` makes of the data set, for people; None where it is 1.

    Args:
        dataset: The group `dataset` of a command, checked.
    """
    small = scaled(dataset)
    if check_scale(dataset.get("scale", 1)) == 1:
        return None
    what = [f"batches of {small['batch_size']:,} rows instead of {dataset['batch_size']:,}"]
    if dataset.get("val_batch_size"):
        instead = f"{small['val_batch_size']:,} instead of {dataset['val_batch_size']:,}"
        what.append(f"to validate {instead}")
    if dataset.get("generate"):
        rows = f"{small['generate']['rows']:,} instead of {dataset['generate']['rows']:,}"
        what.append(f"generated rows {rows}")
    return f"dataset.scale={dataset['scale']}: {', '.join(what)}"
