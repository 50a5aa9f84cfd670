"""Callbacks of every run: claim the directory, keep the position, measure steps and memory, print
the start report; and those of tables: start values from files, tables that begin anew at each
epoch, counts of the rows of dynamic tables.

They are ordinary Lightning callbacks. The callbacks of `conf/callbacks` (checkpoints, early
stopping, rate monitor) run in addition.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from recapp.console import MANY_ROWS, Column, columns_of, note, print_table, readable, short_path
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import EngineObserver
from recapp.errors import ConfigError
from recapp.models.layer_table import layer_table
from recapp.optim.named_rules import tables_that_restart
from recapp.processes.process_memory import peak_resident_bytes, resident_bytes
from recapp.processes.rank_environment import command_age, process_age
from recapp.reporting.phases import DATA, OUTSIDE, PhaseClock, quartiles
from recapp.reporting.plan_report import plan_rows, rank_rows, table_uses
from recapp.reporting.run_record import (
    PERFORMANCE_FILE,
    Performance,
    RankMemory,
    claim_directory,
    write_record,
)
from recapp.reporting.summary import print_rows_read, write_details
from recapp.sharding.layout import WEIGHT
from recapp.stored.checkpoint import remove_earlier
from recapp.stored.operations import CHECKPOINTS
from recapp.stored.start_values import fill_values
from recapp.tables.config import EmbeddingConfig
from recapp.tasks.measures import Measures
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.keep_checkpoints import step_of_best
from recapp.trainer.lightnings_parts import BatchCallback, log_in
from recapp.trainer.module import TaskModule
from recapp.trainer.strategy import strategy_of
from recapp.transport.communicator import together
from recapp.transport.join_ranks import describe

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
    (`recapp/reporting/run_record.py`) and its checkpoints (`recapp/stored/checkpoint.py`). Writes
    the details of validations.

    Args:
        directory: The directory of the run.
        measures: The metrics of the run's task, whose titles reports show; None stores no titles.
        checkpoints: The directory of its checkpoints; None: one in the directory of the run.
    """

    def __init__(
        self,
        directory: Path,
        measures: Measures | None = None,
        checkpoints: Path | None = None,
    ) -> None:
        self.directory = directory
        self.measures = measures
        self.checkpoints = checkpoints or directory / CHECKPOINTS
        self._done = False

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        writes = trainer.loggers and trainer.global_step % every == 0
        if writes or any(
            # it saves after some steps, or after some time
            getattr(c, "_every_n_train_steps", 0) or getattr(c, "_train_time_interval", None)
            for c in trainer.checkpoint_callbacks
        ):
            self.claim(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Claim the directory before a `ModelCheckpoint` chooses a name that is free there."""
        self.claim(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, TaskModule) and pl_module.details:
            self.claim(trainer)
            if trainer.is_global_zero:
                write_details(
                    pl_module.details, self.directory, trainer.global_step, step_of_best(trainer)
                )

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.claim(trainer)

    def claim(self, trainer: Trainer) -> None:
        """Claim the directory, unless that is done."""
        if trainer.is_global_zero and not self._done:
            claim_directory(self.directory, self.measures)
            removed = remove_earlier(self.checkpoints, trainer.ckpt_path)
            if removed:
                note(
                    f"{short_path(self.checkpoints.parent)}: the checkpoints of an earlier run are "
                    f"deleted: {', '.join(removed)}"
                )
        self._done = True


class KeepPosition(BatchCallback):
    """Writes the position of training into the data module, before checkpoints are written."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that validations, and so checkpoints, fall between steps of several batches.
        Correct Lightning's own count of batches after a resume with another batch size or with
        other files.

        Raises:
            ConfigError: The last step of an epoch has fewer batches, so that validations counted
                across epochs leave the ends of steps.
        """
        of_step = trainer.accumulate_grad_batches
        batches = trainer.num_training_batches
        one_epoch = trainer.max_epochs == 1 or 0 <= trainer.max_steps <= -(-batches // of_step)
        if trainer.check_val_every_n_epoch is None and not one_epoch and batches % of_step:
            raise ConfigError(
                f"trainer.val_check_interval={trainer.val_check_interval}: counts batches across "
                f"epochs, and an epoch of {batches:.0f} batches ends with a shorter step "
                f"(trainer.accumulate_grad_batches={of_step}), so that later validations would "
                "fall inside steps: set null for a validation at every epoch's end"
            )
        loop = trainer.fit_loop.epoch_loop
        position = datamodule_of(trainer).position
        if not loop.restarting or position.epoch < trainer.current_epoch:
            return
        over = position.epoch > trainer.current_epoch  # the epoch is over, also if files were added
        # a checkpoint at the end of a step is written before Lightning counts the step as completed
        current = loop.batch_progress.current
        trained = batches if over else position.batches
        behind = trained - current.processed  # type: ignore[attr-defined]
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + behind)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the step count of loggers: a checkpoint written inside an epoch holds a count that
        is one step too low. Count the epoch as begun: Lightning does not where a run resumes at an
        epoch's end, and would take a checkpoint of the next epoch for one between two epochs.
        """
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        progress = trainer.fit_loop.epoch_progress
        for tracker in (progress.current, progress.total):
            tracker.ready = tracker.started = tracker.processed + 1  # type: ignore[attr-defined]

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        position = datamodule_of(trainer).position
        over = done >= trainer.num_training_batches
        position.epoch, position.batches = (
            (trainer.current_epoch + 1, 0) if over else (trainer.current_epoch, done)
        )


def _counters(trainer: Trainer) -> dict[str, float]:
    """Return the counters of this rank: the time and the CPU time of all threads, the bytes sent,
    the collectives, and the waits for counts and ids and for all messages of the tables.
    """
    strategy = strategy_of(trainer)
    waited = [shared.waits.waited_s for shared in strategy.sharded_tables()]
    return {
        "ms": 1e3 * time.perf_counter(),
        "cpu_ms": 1e3 * time.process_time(),
        "bytes_sent": strategy.comm.bytes_sent,
        "calls": strategy.comm.calls,
        "input_wait_ms": 1e3 * sum(each["counts"] + each.get("ids", 0.0) for each in waited),
        "exchange_wait_ms": 1e3 * sum(sum(each.values()) for each in waited),
    }


def held_bytes(tables: Sequence[ShardedTables], device: torch.device) -> RankMemory:
    """Return the bytes that this rank holds.

    Args:
        tables: The sharded tables of the model.
        device: The device of the rank.

    Returns:
        `weights` and `state` (optimiser) of the rows on this rank. `buffers` of the exchange that
        are kept between batches: messages, and scratch memory for batches in look-ahead and later
        ones. They do not include the transport's own memory and memory within a call. `rss` and
        `rss_peak` of the process, now and at the most; None where the system does not report them.
        `allocated`, `reserved` and `allocated_peak` of the GPU; None on CPUs.
    """
    stores = [store.nbytes for shared in tables for store in shared.state.stores]
    buffers = {t.data_ptr(): t.nbytes for shared in tables for t in shared.exchange_buffers()}
    gpu = device.type == "cuda"
    return RankMemory(
        weights=sum(size.rows for size in stores),
        state=sum(size.state for size in stores),
        buffers=sum(buffers.values()),
        rss=resident_bytes(),
        rss_peak=peak_resident_bytes(),
        allocated=torch.cuda.memory_allocated(device) if gpu else None,
        reserved=torch.cuda.memory_reserved(device) if gpu else None,
        allocated_peak=torch.cuda.max_memory_allocated(device) if gpu else None,
    )


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
        self._steps: list[dict[str, float]] = []  # the growth of the counters in each step
        self._host_waits = False
        self._began_ms = 0.0
        self._last: dict[str, float] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        age = command_age()
        of_rank = process_age()
        self.start["seconds_to_ranks"] = None if age is None or of_rank is None else age - of_rank
        self.start["seconds_to_training"] = age
        strategy = strategy_of(trainer)
        self._host_waits = strategy.comm.host_waits
        for shared in strategy.sharded_tables():
            # what comes before a collection's work: the wait for a batch, or the dense part
            shared.state.observer = EngineObserver(
                begins=lambda: self.phases(DATA if self._fetching else OUTSIDE), ends=self.phases
            )
        self._next_step(_counters(trainer))
        self._began_ms = self._last["ms"]

    def _next_step(self, now: dict[str, float]) -> None:
        """Begin a step. It fetches its batch first, and with look-ahead starts an exchange."""
        self._last = now
        self.phases.start()
        self._fetching = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next_step(_counters(trainer))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.phases(DATA)
        self._fetching = False

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Record the step that has ended, and begin to measure the next one. Log the recent samples
        per second of all ranks, and the wait of this rank for the input exchange of a step.
        """
        if not self._steps:
            self.start["seconds_to_first_step"] = command_age()
        now = _counters(trainer)
        self._steps.append({name: now[name] - before for name, before in self._last.items()})
        batches = (done - 1) % trainer.accumulate_grad_batches + 1
        self.rows.append(datamodule_of(trainer).batch_size * batches)
        self.phases.end(OUTSIDE)
        self._next_step(now)
        if done % RATE_STEPS:
            return
        log = partial(log_in, trainer.lightning_module, "on_train_batch_end")
        # CPU tensors: Lightning would copy plain numbers to the module's GPU, and wait for all work
        # that is queued there
        ms = sum(step["ms"] for step in self._steps[-RATE_STEPS:])
        rate = 1e3 * sum(self.rows[-RATE_STEPS:]) / ms
        log("samples_per_s", torch.tensor(rate), 1)
        if self._host_waits:
            waits = [step["input_wait_ms"] for step in self._steps[-RATE_STEPS:]]
            log("input_wait_ms", torch.tensor(statistics.mean(waits)), 1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        ms = [step["ms"] for step in measured]
        cpu_ms = sum(step["cpu_ms"] for step in measured)
        waits = ("input_wait_ms", "exchange_wait_ms") if self._host_waits else ()
        return {
            "step_ms": statistics.median(ms),
            "step_ms_quartiles": quartiles(ms)[1:],
            "samples_per_second": sum(self.rows[-len(ms) :]) / sum(ms) * 1e3,
            "cpu_seconds_per_sample": cpu_ms / sum(self.rows[-len(ms) :]) / 1e3,
            "train_seconds": (self._last["ms"] - self._began_ms) / 1e3,
            "bytes_sent_per_step": statistics.mean(step["bytes_sent"] for step in measured),
            # the first step of an epoch also starts exchanges of later steps, so the last steps
            # of the epoch start fewer
            "collectives_per_step": statistics.median_low(step["calls"] for step in self._steps),
            **{name: statistics.median(step[name] for step in measured) for name in waits},
        }


@dataclass(eq=False)
class StartReport(Callback):
    """Prints a report before the first step: seed, the data, the layers with their output shapes,
    the plan, ranks with their hosts and devices.

    Args:
        seed: The seed of the run.
        shown: Whether to print the report; False if standard output carries a document.
        dense_columns: The number of dense columns that the model reads.
        features: The features of the batches that the model may read, by name.
    """

    seed: int
    shown: bool
    dense_columns: int
    features: Sequence[str] = ()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
            {"rank": i, "host": r["host"], "device": r["device"]}
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


@dataclass(eq=False)
class FillTables(Callback):
    """Fills tables from files when training begins (`recapp/stored/start_values.py`).

    Args:
        values: The files by table. In an ensemble the file of a table is that of all members.
    """

    values: Mapping[str, str]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fill this rank's rectangles. Every rank calls it.

        Raises:
            RecappError: A file cannot be read, or does not fit its table.
        """
        schema = datamodule_of(trainer).schema
        for shared in strategy_of(trainer).sharded_tables():
            for table in shared.tables():
                key = table.name if table.name in self.values else table.member_of
                if key in self.values:
                    _fill(shared, table, str(key), self.values[str(key)], schema)


def _fill(shared: ShardedTables, table: EmbeddingConfig, key: str, file: str, schema: Any) -> None:
    blocks = [b for b in shared.blocks() if (b.table, b.tensor) == (table.name, WEIGHT)]
    rows, values = together(
        shared.comm,
        lambda: fill_values(table, file, schema, key, blocks),
        f"could not read {file}",
    )
    if not shared.comm.rank:
        text = f"table {table.name} has {rows:,} rows from {file}"
        if values > rows:
            text += (
                f"; {values - rows:,} of its {values:,} vectors are not used, because a later id "
                f"has the same row: more rows for {table.name} keep ids apart"
            )
        if left := table.num_embeddings - rows:
            text += f"; {left:,} rows keep their start values"
        note(text)


class RestartTables(Callback):
    """Gives tables the start values of the epoch before the first step of each epoch but the first.

    Click models overfit when the second epoch begins: rows of rare ids have learnt the labels of
    their few samples, and the dense part learns to trust these rows. Here rows and the state of
    their optimiser return to start values at the start of each later epoch, while the dense part
    and its optimiser keep what they have learnt (MEDA, arXiv 2305.19531).

        epoch 0    start values of (seed, table, row, column)           dense part at its start
        epoch e    start values of (seed, e, table, row, column)        dense part as it is

    The values do not depend on ranks or plan, so a run is the same under every plan, and a resumed
    run is the same as an unbroken one. Rows of a dynamic table stay and get start values; what is
    known of the use of their keys stays too.

    Args:
        tables: The names or globs of the tables; `["*"]` is all of them.

    Raises:
        ConfigError: When training begins, if a name or glob matches no table, or if the tables of
            one rule whose step size depends on the number of steps (such as Adam) do not begin
            anew together.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tuple(tables)
        self._names: list[str] = []
        self._epoch = -1  # the epoch in which the tables have begun

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch in which the tables have begun. The manifest has the updates then."""
        return {"epoch": self._epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = int(state_dict["epoch"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the tables. After a resume, go on counting from the step in which they began.

        A checkpoint of a run without this callback counts as one whose tables began with its epoch.
        """
        shared_tables = strategy_of(trainer).sharded_tables()
        rules = {name: rule for shared in shared_tables for name, rule in shared.rules.items()}
        self._names = tables_that_restart(self.tables, rules)
        if self._epoch < 0:
            over = not trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._epoch = max(trainer.current_epoch - over, 0)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch <= self._epoch:
            return
        self._epoch = trainer.current_epoch
        for shared in strategy_of(trainer).sharded_tables():
            shared.begin_anew(self._names, self._epoch)


class LogDynamicRows(Callback):
    """Logs for every dynamic table the number of its rows, and the numbers of new, admitted and
    evicted keys in this run: `rows/C3`, `new_keys/C3`, `admitted/C3`, `evicted/C3`.

    It is collective, and sends one small message.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # `training` is False in a validation
            self._log(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counted = self._log(trainer)
        if counted and trainer.is_global_zero:
            print()
            print_table(counted, title="Dynamic tables")

    def _log(self, trainer: Trainer) -> list[dict[str, Any]]:
        counted = [row for t in strategy_of(trainer).sharded_tables() for row in counted_rows(t)]
        values = {
            f"{name}/{row['table']}": row[name]
            for row in counted
            for name in ("rows", "new_keys", "admitted", "evicted")
        }
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, trainer.global_step)
        return counted


def counted_rows(shared: ShardedTables) -> list[dict[str, Any]]:
    """Return a record for each dynamic table: the number of its rows, and the numbers of new,
    admitted and evicted keys in this run. It is collective.
    """
    rows = shared.rows_of_stretches()
    changes = shared.changes() if rows else {}
    return [
        {
            "table": table,
            "rows": sum(counts["rows"]),
            "new_keys": changes[table].new,
            "admitted": changes[table].admitted,
            "evicted": changes[table].evicted,
        }
        for table, counts in rows.items()
    ]
