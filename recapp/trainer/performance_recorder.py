"""Records a run's time per phase and memory, on every rank: `performance.json`
(recapp/reporting/record.py).

    batch arrives -> [data] input_dist ... -> [outside] forward ... vectors
                  -> [autograd] backward ... update -> [outside] step is over

A collection calls an observer (`recapp/engine/state.py`) when it begins to work and when each part
of its work ends. The time between an end and the next beginning belongs to the phases `data` and
`outside`.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from recapp.engine.memory_use import held_bytes
from recapp.engine.state import EngineObserver
from recapp.reporting.phases import DATA, OUTSIDE, PhaseClock
from recapp.reporting.record import write_performance
from recapp.trainer.batch_callback import BatchCallback
from recapp.trainer.callbacks import WARM_UP_STEPS, StepClock
from recapp.trainer.strategy import strategy_of


class RecordPerformance(BatchCallback):
    """Measures the phases of training steps, memory and bytes sent on every rank. Rank 0 writes
    them at the end of training, but not after an exception.

    The measurement costs a few microseconds a step. Times are times of the host. On a GPU the host
    only queues work: a phase then shows the time to queue its work and to wait for messages, and
    only `step_ms` includes the GPU's work.

    Args:
        directory: The directory of the run.
        clock: The clock that measures whole steps; it must come before this callback in the list.
    """

    def __init__(self, directory: Path, clock: StepClock) -> None:
        self.directory = directory
        self.clock = clock
        self.phases = PhaseClock()
        self._fetching = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach an observer to the collections, and begin the first step."""
        for shared in strategy_of(trainer).sharded_tables():
            shared.state.observer = EngineObserver(begins=self._begins, ends=self.phases)
        self._next_step()

    def _next_step(self) -> None:
        """Begin a step. It fetches its batch first, and with look-ahead starts an exchange."""
        self.phases.start()
        self._fetching = True

    def _begins(self) -> None:
        """End the phase before a collection's work: the wait for a batch, or the dense part."""
        self.phases(DATA if self._fetching else OUTSIDE)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the next step, because a step excludes validation."""
        self._next_step()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the wait for the batch."""
        self.phases(DATA)
        self._fetching = False

    def on_step(self, trainer: Trainer, done: int) -> None:
        """End the step, and begin the next."""
        self.phases.end(OUTSIDE)
        self._next_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the measurements of all ranks; rank 0 writes them."""
        strategy = strategy_of(trainer)
        measured = self.clock.summary()
        if not measured:
            return
        own = {
            "step_ms": measured["step_ms"],
            "phases_ms": self.phases.phases_ms(WARM_UP_STEPS),
            "phases_quartiles_ms": self.phases.phases_quartiles_ms(WARM_UP_STEPS),
            "parts_ms": self.phases.parts_ms(WARM_UP_STEPS),
            "memory": held_bytes(strategy.sharded_tables(), strategy.root_device),
            "sent_bytes": measured["bytes_sent_per_step"],
        }
        measured_W = strategy.comm.all_gather(own)
        if trainer.is_global_zero:
            ranks = strategy.comm.world
            write_performance(
                {
                    "batch_per_rank": self.clock.rows[0] // ranks,
                    "ranks": ranks,
                    "steps": len(self.phases.measured(WARM_UP_STEPS)),
                    "step_ms": own["step_ms"],
                    **{
                        name: [rank[name] for rank in measured_W]
                        for name in own
                        if name != "step_ms"
                    },
                },
                self.directory,
            )
