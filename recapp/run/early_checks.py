"""Check data and settings before ranks start: a mistake then costs a second, not the start of all
ranks.

recipe, files         ->  nothing, or the error that a rank would have raised   check_data
recipe                ->  the same for layers, memory, callbacks and limits     check_training
recipe, command line  ->  nothing, or that a checkpoint's data do not exist     check_generated
recipe, checkpoint    ->  nothing, or that the data are others inside an epoch  check_resumed
recipe                ->  a note of the sizes that dataset.scale makes          note_scale
recipe                ->  a note if no row validates         note_no_validation_rows

This file imports neither torch nor Lightning: that would take the seconds that the checks save.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.console import note, short_path
from recapp.dataset.data_settings import DataSettings
from recapp.errors import CheckpointError, ConfigError, suggest
from recapp.models.catalogue import MODELS, KnownModel
from recapp.models.widths import check_share
from recapp.optim.named_rules import check_types, rules_of, tables_that_restart
from recapp.processes.launch import gpu_count, rank_count
from recapp.processes.rank_environment import external_rank, started_externally
from recapp.run.model_tables import check_collections
from recapp.run.monitors import check_callbacks, schedule_of
from recapp.run.recipe import Recipe, Train
from recapp.run.stored_checks import check_starts
from recapp.settings.check_settings import override_names
from recapp.settings.records import to_plain
from recapp.settings.values import Paths, shown
from recapp.tables.collections import BAGS, MOST_MEMBERS, of_all_members
from recapp.tables.dynamic import MOST_OF_ROWS
from recapp.tables.table_settings import TablesOfDataset

if TYPE_CHECKING:
    from recapp.dataset.schema import Schema

ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


def check_data(recipe: Train, *, test: bool = False) -> None:
    """Check, before ranks start, for data that every rank would refuse some seconds later.

    These are: impossible columns, no label, files that do not exist or are no Parquet files,
    columns that the first file lacks, text instead of row numbers or dense values and fractions
    instead of labels in its first row group, other data where data are to be generated, too few
    lanes. If the ranks were started from outside, files are not read: they may exist only on the
    ranks' hosts.

    Args:
        recipe: The recipe of a run.
        test: Whether the run measures on `dataset.test_path`.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    from recapp.dataset.schema import NO_LABEL, check_sizes

    schema = recipe.labelled_schema
    if not schema.labels:
        raise ConfigError(NO_LABEL)
    _check_metrics(recipe, schema)
    if isinstance(recipe.tables, TablesOfDataset):
        check_sizes(recipe.dataset, schema)
    if started_externally():
        return
    from recapp.dataset.order import check_order

    dataset = recipe.dataset.scaled
    ranks = rank_count(recipe.trainer.devices, recipe.trainer.accelerator)
    check_order(dataset.batch_size, dataset.lanes, ranks, dataset.shuffle_rows)
    named = {"path": dataset.path, "val_path": dataset.val_path}
    for key, paths in ({"test_path": dataset.test_path} if test else named).items():
        if paths is not None and dataset.generate is None:
            _check_files(paths, schema, f"dataset.{key}", recipe.metrics.columns)
    if not test and dataset.val_path is not None and dataset.generate is None:
        _note_shared_files(dataset.path, dataset.val_path)
    if not test and dataset.generate:
        from recapp.dataset.synthetic import check_directory

        if not isinstance(dataset.path, str) or has_magic(dataset.path):
            raise ConfigError(
                f"dataset.path={shown(to_plain(dataset.path))}: data are generated into one "
                "directory; files of your own are read by dataset=custom dataset.path=..."
            )
        check_directory(dataset.path, dataset.generate, dataset.table_rows)
    plan = recipe.plan.path if recipe.plan else None
    if plan is not None and not Path(plan).is_file():
        raise ConfigError(
            f"plan.path={plan}: no such file: `python -m recapp.plan export path=FILE` writes one"
        )


def note_scale(recipe: Recipe) -> None:
    """Print the sizes of a run's data after `dataset.scale`."""
    if not external_rank() and (words := recipe.dataset.scale_in_words()):
        note(words)


def note_no_validation_rows(recipe: Train) -> None:
    """Print if no row validates: the run then has no metrics and no best checkpoint."""
    named = recipe.without_validation
    if named and not external_rank():
        note(
            f"{named}: no row validates, so there are no metrics, and last.ckpt is the only "
            "checkpoint"
        )


def _check_metrics(recipe: Train, schema: "Schema") -> None:
    """Check that the data have what metrics read.

    Raises:
        ConfigError: A column is no sparse column, groups have no ids of their own, or sample
            weights would not count.
    """
    for column, setting in recipe.metrics.columns.items():
        if column not in schema.sparse:
            raise ConfigError(
                f"{setting}={column}: no sparse column: {suggest(column, schema.sparse)}"
            )
    group = recipe.metrics.group
    if group in schema.vocabularies:
        raise ConfigError(
            f"metrics.group={group}: dataset.min_frequency gives all rare ids of {group} one id, "
            "which would be one group: name other columns in dataset.min_frequency, such as "
            "{C1: 2}, or another metrics.group"
        )
    if schema.weights and recipe.metrics.extra:
        name = next(iter(recipe.metrics.extra))
        raise ConfigError(
            f"metrics.extra.{name}: metrics of torchmetrics count no weights, and dataset.weight "
            "names some: leave one of them out"
        )


def _check_files(
    paths: Any, schema: "Schema", setting: str, read_by_metrics: Mapping[str, str]
) -> None:
    """Check that files exist, and that the first one with rows has the columns of the schema, and
    single ids in those that metrics read.
    """
    from recapp.dataset.files import file_names
    from recapp.dataset.source import (
        labels_that_may_be_wrong,
        open_files,
        text_that_may_be_no_number,
        text_that_must_be_integers,
    )

    for name in file_names(paths, setting=setting):
        source = open_files([name], schema, setting=setting)
        if source.segments:
            break
    if not source.segments:
        return
    schema.check_bags(source.bags)
    for column in source.bags.intersection(read_by_metrics):
        raise ConfigError(
            f"{read_by_metrics[column]}={column}: the column has a list of ids in a row: choose "
            "one of single ids"
        )
    ids = text_that_must_be_integers(source, schema)
    numbers = text_that_may_be_no_number(source, schema)
    labels = labels_that_may_be_wrong(source, schema)
    if ids or numbers or labels:
        from recapp.dataset.sequential_rows import check_values  # imports torch

        check_values(source, schema, ids=ids, numbers=numbers, labels=labels)


def _note_shared_files(path: Paths, val_path: Paths) -> None:
    """Print if files both train and validate, so that a metric says little about other rows."""
    from recapp.dataset.files import file_names

    trained = {os.path.realpath(name) for name in file_names(path)}
    names = file_names(val_path, setting="dataset.val_path")
    both = [name for name in names if os.path.realpath(name) in trained]
    if both and not external_rank():
        note(
            f"dataset.val_path={shown(to_plain(val_path))}: dataset.path names {len(both):,} of "
            f"its files, too, so that their rows train and validate: {', '.join(both[:3])}"
        )


def check_generated(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Check that a checkpoint's generated data exist, unless the command line names their
    directory.

    They are not generated again, since a checkpoint must not decide where a command writes.

    Args:
        recipe: The recipe of a run that loads the checkpoint.
        overrides: The command line.

    Raises:
        ConfigError: The data do not exist.
    """
    dataset = recipe.dataset
    named = {"dataset", "dataset.path", "experiment"}.intersection(override_names(overrides))
    if not dataset.generate or named:
        return
    assert isinstance(dataset.scaled.path, str)
    path = Path(dataset.scaled.path)
    if not path.is_dir() or not any(path.iterdir()):
        raise ConfigError(
            f"dataset.path={path}: the generated data of the checkpoint are not there, and nothing "
            "is written at a place that only a checkpoint names: say dataset.path=... to have them "
            "generated"
        )


def check_resumed(recipe: Train) -> None:
    """Check that training can resume on the present files, with the settings of this run.

    Ranks compare the files again and print the changes. This process cannot see the files of ranks
    that were started from outside, or files that are not generated yet.

    Args:
        recipe: The recipe of a run that resumes from a checkpoint.

    Raises:
        CheckpointError: The checkpoint was saved within an epoch, and the files have changed since.
        ConfigError: A setting has changed that a run has no use for once it has begun.
    """
    from recapp.dataset.fingerprint import file_facts, resumed_files
    from recapp.dataset.source import open_source
    from recapp.stored.checkpoint import read_manifest

    dataset = recipe.dataset
    assert recipe.ckpt_path is not None
    manifest = read_manifest(recipe.ckpt_path)
    if manifest.is_joined:
        raise CheckpointError(
            f"ckpt_path={short_path(recipe.ckpt_path)}: joins several models and has no state of "
            "training: resume from last.ckpt beside it"
        )
    check_starts(recipe, manifest.config)
    batches = manifest.position["batches"]
    unseen = started_externally() or dataset.generate is not None
    if not batches or unseen or recipe.resume_data == "ignore":
        return
    source = open_source(dataset.path, recipe.schema)
    resumed_files(
        manifest.info["position"].get("files"),
        file_facts(source.files),
        batches=batches,
        checkpoint=short_path(manifest.folder),
    )


# ---- training


def check_training(recipe: Train) -> None:
    """Check the parts of a run that trains.

    Args:
        recipe: The recipe of a run.

    Raises:
        ConfigError: The layers are invalid or do not fit the tables, the model does not take a
            collection of tables, the weights do not fit in memory, a callback cannot be used or
            monitors a metric that is not measured, tables cannot begin anew, or a share of an
            epoch is less than a batch.
    """
    known = MODELS.get(recipe.model.target)
    if known is None or known.needs != (BAGS,) or not recipe.tables.only_bags:
        check_collections(recipe.model, recipe.model_tables.collections)
    if known is not None:
        _check_output(recipe, known)
        bags = recipe.model_tables.collections.get(BAGS)
        dims = [x.dim for x in bags.lookups] if bags else []
        check_share("model.field_dropout", recipe.model.arguments.get("field_dropout", 0.0))
        open_dims = _dims_of_rule(recipe)
        known.check(recipe.model.arguments, [*dims, *open_dims])
        if known.check_fields is not None:
            known.check_fields(dims, len(recipe.schema.numbers))
        if known.check_lookups is not None:
            collections = recipe.model_tables.collections
            lookups = {name: own.lookups for name, own in collections.items()}
            known.check_lookups(recipe.model.arguments, lookups, not open_dims)
    if recipe.metrics.bootstrap:
        raise ConfigError(
            f"metrics.bootstrap={recipe.metrics.bootstrap}: intervals are of recapp.eval: "
            "python -m recapp.eval ckpt_path=DIR metrics.bootstrap=200"
        )
    check_callbacks(recipe)
    schedule_of(recipe)
    recipe.trainer.average.check_effect()
    if recipe.optimizer.restart_tables:
        _check_restarts(recipe)
    if recipe.snapshots > 1:
        _check_snapshots(recipe)
    _check_types(recipe)
    if not started_externally():
        _check_memory(recipe)
        _check_shares(recipe)


def _check_output(recipe: Train, known: KnownModel) -> None:
    """Check that a model whose losses are those of clicks predicts a logit."""
    outputs = [output.name for output in recipe.built_task.outputs]
    if known.of_clicks(recipe.model.arguments) and outputs != ["logit"]:
        raise ConfigError(
            f"model ({recipe.model.target}): trains with losses of clicks besides that of the task "
            f"({type(recipe.built_task).__name__}), which predicts {', '.join(outputs)}: choose "
            "another model, or task=click"
        )


def _check_snapshots(recipe: Train) -> None:
    """Check that the models of the last epochs will make an ensemble.

    Raises:
        ConfigError: There are fewer epochs than models, there are too many models, a table is
            dynamic, or two tables would get one name.
    """
    setting = f"snapshots={recipe.snapshots}"
    epochs = recipe.trainer.length[0]
    if 0 <= epochs < recipe.snapshots:
        fewer = f"set snapshots={epochs}" if epochs > 1 else "leave snapshots out"
        raise ConfigError(
            f"{setting}: keeps the models of {recipe.snapshots} epochs, and training has {epochs} "
            f"(trainer.max_epochs): set trainer.max_epochs={recipe.snapshots} or more, or {fewer}"
        )
    models = recipe.ensemble * recipe.snapshots
    if models > MOST_MEMBERS:
        raise ConfigError(
            f"{setting} ensemble={recipe.ensemble}: would join {models} models, and "
            f"{MOST_MEMBERS} is the most: lower one of both"
        )
    tables = replace(recipe, ensemble=models).all_tables
    if dynamic := [table.name for table in tables if table.dynamic is not None]:
        raise ConfigError(
            f"{setting}: table {dynamic[0]} is dynamic, and models of dynamic tables cannot be "
            "joined: give tables a number of rows, or leave snapshots out"
        )
    twice = [name for name, n in Counter(table.name for table in tables).items() if n > 1]
    if twice:
        raise ConfigError(
            f"{setting}: two of the joined models' tables would be called {twice[0]}: rename the "
            "column"
        )


def _dims_of_rule(recipe: Train) -> list[int]:
    """Return the dims that a rule gives to tables whose rows are not counted yet: the smallest and
    the largest.
    """
    tables = recipe.tables
    if not isinstance(tables, TablesOfDataset) or tables.dim_rule is None or not recipe.counts_ids:
        return []
    return [tables.dim_rule.dim(rows) for rows in (2, tables.max_rows or MOST_OF_ROWS)]


def _check_restarts(recipe: Train) -> None:
    """Check the names of the tables that begin anew, and that those of one rule do so together."""
    tables = recipe.all_tables
    patterns = of_all_members(dict.fromkeys(recipe.optimizer.restart_tables), tables)
    rules = rules_of(recipe.rules, [table.name for table in tables])
    values = recipe.tables.values or {}
    for name in tables_that_restart(list(patterns), rules):
        if name in values:
            raise ConfigError(
                f"optimizer.restart_tables: {name}: would lose the values of tables.values."
                f"{name}={values[name]} at the second epoch: leave it out, or freeze the table"
            )


def _check_types(recipe: Train) -> None:
    """Check that tables whose rows all take each step have a type that allows it."""
    rules = rules_of(recipe.rules, [table.name for table in recipe.all_tables])
    for member in recipe.members:
        for collection in member.collections.values():
            check_types(rules, collection.tables)


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
    usual = tables.dim if tables.dim_rule is None else tables.dim_rule.least
    dims = [usual, *(dataset.table_dims or {}).values()]
    return max(sum(columns) * min(dims), 2 * max(dims[1:], default=0))


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

    schema = recipe.schema

    def rows_of(paths: Paths, setting: str) -> int:
        nonlocal schema
        source = open_source(paths, schema, setting=setting)
        if schema.lists is None:  # the training files come first, and say it for the others
            schema = replace(schema, lists=source.bags)
        return source.rows

    generate = dataset.generate
    rows = generate.rows if generate else rows_of(dataset.path, "dataset.path")
    if dataset.val_path is not None:
        return rows, rows_of(dataset.val_path, "dataset.val_path")
    train = int(rows * (1 - dataset.share_that_validates))
    return train, rows - train
