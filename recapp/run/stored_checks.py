"""Check, before ranks start, what a command does with a stored model. Ranks would find a mistake
some seconds later, or never, if nothing is left to train.

recipe, command line  ->  nothing, or that the model does not fit it     check_fits_checkpoint
recipe                ->  nothing, or that start values do not fit       check_start_values
recipe                ->  nothing, or that files cannot be scored        check_prediction
recipe                ->  the facts that determine the scores            model_of
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import started_externally
from recapp.run.commands import Predict
from recapp.run.recipe import Train
from recapp.settings.check_settings import override_names
from recapp.settings.records import TARGET, leaves, to_plain
from recapp.settings.values import shown
from recapp.tables.collections import named_tables

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recapp.stored.kinds import Kind
    from recapp.stored.manifest import Manifest
    from recapp.tables.config import EmbeddingConfig

AS_BEFORE = "set dataset, tables and model as they were when it was saved"
START_VALUES = (  # of rows and of optimiser state
    "init_range",
    "weight_init_max",
    "weight_init_min",
    "initial_accumulator",
    "initial_accumulator_value",
)
OF_THE_MODEL = (  # settings that change the shape of tables or of the dense part
    "dataset",
    "dataset.cardinality",
    "dataset.dense",
    "dataset.generate",
    "dataset.id_rule",
    "dataset.naming",
    "dataset.sparse",
    "dataset.table_dims",
    "dataset.table_rows",
    "ensemble",
    "experiment",
    "model",
    "tables",
)


def check_fits_checkpoint(recipe: Train, overrides: Sequence[str]) -> None:
    """Check that the tables and the dense part of a stored model match the changed settings.

    Args:
        recipe: The recipe of a run that loads `ckpt_path`.
        overrides: The command line. If it changes no setting of the model, no file is read.

    Raises:
        CheckpointError: A checkpoint's model differs; the error names the first table or parameter.
        ArtefactError: An artefact's model differs.
        ConfigError: The settings make no model.
    """
    named = override_names(overrides)
    if not any(f"{name}.".startswith(f"{each}.") for name in named for each in OF_THE_MODEL):
        return
    from recapp.run.model import build_model
    from recapp.run.model_tables import check_features
    from recapp.run.trained_model import files_of_values, with_columns_of
    from recapp.stored.stored_model import open_stored

    assert recipe.ckpt_path is not None
    check_features(recipe.model_tables.tables, recipe.schema)

    def wanted(manifest: "Manifest") -> list[str]:
        return [manifest.dense_file, *files_of_values(manifest, recipe)]

    with open_stored(recipe.ckpt_path, wanted=wanted) as stored:
        recipe = with_columns_of(recipe, stored)
        members = stored.manifest.config.get("ensemble", 1)
        if members != recipe.ensemble:
            kind = stored.manifest.kind
            raise kind.error(
                f"ensemble={recipe.ensemble}: the {kind.name} has an ensemble of {members}: leave "
                "out the setting, or train anew"
            )
        tables = {table.name: table for table in recipe.all_tables}
        for table in tables.values():
            rows = None if recipe.counts_ids else table.num_embeddings
            _check_table(stored.manifest, table, rows)
        stored.manifest.check_left_out(tables)
        _check_dense(build_model(recipe, on_paper=True), stored.dense(), stored.kind)


def check_start_values(recipe: Train) -> None:
    """Check the files of start values of a run that does not resume, except for values that are not
    finite, which ranks find. If the ranks were started from outside, only the names of tables are
    checked: the files may exist only on the ranks' hosts.

    Raises:
        ConfigError, DataError: There is no such table, or a file does not fit its table.
    """
    values = recipe.tables.values
    if not values:
        return
    named_tables("tables.values", list(values), recipe.all_tables)
    if not started_externally():
        from recapp.stored.start_values import check_values

        check_values(values, recipe.all_tables, recipe.schema, not recipe.counts_ids)


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


def _check_table(manifest: "Manifest", table: "EmbeddingConfig", rows: int | None) -> None:
    """Check that a table has the shape of the stored one.

    Args:
        manifest: The manifest of the stored model.
        table: The table.
        rows: The number of rows; None if it is not known yet.
    """
    from recapp.stored.block_files import by

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
    wanted = (stored.rows if stored.dynamic or rows is None else rows, table.embedding_dim)
    if stored[:2] != wanted:
        raise kind.error(
            f"table {table.name} is {by(stored[:2])} in the {kind.name}, but {by(wanted)} by the "
            f"settings: {AS_BEFORE}"
        )


def _check_dense(model: "nn.Module", stored: Mapping[str, "Tensor"], kind: "Kind") -> None:
    """Check that the dense parameters and buffers of a model have the stored shapes."""
    from recapp.tables.unsharded_collection import UnshardedCollection

    of_tables = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, UnshardedCollection)
    )
    here = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if not name.startswith(of_tables)
    }
    there = {name: tuple(value.shape) for name, value in stored.items()}
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise kind.error(
                f"the model's {name} {_shaped(there.get(name))} in the {kind.name}, but "
                f"{_shaped(here.get(name))} by the settings: {AS_BEFORE}"
            )


def _shaped(shape: tuple[int, ...] | None) -> str:
    return "is not there" if shape is None else f"is {' x '.join(map(str, shape)) or 'a number'}"


# ---- prediction


def model_of(recipe: Predict) -> dict[str, Any]:
    """Return the facts that determine the scores of a model: the checkpoint and the settings of
    arithmetic.
    """
    from recapp.stored.stored_model import read_stored

    assert recipe.ckpt_path is not None
    return {
        **read_stored(recipe.ckpt_path).version_entry,
        "precision": recipe.trainer.precision,
        "payload": recipe.engine.payload,
    }


def check_prediction(recipe: Predict) -> None:
    """Check, before ranks start, for files that every rank would refuse some seconds later.

    These are: files that do not exist, a first file that is no Parquet file or lacks a column, an
    output that exists or cannot be written, parts of other scores. If the ranks were started from
    outside, files are not read: they may exist only on the ranks' hosts.

    Raises:
        ConfigError, DataError: The error that a rank would raise.
    """
    if started_externally():
        return
    from recapp.dataset.data_file import stamp_of
    from recapp.dataset.files import file_names
    from recapp.dataset.prediction_input import SETTING, open_named
    from recapp.dataset.score_parts import ScoreParts, check_output, identity_of

    assert recipe.output is not None and recipe.input is not None
    output = Path(recipe.output)
    names = file_names(recipe.input, setting=SETTING)
    check_output(output, names, overwrite=recipe.overwrite)
    schema = recipe.schema
    transform = recipe.dataset.dense_transform
    open_named(names[:1], recipe, schema, transform)
    files = [(name, stamp_of(name)) for name in names]
    scores = [one.column for one in recipe.built_task.outputs]
    identity = identity_of(model_of(recipe), files, recipe, schema, transform, scores)
    ScoreParts(output, identity, overwrite=recipe.overwrite).check()
