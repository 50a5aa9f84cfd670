"""Learning-rate schedules: a factor on the rate of every param group, tables and dense part alike.

    lr   ......_______________
        /                     \\
       /                        \\.
      /                            ` . ____ end_lr
     +----+------------------+----------+------> step s = 1, 2, ...
       warmup_steps     decay_start  + decay_steps

A step uses the rate that the scheduler shows before the step. The first step is s = 1, so warm-up
never trains at rate zero. A length of None reaches to the end of the run: the application passes
the number of its steps as `total_steps`.

`Plateau` lowers the rates where validation no longer improves instead, and says when to stop.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from recapp.errors import ConfigError

# The setting that holds a schedule, for errors.
WHERE = "optimizer.schedule"


def warmup_poly(
    optimizer: Optimizer,
    warmup_steps: int = 1,
    decay_start: int | None = 0,
    decay_steps: int | None = 1,
    decay_power: float = 2.0,
    end_lr: float = 0.0,
    total_steps: int | None = None,
) -> LambdaLR:
    """Return a schedule of linear warm-up, a constant rate and polynomial decay.

    HugeCTR's solver defines it. In step s a group of rate lr has s lr / warmup_steps while s <=
    warmup_steps; lr until decay_start; then lr ((decay_start + decay_steps - s) /
    decay_steps)^decay_power, at least end_lr; then end_lr.

    Args:
        optimizer: The optimiser; the schedule sets the rates of all its param groups.
        warmup_steps: The number of warm-up steps; 0 and 1 mean no warm-up.
        decay_start: The step at which decay begins; 0 means no decay, None begins after warm-up.
        decay_steps: The number of decay steps; None decays until the run ends.
        decay_power: The exponent of the decay; 1 is linear.
        end_lr: The final rate, the same for every group.
        total_steps: The number of steps of the run, for lengths of None.

    Raises:
        ConfigError: A value is out of range, or the run has no end to decay to; the message names
            the setting.
    """
    _at_least_0(decay_power=decay_power)
    start = math.inf if decay_start == 0 else decay_start
    lengths = _lengths(warmup_steps, start, decay_steps, total_steps)
    return _schedule(optimizer, lambda left: float(left**decay_power), lengths, end_lr)


def warmup_cosine(
    optimizer: Optimizer,
    warmup_steps: int = 0,
    decay_start: int | None = None,
    decay_steps: int | None = None,
    end_lr: float = 0.0,
    total_steps: int | None = None,
) -> LambdaLR:
    """Return a schedule of linear warm-up, a constant rate and half a period of a cosine.

    Where the share x of decay_steps has passed, a group of rate lr has lr (1 + cos(pi x)) / 2, at
    least end_lr (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    Args:
        optimizer: The optimiser; the schedule sets the rates of all its param groups.
        warmup_steps: The number of warm-up steps; 0 and 1 mean no warm-up.
        decay_start: The step at which decay begins; None begins after warm-up.
        decay_steps: The number of decay steps; None decays until the run ends.
        end_lr: The final rate, the same for every group.
        total_steps: The number of steps of the run, for lengths of None.

    Raises:
        ConfigError: A value is out of range, or the run has no end to decay to; the message names
            the setting.
    """
    lengths = _lengths(warmup_steps, decay_start, decay_steps, total_steps)
    return _schedule(optimizer, lambda left: (1 - math.cos(math.pi * left)) / 2, lengths, end_lr)


class Plateau(ReduceLROnPlateau):
    """Lowers all rates where validation no longer improves, and ends the run after some cuts
    without a gain between them.

    It is the recipe of the published results on click logs: a tenth of the rate after each
    validation without gain, the end after the second.

    Args:
        optimizer: The optimiser; the schedule sets the rates of all its param groups.
        mode: Whether a smaller metric is better, or a larger one.
        factor: The factor of a cut.
        patience: The number of validations without gain before a cut.
        threshold: The smallest change of the metric that counts as a gain.
        threshold_mode: Whether the threshold is a share of the best value, or absolute.
        cooldown: The number of validations after a cut that are not judged.
        min_lr: The lowest rate.
        stop_after: The number of cuts without a gain between them after which the run ends; None
            never ends it.

    Raises:
        ConfigError: `stop_after` is less than 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 0,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        stop_after: int | None = 2,
    ) -> None:
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"{WHERE}.stop_after={stop_after}: must be at least 1, or null")
        super().__init__(
            optimizer,
            mode,
            factor,
            patience,
            threshold,
            threshold_mode,
            cooldown,
            min_lr,
        )
        self.stop_after = stop_after
        self.cuts = 0

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Judge a validation.

        Args:
            metrics: The metric of the validation.
            epoch: As for torch's schedule.
        """
        best = self.best
        judges = not self.in_cooldown
        super().step(metrics, epoch)
        if self.best != best:
            self.cuts = 0
        elif judges and self.num_bad_epochs == 0:
            self.cuts += 1

    @property
    def ends(self) -> str | None:
        """Return why the run ends now; None if it goes on."""
        if self.stop_after is None or self.cuts < self.stop_after:
            return None
        return (
            f"{self.cuts} cut{'s' if self.cuts > 1 else ''} of the learning rates without gain "
            f"({WHERE}.stop_after={self.stop_after}). Best score: {float(self.best):.3f}."
        )


def _at_least_0(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{WHERE}.{name}={value}: must be at least 0")


class _Lengths(NamedTuple):
    """The lengths of a schedule in steps.

    Args:
        warm_up: The last step of warm-up.
        start: The last step before decay; infinite for no decay.
        decay: The number of steps of decay.
    """

    warm_up: int
    start: float
    decay: int


def _lengths(
    warmup_steps: int, decay_start: float | None, decay_steps: int | None, total_steps: int | None
) -> _Lengths:
    """Check the lengths of a schedule, and find those that reach to the end of the run.

    Raises:
        ConfigError: A length is out of range, or the run has no end.
    """
    _at_least_0(warmup_steps=warmup_steps, decay_start=decay_start or 0)
    start = warmup_steps if decay_start is None else decay_start
    if start < warmup_steps:
        raise ConfigError(
            f"{WHERE}.decay_start={decay_start}: may not lie before the end of warm-up "
            f"({WHERE}.warmup_steps={warmup_steps})"
        )
    if decay_steps is not None and not decay_steps >= 1:
        raise ConfigError(f"{WHERE}.decay_steps={decay_steps}: must be at least 1")
    if decay_steps is None and math.isfinite(start):
        if total_steps is None:
            raise ConfigError(
                f"{WHERE}.decay_steps=null: decays until the run ends, and this run has no end: "
                f"set trainer.max_epochs or trainer.max_steps, or {WHERE}.decay_steps"
            )
        decay_steps = max(total_steps - int(start), 1)
    return _Lengths(warmup_steps, start, decay_steps or 1)


def _schedule(
    optimizer: Optimizer, shape: Callable[[float], float], lengths: _Lengths, end_lr: float
) -> LambdaLR:
    """Return a schedule of warm-up, a constant rate and decay.

    Args:
        optimizer: The optimiser.
        shape: The factor of the rate, from the share of the decay that is left.
        lengths: The lengths of its parts.
        end_lr: The final rate.
    """
    _at_least_0(end_lr=end_lr)
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if math.isfinite(lengths.start) and end_lr > lr:
            raise ConfigError(
                f"{WHERE}.end_lr={end_lr}: above the rate {lr} of "
                f"{group.get('name', 'the optimizer')}; make it smaller"
            )

    def factor_of(lr: float) -> Callable[[int], float]:
        least = end_lr / lr if lr else 0.0
        return lambda done: _factor(done + 1, shape, lengths, least)

    return LambdaLR(optimizer, [factor_of(lr) for lr in rates])


def _factor(step: int, shape: Callable[[float], float], lengths: _Lengths, least: float) -> float:
    """Return the factor on the rate in step number `step` = 1, 2, ..."""
    if step <= lengths.warm_up:
        return step / lengths.warm_up
    if step <= lengths.start:
        return 1.0
    left = max(lengths.start + lengths.decay - step, 0) / lengths.decay
    return max(shape(left), least) if left else least
