"""The settings of a run as hyper-parameters, by which services tell the runs of a sweep apart."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.console import note
from recapp.settings.records import leaves

# a resumed run has another `ckpt_path`, and services refuse another value of a setting
NOT_LOGGED = ("logger", "ckpt_path", "trust", "format", "choices")
CREDENTIALS = re.compile(r"(?i)key$|token|secret|passw|credential")
PLAIN_NAME = re.compile(r"\w[\w. -]*", re.ASCII)


class LogSettings(Callback):
    """Logs the settings of the run to every logger, as hyper-parameters with dotted names, and the
    chosen options by the names of their groups.

    Settings of loggers and those that look like credentials are left out.

    Args:
        settings: Returns the plain settings once the data module is set up.
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        self.settings = settings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the settings on rank 0. A logger that refuses them still gets the curves."""
        if not (trainer.loggers and trainer.is_global_zero):
            return
        found = self.settings()
        logged = {
            name: value
            for name, value in leaves(found, is_whole=_is_whole)
            if name.partition(".")[0] not in NOT_LOGGED
            and not any(map(CREDENTIALS.search, name.split(".")))
        }
        logged |= found["choices"]
        for logger in trainer.loggers:
            try:
                logger.log_hyperparams(logged)
            except Exception as error:  # of a service, such as a run that was logged with others
                said = " ".join(str(error).split())
                note(f"{type(logger).__name__}: does not take the settings of the run: {said}")


def _is_whole(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether loggers may refuse the names in a mapping, such as names of columns."""
    return not all(map(PLAIN_NAME.fullmatch, settings))
