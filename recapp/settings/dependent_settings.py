"""Checks of settings that depend on each other, and of those that are fractions."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from recapp.errors import ConfigError
from recapp.settings.values import shown


def check_together(config: Mapping[str, Any], set_by_user: Collection[str]) -> None:
    """Check the settings of a command against each other.

    Args:
        config: The settings, each of which is right by itself.
        set_by_user: The dotted names of those that the command line sets.

    Raises:
        ConfigError: Two do not go together; it names both.
    """
    dataset = config.get("dataset")
    plan = config.get("plan")
    if isinstance(dataset, Mapping):
        for key in ("dense", "sparse"):
            if dataset.get("naming") == "criteo" and (
                dataset.get(key) or f"dataset.{key}" in set_by_user
            ):
                raise ConfigError(
                    f"dataset.{key}={shown(dataset.get(key))}: dataset.naming=criteo has columns "
                    "of its own, all of which are read; set dataset.naming=exact to name others"
                )
        if not dataset.get("path", True):
            raise ConfigError("dataset.path is empty: name a directory, a glob or Parquet files")
        check_share(dataset.get("val_share", 0))
        check_scale(dataset.get("scale", 1))
    if config.get("metrics") and config["metrics"]["names"] == []:
        raise ConfigError("metrics.names=[]: name at least one, such as [auc]")
    trainer = config.get("trainer") or {}
    if (
        type(trainer.get("val_check_interval")) is int
        and trainer.get("check_val_every_n_epoch", 1) != 1
    ):
        raise ConfigError(
            f"trainer.check_val_every_n_epoch={trainer['check_val_every_n_epoch']}: validations "
            f"are every trainer.val_check_interval={trainer['val_check_interval']} steps, counted "
            "across epochs; set one of the two"
        )
    engine = config.get("engine") or {}
    if engine.get("clip_tables") and trainer.get("gradient_clip_val", 1) in (None, 0):
        raise ConfigError(
            f"engine.clip_tables=true: trainer.gradient_clip_val="
            f"{shown(trainer['gradient_clip_val'])} clips nothing: set it to the largest norm, or "
            "leave engine.clip_tables=false"
        )
    if isinstance(plan, Mapping):
        _check_plan(plan)
    tables = config.get("tables")
    if isinstance(tables, Mapping) and tables.get("source") == "from_dataset":
        _check_tables(tables)


def _check_tables(tables: Mapping[str, Any]) -> None:
    """Check that what is said of tables goes with whether they grow."""
    most = tables.get("max_rows")
    if tables.get("num_embeddings") != "dynamic":
        if tables.get("dynamic") is not None:
            raise ConfigError(
                f"tables.dynamic={shown(tables['dynamic'])}: is said of tables that do not grow: "
                "take tables=dynamic"
            )
        return
    if most is not None:
        raise ConfigError(
            f"tables.max_rows={most}: limits hashed tables, and these grow: set "
            f"tables.dynamic.max_rows={most} and leave tables.max_rows=null"
        )
    if tables.get("id_rule") not in (None, "error"):
        raise ConfigError(
            f"tables.id_rule={tables['id_rule']}: a dynamic table has a row for any id: leave it "
            "null, or take tables=from_dataset"
        )


def _check_plan(plan: Mapping[str, Any]) -> None:
    others = [key for key in plan if key not in ("path", "sharding_types")]
    if "path" in plan and others:
        raise ConfigError(
            f"plan.{others[0]}: cannot be set beside plan.path, which is a whole plan: edit the "
            "file"
        )


def without_validation(config: Mapping[str, Any]) -> str | None:
    """Return the setting by which no row validates, such as `dataset.val_share=0`; None where some
    do.
    """
    dataset = config["dataset"]
    limit = config["trainer"]["limit_val_batches"]
    if limit == 0:
        return f"trainer.limit_val_batches={limit}"
    if dataset["val_path"] is None and check_share(dataset["val_share"]) == 0:
        return f"dataset.val_share={dataset['val_share']}"
    return None


def check_share(share: object) -> Fraction:
    """Return `dataset.val_share` as a fraction.

    Raises:
        ConfigError: It is no fraction, or leaves nothing to train on.
    """
    found = _fraction(share, "dataset.val_share", "1/7 or 0.1")
    if not 0 <= found < 1:
        raise ConfigError(
            f"dataset.val_share={share}: must be a share of the rows, from 0 to less than 1"
        )
    return found


def check_scale(scale: object) -> Fraction:
    """Return `dataset.scale` as a fraction.

    Raises:
        ConfigError: It is no fraction, or leaves nothing or more than there is.
    """
    found = _fraction(scale, "dataset.scale", "1/1000 or 0.1")
    if not 0 < found <= 1:
        raise ConfigError(f"dataset.scale={scale}: must be above 0 and at most 1, such as 1/1000")
    return found


def _fraction(value: object, name: str, examples: str) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{name}={value}: must be a fraction such as {examples}") from None
