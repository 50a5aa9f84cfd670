"""Callbacks of every run: claim the directory, keep the position, measure steps, log rates, print
the start report, count the rows of dynamic tables, record the time of each phase and memory.

They are ordinary Lightning callbacks. The callbacks of `conf/callbacks` (checkpoints, early
stopping, rate monitor) run in addition.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.console import MANY_ROWS, Column, columns_of, note, print_table, readable, short_path
from recapp.engine.state import EngineObserver
from recapp.models.layer_table import layer_table
from recapp.planner.topology import hosts_in_blocks
from recapp.processes.rank_environment import command_age, process_age
from recapp.reporting.details import write_details
from recapp.reporting.phases import DATA, OUTSIDE, PhaseClock, quartiles
from recapp.reporting.plan_report import plan_rows, rank_rows, table_uses
from recapp.reporting.run_record import (
    PERFORMANCE_FILE,
    Performance,
    RankMemory,
    claim_directory,
    write_record,
)
from recapp.reporting.summary import print_rows_read
from recapp.stored.run_files import remove_earlier
from recapp.tasks.measures import Measures
from recapp.trainer.batch_callback import BatchCallback
from recapp.trainer.data_protocols import datamodule_of, resumable_data
from recapp.trainer.keep_checkpoints import saves_between_epochs, step_of_best
from recapp.trainer.memory_use import held_bytes
from recapp.trainer.module import TaskModule
from recapp.trainer.step_of_ranks import check_validations
from recapp.trainer.strategy import EmbeddingShardingStrategy, strategy_of
from recapp.transport.choose_transport import describe

WARM_UP_STEPS = 10  # not measured: memory is touched for the first time, DDP takes its first step
RATE_STEPS = 10  # steps over which a rate is averaged
SHOWN = {  # columns of the start report whose numbers have a unit
    "bytes": Column("bytes", "MB a\nrank", ",.3f", 1e6),
    "weights": Column("weights", "weights\nMB", ",.3f", 1e6),
    "optimiser_state": Column("optimiser_state", "optimiser\nstate, MB", ",.3f", 1e6),
    "flops": Column(
        "flops",
        "flop a\nsample",
        meaning="multiplications and additions of matrix products, forward; backward takes twice "
        "as many; -: functions that are not torch's",
    ),
}


class ClaimDirectory(BatchCallback):
    """Claims the run's directory just before the run writes its first file there: the first row of
    a curve, the details of a validation, or a checkpoint. Deletes the results of an earlier run
    (`recapp/reporting/run_record.py`) and its checkpoints (`recapp/stored/run_files.py`). Writes
    the details of validations.

    Args:
        directory: The directory of the run.
        measures: The metrics of the run's task, whose titles reports show; None stores no titles.
    """

    def __init__(self, directory: Path, measures: Measures | None = None) -> None:
        self.directory = directory
        self.measures = measures
        self._done = False

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Claim the directory if loggers or checkpoints may be written after this step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        writes = trainer.loggers and trainer.global_step % every == 0
        if writes or any(saves_between_epochs(c) for c in trainer.checkpoint_callbacks):
            self.claim(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Claim the directory before a `ModelCheckpoint` chooses a name that is free there."""
        self.claim(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write `details.json` if a validation of training has details, such as slices."""
        if isinstance(pl_module, TaskModule) and pl_module.details:
            self.claim(trainer)
            if trainer.is_global_zero:
                step = trainer.global_step
                write_details(pl_module.details, self.directory, step, step_of_best(trainer))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Claim the directory, because a checkpoint is about to be written."""
        self.claim(trainer)

    def claim(self, trainer: Trainer) -> None:
        """Claim the directory, unless that is done."""
        if trainer.is_global_zero and not self._done:
            claim_directory(self.directory, self.measures)
            removed = remove_earlier(self.directory / "checkpoints", trainer.ckpt_path)
            if removed:
                note(
                    f"{short_path(self.directory)}: the checkpoints of an earlier run are deleted: "
                    f"{', '.join(removed)}"
                )
        self._done = True


class KeepPosition(BatchCallback):
    """Writes the position of training into the data module, before checkpoints are written."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that validations, and so checkpoints, fall between steps. Correct Lightning's own
        count of batches after a resume with another batch size or with other files.
        """
        check_validations(trainer)
        loop = trainer.fit_loop.epoch_loop
        position = resumable_data(trainer).position
        if not loop.restarting or position.epoch < trainer.current_epoch:
            return
        over = position.epoch > trainer.current_epoch  # the epoch is over, also if files were added
        # a checkpoint at the end of a step is written before Lightning counts the step as completed
        current = loop.batch_progress.current
        trained = trainer.num_training_batches if over else position.batches
        behind = trained - current.processed  # type: ignore[attr-defined]
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + behind)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the step count of loggers: a checkpoint written inside an epoch holds a count that
        is one step too low.
        """
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Count the trained batches. After the last batch of an epoch, set the position to the
        start of the next epoch.
        """
        position = resumable_data(trainer).position
        over = done >= trainer.num_training_batches
        position.epoch, position.batches = (
            (trainer.current_epoch + 1, 0) if over else (trainer.current_epoch, done)
        )


class _Counters(NamedTuple):
    """Counters of this rank at one time, or their growth in a step.

    Args:
        ms: The time in milliseconds.
        cpu_ms: The CPU time of all threads of this process, in milliseconds.
        bytes_sent: The bytes that this rank has sent.
        calls: The number of collectives.
        input_wait_ms: The wait for counts and ids, in milliseconds.
        exchange_wait_ms: The wait for all messages of the tables, in milliseconds.
    """

    ms: float
    cpu_ms: float
    bytes_sent: int
    calls: int
    input_wait_ms: float
    exchange_wait_ms: float

    @classmethod
    def of(cls, trainer: Trainer) -> "_Counters":
        """Return the counters of this time."""
        strategy = strategy_of(trainer)
        waited = [shared.waits.waited_s for shared in strategy.sharded_tables()]
        return cls(
            1e3 * time.perf_counter(),
            1e3 * time.process_time(),
            strategy.comm.bytes_sent,
            strategy.comm.calls,
            1e3 * sum(seconds["counts"] + seconds.get("ids", 0.0) for seconds in waited),
            1e3 * sum(sum(seconds.values()) for seconds in waited),
        )

    def since(self, before: "_Counters") -> "_Counters":
        """Return the growth since an earlier time."""
        return _Counters._make(now - then for now, then in zip(self, before, strict=True))


class StepClock(BatchCallback):
    """Measures every training step: milliseconds, CPU time, rows, bytes sent, collectives. Logs the
    samples per second and the wait for the input exchange every `RATE_STEPS` steps.

    A step includes the wait for its data and excludes validation. The clock also measures how long
    the host waits in a step for the messages of the tables: for counts and ids (`input_wait_ms`),
    and for all messages (`exchange_wait_ms`). Neither is measured if the GPU waits instead of the
    host.

    On every rank it also measures the phases of steps and the memory. Rank 0 writes them to
    `performance.json` at the end of training, but not after an exception.

        batch arrives -> [data] input_dist ... -> [outside] forward ... vectors
                      -> [autograd] backward ... update -> [outside] step is over

    A collection calls an observer (`recapp/engine/state.py`) when it begins to work and when each
    part of its work ends. The time between an end and the next beginning belongs to the phases
    `data` and `outside`.

    The measurement costs a few microseconds a step. Times are times of the host. On a GPU the host
    only queues work: a phase then shows the time to queue its work and to wait for messages, and
    only `step_ms` includes the GPU's work.

    `start` holds the seconds from the start of the command to three events: the rank has started,
    training begins, the first step ends.

    Args:
        directory: The directory of the run; None writes no `performance.json`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.phases = PhaseClock()
        self._fetching = False
        self.rows: list[int] = []
        self.start: dict[str, float | None] = {}
        self._steps: list[_Counters] = []
        self._host_waits = False
        self._began = self._last = _Counters(0.0, 0.0, 0, 0, 0.0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach an observer to the collections, and begin to measure the first step."""
        age = command_age()
        of_rank = process_age()
        self.start["seconds_to_ranks"] = None if age is None or of_rank is None else age - of_rank
        self.start["seconds_to_training"] = age
        strategy = strategy_of(trainer)
        self._host_waits = strategy.comm.host_waits
        for shared in strategy.sharded_tables():
            shared.state.observer = EngineObserver(begins=self._begins, ends=self.phases)
        self._began = _Counters.of(trainer)
        self._next_step(self._began)

    def _next_step(self, now: _Counters) -> None:
        """Begin a step. It fetches its batch first, and with look-ahead starts an exchange."""
        self._last = now
        self.phases.start()
        self._fetching = True

    def _begins(self) -> None:
        """End the phase before a collection's work: the wait for a batch, or the dense part."""
        self.phases(DATA if self._fetching else OUTSIDE)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the measurement of the next step, because a step excludes validation."""
        self._next_step(_Counters.of(trainer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the wait for the batch."""
        self.phases(DATA)
        self._fetching = False

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Record the step that has ended, and begin to measure the next one. Log the recent samples
        per second of all ranks, and the wait of this rank for the input exchange of a step.
        """
        if not self._steps:
            self.start["seconds_to_first_step"] = command_age()
        now = _Counters.of(trainer)
        self._steps.append(now.since(self._last))
        batches = (done - 1) % trainer.accumulate_grad_batches + 1
        self.rows.append(resumable_data(trainer).batch_size * batches)
        self.phases.end(OUTSIDE)
        self._next_step(now)
        if done % RATE_STEPS:
            return
        log = trainer.lightning_module.log
        # CPU tensors: Lightning would copy plain numbers to the module's GPU, and wait for all work
        # that is queued there
        log("samples_per_s", torch.tensor(self.recent_rate()), batch_size=1)
        if self._host_waits:
            waits = [step.input_wait_ms for step in self._steps[-RATE_STEPS:]]
            log("input_wait_ms", torch.tensor(statistics.mean(waits)), batch_size=1)

    def recent_rate(self) -> float:
        """Return the samples per second of all ranks over the last `RATE_STEPS` steps; 0 before
        the first step.
        """
        ms = sum(step.ms for step in self._steps[-RATE_STEPS:])
        return 1e3 * sum(self.rows[-RATE_STEPS:]) / ms if ms else 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the measurements of all ranks; rank 0 writes them."""
        strategy = strategy_of(trainer)
        measured = self.summary()
        if self.directory is None or not measured:
            return
        of_rank = {
            "phases_ms": self.phases.phases_ms(WARM_UP_STEPS),
            "parts_ms": self.phases.parts_ms(WARM_UP_STEPS),
            "memory": held_bytes(strategy.sharded_tables(), strategy.root_device),
            "sent_bytes": measured["bytes_sent_per_step"],
        }
        measured_W = strategy.comm.all_gather(of_rank)
        if trainer.is_global_zero:
            ranks = strategy.comm.world
            of_ranks = {name: tuple(rank[name] for rank in measured_W) for name in of_rank}
            of_ranks["memory"] = tuple(RankMemory(**memory) for memory in of_ranks["memory"])
            record = Performance(
                batch_per_rank=self.rows[0] // ranks,
                ranks=ranks,
                steps=len(self.phases.measured(WARM_UP_STEPS)),
                step_ms=measured["step_ms"],
                **of_ranks,
            )
            write_record(record, self.directory / PERFORMANCE_FILE)

    def summary(self) -> dict[str, Any]:
        """Return medians, quartiles and rates of the steps after the warm-up, and the seconds of
        all steps and validations.

        Bytes and CPU time are those of this rank; the samples are those of all ranks. The result is
        empty if no step was trained.
        """
        if not self._steps:
            return {}
        measured = self._steps[WARM_UP_STEPS:] or self._steps
        ms = [step.ms for step in measured]
        cpu_ms = sum(step.cpu_ms for step in measured)
        waits = ("input_wait_ms", "exchange_wait_ms") if self._host_waits else ()
        return {
            "step_ms": statistics.median(ms),
            "step_ms_quartiles": quartiles(ms),
            "samples_per_second": sum(self.rows[-len(ms) :]) / sum(ms) * 1e3,
            "cpu_seconds_per_sample": cpu_ms / sum(self.rows[-len(ms) :]) / 1e3,
            "train_seconds": (self._last.ms - self._began.ms) / 1e3,
            "bytes_sent_per_step": statistics.mean(step.bytes_sent for step in measured),
            # the first step of an epoch also starts exchanges of later steps, so the last steps
            # of the epoch start fewer
            "collectives_per_step": statistics.median_low(step.calls for step in self._steps),
            **{name: statistics.median(getattr(s, name) for s in measured) for name in waits},
        }


class StartReport(Callback):
    """Prints a report before the first step: seed, the data, the layers with their output shapes,
    the plan, ranks with their hosts and devices.

    Args:
        seed: The seed of the run.
        shown: Whether to print the report; False if standard output carries a document.
        dense_columns: The number of dense columns that the model reads.
        features: The features of the batches that the model may read, by name.
    """

    def __init__(
        self, seed: int, shown: bool, dense_columns: int, features: Sequence[str] = ()
    ) -> None:
        self.seed = seed
        self.shown = shown
        self.dense_columns = dense_columns
        self.features = features

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on rank 0."""
        strategy = strategy_of(trainer)
        data = datamodule_of(trainer)
        read = (  # also for `metrics.json`
            data.rows_read() if trainer.is_global_zero and hasattr(data, "rows_read") else None
        )
        if not self.shown:
            return
        assert (
            isinstance(pl_module, TaskModule)
            and pl_module.model is not None
            and strategy.plan is not None
        )
        # on all ranks, because a user's model may communicate between ranks in its forward
        layers, failure = layer_table(pl_module.model, self.dense_columns, self.features)
        if not trainer.is_global_zero:
            return
        sharded = strategy.sharded_tables()
        tables = [t for shared in sharded for t in shared.tables()]
        lookups = [x for shared in sharded for m in shared.members for x in m.lookups]
        ranks = f"{len(strategy.ranks)} rank{'s' if len(strategy.ranks) > 1 else ''}"
        averaged = any(shared.keeps_average for shared in sharded)
        memory = rank_rows(tables, strategy.plan, strategy.rule, averaged)
        where = [
            {"rank": i, **_hosts(strategy, i), "device": r["device"]}
            for i, r in enumerate(strategy.ranks)
        ]
        transport = f", {describe(strategy.comm)}" if strategy.comm.world > 1 else ""
        print(
            f"seed {self.seed}, {ranks}, backend {strategy.ranks[0]['backend']}{transport}, plan "
            f"{readable(strategy.plan.name)}"
        )
        if read is not None:
            print()
            print_rows_read(read)
        for title, rows in (
            ("Layers", layers),
            ("Plan", plan_rows(tables, strategy.plan)),
            ("Lookups and rules", table_uses(tables, lookups, strategy.rule)),
            ("Ranks", [w | m for w, m in zip(where, memory, strict=True)]),
        ):
            if rows:
                shown = [SHOWN.get(column.key, column) for column in columns_of(rows)]
                print()
                rest = ": recapp.plan explain with these settings" if title == "Plan" else ""
                print_table(rows, shown, title=title, most=MANY_ROWS, rest=rest)
        notes = list(strategy.plan.notes)
        if failure:
            notes.append(
                "the layers are listed as far as the model ran on a made-up batch, one id of each "
                f"feature: {failure}"
            )
        print("".join(f"\nnote: {readable(note)}" for note in notes), flush=True)


def _hosts(strategy: EmbeddingShardingStrategy, rank: int) -> dict[str, Any]:
    """Return the host on which a rank runs. If `topology.hosts` assumes other hosts than the real
    ones, add the number of the host on which the plan places the rank.
    """
    host = strategy.ranks[rank]["host"]
    if strategy.hosts in (None, hosts_in_blocks([r["host_id"] for r in strategy.ranks])):
        return {"host": host}
    return {"host": host, "plan's_host": rank * strategy.hosts // strategy.comm.world}
