"""Learning-rate schedules: a factor on the rate of every param group, tables and dense part alike.

    lr   ......_______________
        /                     \\
       /                        \\.
      /                            ` . ____ end_lr
     +----+------------------+----------+------> step s = 1, 2, ...
       warmup_steps     decay_start  + decay_steps

A step uses the rate that the scheduler shows before the step. The first step is s = 1, so warm-up
never trains at rate zero.
"""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recapp.errors import ConfigError


def warmup_poly(
    optimizer: Optimizer,
    warmup_steps: int = 1,
    decay_start: int = 0,
    decay_steps: int = 1,
    decay_power: float = 2.0,
    end_lr: float = 0.0,
) -> LambdaLR:
    """Return a schedule of linear warm-up, a constant rate and polynomial decay.

    HugeCTR's solver defines it. In step s a group of rate lr has s lr / warmup_steps while s <=
    warmup_steps; lr until decay_start; then lr ((decay_start + decay_steps - s) /
    decay_steps)^decay_power, at least end_lr; then end_lr.

    Args:
        optimizer: The optimiser; the schedule sets the rates of all its param groups.
        warmup_steps: The number of warm-up steps; 0 and 1 mean no warm-up.
        decay_start: The step at which decay begins; 0 means no decay.
        decay_steps: The number of decay steps.
        decay_power: The exponent of the decay; 1 is linear.
        end_lr: The final rate, the same for every group.

    Raises:
        ConfigError: A value is out of range; the message names the setting.
    """
    where = "optimizer.schedule"
    for name, value, least in (
        ("warmup_steps", warmup_steps, 0),
        ("decay_start", decay_start, 0),
        ("decay_steps", decay_steps, 1),
        ("decay_power", decay_power, 0),
        ("end_lr", end_lr, 0),
    ):
        if not value >= least:
            raise ConfigError(f"{where}.{name}={value}: must be at least {least}")
    if 0 < decay_start < warmup_steps:
        raise ConfigError(
            f"{where}.decay_start={decay_start}: may not lie before the end of warm-up "
            f"({where}.warmup_steps={warmup_steps})"
        )
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if decay_start and end_lr > lr:
            raise ConfigError(
                f"{where}.end_lr={end_lr}: above the rate {lr} of "
                f"{group.get('name', 'the optimizer')}; make it smaller"
            )
    return LambdaLR(
        optimizer,
        [
            _from_one(
                partial(
                    _factor,
                    warmup_steps=warmup_steps,
                    decay_start=decay_start,
                    decay_steps=decay_steps,
                    decay_power=decay_power,
                    least=end_lr / lr if lr else 0.0,
                )
            )
            for lr in rates
        ],
    )


def _from_one(factor: Callable[[int], float]) -> Callable[[int], float]:
    """Return a factor as LambdaLR calls it: with the number of steps done.

    The argument is a factor of the number of the next step.
    """
    return lambda done: factor(done + 1)


def _factor(
    step: int,
    warmup_steps: int,
    decay_start: int,
    decay_steps: int,
    decay_power: float,
    least: float,
) -> float:
    """Return the factor on the rate in step number `step` = 1, 2, ..."""
    if step <= warmup_steps:
        return step / warmup_steps
    if not decay_start or step <= decay_start:
        return 1.0
    left = max(decay_start + decay_steps - step, 0) / decay_steps
    return max(float(left**decay_power), least) if left else least
