"""The callback that writes the scores of `Trainer.predict` to one Parquet file, in the order of the
input.

    rank 0        checks the output, and locks the directory of the parts
    every rank    appends its scores to a part of its own
    rank 0        joins the parts when all ranks are done

The callback writes the scores that `predict_step` of any LightningModule returns: one score for
each row, or one for each row and column if the task has several outputs. The rows come from a
`ClickData` with `scoring`. The callback is not a `BasePredictionWriter` of Lightning, because that
class asks the loader for indices of samples, which a stream does not have, and prints a warning.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from recapp.console import progress
from recapp.dataset.data_settings import SCORE
from recapp.dataset.scoring import Measured, RankInput, ScoreFile, check_output
from recapp.errors import ConfigError
from recapp.planner.choose_modes import from_rank_0
from recapp.processes.rank_environment import locked
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.datamodule import ClickData
from recapp.trainer.module import TaskModule


class ScoreWriter(Callback):
    """Writes scores to a Parquet file, whole or not at all.

    After prediction, every rank knows `joined`, the summary of all scores, and `seconds`, the time
    of the prediction.

    Args:
        output: The file.
        overwrite: Whether to replace an existing file of this name.
        progress: Whether rank 0 shows the number of rows that all ranks have scored: a bar on a
            terminal, elsewhere lines.
    """

    def __init__(
        self,
        output: str | Path,
        *,
        overwrite: bool = False,
        progress: bool = False,
    ) -> None:
        self.output = Path(output).absolute()
        self.overwrite = overwrite
        self.joined: Measured | None = None
        self.seconds = 0.0
        self._since = 0.0
        self._file: ScoreFile | None = None
        self._open = ExitStack()  # the parts, their lock, and the bar
        self._progress = progress
        self._advance: Callable[[int], None] | None = None
        self._done = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the part of each rank, start the clock, and show 0 rows.

        Raises:
            ConfigError: The output may not be written, or the rows do not come from a `ClickData`.
            DataError: The directory of the parts cannot be written.
        """
        data = datamodule_of(trainer)
        if not isinstance(data, ClickData):
            raise ConfigError(
                "ScoreWriter: the rows must come from a ClickData with scoring=ScoringSettings(...)"
            )
        input = data.prediction_input
        outputs = pl_module.task.outputs if isinstance(pl_module, TaskModule) else ()
        columns = tuple(output.column for output in outputs) or (SCORE,)
        scores = self._file = ScoreFile(self.output, input, columns)

        def prepare() -> None:
            inputs = [file.path for file in input.source.files]
            check_output(self.output, inputs, overwrite=self.overwrite)
            self._open.callback(_remove_empty, scores.folder)
            with scores.writing():
                self._open.enter_context(locked(scores.folder, "output"))
                scores.delete_parts()
                self._open.callback(scores.delete_parts)

        from_rank_0(prepare, trainer.global_rank, trainer.strategy.broadcast)
        self._open.callback(scores.abandon)  # before the deletion: open files take room
        scores.open_part(trainer.global_rank)
        self._since = time.perf_counter()
        if self._progress and trainer.is_global_zero and input.rows:
            self._done = 0
            self._advance = self._open.enter_context(progress("rows scored", input.rows))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Append the scores of a batch to this rank's part.

        Raises:
            ConfigError: The module did not return a score for each row and column.
            DataError: The part cannot be written.
        """
        if self._advance is not None:  # every rank has scored as many batches
            rows = cast(RankInput, trainer.predict_dataloaders).rows_after(batch_idx + 1)
            self._advance(rows - self._done)
            self._done = rows
        assert self._file is not None
        columns = self._file.columns
        named = outputs if isinstance(outputs, Mapping) else {columns[0]: outputs}
        scores = [named.get(column) for column in columns]
        if not all(isinstance(one, Tensor) and one.shape == (batch.rows,) for one in scores):
            of = "" if len(columns) == 1 else f" in a mapping with {', '.join(columns)}"
            raise ConfigError(
                f"{type(pl_module).__name__}.predict_step must return a score for each of the "
                f"{batch.rows} rows, a tensor of shape [{batch.rows}]{of}"
            )
        if batch.rows:
            arrays = {column: named[column].detach().float().cpu().numpy() for column in columns}
            self._file.write(batch.kept, arrays)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the parts of all ranks.

        Raises:
            DataError: The output cannot be written.
        """
        assert self._file is not None
        self._file.close_part()
        trainer.strategy.barrier()  # all parts are written
        join = partial(self._file.join, trainer.world_size)
        self.joined = from_rank_0(join, trainer.global_rank, trainer.strategy.broadcast)
        self.seconds = time.perf_counter() - self._since

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._open.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._open.close()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
