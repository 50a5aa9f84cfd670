"""Training on files that appear while it runs (`dataset.follow=true`). Each file is an epoch of its
own, so lanes, shuffling, and a resume in the middle of a file are those of any other data.

    Lightning's loop            this module
    a new epoch begins          rank 0 looks for a file; all ranks open the same one, or wait
    a step                      scores rows with weights that have not seen them, then trains
    the last step of a file     metrics of these scores over all ranks; a checkpoint
    no file for a while         training ends (`dataset.follow_idle`)

The files that have trained, with their metrics, are part of the position in the data: so they are
in each checkpoint. What is there when a run begins tells columns, fitted values, sizes of tables.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from recapp.console import note, short_path
from recapp.dataset.data_file import file_facts
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.followed_files import (
    FollowedFiles,
    first_files,
    known_of,
)
from recapp.dataset.source import open_source
from recapp.reporting.run_record import finite
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.trainer.callbacks import StepClock
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.datamodule import ClickData, EpochLoader
from recapp.trainer.keep_checkpoints import EndTogether
from recapp.trainer.lightnings_parts import BatchCallback, ends_epoch
from recapp.trainer.module import TaskModule


class NoBatches(EpochLoader):
    """The loader of an epoch that is over, or of one that begins before a file is there. Lightning
    asks for another one behind it.
    """

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 1  # with none it would end training

    def __iter__(self) -> Iterator[Batch]:
        return iter(())


class FollowedData(ClickData):
    """The data of a run that follows files. Arguments are those of `ClickData`."""

    # under which Lightning keeps the state: a run may begin to follow, or cease to
    __qualname__ = ClickData.__qualname__

    def __init__(self, settings: DataSettings, *args: Any, **named: Any) -> None:
        super().__init__(settings, *args, **named)
        self.files = FollowedFiles(settings)
        self._file: tuple[str, str] | None = None  # name and path of the one that trains
        self._next_look = 0.0

    @override
    def setup(self, stage: str) -> None:
        if self._opened is None:
            paths = self._on_rank_0(partial(first_files, self.files.settings))
            self.settings = replace(self.settings, path=tuple(paths))
        super().setup(stage)
        if self.trainer.is_global_zero:
            self.rows_read()  # of all files that are here
        self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]

    @property
    @override
    def rows(self) -> tuple[int, int]:
        return sum(known["rows"] for known in self.files.trained.values()), self._rows.val.rows

    @override
    def train_dataloader(self) -> EpochLoader:
        """Return the loader of the file that trains next. Every rank calls it, and waits for a
        file.

        Raises:
            StopIteration: No file has come for `dataset.follow_idle` seconds, so training ends.
            Stopped: A signal has ended training.
        """
        assert self._opened is not None
        trainer = self.trainer
        epoch = trainer.current_epoch
        if self._file is None and self.position.epoch <= epoch:
            begun = trainer.fit_loop._data_fetcher is not None
            # before the loop has begun, a signal would end this rank alone
            self._file = self._awaited() if begun else self._on_rank_0(self.files.next)
        if self._file is None:
            return NoBatches()
        train = open_source([self._file[1]], self.schema)
        self._facts = file_facts(train.files)
        self._resumed_rows = replace(self._opened, train=train)
        self._resumed_epoch = epoch
        stream = self._prepared(self._rows.training_stream(*self._rank))
        return EpochLoader(
            stream, self.position, lambda: trainer.current_epoch, len(self.files.trained)
        )

    def _awaited(self) -> tuple[str, str]:
        """Return name and path of the next file."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        ends = next(each for each in callbacks if isinstance(each, EndTogether))
        since = time.monotonic()
        while True:
            file, over = self._on_rank_0(partial(self._look, since))
            if file is not None:
                return file
            if over:
                raise StopIteration
            ends.check(self.trainer)

    def _look(self, since: float) -> tuple[tuple[str, str] | None, bool]:
        """Look for the next file, or nap.

        Args:
            since: The time from which on no file has come.

        Returns:
            Name and path of a file, or None; and whether training ends without one.
        """
        if time.monotonic() >= self._next_look:
            file = self.files.next()
            seconds = self.files.settings.follow_seconds
            self._next_look = 0.0 if file else time.monotonic() + seconds
            if file:
                return file, False
        if over := self.files.nap(since):
            note(f"dataset.follow_idle={self.files.settings.follow_idle:g}: no file has come since")
        return None, over

    def trained(self) -> list[dict[str, Any]]:
        """Return what is known of the files that have trained."""
        return [{"file": name} | known for name, known in self.files.trained.items()]

    def finished(self, step: int, metrics: Mapping[str, float]) -> tuple[str, dict[str, Any]]:
        """Note that the file under way has trained.

        Args:
            step: The number of steps so far.
            metrics: The metrics of its rows by name.

        Returns:
            Its name, and what is known of it from now on.
        """
        assert self._file is not None
        (file,) = self._rows.train.files
        known = known_of(file) | {"step": step}
        known |= {name: finite(value) for name, value in metrics.items()}
        name, _ = self._file
        self.files.trained[name] = known
        self._file = None
        return name, known

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position; `trained`, what is known of the files that have trained; and `file`,
        the name of the file in which training is, None between two files.
        """
        name = self._file and self._file[0]
        return super().state_dict() | {"file": name, "trained": self.files.trained}

    @override
    def _resume_files(self, position: Mapping[str, Any]) -> None:
        checkpoint = short_path(self.trainer.ckpt_path or "the checkpoint")
        resume = partial(self.files.resume, position, self.schema, checkpoint, self._resume_data)
        self.files.trained, self._file = self._on_rank_0(resume)


@dataclass(eq=False)
class MeasureFiles(BatchCallback):
    """Measures each file on the scores by which it has trained: those of a batch are made before
    its rows change a weight. So they are scores of rows that the model has not seen, in training's
    own mode (with dropout, if a model has some).

    A line on the console, a row of each logger and `FollowedFiles.trained` have the metrics.

    Args:
        clock: The clock of steps, which leaves out the wait for files.
    """

    clock: StepClock

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.on_validation_end(trainer, pl_module)

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        if not ends_epoch(trainer, done):
            return
        module: Any = trainer.lightning_module
        with module.over_ranks() as metrics:
            values = {name: float(metric.compute()) for name, metric in metrics.items()}
        name, known = datamodule_of(trainer).finished(trainer.global_step, values)
        if not trainer.is_global_zero:
            return
        texts = [
            f"{measure.title} {values[measure.name]:.4f}"
            for measure in module.task.measures
            if measure.name in values
        ]
        note(f"{name}: {known['rows']:,} rows before they trained: {', '.join(texts)}")
        row = {f"file_{each}": value for each, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(row | {"file_rows": known["rows"]}, trainer.global_step - 1)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the sums over all ranks of the file in which training is. Every rank calls it."""
        assert isinstance(pl_module, TaskModule)
        if not datamodule_of(trainer).position.batches:
            return
        with pl_module.over_ranks() as metrics:
            checkpoint["callbacks"][self.state_key] = {
                name: {state: getattr(metric, state).clone() for state in metric.metric_state}
                for name, metric in metrics.items()
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give rank 0 these sums."""
        assert isinstance(pl_module, TaskModule)
        sums = checkpoint["callbacks"].get(self.state_key, {}) if trainer.is_global_zero else {}
        for name, metric in pl_module.train_metrics.items():
            for state, value in sums.get(name, {}).items():
                getattr(metric, state).copy_(value)
