"""Callbacks of every run: claim the directory, keep the position, measure steps, log rates, print
the start report, count the rows of dynamic tables.

They are ordinary Lightning callbacks. The callbacks of `conf/callbacks` (checkpoints, early
stopping, rate monitor) run in addition.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.console import Column, columns_of, print_table, readable
from recapp.engine.sharded_tables import ShardedTables
from recapp.models.layer_table import layer_table
from recapp.planner.topology import hosts_in_blocks
from recapp.processes.process_status import command_age, process_age
from recapp.reporting.phases import quartiles
from recapp.reporting.plan_explanation import plan_rows, rank_rows, table_uses
from recapp.reporting.record import claim_directory
from recapp.tasks.measures import Measures
from recapp.trainer.batch_callback import BatchCallback
from recapp.trainer.data_protocols import resumable_data
from recapp.trainer.module import TaskModule
from recapp.trainer.strategy import EmbeddingShardingStrategy, strategy_of
from recapp.transport.choose_transport import describe

WARM_UP_STEPS = 10  # not measured: memory is touched for the first time, DDP takes its first step
RATE_STEPS = 10  # steps over which a rate is averaged
IN_MB = {  # columns of the start report, each in one unit
    "bytes": Column("bytes", "MB a\nrank", ",.3f", 1e6),
    "weights": Column("weights", "weights\nMB", ",.3f", 1e6),
    "optimiser_state": Column("optimiser_state", "optimiser\nstate, MB", ",.3f", 1e6),
}


class ClaimDirectory(BatchCallback):
    """Claims the run's directory (`recapp/reporting/record.py`) just before the run writes its
    first file there: the first row of a curve, or a checkpoint.

    Args:
        directory: The directory of the run.
        measures: The metrics of the run's task, whose titles reports show; None stores no titles.
    """

    def __init__(self, directory: Path, measures: Measures | None = None) -> None:
        self.directory = directory
        self.measures = measures
        self._done = False

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Claim the directory if loggers write after this step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.loggers and trainer.global_step % every == 0:
            self._claim(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Claim the directory, because a checkpoint is about to be written."""
        self._claim(trainer)

    def _claim(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and not self._done:
            claim_directory(self.directory, self.measures)
        self._done = True


class KeepPosition(BatchCallback):
    """Writes the position of training into the data module, before checkpoints are written."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct Lightning's own count of batches after a resume with another batch size or with
        other files.
        """
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
        """Count one more trained batch. After the last batch of an epoch, set the position to the
        start of the next epoch.
        """
        position = resumable_data(trainer).position
        over = done >= trainer.num_training_batches
        position.epoch, position.batches = (
            (trainer.current_epoch + 1, 0) if over else (trainer.current_epoch, done)
        )


class StepClock(BatchCallback):
    """Measures every training step: milliseconds, rows, bytes sent, collectives.

    A step includes the wait for its data and excludes validation. The clock also measures how long
    the host waits in a step for the messages of the tables: for counts and ids (`input_wait_ms`),
    and for all messages (`exchange_wait_ms`). Both lists stay empty if the GPU waits instead of the
    host.

    `start` holds the seconds from the start of the command to three events: the rank has started,
    training begins, the first step ends.
    """

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.rows: list[int] = []
        self.bytes_sent: list[int] = []
        self.calls: list[int] = []
        self.input_wait_ms: list[float] = []
        self.exchange_wait_ms: list[float] = []
        self.start: dict[str, float | None] = {}
        self._began = 0.0
        self._since: float | None = None
        self._sent = self._called = 0
        self._input = self._exchange = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure the first step."""
        age = command_age()
        own = process_age()
        self.start["seconds_to_ranks"] = None if age is None or own is None else age - own
        self.start["seconds_to_training"] = age
        self._begin(trainer)
        assert self._since is not None
        self._began = self._since

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the measurement of the next step, because a step excludes validation."""
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        comm = strategy_of(trainer).comm
        self._since = time.perf_counter()
        self._sent = comm.bytes_sent
        self._called = comm.calls
        self._input, self._exchange = _waited_ms(trainer)

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Record the step that has ended, and begin to measure the next one."""
        assert self._since is not None
        comm = strategy_of(trainer).comm
        if not self.step_ms:
            self.start["seconds_to_first_step"] = command_age()
        self.step_ms.append((time.perf_counter() - self._since) * 1e3)
        self.rows.append(resumable_data(trainer).batch_size)
        self.bytes_sent.append(comm.bytes_sent - self._sent)
        self.calls.append(comm.calls - self._called)
        if comm.host_waits:
            counts_and_ids, everything = _waited_ms(trainer)
            self.input_wait_ms.append(counts_and_ids - self._input)
            self.exchange_wait_ms.append(everything - self._exchange)
        self._begin(trainer)

    def recent_rate(self) -> float:
        """Return the samples per second of all ranks over the last `RATE_STEPS` steps; 0 before
        the first step.
        """
        rows = sum(self.rows[-RATE_STEPS:])
        ms = sum(self.step_ms[-RATE_STEPS:])
        return 1e3 * rows / ms if ms else 0.0

    def recent_input_wait_ms(self) -> float:
        """Return the mean wait for counts and ids on this rank, in milliseconds a step, over the
        last `RATE_STEPS` steps; 0 before the first step.
        """
        return statistics.mean(self.input_wait_ms[-RATE_STEPS:] or [0.0])

    def _measured(self, values: list[Any]) -> list[Any]:
        return values[WARM_UP_STEPS:] or values

    def summary(self) -> dict[str, Any]:
        """Return medians, quartiles and rates of the steps after the warm-up, and the seconds of
        all steps and validations.

        Bytes are the bytes that this rank sent. The result is empty if no step was trained.
        """
        if not self.step_ms or self._since is None:
            return {}
        ms = self._measured(self.step_ms)
        rows = self._measured(self.rows)
        return {
            "step_ms": statistics.median(ms),
            "step_ms_quartiles": quartiles(ms),
            "samples_per_second": sum(rows) / sum(ms) * 1e3,
            "train_seconds": self._since - self._began,
            "bytes_sent_per_step": statistics.mean(self._measured(self.bytes_sent)),
            # the first step of an epoch also starts exchanges of later steps, so the last steps
            # of the epoch start fewer
            "collectives_per_step": statistics.median_low(self.calls),
            **{
                name: statistics.median(self._measured(waited))
                for name, waited in (
                    ("input_wait_ms", self.input_wait_ms),
                    ("exchange_wait_ms", self.exchange_wait_ms),
                )
                if waited
            },
        }


def _waited_ms(trainer: Trainer) -> tuple[float, float]:
    """Return two waits of this rank so far, in milliseconds: for counts and ids, and for all
    messages of the tables.
    """
    waited = [c.waits.waited_s for c in strategy_of(trainer).sharded_tables()]
    return 1e3 * sum(w["counts"] + w.get("ids", 0.0) for w in waited), 1e3 * sum(
        sum(w.values()) for w in waited
    )


class LogRate(BatchCallback):
    """Logs the samples per second of all ranks, and the wait of this rank for the input exchange
    of a step.

    Args:
        clock: The clock that measures the steps.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Log both after every `RATE_STEPS` steps."""
        if done % RATE_STEPS == 0:
            log = trainer.lightning_module.log
            # CPU tensors: Lightning would copy plain numbers to the module's GPU, and wait for all
            # work that is queued there
            log("samples_per_s", torch.tensor(self.clock.recent_rate()), batch_size=1)
            if not self.clock.input_wait_ms:
                return
            log("input_wait_ms", torch.tensor(self.clock.recent_input_wait_ms()), batch_size=1)


class StartReport(Callback):
    """Prints a report before the first step: seed, ranks with their hosts and devices, the layers
    with their output shapes, the plan.

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
        held = rank_rows(tables, strategy.plan, strategy.rule)
        where = [
            {"rank": i, **_hosts(strategy, i), "device": r["device"]}
            for i, r in enumerate(strategy.ranks)
        ]
        transport = f", {describe(strategy.comm)}" if strategy.comm.world > 1 else ""
        print(
            f"seed {self.seed}, {ranks}, backend {strategy.ranks[0]['backend']}{transport}, plan "
            f"{readable(strategy.plan.name)}"
        )
        for title, rows in (
            ("Layers", layers),
            ("Plan", plan_rows(tables, strategy.plan)),
            ("Lookups and rules", table_uses(tables, lookups, strategy.rule)),
            ("Ranks", [w | h for w, h in zip(where, held, strict=True)]),
        ):
            if rows:
                shown = [IN_MB.get(column.key, column) for column in columns_of(rows)]
                print()
                print_table(rows, shown, title=title)
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
    found = strategy.ranks[rank]["host"]
    if strategy.hosts in (None, hosts_in_blocks([r["host_id"] for r in strategy.ranks])):
        return {"host": found}
    return {"host": found, "plan's_host": rank * strategy.hosts // strategy.comm.world}


class LogDynamicRows(Callback):
    """Logs for every dynamic table the number of its rows, and the numbers of new, admitted and
    evicted keys in this run: `rows/C3`, `new_keys/C3`, `admitted/C3`, `evicted/C3`.

    It is collective, and sends one small message.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts of all ranks."""
        if trainer.training:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts once more, and print them on rank 0."""
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
    rows = shared.stored.rows_of_runs()
    changes = shared.stored.changes() if rows else {}
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
