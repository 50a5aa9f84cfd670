"""The check, before ranks are started, that a checkpoint fits the model that a command line has
changed: ranks would find out some seconds later, or, where nothing is left to train, never.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recapp.errors import CheckpointError, suggest
from recapp.recipe.recipe import Train

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recapp.stored.checkpoint_manifest import CheckpointManifest
    from recapp.tables.config import EmbeddingBagConfig

AS_BEFORE = "set dataset, tables and model as they were when it was saved"
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
    "experiment",
    "model",
    "tables",
)


def check_fits_checkpoint(recipe: Train, overrides: Sequence[str]) -> None:
    """Check that the tables and the dense part of a checkpoint are those of the model.

    Args:
        recipe: That of a run that loads `ckpt_path`.
        overrides: Its command line; where it changes no setting of the model nothing is read.

    Raises:
        CheckpointError: They are not; the error names the first table or parameter that differs.
        ConfigError: There is no model of such settings.
    """
    names = (override.lstrip("+~").partition("=")[0] for override in overrides)
    if not any(f"{name}.".startswith(f"{each}.") for name in names for each in OF_THE_MODEL):
        return
    from recapp.recipe.model import build_model
    from recapp.recipe.model_tables import check_features
    from recapp.stored.checkpoint import read_manifest, read_meta
    from recapp.trainer.restored import dense_state

    assert recipe.ckpt_path is not None
    manifest = read_manifest(recipe.ckpt_path)
    check_features(recipe.table_configs, recipe.schema)
    for table in recipe.table_configs:
        _check_table(manifest, table, None if recipe.counts_ids else table.num_embeddings)
    model = build_model(recipe, on_paper=True)
    _check_dense(model, dense_state(read_meta(recipe.ckpt_path)))


def _check_table(
    manifest: "CheckpointManifest", table: "EmbeddingBagConfig", rows: int | None
) -> None:
    """Check that a table is the checkpoint's.

    Args:
        manifest: That of the checkpoint.
        table: The table.
        rows: Its rows; None where they are not known yet.
    """
    held = {
        name: blocks[0].shape
        for (name, tensor), blocks in manifest.tensors.items()
        if tensor == "weight"
    }
    if table.name not in held:
        raise CheckpointError(
            f"the checkpoint has no table {table.name}: {suggest(table.name, held)}; {AS_BEFORE}"
        )
    grew = table.name in manifest.dynamic
    if grew != (table.dynamic is not None):
        kinds = ("grows", "has a fixed number of rows")
        raise CheckpointError(
            f"table {table.name} {kinds[not grew]} in the checkpoint, but {kinds[grew]} by the "
            f"settings: {AS_BEFORE}"
        )
    from recapp.stored.rectangles import by

    stored = held[table.name]
    wanted = (stored[0] if grew or rows is None else rows, table.embedding_dim)
    if stored != wanted:
        raise CheckpointError(
            f"table {table.name} is {by(stored)} in the checkpoint, but {by(wanted)} by the "
            f"settings: {AS_BEFORE}"
        )


def _check_dense(model: "nn.Module", stored: Mapping[str, "Tensor"]) -> None:
    """Check that the parameters and buffers of a model beside its tables are the checkpoint's."""
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
            raise CheckpointError(
                f"the model's {name} {_shaped(there.get(name))} in the checkpoint, but "
                f"{_shaped(here.get(name))} by the settings: {AS_BEFORE}"
            )


def _shaped(shape: tuple[int, ...] | None) -> str:
    return "is not there" if shape is None else f"is {' x '.join(map(str, shape)) or 'a number'}"
