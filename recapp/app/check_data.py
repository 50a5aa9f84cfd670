"""Checks of the data before ranks are started, so that a mistake costs a second and not the start
of every rank.

    recipe, files         ->  nothing, or the error that a rank would have raised   check_data
    recipe, command line  ->  nothing, or that a checkpoint's data are not there    check_generated
    recipe, checkpoint    ->  nothing, or that the data are others inside an epoch  check_resumed
    recipe                ->  a note of the sizes that dataset.scale makes          note_scale
"""

from collections.abc import Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.console import note, short_path
from recapp.dataset.data_settings import DataSettings
from recapp.errors import ConfigError
from recapp.processes.launch import rank_count
from recapp.processes.rank_environment import external_rank, started_externally
from recapp.recipe.recipe import Recipe, Train
from recapp.settings.records import to_plain
from recapp.settings.values import shown
from recapp.tables.table_settings import TablesOfDataset

if TYPE_CHECKING:
    from recapp.dataset.schema import Schema


def check_data(recipe: Train, *, test: bool = False) -> None:
    """Check, before ranks are started, the data that each of them would refuse some seconds later.

    That is: impossible columns, no label, files that do not exist or are no Parquet files, columns
    that the first file lacks, text in its first row group where a table takes ids for rows or a
    number is wanted, other data where some are to be generated, too few lanes. Files are not looked
    at where the ranks were started from outside: they may lie on the ranks' hosts only.

    Args:
        recipe: That of a run.
        test: Whether the run measures on `dataset.test_path`.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    from recapp.dataset.schema import NO_LABEL, check_sizes

    schema = recipe.labelled_schema
    if not schema.labels:
        raise ConfigError(NO_LABEL)
    if isinstance(recipe.tables, TablesOfDataset):
        check_sizes(recipe.dataset, schema.sparse)
    if started_externally():
        return
    from recapp.dataset.order import check_order

    dataset = recipe.dataset.scaled
    ranks = rank_count(recipe.trainer.devices, recipe.trainer.accelerator)
    check_order(dataset.batch_size, dataset.lanes, ranks, dataset.shuffle_rows)
    named = {"path": dataset.path, "val_path": dataset.val_path}
    for key, paths in ({"test_path": dataset.test_path} if test else named).items():
        if paths is not None and dataset.generate is None:
            _check_files(paths, schema, f"dataset.{key}")
    if not test and dataset.generate:
        _check_generated_directory(dataset)
    plan = recipe.plan.path if recipe.plan else None
    if plan is not None and not Path(plan).is_file():
        raise ConfigError(
            f"plan.path={plan}: no such file: `python -m recapp.plan export path=FILE` writes one"
        )


def _check_generated_directory(dataset: DataSettings) -> None:
    """Check that the generated data can be written, unless they are there."""
    from recapp.dataset.synthetic import check_directory

    assert dataset.generate is not None
    if not isinstance(dataset.path, str) or has_magic(dataset.path):
        raise ConfigError(
            f"dataset.path={shown(to_plain(dataset.path))}: data are generated into one directory; "
            "files of your own are read by dataset=custom dataset.path=..."
        )
    check_directory(dataset.path, dataset.generate, dataset.table_rows)


def note_scale(recipe: Recipe) -> None:
    """Note the sizes that `dataset.scale` makes of the data of a run."""
    if not external_rank() and (words := recipe.dataset.scale_in_words()):
        note(words)


def _check_files(paths: Any, schema: "Schema", setting: str) -> None:
    """Check that files exist, and that the first one with rows has the columns of the schema."""
    from recapp.dataset.files import file_names
    from recapp.dataset.source import (
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
    ids = text_that_must_be_integers(source, schema)
    numbers = text_that_may_be_no_number(source, schema)
    if ids or numbers:
        from recapp.dataset.first_rows import check_values  # imports torch

        check_values(source, schema, ids=ids, numbers=numbers)


def check_generated(recipe: Recipe, overrides: Sequence[str]) -> None:
    """Check that the generated data of a checkpoint are there, unless the command line names their
    directory: a checkpoint does not decide where something is written.

    Args:
        recipe: That of a run that loads the checkpoint.
        overrides: Its command line.

    Raises:
        ConfigError: They are not.
    """
    dataset = recipe.dataset
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not dataset.generate or said & {"dataset", "dataset.path", "experiment"}:
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
    """Check that training can resume on the files that are there.

    Ranks compare them once more, and say what has changed: this process cannot see the files of
    ranks that were started from outside, nor those that are still to be generated.

    Args:
        recipe: That of a run that resumes from a checkpoint.

    Raises:
        CheckpointError: The checkpoint was saved inside of an epoch, and its files have changed.
    """
    from recapp.dataset.fingerprint import file_facts
    from recapp.dataset.resumed_files import resumed_files
    from recapp.dataset.source import open_source
    from recapp.stored.checkpoint import read_manifest

    dataset = recipe.dataset
    assert recipe.ckpt_path is not None
    manifest = read_manifest(recipe.ckpt_path)
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
