"""The callback that writes the scores of `Trainer.predict` to one Parquet file, in the order of the
input.

    rank 0        compares the parts of an earlier run with this run; lists the complete parts
    every rank    scores parts of its own, and writes each part after its last batch
    rank 0        joins the parts when all ranks are done

The callback writes the scores that `predict_step` of any LightningModule returns: one score for
each row, or one for each row and column if the task has several outputs. The rows come from a
`ClickData` with `scoring`. The callback is not a `BasePredictionWriter` of Lightning, because that
class asks the loader for indices of samples, which a stream does not have, and prints a warning.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from recapp.dataset.data_settings import SCORE
from recapp.dataset.prediction_input import InputBatch, RankInput
from recapp.dataset.score_parts import (
    Measured,
    ScoreParts,
    Scores,
    check_output,
    identity_of,
    note_finished,
)
from recapp.errors import ConfigError
from recapp.planner.choose_modes import from_rank_0
from recapp.processes.lock import locked
from recapp.stored.checkpoint import read_manifest
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.datamodule import ClickData
from recapp.trainer.module import TaskModule


class ScoreWriter(Callback):
    """Writes scores to a Parquet file, and resumes the prediction of an interrupted run.

    After prediction, every rank knows `joined`, the summary of all scores; `rows`, the number of
    rows that this run has scored on all ranks; and `seconds`, the time of this run's prediction.

    Args:
        output: The file.
        overwrite: Whether to replace an existing file of this name, and parts of other scores.
        model: Plain values that identify the model, so that scores of two models are not mixed;
            None takes the identity of the checkpoint that `Trainer.predict` gets.
    """

    def __init__(
        self,
        output: str | Path,
        *,
        overwrite: bool = False,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        self.output = Path(output).absolute()
        self.overwrite = overwrite
        self.model = model
        self.joined: Measured | None = None
        self.rows = 0
        self.seconds = 0.0
        self._since = 0.0
        self._parts: ScoreParts | None = None
        self._scored: list[tuple[InputBatch, Mapping[str, Scores]]] = []
        self._lock = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the data module skip the parts that are complete already.

        Raises:
            ConfigError: The rows do not come from a `ClickData`.
        """
        if stage == "predict":
            _data_of(trainer).find_finished = lambda: self._find_finished(trainer)

    def _find_finished(self, trainer: Trainer) -> list[int]:
        """Return the complete parts, the same on all ranks. It is collective.

        Raises:
            ConfigError: The output may not be written, or parts of other scores exist.
            DataError: The directory of the parts cannot be written.
        """
        input = _data_of(trainer).prediction_input
        files = [(file.path, file.stamp) for file in input.source.files]
        model = model_identity(trainer.ckpt_path) if self.model is None else self.model
        identity = identity_of(
            model,
            files,
            input.settings,
            input.schema,
            input.transform,
            columns_of(trainer.lightning_module),
        )
        parts = ScoreParts(self.output, identity, overwrite=self.overwrite)
        self._parts = parts
        self._scored = []

        def prepare() -> list[int]:
            check_output(self.output, [path for path, _ in files], overwrite=self.overwrite)
            parts.check()
            self._lock.enter_context(locked(parts.folder, "output"))
            parts.prepare()
            finished = parts.finished(input)
            note_finished(finished, input)
            return finished

        return from_rank_0(prepare, trainer.global_rank, trainer.strategy.broadcast)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take the scores of a batch. If the batch is the last one of a part, write the part.

        Raises:
            ConfigError: The module did not return a score for each row and column.
            DataError: The part cannot be written.
        """
        assert self._parts is not None
        columns = self._parts.columns
        named = outputs if isinstance(outputs, Mapping) else {columns[0]: outputs}
        scores = [named.get(column) for column in columns]
        if not all(isinstance(one, Tensor) and one.shape == (batch.rows,) for one in scores):
            of = "" if len(columns) == 1 else f" in a mapping with {', '.join(columns)}"
            raise ConfigError(
                f"{type(pl_module).__name__}.predict_step must return a score for each of the "
                f"{batch.rows} rows, a tensor of shape [{batch.rows}]{of}"
            )
        if not batch.rows:
            return
        input = _data_of(trainer).prediction_input
        arrays = {column: named[column].detach().float().cpu().numpy() for column in columns}
        self._scored.append((batch, arrays))
        number = batch.first_row // input.rows_per_part
        if batch.first_row + batch.rows == input.part(number).stop:
            self._parts.write(number, self._scored)
            self._scored = []

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the parts of all ranks.

        Raises:
            DataError: The output cannot be written.
        """
        assert self._parts is not None
        parts = self._parts
        data = _data_of(trainer)
        trainer.strategy.barrier()  # all parts are written

        def join() -> Measured:
            joined = parts.join(data.prediction_input)
            self._lock.close()
            parts.remove()
            return joined

        self.joined = from_rank_0(join, trainer.global_rank, trainer.strategy.broadcast)
        loader = trainer.predict_dataloaders
        self.rows = loader.rows if isinstance(loader, RankInput) else data.prediction_input.rows
        self.seconds = time.perf_counter() - self._since

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Unlock the directory of the parts, and keep the parts, so that a later run can resume."""
        self._lock.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unlock the directory of the parts."""
        self._lock.close()


def columns_of(module: LightningModule) -> tuple[str, ...]:
    """Return the names of a module's score columns."""
    if not isinstance(module, TaskModule):
        return (SCORE,)
    return tuple(output.column for output in module.task.outputs)


def model_identity(ckpt_path: object) -> dict[str, Any]:
    """Return a value that identifies a checkpoint, and changes with each version of it.

    Raises:
        ConfigError: `Trainer.predict` was given no checkpoint.
    """
    if not ckpt_path:
        raise ConfigError(
            "ScoreWriter: Trainer.predict has no ckpt_path, so a later run could not know whether "
            "parts are of the same model: give ScoreWriter(model={...}) what tells models apart"
        )
    manifest = read_manifest(str(ckpt_path))
    return {"checkpoint": f"{manifest.identity:08x}"}


def _data_of(trainer: Trainer) -> ClickData:
    data = datamodule_of(trainer)
    if not isinstance(data, ClickData):
        raise ConfigError(
            "ScoreWriter: the rows must come from a ClickData with scoring=ScoringSettings(...)"
        )
    return data
