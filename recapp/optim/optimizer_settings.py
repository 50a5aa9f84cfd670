"""The settings of the optimiser, the group `optimizer`."""

from dataclasses import dataclass
from typing import Annotated

from recapp.settings.records import Constructor, Made

DenseOptimizer = Annotated[
    Constructor,
    Made(positional=1, makes="torch.optim.Optimizer", such_as="torch.optim.Adam"),
]
RuleOfTables = Annotated[
    Constructor,
    Made(
        makes="recapp.optim.rules.RowRule",
        such_as="rowwise_adagrad, adam and the others of recapp.optim.rules",
        beside="tables",
    ),
]
Schedule = Annotated[
    Constructor,
    Made(
        positional=1,
        makes="torch.optim.lr_scheduler.LRScheduler",
        such_as="recapp.optim.schedule.warmup_poly",
        own=(("monitor", "torch.optim.lr_scheduler.ReduceLROnPlateau"),),
    ),
]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The group `optimizer`.

    Args:
        dense: The optimiser of the dense part.
        sparse: The row rule of the tables; its argument `tables` holds the rules of single tables.
        restart_tables: The tables, by name or glob, that begin anew at each epoch.
        schedule: The schedule of learning rates; None keeps them constant.
    """

    dense: DenseOptimizer
    sparse: RuleOfTables
    restart_tables: tuple[str, ...] = ()
    schedule: Schedule | None = None
