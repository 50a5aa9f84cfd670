"""Tables that begin anew at each epoch, so that several epochs do not overfit.

Click models overfit when the second epoch begins: rows of rare ids have learnt the labels of their
few samples, and the dense part learns to trust these rows. Here rows and the state of their
optimiser return to start values at the start of each later epoch, while the dense part and its
optimiser keep what they have learnt (MEDA, arXiv 2305.19531).

    epoch 0    start values of (seed, table, row, column)           dense part at its start
    epoch e    start values of (seed, e, table, row, column)        dense part as it is

The values do not depend on ranks or plan, so a run is the same under every plan, and a resumed run
is the same as an unbroken one.
"""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.optim.named_rules import tables_that_restart
from recapp.trainer.strategy import strategy_of


class RestartTables(Callback):
    """Gives tables the start values of the epoch before the first step of each epoch but the first.

    Rows of a dynamic table stay and get start values; what is known of the use of their keys stays
    too.

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the epoch in which the tables of a checkpoint have begun."""
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

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the tables anew, if this step is the first of a later epoch."""
        if trainer.current_epoch <= self._epoch:
            return
        self._epoch = trainer.current_epoch
        shared_tables = strategy_of(trainer).sharded_tables()
        for shared in shared_tables:
            shared.begin_anew(self._names, self._epoch)
