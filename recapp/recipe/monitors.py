"""The metrics of validation that callbacks and schedules may monitor, and callbacks that cannot be
used. Neither torch nor Lightning is imported.
"""

from collections.abc import Mapping

from recapp.errors import ConfigError, alike, suggest
from recapp.recipe.recipe import Train
from recapp.settings.records import Constructor

_AVERAGES = "it averages parameters, and tables are none: half of the model would be an average"
NOT_OF_TABLES = {  # Lightning's callbacks that cannot be used: why
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "GradientAccumulationScheduler": (
        "tables are updated in every backward; use a larger dataset.batch_size"
    ),
    "ModelPruning": "it prunes parameters, and tables are none",
    "BatchSizeFinder": (
        "dataset.batch_size is part of the order of the data; sweep it: -m "
        "dataset.batch_size=512,1024"
    ),
    "LearningRateFinder": (
        "it knows one learning rate and there are two; sweep them: -m optimizer.dense.lr=0.001,0.01"
    ),
}
MODE_BY_DEFAULT = {"ModelCheckpoint": "min", "EarlyStopping": "min"}  # of Lightning's callbacks
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def check_callbacks(recipe: Train) -> None:
    """Check the names and monitors of callbacks, of which none is imported.

    Raises:
        ConfigError: A callback cannot be used, or monitors a metric that nobody measures.
    """
    measured = measured_by(recipe)
    known = all_known(recipe)
    for name, wanted in recipe.callbacks.items():
        setting = f"callbacks.{name}"
        home, _, kind = wanted.target.rpartition(".")
        if home.startswith("lightning."):
            refuse_callback(kind, setting)
        mode = wanted.arguments.get("mode", MODE_BY_DEFAULT.get(kind))
        monitor = wanted.arguments.get("monitor")
        check_monitor(setting, monitor, mode, measured, all_known=known)


def measured_by(recipe: Train) -> dict[str, str | None]:
    """Return the metrics of validation, each with whether more (`max`) or less (`min`) of it is
    better.
    """
    measures = recipe.built_task.measures
    return {each.of_validation: each.better for each in measures}


def all_known(recipe: Train) -> bool:
    """Return whether no callback is the user's own, which may log metrics of its own."""
    targets = [wanted.target for wanted in recipe.callbacks.values()]
    return all(target.startswith(("lightning.", "recapp.")) for target in targets)


def refuse_callback(kind: str, setting: str) -> None:
    """Check that a callback is none of Lightning's that would do half of their work here.

    Args:
        kind: The name of its class, or of one that it is derived from.
        setting: The dotted name of its settings.

    Raises:
        ConfigError: It is one of them; the error names the replacement.
    """
    if kind in NOT_OF_TABLES:
        raise ConfigError(f"{setting} ({kind}): cannot be used: {NOT_OF_TABLES[kind]}")


def check_monitor(
    setting: str,
    monitor: str | None,
    mode: str | None,
    measured: Mapping[str, str | None],
    *,
    all_known: bool,
) -> None:
    """Check that a callback monitors a metric that is measured, and takes larger for better where
    it is.

    Lightning would find the first mistake after the first epoch, and the second never.

    Args:
        setting: The dotted name of its settings.
        monitor: The metric.
        mode: `max` where larger is better, `min` where smaller is.
        measured: The metrics of validation (`measured_by`).
        all_known: Whether nothing else is measured.

    Raises:
        ConfigError: The metric is not measured, or the mode is the wrong one.
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
    """Return the schedule of learning rates; one that waits for gains of validation with the metric
    that it monitors, and its mode.

    Raises:
        ConfigError: That metric is not measured, or the mode is the wrong one.
    """
    schedule = recipe.optimizer.schedule
    if schedule is None or schedule.target != PLATEAU:
        return schedule
    measured = measured_by(recipe)
    checkpoint = recipe.callbacks.get("checkpoint")
    best = checkpoint.arguments.get("monitor") if checkpoint else None
    given = schedule.arguments
    monitor = given.get("monitor") or (best if best in measured else next(iter(measured)))
    mode = given.get("mode") or measured.get(monitor) or "min"
    check_monitor("optimizer.schedule", monitor, mode, measured, all_known=True)
    return Constructor(PLATEAU, {**given, "monitor": monitor, "mode": mode})
