"""Averages the weights while they train: an exponential moving average (EMA), or the mean of many
steps or epochs (SWA, stochastic weight averaging).

    ema    average += (1 - decay) (weights - average)    weighs a past update by decay^age
    swa    average += (weights - average) / (n + 1)      the mean of n + 1 updates

The average of the weights along the way often predicts better than the last weights (Polyak and
Juditsky 1992; Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization",
arXiv 1803.05407). It is validated, kept as the best checkpoint and stored to score by; training
goes on with the raw weights.

Lightning's `WeightAveraging` averages a copy of the module: its parameters. Tables are no
parameters here, and a module may be too large to copy on one rank, so this callback replaces it.
Updates are those of `torch.optim.swa_utils`.
"""

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from recapp.console import note
from recapp.errors import ConfigError
from recapp.settings.values import shown
from recapp.trainer.batch_callback import BatchCallback, ends_epoch
from recapp.trainer.strategy import strategy_of
from recapp.trainer.trainer_settings import AverageSettings
from recapp.trainer.weight_average import OF_AVERAGE, WeightAverage


class AverageWeights(BatchCallback):
    """Averages the weights. It must come before callbacks that save.

    Args:
        settings: When and how to average.
        restarts: Whether tables begin anew at each epoch: then the average does, too, because rows
            of two epochs have nothing in common.

    Raises:
        ConfigError: A setting has no effect, or the kind is `none`.
    """

    def __init__(self, settings: AverageSettings, restarts: bool = False) -> None:
        settings.check_effect()
        if settings.kind == "none":
            raise ConfigError(
                "AverageWeights: kind=none averages nothing: set ema or swa, or leave it out"
            )
        self.settings = settings
        self.restarts = restarts
        self.average = WeightAverage(settings.every or math.inf)
        self._epoch = 0  # of the last update
        self._left = ""  # the kind of an average that a checkpoint has and this run does not go on

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the strategy store the average, and plan for it, also where a validation comes before
        the training.
        """
        strategy_of(trainer).weight_average = self.average

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make room for the average, before a checkpoint is loaded."""
        self._epoch = 0
        self.average.keep(pl_module, strategy_of(trainer).sharded_tables())

    def state_dict(self) -> dict[str, Any]:
        """Return the kind of the average, the number of its updates and the epoch of the last."""
        kind = self.settings.kind
        return {"kind": kind, "updates": self.average.updates, "epoch": self._epoch}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check that the number of updates and the stored average fit together.

        Raises:
            ValueError: They do not.
        """
        state = checkpoint["callbacks"].get(self.state_key)
        if state and bool(state["updates"]) != (OF_AVERAGE in checkpoint):
            raise ValueError(f"updates={state['updates']} is not that of its average")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the average of a checkpoint. An average of another kind begins anew."""
        if state_dict["kind"] == self.settings.kind:
            self.average.updates = int(state_dict["updates"])
            self._epoch = int(state_dict["epoch"])
        elif state_dict["updates"]:
            self._left = str(state_dict["kind"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that the average of the checkpoint ends, if it is of another kind."""
        if self._left and trainer.is_global_zero:
            note(
                f"trainer.average.kind={self.settings.kind}: the average begins anew, because that "
                f"of the checkpoint is of kind {self._left}"
            )
        self._left = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that there is no average, if no update has come."""
        if not self.average.begun and trainer.is_global_zero:
            settings = self.settings
            unit = "epochs" if settings.every is None else "steps"
            note(
                f"trainer.average.start={settings.start} trainer.average.every="
                f"{shown(settings.every)}: training ended before the first update of the average, "
                f"so the model has its last weights: set trainer.average.start or "
                f"trainer.average.every to fewer {unit} than the run has"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the average anew with the tables of a later epoch."""
        if self.restarts and trainer.current_epoch > self._epoch:
            self.average.updates = 0
        self._epoch = trainer.current_epoch

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Update the average, if this step is one of those."""
        settings = self.settings
        every = settings.every
        now = ends_epoch(trainer, done) if every is None else trainer.global_step % every == 0
        passed = trainer.current_epoch + 1 if every is None else trainer.global_step
        if now and passed > settings.start:
            count = self.average.updates
            self.average.update(1 - settings.decay if settings.kind == "ema" else 1 / (count + 1))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in the place of the weights."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.average.show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the raw weights back."""
        self.average.hide()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the raw weights back."""
        self.average.hide()
