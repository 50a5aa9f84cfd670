"""Settings that other tools have and recapp has not: what to do instead."""

import re
from typing import get_args

from recapp.settings.groups import Metric

OWN_MODULE = "a LightningModule of your own computes any loss (docs/python.md, Lightning)"
INSTEAD = {  # a pattern of whole names: the end of a sentence that begins with the setting
    r"((model|trainer|optimizer)\.)?(loss|criterion)(_\w+)?(\..+)?": (
        f"recapp.train has one loss, binary cross-entropy of the logits; {OWN_MODULE}"
    ),
    r"dataset\.(\w+_)?weights?(_\w+)?(\..+)?": (
        f"weights of rows are not supported by recapp.train; {OWN_MODULE}"
    ),
    r"metrics\..+": (
        f"metrics.names chooses of {', '.join(get_args(Metric))}; a callback of your own logs "
        "others, +callbacks.NAME._target_=package.Class"
    ),
}


def why_not(name: str) -> str | None:
    """Return what to do without a setting that recapp does not have; None where nothing is known.

    Args:
        name: The setting, dotted.
    """
    return next((says for pattern, says in INSTEAD.items() if re.fullmatch(pattern, name)), None)
