"""What a run does beside training: keep the position, measure steps, say how it goes, end well.

Ordinary Lightning callbacks; those of `conf/callbacks` (checkpoints, early stopping, rate monitor) stand beside them.
"""

import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from recapp.checkpoints.directory import remove_checkpoint
from recapp.console import Column, columns_of, print_table
from recapp.distributed.transport import describe
from recapp.models.layer_table import layer_table
from recapp.planner.explain import plan_rows, rank_rows
from recapp.planner.topology import hosts_in_blocks
from recapp.reporting.phases import quartiles
from recapp.reporting.record import take_over
from recapp.trainer.datamodule import ClickData
from recapp.trainer.module import ClickModule
from recapp.trainer.strategy import EmbeddingShardingStrategy

WARM_UP_STEPS = 10      # not measured: first touches of memory, DDP's first step
RATE_STEPS = 10         # a rate is that of so many steps
IN_MB = {  # columns of the start report, each in one unit
    "bytes": Column("bytes", "MB a\nrank", ",.3f", 1e6),
    "weights": Column("weights", "weights\nMB", ",.3f", 1e6),
    "optimiser_state": Column("optimiser_state", "optimiser\nstate, MB", ",.3f", 1e6),
}  # fmt: skip


def _data(trainer: Trainer) -> ClickData:
    data = getattr(trainer, "datamodule", None)
    assert isinstance(data, ClickData)
    return data


def _strategy(trainer: Trainer) -> EmbeddingShardingStrategy:
    assert isinstance(trainer.strategy, EmbeddingShardingStrategy)
    return trainer.strategy


class TakeOver(Callback):
    """A run has its directory for itself (`recapp/reporting/record.py`) once it writes there: a curve's first row or a checkpoint.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._done = directory, False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Loggers write after this step."""
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._take_over(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written."""
        self._take_over(trainer)

    def _take_over(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and not self._done:
            take_over(self.directory)
        self._done = True


class KeepPosition(Callback):
    """Writes how far training has come into the data module, before checkpoints are written."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a resume under another batch size Lightning's own count of batches is put right."""
        loop, data = trainer.fit_loop.epoch_loop, _data(trainer)
        if loop.restarting and data.position.epoch == trainer.current_epoch:
            current = loop.batch_progress.current
            behind = data.position.batches - current.completed
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + behind)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Loggers number steps by a count of their own, which a checkpoint written inside an epoch holds one step too low."""
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One more batch is trained; after the last one the position is the start of the next epoch."""
        position, done = _data(trainer).position, batch_idx + 1
        over = done >= trainer.num_training_batches
        position.epoch, position.batches = (trainer.current_epoch + 1, 0) if over else (trainer.current_epoch, done)


class StepClock(Callback):
    """Measures training steps, waiting for data included, validation excluded: milliseconds, rows, bytes sent, collectives.

    Also for how much of it the host stood waiting for the tables' messages: for counts and ids (`input_wait_ms`), and for all of them.
    """

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.rows: list[int] = []
        self.bytes_sent: list[int] = []
        self.calls: list[int] = []
        self.input_wait_ms: list[float] = []
        self.exchange_wait_ms: list[float] = []
        self._since: float | None = None
        self._sent = self._called = 0
        self._input = self._exchange = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first step begins."""
        self._begin(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no part of the next step."""
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        comm = _strategy(trainer).comm
        self._since, self._sent, self._called = time.perf_counter(), comm.bytes_sent, comm.calls
        self._input, self._exchange = _waited_ms(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is over; the next begins."""
        assert self._since is not None
        comm = _strategy(trainer).comm
        self.step_ms.append((time.perf_counter() - self._since) * 1e3)
        self.rows.append(_data(trainer).settings.batch_size)
        self.bytes_sent.append(comm.bytes_sent - self._sent)
        self.calls.append(comm.calls - self._called)
        counts_and_ids, everything = _waited_ms(trainer)
        self.input_wait_ms.append(counts_and_ids - self._input)
        self.exchange_wait_ms.append(everything - self._exchange)
        self._begin(trainer)

    def recent_rate(self) -> float:
        """Samples per second of all ranks over the last steps; 0 before the first."""
        rows, ms = sum(self.rows[-RATE_STEPS:]), sum(self.step_ms[-RATE_STEPS:])
        return 1e3 * rows / ms if ms else 0.0

    def recent_input_wait_ms(self) -> float:
        """What a step of the last ones waited for counts and ids on this rank; 0 before the first."""
        return statistics.mean(self.input_wait_ms[-RATE_STEPS:] or [0.0])

    def _measured(self, values: list[Any]) -> list[Any]:
        return values[WARM_UP_STEPS:] or values

    def summary(self) -> dict[str, Any]:
        """Medians, quartiles and rates without the first steps; empty where nothing was trained. Bytes are this rank's."""
        if not self.step_ms:
            return {}
        ms, rows = self._measured(self.step_ms), self._measured(self.rows)
        return {"step_ms": statistics.median(ms), "step_ms_quartiles": quartiles(ms), "samples_per_second": sum(rows) / sum(ms) * 1e3,
                "bytes_sent_per_step": statistics.mean(self._measured(self.bytes_sent)),
                "collectives_per_step": statistics.median_low(self.calls),      # an epoch's first steps make some of its last ones'
                "input_wait_ms": statistics.median(self._measured(self.input_wait_ms)),
                "exchange_wait_ms": statistics.median(self._measured(self.exchange_wait_ms))}


def _waited_ms(trainer: Trainer) -> tuple[float, float]:
    """So far: for counts and ids, for every message of the tables."""
    waited = [c.waits.waited_s for c in _strategy(trainer).collections()]
    return 1e3 * sum(w["counts"] + w["ids"] for w in waited), 1e3 * sum(sum(w.values()) for w in waited)


class LogRate(Callback):
    """Logs samples per second of all ranks, and what a step of this rank waited for its input exchange."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A reading in a while."""
        if batch_idx % RATE_STEPS == RATE_STEPS - 1:
            # As tensors of the host: Lightning would put numbers on the module's GPU, and wait for all it has to do.
            pl_module.log("samples_per_s", torch.tensor(self.clock.recent_rate()), batch_size=1)
            pl_module.log("input_wait_ms", torch.tensor(self.clock.recent_input_wait_ms()), batch_size=1)


class KeepLast(Checkpoint):
    """However a run ends, it validates at its last step and leaves `last.ckpt`, from which training goes on.

    Lightning validates after a stop, but not where max_steps ends an epoch early or where validation goes by steps: so the last step
    becomes a stop. All of it happens inside the epoch, because a checkpoint written after it would say that the epoch is over. Where a
    `ModelCheckpoint` has just written the same state, `last.ckpt` is a link to it.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "last.ckpt"
        self._step = -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The last step is a stop; without validation it is the time to save."""
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        if 0 <= trainer.max_steps <= trainer.global_step or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True
        if trainer.should_stop and not trainer.limit_val_batches:
            self._keep(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every validated state is the last one for a while."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._keep(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch's end without validation is kept too."""
        self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        if self._step == trainer.global_step:
            return
        self._step = trainer.global_step
        same = next((Path(c.best_model_path) for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)
                     and c.best_model_path and c._last_global_step_saved == trainer.global_step), None)
        if trainer.is_global_zero and self.path.is_symlink():
            self.path.unlink()
        if same is None:
            trainer.save_checkpoint(self.path)
        elif trainer.is_global_zero:
            remove_checkpoint(self.path)
            self.path.symlink_to(same.name)
        trainer.strategy.barrier()

    def named(self, trainer: Trainer) -> str:
        """The checkpoint that a run's summary speaks of: the best one, or the last where none was chosen."""
        best = [c.best_model_path for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
        return best[0] if best else str(self.path)


class StopTogether(Callback):
    """A stop that one rank was asked for (SIGTERM of a scheduler) is taken by all at the same step, agreed in the counts message."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here to the end SIGTERM asks; Lightning's own handler would start a broadcast wherever it interrupts this rank."""
        self._want(trainer, 0)
        signal.signal(signal.SIGTERM, lambda *_: self._want(trainer, 1))

    def _want(self, trainer: Trainer, wanted: int) -> None:
        """At once: the next counts to leave are those of a batch that is looked ahead to."""
        for collection in _strategy(trainer).collections():
            collection.header.wanted = wanted

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Hear what all want."""
        if any(any(c.header.wanted_W) for c in _strategy(trainer).collections()):
            trainer.should_stop = True


class StartReport(Callback):
    """Before the first step: seed, ranks with their hosts and devices, the layers with their output shapes, the plan.

    Args:
        seed: of the run.
        shown: False where standard output carries a document.
    """

    def __init__(self, seed: int, shown: bool) -> None:
        self.seed, self.shown = seed, shown

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 prints."""
        strategy = _strategy(trainer)
        if not (self.shown and trainer.is_global_zero):
            return
        assert isinstance(pl_module, ClickModule) and pl_module.model is not None and strategy.plan is not None
        tables = [t for c in strategy.collections() for t in c.embedding_bag_configs()]
        ranks = f"{len(strategy.ranks)} rank{'s' if len(strategy.ranks) > 1 else ''}"
        held = rank_rows(tables, strategy.plan, strategy.rule)
        where = [{"rank": i, **_hosts(strategy, i), "device": r["device"]} for i, r in enumerate(strategy.ranks)]
        way = f", {describe(strategy.comm)}" if strategy.comm.world > 1 else ""
        print(f"seed {self.seed}, {ranks}, backend {strategy.ranks[0]['backend']}{way}, plan {strategy.plan.name}")
        for title, rows in (("Layers", layer_table(pl_module.model, len(_data(trainer).schema.dense))),
                            ("Plan", plan_rows(tables, strategy.plan)),
                            ("Ranks", [w | h for w, h in zip(where, held, strict=True)])):
            print()
            print_table(rows, [IN_MB.get(column.key, column) for column in columns_of(rows)], title=title)
        print("".join(f"\nnote: {note}" for note in strategy.plan.notes), flush=True)


def _hosts(strategy: EmbeddingShardingStrategy, rank: int) -> dict[str, Any]:
    """The host a rank is on, and the number of the one it is on for the plan where `topology.hosts` says otherwise."""
    found = strategy.ranks[rank]["host"]
    if strategy.hosts in (None, hosts_in_blocks([r["host_id"] for r in strategy.ranks])):
        return {"host": found}
    return {"host": found, "plan's_host": rank * strategy.hosts // strategy.comm.world}
