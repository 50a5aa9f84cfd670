"""Load a trained model for scoring: a checkpoint or an artefact becomes a `Scorer`, in one process.

    DIR/manifest.json (trusted settings) -> model on the meta device -> its tables on one rank
    DIR/*.safetensors, meta.pt           -> rows, dense part

All settings come from the checkpoint, as in `recapp.eval`.
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

    A checkpoint of your own LightningModule holds no settings, so pass the module:

        model = recapp.load_model("best.ckpt", module=Clicks())
        logits = model(batch)

    Args:
        path: A checkpoint, or an artefact that `recapp.export` has written.
        device: The device to compute on; None is the CPU.
        trust: Your packages whose classes the settings may name.
        check_rows: Whether to read an artefact's rows to compare their checksums. If not, the files
            are mapped in milliseconds, and rows are read when they are used.
        trust_compiled: Whether to run the compiled dense part, which is machine code in the
            artefact. It is two to three times as fast for small batches.
        env: The ranks that hold the tables: a process group, or an object with an attribute
            `process_group`. Every rank calls this function. Every rank scores a batch of its own,
            which may be empty, whenever the others score one. None is this process alone, without a
            process group.
        module: The trained module, with its tables on the meta device and a forward that returns
            logits [B]. Its `configure_model` is called, if it has one. It is changed in place. None
            builds the model of the stored settings.
        data: The data that the module was trained on: `predict` reads its columns. None scores only
            batches.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged or of a later version, or names a
            constructor that may not be called.
        ArtefactError: The same for an artefact, or its example gets other scores.
        ConfigError: `device` and `env` are both given, though each rank has its own device; a
            module is given for an artefact, which has its own; or `data` is given without a module.
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
    """Fill a user's module with the rows and dense part of a checkpoint, and return its scorer."""
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
    """Load a trained model whose tables the ranks hold together. Every rank calls this.

    Arguments and errors are those of `load_model`.
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
    """Fill the tables and the dense part of a model on all ranks.

    A checkpoint's rows are read and compared with their checksums. An artefact's files are mapped.
    """
    if not isinstance(stored, Artefact):
        return load_weights(stored, placed(model, comm), comm)
    if check_rows:
        together(comm, lambda: 0 if comm.rank else stored.verify())
    placed(model, comm, together(comm, lambda: mapped_tables(stored).make_store))
    together(comm, lambda: load_dense(stored, model))


def _compiled(artefact: Artefact, model: nn.Module) -> CompiledModel | None:
    """Return the model with its compiled dense part; if it cannot run here, print why, return
    None.
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
    """Return the recipe that a stored model was trained with, checked for trust.

    Raises:
        CheckpointError: The settings are damaged, or name a constructor that may not be called.
        ArtefactError: The settings are damaged.
    """
    recipe: Train = recipe_over(manifest.config, "eval", trusting(trust))
    return match_stored(recipe, manifest)


def load_weights(
    checkpoint: Checkpoint, model: nn.Module, comm: Comm, of_model: str = OF_MODEL
) -> None:
    """Fill this rank's rows of tables and the dense part from a checkpoint. Every rank calls this.

    Args:
        checkpoint: The checkpoint, with all files open.
        model: The model that `recapp.inference.placed_model` returned.
        comm: The ranks that hold the model.
        of_model: The prefix of the parameters' names in the checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """
    tables = StoredTables(sharded_tables(model), fitting=False, speaks=False)
    dense = [f"{of_model}{name}" for name, _ in model.named_parameters()]
    held = list(tables.to_fill(checkpoint.manifest))
    meta = fill_together(checkpoint, held, dense, comm)
    tables.filled(checkpoint.manifest)
    check_state(meta, checkpoint.path)
    with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
        model.load_state_dict(dense_state(meta, of_model))
