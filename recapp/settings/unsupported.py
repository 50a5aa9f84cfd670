"""Settings that other tools have and recapp does not, each with an alternative."""

import re

OWN_TASK = "a task of your own computes any (CONTRIBUTING.md, A task)"
INSTEAD = {  # pattern of the full name -> the end of a sentence that begins with the name
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
    """Return an alternative to a setting that recapp does not have; None if there is none.

    Args:
        name: The setting, dotted.
    """
    return next((says for pattern, says in INSTEAD.items() if re.fullmatch(pattern, name)), None)
