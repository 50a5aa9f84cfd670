"""Load a trained model for scoring: a checkpoint or an artefact becomes a `Scorer`, in one process.

    path -> open_stored -> recipe, trusted -> model on the meta device -> filled -> Scorer

All settings come from the stored model, as in `recapp.eval`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recapp.cli.stored_recipe import recipe_of_stored
from recapp.data_parallel import own_device, process_group_of, tables_group
from recapp.dataset.collate import RawRows, RawTable
from recapp.errors import ConfigError
from recapp.inference.scorer import Scorer
from recapp.run.model import check_outputs, meta_model, raw_rows_of
from recapp.run.recipe import Train
from recapp.run.trained_model import TrainedArtefact, trained, with_columns_of
from recapp.stored.stored_model import StoredModel, open_stored
from recapp.tasks.task import Task
from recapp.transport.communicator import Comm, together
from recapp.transport.join_ranks import make_comm

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

    A task of several outputs gives a mapping of each output, or column of scores, to its tensor.

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
            the outputs of its attribute `task` (a `TaskModule` has one), else logits [B]. Its
            `configure_model` is called, if it has one. It is changed in place. None builds the
            model of the stored settings.
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
        raise ConfigError(
            "data=...: needs module=...; the model of the stored settings reads rows by its own "
            "columns: pass module, or leave data out"
        )
    return load_on(comm, path, trust, check_rows, trust_compiled)


def _own_module(
    comm: Comm, path: str | Path, module: nn.Module, data: "ClickData | None"
) -> Scorer:
    """Fill a user's module with the rows and dense part of a checkpoint, and return its scorer."""
    with open_stored(path, comm) as opened:
        stored = trained(opened).fill_own(module, comm)
        schema = None if data is None else data.schema
        if schema is not None:
            schema = schema.with_stored_lists(opened.manifest.info.get("ids"))
            if schema.derived:
                schema = schema.with_values(opened.derived_values(schema.derived))
    raw_rows = None
    if data is not None and schema is not None:
        raw_rows = RawRows(schema, data.settings.dense_transform)
    task = getattr(module, "task", None)
    return _scorer(stored, module, raw_rows, None, task if isinstance(task, Task) else None)


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
    with open_stored(path, comm) as opened:

        def read() -> tuple[Train, nn.Module]:
            recipe = with_columns_of(recipe_of_stored(opened.manifest, trust), opened)
            return recipe, meta_model(opened.manifest, recipe)

        recipe, model = together(comm, read, "could not load the model")
        kind = trained(opened)
        stored = kind.fill(model, comm, check_rows)
        raw_rows = raw_rows_of(recipe)
        example = together(comm, lambda: stored.example(raw_rows), "could not load the model")
        scorer = _scorer(stored, model, raw_rows, example, recipe.built_task)
        if trust_compiled and isinstance(kind, TrainedArtefact):
            compiled = together(comm, lambda: kind.compiled(model), "could not load the model")
            scorer.model = compiled or model
            scorer.info["compiled"] = compiled is not None
        if example is not None:
            check_outputs(stored.manifest, scorer.outputs(scorer.batch(example)))
        return scorer


def _scorer(
    stored: StoredModel,
    model: nn.Module,
    raw_rows: RawRows | None,
    example: RawTable | None,
    task: Task | None,
) -> Scorer:
    return Scorer(
        model,
        raw_rows,
        stored.name,
        f"{stored.manifest.identity:08x}",
        stored.facts(),
        example,
        _expected(stored, task),
        task,
    )


def _expected(stored: StoredModel, task: Task | None) -> dict[str, Tensor] | None:
    """Return the scores of the example by column; None if they are not stored."""
    if task is None:
        return None
    outputs = stored.manifest.example_outputs([one.name for one in task.outputs])
    if outputs is None:
        return None
    return task.scores({name: torch.tensor(values) for name, values in outputs.items()})
