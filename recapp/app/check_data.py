"""Checks of the data before ranks are started, so that a mistake costs a second and not the start
of every rank.

    settings, checkpoint  ->  settings that fit the checkpoint's model              match_checkpoint
    settings, files       ->  nothing, or the error that a rank would have raised   check_data
    settings, command line -> nothing, or that a checkpoint's data are not there    check_generated
    settings, checkpoint  ->  nothing, or that the data are others inside an epoch  check_resumed
    settings              ->  a note of what dataset.scale makes of them            note_scale
"""

from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.app.build_task import labelled_schema
from recapp.console import note, short_path
from recapp.errors import ConfigError
from recapp.processes.launch import rank_count
from recapp.processes.rank_environment import external_rank, started_externally
from recapp.settings.values import shown

if TYPE_CHECKING:
    from recapp.dataset.schema import Schema
    from recapp.stored.manifest import Manifest


def check_data(config: Mapping[str, Any]) -> None:
    """Check, before ranks are started, what each of them would refuse some seconds later.

    That is: impossible columns, no label, files that do not exist or are no Parquet files, columns
    that the first file lacks, text in its first row group where a table takes ids for rows or a
    number is wanted, other data where some are to be generated, too few lanes. Files are not looked
    at where the ranks were started from outside: they may lie on the ranks' hosts only.

    Args:
        config: The settings of a run.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    from recapp.dataset.schema import NO_LABEL, check_sizes

    schema = labelled_schema(config)
    if not schema.labels:
        raise ConfigError(NO_LABEL)
    if (config.get("tables") or {}).get("source") == "from_dataset":
        check_sizes(config["dataset"], schema.sparse)
    if started_externally():
        return
    from recapp.dataset.data_scale import scaled
    from recapp.dataset.order import check_order

    dataset = scaled(config["dataset"])
    test = config.get("split") == "test"
    ranks = rank_count(config["trainer"]["devices"], config["trainer"]["accelerator"])
    check_order(dataset["batch_size"], dataset["lanes"], ranks, dataset["shuffle_rows"])
    for key in ("test_path",) if test else ("path", "val_path"):
        if dataset[key] is not None and dataset["generate"] is None:
            _check_files(dataset[key], schema, f"dataset.{key}")
    if not test and dataset["generate"]:
        from recapp.dataset.synthetic import check_directory, writer_arguments

        if not isinstance(dataset["path"], str) or has_magic(dataset["path"]):
            raise ConfigError(
                f"dataset.path={shown(dataset['path'])}: data are generated into one directory; "
                "files of your own are read by dataset=custom dataset.path=..."
            )
        kind, wanted = writer_arguments(dataset["generate"], dataset["table_rows"])
        check_directory(dataset["path"], kind, **wanted)
    plan = (config.get("plan") or {}).get("path")
    if plan is not None and not Path(plan).is_file():
        raise ConfigError(
            f"plan.path={plan}: no such file: `python -m recapp.plan export path=FILE` writes one"
        )


def note_scale(config: Mapping[str, Any]) -> None:
    """Note what `dataset.scale` makes of the data of a run."""
    from recapp.dataset.data_scale import scale_in_words

    if not external_rank() and (words := scale_in_words(config["dataset"])):
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


def check_generated(settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check that the generated data of a checkpoint are there, unless the command line names their
    directory: a checkpoint does not decide where something is written.

    Args:
        settings: Those of a run that loads the checkpoint.
        overrides: Its command line.

    Raises:
        ConfigError: They are not.
    """
    from recapp.dataset.data_scale import scaled

    dataset = settings["dataset"]
    said = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not dataset["generate"] or said & {"dataset", "dataset.path", "experiment"}:
        return
    path = Path(scaled(dataset)["path"])
    if not path.is_dir() or not any(path.iterdir()):
        raise ConfigError(
            f"dataset.path={path}: the generated data of the checkpoint are not there, and nothing "
            "is written at a place that only a checkpoint names: say dataset.path=... to have them "
            "generated"
        )


def check_resumed(settings: Mapping[str, Any]) -> None:
    """Check that training can resume on the files that are there.

    Ranks compare them once more, and say what has changed: this process cannot see the files of
    ranks that were started from outside, nor those that are still to be generated.

    Args:
        settings: Those of a run that resumes from a checkpoint.

    Raises:
        CheckpointError: The checkpoint was saved inside of an epoch, and its files have changed.
    """
    from recapp.dataset.fingerprint import file_facts
    from recapp.dataset.resumed_files import resumed_files
    from recapp.dataset.schema import schema_from
    from recapp.dataset.source import open_source
    from recapp.stored.checkpoint import read_manifest

    dataset = settings["dataset"]
    manifest = read_manifest(settings["ckpt_path"])
    batches = manifest.position["batches"]
    unseen = started_externally() or dataset["generate"] is not None
    if not batches or unseen or settings["resume_data"] == "ignore":
        return
    source = open_source(dataset["path"], schema_from(settings))
    resumed_files(
        manifest.info["position"].get("files"),
        file_facts(source.files),
        batches=batches,
        checkpoint=short_path(manifest.folder),
    )


def match_checkpoint(settings: dict[str, Any], manifest: "Manifest") -> dict[str, Any]:
    """Return settings under which a stored model reads the same ids into tables of the same size.

    Tables that would be sized by the ids of the data set keep the stored sizes. A checkpoint of an
    earlier recapp does not say how it read text ids; it read all of them as hexadecimal, so they
    are read in this way again, which is noted.

    Args:
        settings: Those of a run that loads the model.
        manifest: That of the checkpoint or artefact.

    Raises:
        CheckpointError: Text ids would be read otherwise than they were in training.
    """
    from recapp.dataset.schema import TEXT_HASH, schema_from

    dataset = dict(settings["dataset"])
    settings = {**settings, "dataset": dataset}
    sparse = schema_from(settings).sparse
    stored = manifest.info.get("ids")
    if "ids" not in manifest.info:
        stored = {"text": TEXT_HASH, "hex": list(sparse)}
        dataset["hex"] = dataset.get("hex") or list(sparse)
        if not external_rank():
            note(
                f"{short_path(manifest.folder)} does not say how text ids were read: "
                "it was as hexadecimal, so it is now"
            )
    if stored is not None:
        schema_from(settings).check_id_encoding(stored, str(manifest.folder))
    rows = manifest.numbered_rows
    sized = dataset["table_rows"] or dataset["cardinality"] or dataset["generate"]
    if (
        not sized
        and settings["tables"]["source"] == "from_dataset"
        and all(name in rows for name in sparse)
    ):
        dataset["table_rows"] = [rows[name] for name in sparse]
    return settings
