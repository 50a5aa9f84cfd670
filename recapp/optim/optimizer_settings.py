"""The settings of the optimiser, the group `optimizer`."""

from dataclasses import dataclass

from recapp.settings.records import Constructor


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The group `optimizer`.

    Args:
        dense: The optimiser of the dense part.
        sparse: The row rule of the tables; its argument `tables` holds the rules of single tables.
        restart_tables: The tables, by name or glob, that begin anew at each epoch.
        schedule: The schedule of learning rates; None keeps them constant.
    """

    dense: Constructor
    sparse: Constructor
    restart_tables: tuple[str, ...] = ()
    schedule: Constructor | None = None
