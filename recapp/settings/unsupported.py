"""Settings that other tools have and recapp has not: what to do instead."""

import re

OWN_TASK = "a task of your own computes any (CONTRIBUTING.md, A task)"
INSTEAD = {  # a pattern of whole names: the end of a sentence that begins with the setting
    r"((model|trainer|optimizer)\.)?(loss|criterion)(_\w+)?(\..+)?": (
        "the loss is that of the task, for task=click binary cross-entropy of the logits; "
        f"{OWN_TASK}"
    ),
    r"metrics\..+": (
        "metrics.names chooses of those of the task, and a task of your own measures others "
        "(CONTRIBUTING.md, A task)"
    ),
}


def why_not(name: str) -> str | None:
    """Return what to do without a setting that recapp does not have; None where nothing is known.

    Args:
        name: The setting, dotted.
    """
    return next((says for pattern, says in INSTEAD.items() if re.fullmatch(pattern, name)), None)
