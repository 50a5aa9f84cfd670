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

from recapp.app import build
from recapp.app.artefact_model import raw_rows_of
from recapp.app.check_data import match_checkpoint
from recapp.app.compose import compose_over, trusting
from recapp.app.load_artefact import load_artefact
from recapp.dataset.example_rows import table_of
from recapp.dataset.raw_rows import RawRows, RawTable
from recapp.engine.shard_model import sharded_collections, sharded_tables
from recapp.engine.sharded_state import without_tables
from recapp.engine.sharder import own_device, process_group_of, tables_group
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.inference.placed_model import placed, together
from recapp.inference.scorer import Scorer
from recapp.stored.checkpoint import load_together, read_manifest
from recapp.stored.checkpoint_manifest import CheckpointManifest
from recapp.stored.directories import is_artefact
from recapp.trainer.restored import OF_MODEL, check_state, dense_state, state_must_fit
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
    manifest = load_weights(path, placed(module, comm), comm, of_model="")
    raw_rows = None if data is None else RawRows(data.schema, data.settings.dense_transform)
    return _scorer(path, module, raw_rows, manifest)


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
    if is_artefact(path):
        return load_artefact(comm, path, trust, check_rows, trust_compiled)

    def read() -> tuple[dict[str, Any], nn.Module]:
        settings = settings_of(read_manifest(path), trust)
        return settings, build.build_model(settings)

    settings, model = together(comm, read)
    manifest = load_weights(path, placed(model, comm), comm)
    raw_rows = raw_rows_of(settings)
    return _scorer(path, model, raw_rows, manifest, _example_of(manifest, raw_rows))


def _example_of(manifest: CheckpointManifest, raw_rows: RawRows) -> RawTable | None:
    """Return the rows that a checkpoint has kept of its data; None where there are none.

    Raises:
        CheckpointError: They are no rows that its model could read.
    """
    if not (rows := manifest.example):
        return None
    try:
        table = table_of(rows, raw_rows.schema)
        raw_rows.batch(table)
    except (DataError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"checkpoint {manifest.folder}: its example is no row of its data: {error}; use "
            "another checkpoint"
        ) from error
    return table


def _scorer(
    path: str | Path,
    model: nn.Module,
    raw_rows: RawRows | None,
    manifest: CheckpointManifest,
    example: RawTable | None = None,
) -> Scorer:
    return Scorer(
        model,
        raw_rows,
        Path(path).absolute().name.partition(".")[0],
        f"{manifest.identity:08x}",
        {"path": str(Path(path).absolute()), "step": manifest.step, "metrics": manifest.metrics},
        example,
    )


def settings_of(manifest: CheckpointManifest, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings that a checkpoint's model was made with, judged.

    Raises:
        CheckpointError: They are damaged, or name something that may not be called.
    """
    return match_checkpoint(compose_over(manifest.config, "eval", trusting(trust)), manifest)


def load_weights(
    path: str | Path, model: nn.Module, comm: Comm, of_model: str = OF_MODEL
) -> CheckpointManifest:
    """Fill a model from a checkpoint: this rank's rows of tables, and the dense part. Every rank
    calls it.

    Args:
        path: The checkpoint.
        model: As `recapp.inference.placed_model` makes it.
        comm: The ranks that hold it.
        of_model: What stands in front of its parameters' names in the checkpoint.

    Returns:
        The manifest of the version that was read.

    Raises:
        CheckpointError: It is damaged, or of another model.
    """
    tables = StoredTables(sharded_tables(model), fitting=False, speaks=False)
    dense = [f"{of_model}{name}" for name, _ in model.named_parameters()]
    manifest, meta = load_together(path, tables.to_fill, dense, comm)
    tables.filled(manifest)
    check_state(meta, path)
    with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
        model.load_state_dict(dense_state(meta, of_model))
    return manifest
