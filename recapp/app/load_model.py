"""A trained model for whoever wants scores: a checkpoint or an artefact becomes a `Scorer`, in one
process.

    DIR/manifest.json (settings, judged) -> model on the meta device -> its tables on one rank
    DIR/*.safetensors, meta.pt           -> rows, dense part

Settings come from the checkpoint alone, as those of `recapp.eval` do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recapp import console
from recapp.app.artefact_model import check_logits, load_dense, meta_model, raw_rows_of
from recapp.app.compose import recipe_over, trusting
from recapp.app.match_trained import match_stored
from recapp.dataset.raw_rows import RawRows, RawTable
from recapp.engine.shard_model import sharded_collections, sharded_tables
from recapp.engine.sharded_state import without_tables
from recapp.engine.sharder import own_device, process_group_of, tables_group
from recapp.errors import ConfigError
from recapp.inference.compiled import CompiledModel, NotCompiled, load_compiled
from recapp.inference.mapped_rows import mapped_tables
from recapp.inference.placed_model import placed, together
from recapp.inference.scorer import Scorer
from recapp.recipe.recipe import Train
from recapp.stored.checkpoint import fill_together, open_checkpoint
from recapp.stored.directories import is_artefact
from recapp.stored.manifest import Manifest
from recapp.stored.snapshot import Artefact, Checkpoint, every_file
from recapp.stored.stored_model import StoredModel, open_stored
from recapp.stored.training_state import OF_MODEL, check_state, dense_state, state_must_fit
from recapp.trainer.stored_tables import StoredTables
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm

if TYPE_CHECKING:
    from recapp.trainer.datamodule import ClickData  # scoring does without Lightning


def load_model(
    path: str | Path,
    device: torch.device | str | None = None,
    trust: Sequence[str] = (),
    check_rows: bool = True,
    trust_compiled: bool = False,
    env: Any = None,
    *,
    module: nn.Module | None = None,
    data: "ClickData | None" = None,
) -> Scorer:
    """Return a trained model as an ordinary `nn.Module`, ready to score raw rows.

        model = recapp.load_model("best.ckpt")
        scores = model.predict(pyarrow.parquet.read_table("day.parquet"))

    A checkpoint of a LightningModule of your own holds no settings, so give the module:

        model = recapp.load_model("best.ckpt", module=Clicks())
        logits = model(batch)

    Args:
        path: A checkpoint, or an artefact that `recapp.export` has written.
        device: Where it is to compute; None is the CPU.
        trust: Packages of your own whose classes its settings may name.
        check_rows: Whether an artefact's rows are read to compare their checksums; without, its
            files are mapped in milliseconds, and rows are read when they are used.
        trust_compiled: Whether an artefact's dense part may run as the machine code that it brings
            along, which is two to three times as fast in small batches.
        env: The ranks that hold its tables together, a process group or an object that has one as
            `process_group`. Each of them calls this, and scores a batch of its own, maybe of no
            rows, whenever the others do. None is this process alone, which needs no process group.
        module: The module that was trained, whose tables are on the meta device and whose forward
            makes logits [B]; None makes the model of the stored settings. Its `configure_model`
            is called where it has one. It is changed in place.
        data: The data that the module was trained on, whose columns `predict` reads; None where
            only batches are scored.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, of a later version, or names
            something that may not be called.
        ArtefactError: As of a checkpoint, or the artefact's example has other scores.
        ConfigError: A device beside ranks, which have one each; a module for an artefact, which
            has its own, or `data` without a module.
        PlanError: The tables do not fit on the ranks.
    """
    if env is None:
        comm = Comm(device=torch.device(device or "cpu"), alone=True)
    elif device is not None:
        raise ConfigError(
            f"device={device} env=...: a rank computes on its GPU where the process group is NCCL, "
            "else on the CPU: leave device out"
        )
    else:
        ranks = process_group_of(env)
        comm = make_comm(tables_group(ranks), own_device(ranks))
    if module is not None:
        return _own_module(comm, path, module, data)
    if data is not None:
        raise ConfigError("data=...: a stored model reads rows by its settings: give module=, too")
    return load_on(comm, path, trust, check_rows, trust_compiled)


def _own_module(
    comm: Comm, path: str | Path, module: nn.Module, data: "ClickData | None"
) -> Scorer:
    """Return somebody's module with the rows and dense part of a checkpoint."""
    if is_artefact(path):
        raise ConfigError(f"module=...: {path} is an artefact, which has its own: leave module out")
    configure = getattr(module, "configure_model", None)
    if configure is not None:
        configure()
    with open_checkpoint(path, every_file, comm) as stored:
        load_weights(stored, placed(module, comm), comm, of_model="")
        raw_rows = None if data is None else RawRows(data.schema, data.settings.dense_transform)
        return _scorer(stored, module, raw_rows, None)


def load_on(
    comm: Comm,
    path: str | Path,
    trust: Sequence[str] = (),
    check_rows: bool = True,
    trust_compiled: bool = False,
) -> Scorer:
    """Return a trained model whose tables some ranks hold, each of which calls this; arguments and
    errors are those of `load_model`.
    """
    with open_stored(path, comm) as stored:

        def read() -> tuple[Train, nn.Module]:
            recipe = recipe_of_stored(stored.manifest, trust)
            recipe.built_task.check_one_logit()
            return recipe, meta_model(stored.manifest, recipe)

        recipe, model = together(comm, read)
        _place(stored, model, comm, check_rows)
        raw_rows = raw_rows_of(recipe)
        example = together(comm, lambda: stored.example(raw_rows))
        scorer = _scorer(stored, model, raw_rows, example)
        if trust_compiled and isinstance(stored, Artefact):
            compiled = together(comm, lambda: _compiled(stored, model))
            scorer.model = compiled or model
            scorer.info["compiled"] = compiled is not None
        if example is not None:
            check_logits(stored.manifest, scorer(scorer.batch(example)))
        return scorer


def _place(stored: StoredModel, model: nn.Module, comm: Comm, check_rows: bool) -> None:
    """Give ranks the rows of a model's tables and its dense part: read from a checkpoint, which is
    compared with its checksums meanwhile, or mapped of an artefact.
    """
    if not isinstance(stored, Artefact):
        return load_weights(stored, placed(model, comm), comm)
    if check_rows:
        together(comm, lambda: 0 if comm.rank else stored.verify())
    placed(model, comm, together(comm, lambda: mapped_tables(stored).make_store))
    together(comm, lambda: load_dense(stored, model))


def _compiled(artefact: Artefact, model: nn.Module) -> CompiledModel | None:
    """Return the model with its compiled dense part; None where that cannot run here, which is
    noted.
    """
    why = "it was exported without one"
    if artefact.manifest.info.get("compiled") is not None:
        try:
            if next(model.parameters()).device.type != "cpu":
                raise NotCompiled("it is code for the CPU")
            return load_compiled(artefact, artefact.manifest.entry("compiled", dict), model)
        except NotCompiled as error:
            why = str(error)
    console.note(
        f"trust_compiled=true: {console.short_path(artefact.path)} runs without its compiled "
        f"dense part, by the portable one: {why}"
    )
    return None


def _scorer(
    stored: StoredModel, model: nn.Module, raw_rows: RawRows | None, example: RawTable | None
) -> Scorer:
    logits = stored.manifest.logits
    return Scorer(
        model,
        raw_rows,
        stored.name,
        f"{stored.manifest.identity:08x}",
        stored.facts(),
        example,
        None if logits is None else torch.sigmoid(torch.tensor(logits)),
    )


def recipe_of_stored(manifest: Manifest, trust: Sequence[str] = ()) -> Train:
    """Return the recipe that a stored model was made with, judged.

    Raises:
        CheckpointError: They are damaged, or name something that may not be called.
        ArtefactError: They are damaged.
    """
    recipe: Train = recipe_over(manifest.config, "eval", trusting(trust))
    return match_stored(recipe, manifest)


def load_weights(
    checkpoint: Checkpoint, model: nn.Module, comm: Comm, of_model: str = OF_MODEL
) -> None:
    """Fill a model from a checkpoint: this rank's rows of tables, and the dense part. Every rank
    calls it.

    Args:
        checkpoint: The checkpoint, with all its files open.
        model: As `recapp.inference.placed_model` makes it.
        comm: The ranks that hold it.
        of_model: What stands in front of its parameters' names in the checkpoint.

    Raises:
        CheckpointError: It is damaged, or of another model.
    """
    tables = StoredTables(sharded_tables(model), fitting=False, speaks=False)
    dense = [f"{of_model}{name}" for name, _ in model.named_parameters()]
    held = list(tables.to_fill(checkpoint.manifest))
    meta = fill_together(checkpoint, held, dense, comm)
    tables.filled(checkpoint.manifest)
    check_state(meta, checkpoint.path)
    with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
        model.load_state_dict(dense_state(meta, of_model))
