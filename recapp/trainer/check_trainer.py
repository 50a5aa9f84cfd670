"""Checks of a Lightning Trainer that trains sharded tables, whoever has made it."""

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from recapp.errors import ConfigError
from recapp.trainer.unusable_callbacks import refuse_class


def check_trainer(trainer: Trainer) -> None:
    """Check the precision and, where it trains, the callbacks of a trainer.

    Raises:
        ConfigError: The trainer cannot train tables; the error gives the reason.
    """
    if trainer.precision == "16-mixed":
        raise ConfigError(
            "trainer.precision=16-mixed: tables are updated in backward, where the scaled loss "
            "would reach them; use bf16-mixed"
        )
    fitting = trainer.state.fn == TrainerFn.FITTING
    for callback in trainer.callbacks if fitting else ():  # type: ignore[attr-defined]
        refuse_class(type(callback), "Trainer(callbacks=...)")
