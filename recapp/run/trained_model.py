"""The ways in which the two kinds of stored models become a model that scores.

    stored model -> trained -> fill       a model of this process, or of ranks without Lightning
                            -> on_ranks   module, strategy and checkpoint for Lightning
    recipe, stored model -> recipe whose schema reads and computes the columns as training did

A checkpoint's rows are read into tables, under any plan, as training does. An artefact's rows are
mapped. No other file asks which kind a stored model is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from recapp import console
from recapp.engine.sharded_collection import sharded_collections, sharded_tables, without_tables
from recapp.errors import CheckpointError, ConfigError
from recapp.inference.compiled import CompiledModel, NotCompiled, load_compiled
from recapp.inference.held_tables import mapped_tables, placed
from recapp.processes.rank_environment import is_first
from recapp.run.model import build_model, load_dense, model_to_shard, raw_rows_of
from recapp.run.recipe import Eval, Recipe, Train
from recapp.stored.manifest import META, CheckpointManifest
from recapp.stored.plain_parts import (
    DERIVED_FILE,
    OF_MODEL,
    check_state,
    dense_state,
    state_must_fit,
)
from recapp.stored.stored_model import (
    Artefact,
    Checkpoint,
    StoredModel,
    load_together,
    open_stored,
)
from recapp.trainer.sharded_checkpoint import StoredTables
from recapp.transport.communicator import Comm, together

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

    assert recipe.ckpt_path is not None
    stored = open_stored(
        recipe.ckpt_path,
        selector=lambda manifest: {*manifest.in_use, *files_of_values(manifest, recipe)},
    )
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
