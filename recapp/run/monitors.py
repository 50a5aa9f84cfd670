"""The validation metrics that callbacks and schedules may monitor.

This file imports neither torch nor Lightning.
"""

from collections.abc import Mapping
from typing import Any

from recapp.errors import ConfigError, alike, suggest
from recapp.run.recipe import Train
from recapp.settings.records import Constructor

PLATEAUS = ("torch.optim.lr_scheduler.ReduceLROnPlateau", "recapp.optim.schedule.Plateau")
"""The schedules that follow a metric."""


def measured_by(recipe: Train) -> dict[str, str | None]:
    """Return the validation metrics, each with `max` if larger is better, `min` if smaller is, or
    None if neither is.
    """
    measures = recipe.built_task.measures
    return {each.of_validation: each.better for each in measures}


def all_known(recipe: Train) -> bool:
    """Return whether every callback is Lightning's or recapp's. Other callbacks may log other
    metrics.
    """
    targets = [wanted.target for wanted in recipe.callbacks.values()]
    return all(target.startswith(("lightning.", "recapp.")) for target in targets)


def check_monitor(
    setting: str,
    monitor: str | None,
    mode: str | None,
    measured: Mapping[str, str | None],
    *,
    all_known: bool,
) -> None:
    """Check that a callback monitors a measured metric, and in the right direction.

    Lightning would find a wrong metric only after the first epoch, and a wrong direction never.

    Args:
        setting: The dotted name of the callback's settings.
        monitor: The metric.
        mode: `max` if larger is better, `min` if smaller is.
        measured: The validation metrics (`measured_by`).
        all_known: Whether no other metrics are logged.

    Raises:
        ConfigError: The metric is not measured, or the mode is wrong.
    """
    if monitor is None or (
        monitor not in measured and not all_known and not monitor.startswith("val_")
    ):
        return
    if monitor not in measured:
        other = next(iter([*alike(monitor, measured), *measured]))
        fix = f"{setting}.monitor={other}" + (f" {setting}.mode={measured[other]}" if mode else "")
        raise ConfigError(
            f"{setting}.monitor={monitor}: not measured (metrics.names); "
            f"{suggest(monitor, measured)}; set {fix}"
        )
    better = measured[monitor]
    if mode in ("min", "max") and better is not None and mode != better:
        word = "larger" if better == "max" else "smaller"
        raise ConfigError(
            f"{setting}.mode={mode}: a {word} {monitor} is better; set {setting}.mode={better}"
        )


def schedule_of(recipe: Train) -> Constructor | None:
    """Return the schedule of learning rates. A schedule that follows a metric gets its metric and
    mode filled in.

    Raises:
        ConfigError: The metric is not measured, or the mode is wrong.
    """
    schedule = recipe.optimizer.schedule
    if schedule is None or schedule.target not in PLATEAUS:
        return schedule
    measured = measured_by(recipe)
    checkpoint = recipe.callbacks.get("checkpoint")
    best = checkpoint.arguments.get("monitor") if checkpoint else None
    given = schedule.arguments
    if recipe.without_validation is not None:
        raise ConfigError(
            f"{recipe.without_validation}: optimizer.schedule ({schedule.target}) follows a metric "
            "of validations; validate, or choose another schedule"
        )
    monitor = given.get("monitor") or (best if best in measured else _usual(recipe))
    mode = given.get("mode") or measured.get(monitor)
    check_monitor("optimizer.schedule", monitor, mode, measured, all_known=True)
    if mode is None:
        raise ConfigError(
            f"optimizer.schedule.monitor={monitor}: neither larger nor smaller values of it are "
            f"better; {suggest(monitor, [name for name, better in measured.items() if better])}"
        )
    return Constructor(schedule.target, {**given, "monitor": monitor, "mode": mode})


def _usual(recipe: Train) -> str:
    """Return the metric that a schedule follows if the settings leave it open: the task's best one,
    or the first one measured for which one direction is better.
    """
    measured = measured_by(recipe)
    best = recipe.built_task.measures.objective
    if best in measured:
        return best
    return next((name for name, better in measured.items() if better), next(iter(measured)))


def with_monitor(settings: Mapping[str, Any]) -> Any:
    """Return the group `optimizer` of plain settings, in which a schedule that leaves its metric
    open follows that of `callbacks.checkpoint`.

    Args:
        settings: The settings of a run. Those of a damaged checkpoint may be anything.
    """
    optimizer: Any = settings.get("optimizer")
    try:
        schedule = optimizer["schedule"]
        if schedule["_target_"] in PLATEAUS and schedule.get("monitor") is None:
            followed = settings["callbacks"]["checkpoint"]["monitor"]
            return {**optimizer, "schedule": {**schedule, "monitor": followed}}
    except (KeyError, TypeError, AttributeError):
        pass
    return optimizer
