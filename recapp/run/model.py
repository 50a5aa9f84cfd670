"""The model of a recipe, with its tables on the meta device: of its settings alone, or of a stored
model, for ranks to shard or to be filled on one rank.

Ranks import this file, so it does not import Hydra.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from recapp import console
from recapp.dataset.collate import RawRows
from recapp.engine.sharded_collection import (
    embedding_collections,
    sharded_collections,
    sharded_tables,
    without_tables,
)
from recapp.errors import ArtefactError, CheckpointError, ConfigError, RecappError
from recapp.inference.compiled import CompiledModel, NotCompiled, load_compiled
from recapp.inference.placed_model import mapped_tables, placed
from recapp.models.catalogue import MODELS
from recapp.models.ensemble import Ensemble
from recapp.processes.rank_environment import is_first
from recapp.run.constructors import constructor_of, derived_constructor, make_a
from recapp.run.model_tables import check_collections, check_features
from recapp.run.recipe import Eval, Recipe, Train
from recapp.settings.records import Constructor
from recapp.stored.artefact_files import DERIVED_FILE
from recapp.stored.checkpoint import load_together
from recapp.stored.manifest import Manifest
from recapp.stored.meta_file import OF_MODEL, check_state, dense_state, state_must_fit
from recapp.stored.model_manifests import META, CheckpointManifest
from recapp.stored.stored_model import Artefact, Checkpoint, StoredModel, files_in_use, open_stored
from recapp.tables.collections import embedding_tables
from recapp.tables.named_collections import ModelTables
from recapp.tables.table_settings import TablesOfDataset
from recapp.tables.unsharded_collection import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    UnshardedCollection,
)
from recapp.trainer.sharded_checkpoint import StoredTables
from recapp.transport.communicator import Comm, together


def build_model(recipe: Recipe, *, on_paper: bool = False) -> nn.Module:
    """Return the model, with its tables on the meta device.

    The models of an ensemble have the start values of runs of their own: those of the seeds `seed`,
    `seed + 1` and so on.

    Args:
        recipe: The recipe.
        on_paper: Whether the dense part is on the meta device, too, and tables may read features
            that the data set does not have.

    Raises:
        ConfigError: A table reads a feature that the data set does not have, the model does not
            take the collections of the tables, or `model._target_` makes no module.
    """
    derived_constructor(nn.Module, recipe.model, "model")
    tables = recipe.model_tables
    if not on_paper:
        check_features(tables.tables, recipe.schema)
    check_collections(recipe.model, tables.collections)
    dense = len(recipe.schema.numbers)
    output = recipe.built_task.outputs[0].name if isinstance(recipe, Train) else "logit"

    def build() -> nn.Module:
        members = []
        for number, member_tables in enumerate(recipe.members):
            if number:  # the caller has set the seed of the first
                torch.manual_seed(recipe.seed + number)
            members.append(_model(recipe.model, member_tables, dense, recipe.seed + number))
        return Ensemble(members, output) if len(members) > 1 else members[0]

    if on_paper:
        with torch.device("meta"):
            return build()
    return build()


def _model(settings: Constructor, tables: ModelTables, dense: int, seed: int) -> nn.Module:
    """Return a model. Collections that read the same table share its rows."""
    collections: dict[str, UnshardedCollection] = {}
    first: dict[str, UnshardedCollection] = {}
    for name, collection_tables in tables.collections.items():
        kind = EmbeddingBagCollection if collection_tables.pools else EmbeddingCollection
        collection = kind(
            collection_tables.tables,
            device=torch.device("meta"),
            seed=seed,
            lookups=collection_tables.lookups,
        )
        collections[name] = collection
        for table in collection_tables.tables:
            collection.share(table.name, first.setdefault(table.name, collection))
    return make_a(nn.Module, settings, "model", **collections, dense_in_features=dense)


def check_model(recipe: Recipe) -> None:
    """Make the model on paper. Check only its arguments and collections if its constructor may not
    run there: a user's own, or one whose widths follow from ids that are counted later.

    Raises:
        ConfigError: The model cannot be made.
    """
    tables = recipe.tables
    is_open = (
        isinstance(tables, TablesOfDataset) and tables.dim_rule is not None and recipe.counts_ids
    )
    if recipe.model.target in MODELS and not is_open:
        build_model(recipe, on_paper=True)
        return
    derived_constructor(nn.Module, recipe.model, "model")
    collections = recipe.model_tables.collections
    check_collections(recipe.model, collections)
    constructor_of(recipe.model, "model", [*collections, "dense_in_features"])


TOLERANCE = 1e-4
"""The largest allowed difference between an output of the example and the exported one, relative to
the larger of 1 and its size. Other machines add numbers in another order.
"""


def meta_model(manifest: Manifest, recipe: Recipe) -> nn.Module:
    """Return the model of a stored model, with tables on the meta device and in the stored data
    types.

    Raises:
        ArtefactError: The settings and the files describe different tables.
    """
    model = build_model(recipe)
    manifest.check_tables(embedding_tables(model))
    if manifest.data_types:
        for collection in dict.fromkeys(c for _, c in embedding_collections(model)):
            collection.store_as(manifest.data_types)
    return model


def load_dense(artefact: Artefact, model: nn.Module) -> None:
    """Fill the dense part of a model. Its tables are sharded or still on the meta device.

    Raises:
        ArtefactError: The dense part does not fit the model.
    """
    parameters = model.named_parameters(remove_duplicate=False)  # collections may share a table
    tables = {name for name, p in parameters if p.device.type == "meta"}
    state = artefact.dense()
    try:
        with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
            missing, unknown = model.load_state_dict(state, strict=False)
    except RecappError as error:
        raise artefact.manifest.damaged(str(error)) from error
    if odd := [*(set(missing) - tables), *unknown]:
        raise artefact.manifest.damaged(f"the dense part differs from its settings in {odd[0]}")


def model_to_shard(artefact: Artefact, recipe: Recipe) -> nn.Module:
    """Return the model with a filled dense part, and with tables on the meta device for ranks to
    shard.

    Raises:
        ArtefactError: The settings and the files do not fit together.
    """
    model = meta_model(artefact.manifest, recipe)
    load_dense(artefact, model)
    return model


def raw_rows_of(recipe: Recipe) -> RawRows:
    """Return a reader of raw rows that reads them as the run read its data set."""
    return RawRows(recipe.schema, recipe.dataset.dense_transform)


def check_outputs(manifest: Manifest, outputs: Mapping[str, Tensor]) -> None:
    """Compare the outputs of the example with the stored ones, if any.

    Args:
        manifest: The manifest.
        outputs: The outputs of the task by name, each [N].

    Raises:
        ArtefactError: The outputs differ by more than `TOLERANCE`.
    """
    stored = manifest.example_outputs(list(outputs))
    for name, values in {} if stored is None else stored.items():
        expected = torch.tensor(values, dtype=torch.float64)
        actual = outputs[name].double().cpu()
        if actual.shape != expected.shape:
            raise manifest.damaged(
                f"its example has {len(actual)} rows, and {len(expected)} scores"
            )
        apart = (actual - expected).abs() / expected.abs().clamp(min=1)
        if not bool((apart <= TOLERANCE).all()):
            worst = int(apart.nan_to_num(math.inf).argmax())
            raise ArtefactError(
                f"artefact {manifest.folder} scores its example otherwise than it was exported: "
                f"row {worst} has the {name} {float(actual[worst]):.6f}, must be "
                f"{float(expected[worst]):.6f}: its files do not belong together; export it again"
            )


if TYPE_CHECKING:  # scoring without ranks does without Lightning
    from recapp.run.training import RankModel


@dataclass(frozen=True)
class TrainedCheckpoint:
    """An open checkpoint that becomes a model that scores. Every rank calls its methods."""

    stored: Checkpoint

    def fill(self, model: nn.Module, comm: Comm, check_rows: bool) -> Checkpoint:
        """Read this rank's rows and the dense part.

        Args:
            model: The result of `recapp.run.model.meta_model`.
            comm: The ranks that hold the tables.
            check_rows: Whether to compare the checksums of mapped rows; rows that are read are
                always compared.

        Returns:
            The version that fills the model: a later one if a save has replaced the checkpoint
            since it was opened.

        Raises:
            CheckpointError: A file is damaged, or the model does not fit.
        """
        filled = self._fill(placed(model, comm), comm, OF_MODEL)
        if filled.manifest.config != self.stored.manifest.config:
            raise CheckpointError(
                f"checkpoint {filled.path} was replaced by one with other settings while it was "
                "loaded: load it again"
            )
        return filled

    def compiled(self, model: nn.Module) -> None:
        """Return None: a checkpoint has no compiled dense part."""

    def fill_own(self, module: nn.Module, comm: Comm) -> Checkpoint:
        """Read this rank's rows and the dense part into a user's module.

        Raises:
            CheckpointError: A file is damaged, or the module does not fit.
        """
        configure = getattr(module, "configure_model", None)
        if configure is not None:
            configure()
        return self._fill(placed(module, comm), comm, "")

    def _fill(self, model: nn.Module, comm: Comm, of_model: str) -> Checkpoint:
        """Fill a placed model; `of_model` is the prefix of the parameters' stored names."""
        tables = StoredTables(sharded_tables(model), fitting=False, speaks=False)
        dense = [f"{of_model}{name}" for name, _ in model.named_parameters()]
        filled, meta = load_together(self.stored.path, tables.to_fill, dense, comm)
        tables.filled(filled.manifest)
        check_state(meta, filled.path)
        with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
            model.load_state_dict(dense_state(meta, of_model))
        return filled

    def on_ranks(self, recipe: Train) -> "RankModel":
        """Return the module, and a strategy that restores it from the checkpoint.

        Args:
            recipe: The recipe of the command that scores; its `ckpt_path` is this model.
        """
        from recapp.run.training import RankModel, build_module, build_strategy

        # the modes of training belong to its number of ranks, and so do the scores of validation
        manifest = self.stored.manifest if isinstance(recipe, Eval) else None
        strategy = build_strategy(recipe, training=False, resumed=manifest)
        module = build_module(recipe, partial(build_model, recipe))
        return RankModel(module, strategy, str(self.stored.path))


@dataclass(frozen=True)
class TrainedArtefact:
    """An open artefact that becomes a model that scores. Its methods are those of
    `TrainedCheckpoint`.
    """

    stored: Artefact

    def fill(self, model: nn.Module, comm: Comm, check_rows: bool) -> Artefact:
        """Map the rows, and read the dense part.

        Raises:
            ArtefactError: A file is damaged, or the files do not belong together.
        """
        stored = self.stored
        failed = "could not load the model"
        if check_rows:
            together(comm, lambda: 0 if comm.rank else stored.verify(), failed)
        placed(model, comm, together(comm, lambda: mapped_tables(stored).make_store, failed))
        together(comm, lambda: load_dense(stored, model), failed)
        return stored

    def compiled(self, model: nn.Module) -> CompiledModel | None:
        """Return the filled model with its compiled dense part; if it cannot run here, print why,
        return None.
        """
        why = "it was exported without one"
        if self.stored.manifest.info.get("compiled") is not None:
            try:
                if next(model.parameters()).device.type != "cpu":
                    raise NotCompiled("it runs only on the CPU")
                entry = self.stored.manifest.entry("compiled", dict)
                return load_compiled(self.stored, entry, model)
            except NotCompiled as error:
                why = str(error)
        console.note(
            f"trust_compiled=true: {console.short_path(self.stored.path)} runs its portable dense "
            f"part instead of a compiled one: {why}"
        )
        return None

    def fill_own(self, module: nn.Module, comm: Comm) -> Artefact:
        """Refuse a user's module.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"module=...: {self.stored.path} is an artefact, which has its own: leave module out"
        )

    def on_ranks(self, recipe: Train) -> "RankModel":
        """Return the module with a filled dense part, and a strategy that maps the rows."""
        from recapp.run.training import CheckExample, RankModel, build_module, build_strategy

        stored = self.stored
        if is_first():
            stored.verify()
        make_store = mapped_tables(stored).make_store
        strategy = build_strategy(recipe, training=False, make_store=make_store)
        module = build_module(recipe, lambda: model_to_shard(stored, recipe))
        raw_rows = raw_rows_of(recipe)
        example = raw_rows.batch(stored.example(raw_rows))
        check = CheckExample(stored.manifest, example)
        return RankModel(module, strategy, None, (check,))


def trained(stored: StoredModel) -> TrainedCheckpoint | TrainedArtefact:
    """Return an open stored model as one that becomes a model that scores."""
    return TrainedArtefact(stored) if isinstance(stored, Artefact) else TrainedCheckpoint(stored)


T = TypeVar("T", bound=Train)
R = TypeVar("R", bound=Recipe)


def open_trained(recipe: T) -> "tuple[T, TrainedCheckpoint | TrainedArtefact]":
    """Open the stored model `ckpt_path` of a run that scores. Return the recipe with its columns,
    and the model, which is handed down: a rank opens it once.

    Raises:
        CheckpointError: The model does not exist, or is damaged.
        ArtefactError: The same for an artefact.
    """

    def needed_files(manifest: Any) -> set[str]:
        return {*files_in_use(manifest), *files_of_values(manifest, recipe)}

    assert recipe.ckpt_path is not None
    stored = open_stored(recipe.ckpt_path, selector=needed_files)
    return with_columns_of(recipe, stored), trained(stored)


def with_columns_of(recipe: R, stored: StoredModel) -> R:
    """Return a recipe with the columns of an open stored model."""
    recipe = replace(recipe, stored_ids=stored.manifest.info.get("ids"))
    if not recipe.schema.derived:
        return recipe
    return recipe.sized(None, stored.derived_values(recipe.schema.derived))


def files_of_values(manifest: Any, recipe: Recipe) -> Iterable[str]:
    """Select the files that hold the fitted values of a recipe's derived columns, if it has any."""
    if not recipe.schema.derived:
        return []
    return [META] if isinstance(manifest, CheckpointManifest) else [DERIVED_FILE]
