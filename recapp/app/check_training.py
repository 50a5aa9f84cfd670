"""Checks before ranks are started of layers, memory, callbacks and shares of an epoch.

settings -> nothing, or the error that a rank would have raised some seconds later

Neither torch nor Lightning is imported: that would take the seconds that these checks save.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from recapp.app.build_task import build_task
from recapp.errors import ConfigError, alike, suggest
from recapp.models.widths import check_dlrm
from recapp.processes.launch import gpu_count, rank_count
from recapp.processes.rank_environment import started_externally
from recapp.settings.check_settings import TARGET
from recapp.settings.dependent_settings import check_share
from recapp.settings.renamed import target_of_today

Settings = Mapping[str, Any]

WIDTHS: dict[str, Callable[..., None]] = {"recapp.models.published_dlrm.DLRM": check_dlrm}
"""What checks the layers of a model of recapp, by its `_target_`."""

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
ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def check_training(settings: Settings) -> None:
    """Check what trains.

    Args:
        settings: Those of a run, each of which is right by itself.

    Raises:
        ConfigError: Layers that are none, weights that no machine of this size holds, a callback
            that cannot be used or monitors what nobody measures, or a share of an epoch that is
            less than a batch.
    """
    model = settings["model"]
    if check := WIDTHS.get(target_of_today(str(model.get(TARGET)))):
        check(model.get("bottom_layers"), model.get("top_layers"))
    _check_callbacks(settings)
    schedule_of(settings)
    if not started_externally():
        _check_memory(settings)
        _check_shares(settings)


# ---- callbacks


def _check_callbacks(settings: Settings) -> None:
    measured = measured_by(settings)
    known = all_known(settings)
    for name, wanted in (settings["callbacks"] or {}).items():
        setting = f"callbacks.{name}"
        home, _, kind = str(wanted.get(TARGET)).rpartition(".")
        if home.startswith("lightning."):
            refuse_callback(kind, setting)
        mode = wanted.get("mode", MODE_BY_DEFAULT.get(kind))
        check_monitor(setting, wanted.get("monitor"), mode, measured, all_known=known)


def measured_by(settings: Settings) -> dict[str, str | None]:
    """Return the metrics of validation, each with whether more (`max`) or less (`min`) of it is
    better.
    """
    return {each.of_validation: each.better for each in build_task(settings).measures}


def all_known(settings: Settings) -> bool:
    """Return whether no callback is the user's own, which may log metrics of its own."""
    targets = [str(wanted.get(TARGET)) for wanted in (settings["callbacks"] or {}).values()]
    return all(target.startswith(("lightning.", "recapp.")) for target in targets)


def refuse_callback(kind: str, setting: str) -> None:
    """Check that a callback is none of Lightning's that would do half of their work here.

    Args:
        kind: The name of its class, or of one that it is derived from.
        setting: The dotted name of its settings.

    Raises:
        ConfigError: It is one of them; the error names what to use instead.
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


def schedule_of(settings: Settings) -> dict[str, Any] | None:
    """Return the settings of the schedule; of one that waits for gains of validation with the
    metric that it monitors, and its mode.

    Raises:
        ConfigError: That metric is not measured, or the mode is the wrong one.
    """
    schedule = settings["optimizer"]["schedule"]
    if schedule is None or schedule.get(TARGET) != PLATEAU:
        return None if schedule is None else dict(schedule)
    measured = measured_by(settings)
    best = ((settings["callbacks"] or {}).get("checkpoint") or {}).get("monitor")
    monitor = schedule.get("monitor") or (best if best in measured else next(iter(measured)))
    mode = schedule.get("mode") or measured.get(monitor) or "min"
    check_monitor("optimizer.schedule", monitor, mode, measured, all_known=True)
    return {**schedule, "monitor": monitor, "mode": mode}


# ---- memory


def _check_memory(settings: Settings) -> None:
    """Check that the weights of tables could lie in the memory of this machine, which all of its
    ranks share. What else they need is known to the ranks.
    """
    tables = settings["tables"]
    if tables["source"] != "from_dataset" or gpu_count():
        return
    weights = _least_weights(settings["dataset"], tables) * ITEM_BYTES[tables["data_type"]]
    ranks = rank_count(settings["trainer"]["devices"], settings["trainer"]["accelerator"])
    said = settings["topology"]["memory_bytes"]
    there = said * ranks if said else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights > there:
        raise ConfigError(
            f"tables.dim={tables['dim']}: the weights of the tables alone need "
            f"{weights / 1e9:,.4g} GB, and the ranks have {there / 1e9:,.4g} GB: use a smaller "
            "tables.dim, hashed tables of fewer rows (tables.id_rule=hash tables.max_rows=...), "
            "a smaller tables.data_type or more machines"
        )


def _least_weights(dataset: Settings, tables: Settings) -> int:
    """Return how many weights the tables have at least: of tables whose rows are counted later, or
    come as ids do, two rows.
    """
    columns: list[int] = dataset["table_rows"] or dataset["cardinality"]
    if not columns or tables["num_embeddings"] is not None:
        columns = [2] * max(len(dataset["sparse"]), 1)
    elif (tables["id_rule"] or dataset["id_rule"]) == "hash" and tables["max_rows"]:
        columns = [min(rows, tables["max_rows"]) for rows in columns]
    dims: list[int] = [tables["dim"], *(dataset["table_dims"] or {}).values()]
    return max(sum(columns) * min(dims), 2 * max(dims[1:], default=0))


# ---- shares of an epoch


def _check_shares(settings: Settings) -> None:
    """Check that a share of an epoch's batches is at least one of them."""
    trainer = settings["trainer"]
    limits = {
        name: limit
        for name in ("limit_train_batches", "limit_val_batches")
        if isinstance(limit := trainer[name], float) and 0 < limit < 1
    }
    if not limits:
        return
    from recapp.dataset.data_scale import scaled
    from recapp.dataset.order import batches

    dataset = scaled(settings["dataset"])
    train, val = _rows(settings, dataset)
    val_size = dataset["val_batch_size"] or dataset["batch_size"]
    there = {
        "limit_train_batches": batches(train, dataset["batch_size"], training=True),
        "limit_val_batches": batches(val, val_size, training=False),
    }
    for name, limit in limits.items():
        if there[name] and int(there[name] * limit) < 1:
            what = "an epoch" if name == "limit_train_batches" else "a validation"
            raise ConfigError(
                f"trainer.{name}={limit}: is less than one of the {there[name]:,} batches of "
                f"{what}: set a number of batches, such as 1, or a share of at least "
                f"{1 / there[name]:.2g}"
            )


def _rows(settings: Settings, dataset: Settings) -> tuple[int, int]:
    """Return the rows that train and those that validate, of which files know only the number."""
    from recapp.dataset.schema import schema_from
    from recapp.dataset.source import open_source

    def rows_of(setting: str) -> int:
        source = open_source(dataset[setting], schema_from(settings), setting=f"dataset.{setting}")
        return source.rows

    rows = dataset["generate"]["rows"] if dataset["generate"] else rows_of("path")
    if dataset["val_path"] is not None:
        return rows, rows_of("val_path")
    train = int(rows * (1 - check_share(dataset["val_share"])))
    return train, rows - train
