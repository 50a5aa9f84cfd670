"""What rank 0 checks before the ranks meet, besides what records and constructors refuse: the files
of a run, the parts that are made late, a checkpoint under changed settings.

    recipe  ->  nothing, or the error in one line     check_run
            ->  notes: sizes after dataset.scale, files that train and validate, no validation

The other ranks wait for rank 0 meanwhile, or end with it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from glob import has_magic
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from recapp.console import note, short_path
from recapp.dataset.click_rows import first_outside, place_of
from recapp.dataset.data_file import file_facts, resumed_files
from recapp.dataset.files import file_names
from recapp.dataset.followed_files import FollowedFiles, first_files
from recapp.dataset.formats import Formats, formats_of
from recapp.dataset.schema import NO_LABEL, Schema, check_sizes
from recapp.dataset.sequential_rows import check_first_rows
from recapp.dataset.source import open_files, open_source
from recapp.dataset.stream import check_order
from recapp.dataset.synthetic import check_directory
from recapp.errors import CheckpointError, ConfigError, suggest
from recapp.models.catalogue import MODELS
from recapp.optim.named_rules import check_types, rules_of, tables_that_restart
from recapp.processes.launch import rank_count
from recapp.processes.rank_environment import rank_info
from recapp.run.constructors import constructor_of
from recapp.run.model import build_model, check_model
from recapp.run.recipe import Train
from recapp.run.training import dense_optimizer, without_monitor
from recapp.settings.records import TARGET, leaves, to_plain
from recapp.settings.uris import is_uri, path_to
from recapp.settings.values import Paths, shown, typed
from recapp.stored.block_files import by
from recapp.stored.manifest import JOINED, CheckpointManifest, Manifest
from recapp.stored.operations import LAST
from recapp.stored.start_values import check_values as check_start_files
from recapp.stored.store import entry_of, files_at, write_file
from recapp.stored.stored_model import read_manifest
from recapp.tables.collections import embedding_tables
from recapp.tables.config import EmbeddingConfig, IdRule
from recapp.tables.ids import OutsideTable
from recapp.tables.table_settings import MOST_MEMBERS, TablesOfDataset, named_tables, of_all_members

AS_BEFORE = "set dataset, tables and model as they were when it was saved"
PROBE = "probe.recapp"  # a file that is written and deleted before a run begins
MOST_LOOKS = 20_000  # at the range of a column in a row group: some tenths of a second
START_VALUES = (  # of rows and of optimiser state
    "init_range",
    "weight_init_max",
    "weight_init_min",
    "initial_accumulator",
    "initial_accumulator_value",
)


def check_run(recipe: Train, resumed: CheckpointManifest | None) -> None:
    """Check a run that trains, and print what is odd about its data.

    Args:
        recipe: The recipe of the run.
        resumed: The manifest of the checkpoint from which it resumes; None for a new run.

    Raises:
        RecappError: The first mistake.
    """
    here = recipe
    if recipe.dataset.follow:
        _check_followed(recipe)
    check_training(recipe)
    _check_checkpoints(recipe, resumed)
    if recipe.dataset.follow:
        paths = tuple(first_files(recipe.dataset))
        here = replace(recipe, dataset=replace(recipe.dataset, path=paths))
    check_data(here)
    if resumed:
        check_resumed(recipe, resumed)
    else:
        check_start_values(recipe)
    check_ids(here)
    if named := recipe.without_validation:
        note(
            f"{named}: no row validates, so there are no metrics"
            f"{' but those of each file before it trains' if recipe.dataset.follow else ''}, and "
            "last.ckpt is the only checkpoint"
        )


def _check_checkpoints(recipe: Train, resumed: CheckpointManifest | None) -> None:
    """Check that a directory of checkpoints can be written, and has no other run's."""
    if recipe.checkpoints is None:
        return
    folder = path_to(recipe.checkpoints)
    setting = f"checkpoints={short_path(folder)}"
    last = folder / LAST
    if entry_of(last) and (resumed is None or read_manifest(last).run != resumed.run):
        raise ConfigError(
            f"{setting}: has the checkpoints of another run: go on from them "
            f"({typed('ckpt_path', short_path(last))}), or choose another directory"
        )
    try:
        write_file(folder / PROBE, b"")
        files_at(folder).remove(folder / PROBE)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written: {error.strerror or error}") from error


def check_scoring(recipe: Train, manifest: Manifest) -> None:
    """Check that a stored model fits the settings of a run that scores.

    Args:
        recipe: The recipe of the run.
        manifest: The manifest of the model.

    Raises:
        RecappError: The first mistake.
    """
    check_model(recipe)
    check_tables(recipe, manifest)


# ---- data


def check_data(recipe: Train, *, test: bool = False) -> None:
    """Check the data of a run, as far as its settings and its first file tell: impossible columns,
    no label, files that do not exist or are no Parquet files, columns that the first file lacks,
    text instead of row numbers or dense values and fractions instead of labels in its first row
    group, other data where data are to be generated, too few lanes.

    Args:
        recipe: The recipe of a run.
        test: Whether the run measures on `dataset.test_path`.

    Raises:
        ConfigError, DataError: The first mistake.
    """
    schema = recipe.labelled_schema
    if not schema.labels:
        raise ConfigError(NO_LABEL)
    _check_metrics(recipe, schema)
    if isinstance(recipe.tables, TablesOfDataset):
        check_sizes(recipe.dataset, schema)
    dataset = recipe.dataset.scaled
    if dataset is not recipe.dataset:
        note(
            f"dataset.scale={recipe.dataset.scale}: batches of {dataset.batch_size:,} rows instead "
            f"of {recipe.dataset.batch_size:,}"
        )
    here = rank_info()
    ranks = here.world if here else rank_count(recipe.trainer.devices, recipe.trainer.accelerator)
    check_order(dataset.batch_size, dataset.lanes, ranks)
    named = {"path": dataset.path, "val_path": dataset.val_path}
    for key, paths in ({"test_path": dataset.test_path} if test else named).items():
        if paths is not None and dataset.generate is None:
            _check_files(paths, schema, f"dataset.{key}", recipe.metrics.columns)
    if not test and dataset.val_path is not None and dataset.generate is None:
        _note_shared_files(dataset.path, dataset.val_path, formats_of(schema.files))
    if not test and dataset.generate:
        path = dataset.path
        if not isinstance(path, str) or has_magic(path) or is_uri(path):
            raise ConfigError(
                f"dataset.path={shown(to_plain(dataset.path))}: data are generated into one "
                "directory of this machine; files of your own are read by dataset=custom "
                "dataset.path=..."
            )
        check_directory(path, dataset.generate, dataset.table_rows)


def _check_metrics(recipe: Train, schema: Schema) -> None:
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
    paths: Any, schema: Schema, setting: str, read_by_metrics: Mapping[str, str]
) -> None:
    for name in file_names(paths, setting=setting, formats=formats_of(schema.files)):
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
    check_first_rows(source, schema)


def _note_shared_files(path: Paths, val_path: Paths, formats: Formats) -> None:
    trained = {os.path.realpath(name) for name in file_names(path, formats=formats)}
    names = file_names(val_path, setting="dataset.val_path", formats=formats)
    both = [name for name in names if os.path.realpath(name) in trained]
    if both:
        note(
            f"dataset.val_path={shown(to_plain(val_path))}: dataset.path names {len(both):,} of "
            f"its files, too, so that their rows train and validate: {', '.join(both[:3])}"
        )


def check_ids(recipe: Train) -> None:
    """Check that training and validation files have no id outside of a table whose id rule is
    `error`, as far as their footers tell.

    Raises:
        OutsideTable: An id has no row; the text names table, feature, id, file and row.
    """
    if recipe.dataset.generate is not None:
        return
    strict = {
        lookup.feature: lookup.table
        for collection in recipe.model_tables.collections.values()
        for lookup in collection.lookups
        if lookup.table.id_rule is IdRule.ERROR and lookup.table.dynamic is None
    }
    schema = recipe.labelled_schema
    formats = formats_of(schema.files)
    limits = {f: range(t.min_key, t.min_key + t.num_embeddings) for f, t in strict.items()}
    for split in ("path", "val_path") if strict else ():
        setting = f"dataset.{split}"
        paths = getattr(recipe.dataset.scaled, split)
        looks = 0
        names = file_names(paths, setting=setting, formats=formats) if paths is not None else ()
        for name in names:
            source = open_files([name], schema, setting=setting)
            looks += len(source.segments) * len(limits)
            outside = first_outside(source, schema, limits)
            # footers that tell of an id that no row has are not believed
            if outside and (place := place_of(source, schema, outside[0], number=outside[1])):
                table = strict[outside[0]]
                raise OutsideTable(table, outside[0], 0, outside[1], f" in {place} ({setting})")
            if looks > MOST_LOOKS:
                break


# ---- training


def check_training(recipe: Train) -> None:
    """Check the parts of a run that trains which are made after the ranks meet.

    Args:
        recipe: The recipe of a run.

    Raises:
        ConfigError: A constructor of the settings refuses its arguments, the layers are invalid or
            do not fit the tables, the model does not take a collection of tables, or tables cannot
            begin anew or be joined.
    """
    dense_optimizer(recipe.optimizer.dense, [nn.Parameter(torch.zeros(1))])
    if schedule := recipe.optimizer.schedule:  # made for param groups that ranks make
        plain = without_monitor(schedule)
        constructor_of(plain, "optimizer.schedule", positional=1, kind=LRScheduler)
    for name, logger in recipe.logger.items():  # only rank 0 makes them
        constructor_of(logger, f"logger.{name}", ["save_dir"], kind=Logger)
    check_model(recipe)
    outputs = [output.name for output in recipe.built_task.outputs]
    known = MODELS.get(recipe.model.target)
    if known and known.of_clicks(recipe.model.arguments) and outputs != ["logit"]:
        raise ConfigError(
            f"model ({recipe.model.target}): trains with losses of clicks besides that of the task "
            f"({type(recipe.built_task).__name__}), which predicts {', '.join(outputs)}: choose "
            "another model, or task=click"
        )
    if recipe.metrics.bootstrap:
        raise ConfigError(
            f"metrics.bootstrap={recipe.metrics.bootstrap}: intervals are of recapp.eval: "
            "python -m recapp.eval ckpt_path=DIR metrics.bootstrap=200"
        )
    if recipe.optimizer.restart_tables:
        _check_restarts(recipe)
    if recipe.snapshots > 1:
        _check_snapshots(recipe)
    rules = rules_of(recipe.rules, [table.name for table in recipe.all_tables])
    for member in recipe.members:
        for collection in member.collections.values():
            check_types(rules, collection.tables)


def _check_followed(recipe: Train) -> None:
    trainer = recipe.trainer
    batches = trainer.accumulate_grad_batches
    every = trainer.val_check_interval
    because = {
        f"dataset.generate={shown(to_plain(recipe.dataset.generate))}": (
            recipe.dataset.generate is not None,
            "generated files do not grow",
        ),
        f"optimizer.restart_tables={shown(list(recipe.optimizer.restart_tables))}": (
            bool(recipe.optimizer.restart_tables),
            "each file is an epoch, so tables would forget at each file",
        ),
        f"snapshots={recipe.snapshots}": (recipe.snapshots > 1, "there is no last epoch"),
        f"trainer.max_epochs={trainer.max_epochs}": (
            trainer.max_epochs not in (None, -1),
            "each file trains once: trainer.max_steps or dataset.follow_idle end training",
        ),
        f"trainer.limit_train_batches={trainer.limit_train_batches}": (
            trainer.limit_train_batches not in (None, 1.0),
            "would leave rows of each file out",
        ),
        f"trainer.val_check_interval={every} trainer.accumulate_grad_batches={batches}": (
            type(every) is int and batches > 1,
            "a file ends with a shorter step, so validations would fall inside steps",
        ),
    }
    for setting, (holds, why) in because.items():
        if holds:
            raise ConfigError(f"{setting}: cannot be with dataset.follow=true: {why}")


def _check_snapshots(recipe: Train) -> None:
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


def _check_restarts(recipe: Train) -> None:
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


def check_start_values(recipe: Train) -> None:
    """Check the files of start values of a run that does not resume, except for values that are not
    finite, which are found when they are read.

    Raises:
        ConfigError, DataError: There is no such table, or a file does not fit its table.
    """
    if values := recipe.tables.values:
        named_tables("tables.values", list(values), recipe.all_tables)
        check_start_files(values, recipe.all_tables, recipe.schema, not recipe.counts_ids)


# ---- a checkpoint under changed settings


def check_resumed(recipe: Train, manifest: CheckpointManifest) -> None:
    """Check that training can resume from its checkpoint, with the settings of this run.

    Args:
        recipe: The recipe of a run that resumes from a checkpoint.
        manifest: The manifest of the checkpoint.

    Raises:
        CheckpointError: The checkpoint has no state of training, or other tables; or it was saved
            within an epoch, and the files have changed since.
        ConfigError: A setting has changed that a run has no use for once it has begun.
    """
    if JOINED in manifest.info:
        raise CheckpointError(
            f"ckpt_path={short_path(manifest.folder)}: joins several models and has no state of "
            "training: resume from last.ckpt beside it"
        )
    check_starts(recipe, manifest.config)
    check_tables(recipe, manifest)
    batches = manifest.position["batches"]
    if recipe.dataset.follow:
        where = short_path(manifest.folder)
        position = manifest.info["position"]
        FollowedFiles(recipe.dataset).resume(position, recipe.schema, where, recipe.resume_data)
    elif batches and recipe.dataset.generate is None and recipe.resume_data != "ignore":
        resumed_files(
            manifest.info["position"].get("files"),
            file_facts(open_source(recipe.dataset.path, recipe.schema).files),
            batches=batches,
            checkpoint=short_path(manifest.folder),
        )


def check_tables(recipe: Train, manifest: Manifest) -> None:
    """Check that a stored model has the tables that the settings make. Its dense part is compared
    when it is loaded.

    Args:
        recipe: The recipe of a run that loads the model.
        manifest: The manifest of the model.

    Raises:
        CheckpointError: A checkpoint has others; the error names the first table.
        ArtefactError: An artefact has others.
    """
    kind = manifest.kind
    members = manifest.config.get("ensemble", 1)
    if members != recipe.ensemble:
        raise kind.error(
            f"ensemble={recipe.ensemble}: the {kind.name} has an ensemble of {members}: leave "
            "out the setting, or train anew"
        )
    tables = {table.name: table for table in recipe.all_tables}
    if tables.keys() != manifest.shapes.keys():  # a model may make tables of its own, or take none
        tables = {t.name: t for t in embedding_tables(build_model(recipe, on_paper=True))}
    for table in tables.values():
        _check_table(manifest, table, None if recipe.counts_ids else table.num_embeddings)
    manifest.check_left_out(tables)


def check_starts(recipe: Train, stored: Mapping[str, Any]) -> None:
    """Check that a run that goes on changes no start value, which would have no effect.

    Args:
        recipe: The recipe of the run.
        stored: The settings of its checkpoint.

    Raises:
        ConfigError: A start value has changed.
    """
    restarts = bool(recipe.optimizer.restart_tables)
    before, now = (dict(leaves(_numbered(each))) for each in (stored, to_plain(recipe)))
    for name, value in now.items():
        home, _, leaf = name.rpartition(".")
        of_file = home == "tables.values"
        if not (of_file or leaf in START_VALUES) or (before.get(name) or None) == (value or None):
            continue
        others = [f"{home}.{key}" for key in (TARGET, "rule")]
        anew = any(before.get(other) != now.get(other) for other in others)
        new_rows = restarts or any(table.dynamic for table in recipe.all_tables)
        if of_file or not (anew or (new_rows and home != "optimizer.dense")):
            raise ConfigError(
                f"{name}={shown(value)}: is a start value, which has no effect where training goes "
                "on from ckpt_path: leave it out, or train anew"
            )


def _numbered(settings: Any) -> Any:
    """Return plain settings with lists as mappings from the number of an item."""
    items = dict(enumerate(settings)) if isinstance(settings, list) else settings
    return {k: _numbered(v) for k, v in items.items()} if isinstance(items, Mapping) else items


def _check_table(manifest: Manifest, table: EmbeddingConfig, rows: int | None) -> None:
    kind = manifest.kind
    shapes = manifest.shapes
    if table.name not in shapes:
        raise kind.error(
            f"the {kind.name} has no table {table.name}: {suggest(table.name, shapes)}; {AS_BEFORE}"
        )
    stored = shapes[table.name]
    if stored.dynamic != (table.dynamic is not None):
        kinds = ("grows", "has a fixed number of rows")
        raise kind.error(
            f"table {table.name} {kinds[not stored.dynamic]} in the {kind.name}, but "
            f"{kinds[stored.dynamic]} by the settings: {AS_BEFORE}"
        )
    shape = (stored.rows if stored.dynamic or rows is None else rows, table.embedding_dim)
    if stored[:2] != shape:
        raise kind.error(
            f"table {table.name} is {by(stored[:2])} in the {kind.name}, but {by(shape)} by the "
            f"settings: {AS_BEFORE}"
        )
