"""The LightningDataModule: it opens the rows of a run, and keeps the position of training in them;
and the callback that writes the scores of the rows of a prediction.

Lightning counts batches but skips no data on resume, and it fetches batches before they are
trained. So this module keeps the position itself, as (epoch, batches trained in the epoch). A
callback updates the position after each step; the train loader reads it at its first `next()`, when
Lightning has settled the epoch. The position is the same on all ranks, and is valid for any number
of ranks and threads.

A checkpoint stores a position together with the list of its files. Files that were added after the
checkpoint do not belong to the resumed epoch: this epoch reads the stored files alone, and
Lightning asks for new loaders at the next epoch.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from recapp.console import note, progress, short_path
from recapp.dataset.click_rows import (
    ClickRows,
    open_rows,
    place_of,
    rows_of,
    rows_read,
)
from recapp.dataset.data_file import (
    FileFacts,
    Fingerprint,
    ResumeData,
    conversions_of,
    file_facts,
    resumed_files,
)
from recapp.dataset.data_settings import SCORE, SETTINGS, DataSettings, ScoringSettings
from recapp.dataset.schema import Schema
from recapp.dataset.scoring import (
    Measured,
    PredictionInput,
    RankInput,
    ScoreFile,
    check_output,
    open_input,
)
from recapp.dataset.sequential_rows import (
    example_rows,
    frequent_values,
    plain_rows,
    remarks,
    table_rows,
)
from recapp.dataset.source import Source
from recapp.dataset.storage import located
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError
from recapp.planner.choose_modes import from_rank_0
from recapp.processes.rank_environment import cores_of_rank, locked
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.plain_parts import values_in
from recapp.stored.stored_model import read_meta
from recapp.tables.config import EmbeddingConfig, TableLookup
from recapp.tables.ids import LongBag, OutsideTable
from recapp.tables.statistics import TableStatistics
from recapp.trainer.data_protocols import Position, datamodule_of
from recapp.trainer.module import TaskModule

T = TypeVar("T")
EXAMPLE_ROWS = 4  # rows that a checkpoint keeps
MOST_THREADS = 6  # that decode ahead: as many as a fast GPU needs
# Names of the rows of each split, for errors.
ROWS_OF = {
    "train": "training rows",
    "val": "dataset.val_path",
    "test": "dataset.test_path",
    "input": "input",
}


def reading_threads(settings: DataSettings) -> int:
    """Return the number of threads of this rank that decode ahead."""
    if settings.num_threads is not None:
        return settings.num_threads
    return min(cores_of_rank() // 2, MOST_THREADS)


@dataclass
class EpochLoader:
    """The loader of a training epoch. It starts at the position of training.

    Its length is the length of the full epoch, because Lightning continues its count after a
    resume.

    Args:
        stream: The batches; `__iter__` sets its position.
        position: The position of training.
        current_epoch: Returns Lightning's current epoch.
        order: The epoch whose order the rows have; None takes Lightning's.
    """

    stream: BatchStream
    position: Position
    current_epoch: Callable[[], int]
    order: int | None = None

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.current_epoch()
        start = self.position.batches if self.position.epoch == epoch else 0
        self.stream.set_position(epoch if self.order is None else self.order, start)
        yield from self.stream


class ClickData(LightningDataModule):
    """The data module that streams Parquet click logs to this rank.

    Args:
        settings: The rows and their order.
        schema: The columns.
        seed: The seed of the order.
        prepare: Writes generated data; called once per host before any rank reads.
        set_table_rows: Called with the number of rows that the hashed table of each sparse feature
            should have, the same on all ranks, once they are counted before training
            (`recapp/dataset/sequential_rows.py`); None if the sizes are known.
        max_table_rows: The largest number of rows of such a table. None if tables grow; the counted
            number is then the number of rows expected.
        scoring: The rows that `Trainer.predict` scores; None for no prediction.
        resume_data: The action if training resumes inside an epoch and its training files differ
            from the files of the checkpoint: "check" raises an error, "ignore" goes on with a note.
        number_rows: Whether batches of validation and test rows have the numbers of their rows,
            which a bootstrap needs.

    Raises:
        ConfigError: `resume_data` is neither "check" nor "ignore".
    """

    trainer: Trainer  # None before Lightning sets it
    prediction_input: PredictionInput  # the rows to score; known after `setup("predict")`

    def __init__(
        self,
        settings: DataSettings,
        schema: Schema,
        seed: int = 1,
        prepare: Callable[[], None] | None = None,
        *,
        set_table_rows: Callable[[list[int]], object] | None = None,
        max_table_rows: int | None = None,
        scoring: ScoringSettings | None = None,
        resume_data: ResumeData = "check",
        number_rows: bool = False,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.batch_size = settings.batch_size  # over all ranks
        self.schema = schema
        self._initial_schema = schema
        self.seed = seed
        self._prepare = prepare
        self._take_table_rows = set_table_rows
        # The number of rows that each table should have; None before the count.
        self.table_rows: list[int] | None = None
        self._max_table_rows = max_table_rows
        self.position = Position()
        self._opened: ClickRows | None = None
        self._facts: Sequence[FileFacts] | None = None
        self._read: dict[str, Any] | None = None
        self._example: list[dict[str, Any]] = []
        self._resume_data: ResumeData = resume_data
        self._number_rows = number_rows
        self._resumed_rows: ClickRows | None = None
        self._resumed_epoch = -1
        self._scoring = scoring

    @override
    def prepare_data(self) -> None:
        predicting = self.trainer is not None and self.trainer.predicting
        if self._prepare is not None and not predicting:
            self._prepare()

    def setup(self, stage: str) -> None:
        """Read the footers of the files, split training from validation rows, and count table rows
        if `set_table_rows` asks for it.

        A prediction needs only the rows to score.

        Args:
            stage: Lightning's "fit", "validate", "test" or "predict".

        Raises:
            ConfigError: The rows have no labels, so they can only be scored; or `scoring` does not
                name the rows to score.
        """
        noted = self.trainer is None or self.trainer.is_global_zero
        if stage == "predict":
            if self._scoring is None:
                raise ConfigError(
                    "ClickData does not know which rows to score: give it "
                    "scoring=ScoringSettings(input=...)"
                )
            self._open_input(self._scoring)
            for remark in remarks(self.prediction_input.source, self.schema) if noted else ():
                note(remark)
            return
        if self._opened is None:
            opened = open_rows(self.settings, self.schema, self.seed, trains=stage == "fit")
            self.schema = opened.schema
            if stage == "fit" and self.schema.fits:  # no checkpoint has given their values
                values = self._on_rank_0(lambda: opened.fitted().schema.values)
                self.schema = self.schema.with_values(values)
            self._opened = replace(opened, schema=self.schema)
            self.conversions = conversions_of(opened.train.files) if stage == "fit" else []
        if self._facts is None and stage == "fit":
            self._facts = file_facts(self._opened.train.files)
            if noted:
                for remark in remarks(self._opened.train, self.schema):
                    note(remark)
                source = self._opened.val if self._opened.val.rows else self._opened.train
                rows = min(EXAMPLE_ROWS, source.rows)
                self._example = plain_rows(example_rows(source, self.schema, rows)) if rows else []
        if self._take_table_rows is not None and stage == "fit":
            self.table_rows = self._on_rank_0(
                partial(table_rows, self._rows.train, self.schema, self._max_table_rows)
            )
            self._take_table_rows(self.table_rows)

    def _open_input(self, scoring: ScoringSettings) -> None:
        self.prediction_input = open_input(scoring, self.schema, self.settings.dense_transform)

    def _check_fitted(self) -> None:
        if self.schema.fits:
            raise ConfigError(f"{SETTINGS} belong to a trained model: name it, ckpt_path=...")

    def _on_rank_0(self, make: Callable[[], T]) -> T:
        return (
            make()
            if self.trainer is None
            else from_rank_0(make, self.trainer.global_rank, self.trainer.strategy.broadcast)
        )

    @property
    def _rows(self) -> ClickRows:
        return self._rows_of(self.trainer.current_epoch if self.trainer is not None else 0)

    def _rows_of(self, epoch: int) -> ClickRows:
        rows = self._resumed_rows if epoch == self._resumed_epoch else self._opened
        assert rows is not None
        return rows

    @property
    def _rank(self) -> tuple[int, int]:
        return self.trainer.global_rank, self.trainer.world_size

    def example(self) -> list[dict[str, Any]]:
        """Return the first validation rows as plain values, or the first training rows if there is
        no validation. Return no rows on ranks other than 0, and before `setup("fit")`.
        """
        return self._example

    def id_encoding(self) -> dict[str, Any]:
        """Return the rules that turn text into ids, for a checkpoint."""
        return self.schema.id_encoding()

    def check_ids(self, checkpoint: str | Path, info: Mapping[str, Any]) -> None:
        """Check that a checkpoint was trained with the same rules from text to ids. Read rows as
        its training did, where the given schema does not say how: take over the features with bags
        and the fitted values of derived columns.

        Lightning names a checkpoint after `setup`, so rows that are open are opened again.

        Args:
            checkpoint: The checkpoint.
            info: The entries of its manifest.

        Raises:
            CheckpointError: The text of a column became other ids in the checkpoint.
        """
        ids = info.get("ids")
        if ids is not None:
            self.schema.check_id_encoding(ids, str(checkpoint))
        schema = self._initial_schema
        if schema.lists is None:
            schema = schema.with_stored_lists(ids)
        if schema.fits:
            values = values_in(read_meta(checkpoint), schema.derived, checkpoint)
            schema = schema.with_values(values)
        if schema is self._initial_schema:
            return
        self.schema = schema
        if self._opened is not None:
            opened = open_rows(self.settings, schema, self.seed, trains=self._facts is not None)
            self._opened = opened
            self.schema = opened.schema
        if hasattr(self, "prediction_input") and self._scoring is not None:
            self._open_input(self._scoring)

    @property
    def rows(self) -> tuple[int, int]:
        """Return the number of training rows and the number of validation rows; known after
        `setup`.
        """
        return self._rows.train.rows, self._rows.val.rows

    def rows_read(self) -> dict[str, Any]:
        """Return what training reads (`recapp/dataset/click_rows.py`). Known after `setup`; rank 0
        asks before the first step, and files may change later.
        """
        if self._read is None:
            self._read = rows_of(self.settings, self._rows, ("train", "val"))
        return self._read

    def rows_measured(self, split: str) -> dict[str, Any]:
        """Return what an evaluation or a prediction reads.

        Args:
            split: `val`, `test` or `input`.
        """
        if split != "input":
            return rows_of(self.settings, self._rows, [split])
        assert self._scoring is not None
        source = {split: self.prediction_input.source}
        return rows_read(source, self.schema.unlabelled(), {split: self._scoring.input})

    @override
    def train_dataloader(self) -> EpochLoader:
        stream = self._prepared(self._rows.training_stream(*self._rank))
        return EpochLoader(stream, self.position, lambda: self.trainer.current_epoch)

    def steps_of_run(self) -> int | None:
        """Return the number of steps after which the run ends if nothing stops it earlier; None if
        it has no end. Known after `setup`.
        """
        trainer = self.trainer
        epochs = trainer.max_epochs
        steps = trainer.max_steps if trainer.max_steps >= 0 else None
        if epochs is None or epochs < 0:
            return steps
        batches = len(self._rows.training_stream(*self._rank))
        limit = trainer.limit_train_batches
        batches = (
            min(batches, limit) if isinstance(limit, int) else int(batches * float(limit or 1))
        )
        total = epochs * math.ceil(batches / trainer.accumulate_grad_batches)
        return total if steps is None else min(total, steps)

    def sample(self, batches: int) -> list[Batch]:
        """Return this rank's first training batches of the first epoch, at any position.

        The bytes that these batches exchange decide the modes of tables.

        Args:
            batches: The number of batches.
        """
        stream = self._rows.training_stream(*self._rank)
        stream.set_position(0, 0)
        return list(islice(stream, batches))

    def statistics(
        self,
        tables: Sequence[EmbeddingConfig],
        lookups: Sequence[TableLookup] | None = None,
    ) -> dict[str, TableStatistics]:
        """Return id statistics by table, counted on the first training rows of the first epoch.

        The statistics do not depend on the rank or the number of ranks (`ClickRows.statistics`).

        Args:
            tables: The tables whose ids are counted.
            lookups: The lookups of these tables; None takes the lookups that the tables declare.
        """
        if self.trainer is not None:
            # raises an error for an impossible order before the run writes a file
            self._rows.training_stream(*self._rank)
        return self._rows.statistics(tables, lookups)

    def val_dataloader(self) -> BatchStream:
        """Return every validation row once, in file order. A rank that has no rows
        left gets empty batches.
        """
        return self._measured(self._rows.val)

    def test_dataloader(self) -> BatchStream:
        """Return every test row once.

        Raises:
            ConfigError: `dataset.test_path` is not set.
        """
        return self._measured(self._rows.test())

    def frequent_values(self, column: str, most: int, *, test: bool) -> list[tuple[str, int]]:
        """Return text and id of the most frequent values of a sparse column in the validation
        rows, or in the test rows.

        Args:
            column: The sparse column.
            most: The largest number of values.
            test: Whether to count the test rows.
        """
        source = self._rows.test() if test else self._rows.val
        return frequent_values(source, self.schema, column, most)

    def _measured(self, source: Source) -> BatchStream:
        self._check_fitted()
        return self._prepared(self._rows.stream(source, *self._rank, numbered=self._number_rows))

    def _prepared(self, stream: BatchStream) -> BatchStream:
        """Return a stream as it is read here: threads read ahead, a batch goes to a GPU in one
        copy, and half the bytes of its ids, if they may.
        """
        stream.for_gpu = stream.narrows = self.trainer.strategy.root_device.type == "cuda"
        stream.num_threads = reading_threads(self.settings)
        return stream

    @override
    def predict_dataloader(self) -> RankInput:
        self._check_fitted()
        return RankInput(self.prediction_input, *self._rank)

    def on_exception(self, exception: BaseException) -> None:
        """Name the row of an id that is outside of its table, or of a bag that is too long."""
        if isinstance(exception, OutsideTable | LongBag) and self.trainer is not None:
            trainer = self.trainer
            split = (
                "val"
                if trainer.validating or trainer.sanity_checking
                else "test"
                if trainer.testing
                else "input"
                if trainer.predicting
                else "train"
            )
            source = self.prediction_input.source if split == "input" else self._rows.of(split)
            asked = (
                {"length": exception.length}
                if isinstance(exception, LongBag)
                else {"number": exception.number}
            )
            place = place_of(source, self.schema, exception.feature, **asked)
            if place:
                apart = split != "val" or self.settings.val_path is not None
                rows = ROWS_OF[split] if apart else "validation rows"
                exception.args = exception.at(f" in {place} ({rows})").args

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the batch size of its batches, and the fingerprint of the training
        files of its epoch (`recapp/dataset/data_file.py`).
        """
        files = self._rows_of(self.position.epoch).train.files if self._opened else ()
        known = Fingerprint.of(self._facts[: len(files)]) if self._facts is not None else None
        return {
            "epoch": self.position.epoch,
            "batches": self.position.batches,
            "batch_size": self.settings.batch_size,
            "files": known and known.to_plain(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position to the position of a checkpoint. If the batch size has changed, take the
        position of the same row, rounded down to a whole batch.

        Raises:
            CheckpointError: Training resumes in the middle of an epoch, and the epoch's files have
                changed.
        """
        self.position.epoch = int(state_dict.get("epoch", 0))
        batches = int(state_dict.get("batches", 0))
        rows = batches * int(state_dict.get("batch_size", self.settings.batch_size))
        self.position.batches = rows // self.settings.batch_size
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._resume_files({"batches": batches, **state_dict})

    def _resume_files(self, position: Mapping[str, Any]) -> None:
        assert self._opened is not None and self._facts is not None
        count, remark = resumed_files(
            position.get("files"),
            self._facts,
            batches=position["batches"],
            checkpoint=short_path(self.trainer.ckpt_path or "the checkpoint"),
            resume_data=self._resume_data,
        )
        if remark and self.trainer.is_global_zero:
            note(remark)
        if count is not None:
            paths = tuple(file.path for file in self._opened.train.files[:count])
            self._resumed_rows = open_rows(
                replace(self.settings, path=paths), self.schema, self.seed
            )
            self._resumed_epoch = self.position.epoch
            # the next epoch reads all files, so Lightning must ask for new loaders
            self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]


class ScoreWriter(Callback):
    """Writes the scores of `Trainer.predict` to one Parquet file, in the order of the input, whole
    or not at all.

        rank 0        checks the output, and locks the directory of the parts
        every rank    appends its scores to a part of its own
        rank 0        joins the parts when all ranks are done

    It writes the scores that `predict_step` of any LightningModule returns: one score for each row,
    or one for each row and column if the task has several outputs. The rows come from a `ClickData`
    with `scoring`. Lightning's `BasePredictionWriter` asks the loader for indices of samples, which
    a stream does not have, and prints a warning.

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
        self.output = located(str(output)).absolute()
        self.overwrite = overwrite
        self.joined: Measured = {}
        self.seconds = 0.0
        self._since = 0.0
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
        self._file = scores = ScoreFile(self.output, input, columns)

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
