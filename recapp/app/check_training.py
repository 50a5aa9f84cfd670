"""Check layers, memory, callbacks and shares of an epoch before ranks start.

settings -> nothing, or the error that a rank would have raised some seconds later

This file imports neither torch nor Lightning: that would take the seconds that the checks save.
"""

import os
from collections.abc import Callable

from recapp.dataset.data_settings import DataSettings
from recapp.errors import ConfigError
from recapp.models.widths import check_dlrm
from recapp.processes.launch import gpu_count, rank_count
from recapp.processes.rank_environment import started_externally
from recapp.recipe.monitors import check_callbacks, schedule_of
from recapp.recipe.recipe import Train
from recapp.settings.renamed import target_of_today
from recapp.settings.value_kinds import Paths
from recapp.tables.table_settings import TablesOfDataset

WIDTHS: dict[str, Callable[..., None]] = {"recapp.models.published_dlrm.DLRM": check_dlrm}
"""The function that checks the layers of a model of recapp, by the model's `_target_`."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def check_training(recipe: Train) -> None:
    """Check the parts of a run that trains.

    Args:
        recipe: The recipe of a run.

    Raises:
        ConfigError: The layers are invalid, the weights do not fit in memory, a callback cannot be
            used or monitors a metric that is not measured, or a share of an epoch is less than a
            batch.
    """
    if check := WIDTHS.get(target_of_today(recipe.model.target)):
        layers = recipe.model.arguments
        check(layers.get("bottom_layers"), layers.get("top_layers"))
    check_callbacks(recipe)
    schedule_of(recipe)
    if not started_externally():
        _check_memory(recipe)
        _check_shares(recipe)


# ---- memory


def _check_memory(recipe: Train) -> None:
    """Check that the weights of tables fit in the memory of this machine, which its ranks share.
    The ranks check their other memory.
    """
    tables = recipe.tables
    if not isinstance(tables, TablesOfDataset) or gpu_count():
        return
    weights = _least_weights(recipe.dataset, tables) * ITEM_BYTES[tables.data_type]
    ranks = rank_count(recipe.trainer.devices, recipe.trainer.accelerator)
    said = recipe.topology.memory_bytes
    there = said * ranks if said else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights > there:
        raise ConfigError(
            f"tables.dim={tables.dim}: the weights of the tables alone need "
            f"{weights / 1e9:,.4g} GB, and the ranks have {there / 1e9:,.4g} GB: use a smaller "
            "tables.dim, hashed tables of fewer rows (tables.id_rule=hash tables.max_rows=...), "
            "a smaller tables.data_type or more machines"
        )


def _least_weights(dataset: DataSettings, tables: TablesOfDataset) -> int:
    """Return the least number of weights in the tables. Dynamic tables, and tables whose rows are
    counted later, have at least two rows.
    """
    columns = list(dataset.table_rows or dataset.cardinality or ())
    if not columns or tables.grow:
        columns = [2] * max(len(dataset.sparse), 1)
    elif (tables.id_rule or dataset.id_rule) == "hash" and tables.max_rows:
        columns = [min(rows, tables.max_rows) for rows in columns]
    dims = [tables.dim, *(dataset.table_dims or {}).values()]
    return max(sum(columns) * min(dims), 2 * max(dims[1:], default=0))


# ---- shares of an epoch


def _check_shares(recipe: Train) -> None:
    """Check that a share of an epoch is at least one batch."""
    trainer = recipe.trainer
    named = {
        "limit_train_batches": trainer.limit_train_batches,
        "limit_val_batches": trainer.limit_val_batches,
    }
    limits = {
        name: limit for name, limit in named.items() if isinstance(limit, float) and 0 < limit < 1
    }
    if not limits:
        return
    from recapp.dataset.order import batches

    dataset = recipe.dataset.scaled
    train, val = _rows(recipe, dataset)
    val_size = dataset.val_batch_size or dataset.batch_size
    there = {
        "limit_train_batches": batches(train, dataset.batch_size, training=True),
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


def _rows(recipe: Train, dataset: DataSettings) -> tuple[int, int]:
    """Return the numbers of training and validation rows."""
    from recapp.dataset.source import open_source

    def rows_of(paths: Paths, setting: str) -> int:
        return open_source(paths, recipe.schema, setting=setting).rows

    generate = dataset.generate
    rows = generate.rows if generate else rows_of(dataset.path, "dataset.path")
    if dataset.val_path is not None:
        return rows, rows_of(dataset.val_path, "dataset.val_path")
    train = int(rows * (1 - dataset.share_that_validates))
    return train, rows - train
