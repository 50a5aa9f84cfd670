"""How long Lightning waits for other ranks: not before every step, and never without a limit."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.distributed import _distributed_is_initialized, _InfiniteBarrier
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import data_connector


def limit_waits(trainer: Trainer, make_group: Callable[[], Any]) -> None:
    """Remove Lightning's waits of a step, and end its wait for the rank that prepares data after a
    time.

    Args:
        trainer: The trainer, before it prepares data.
        make_group: Makes a process group, with the timeout of all waits.
    """
    _remove_stop_broadcast(trainer)
    connector = trainer._data_connector
    prepare = type(connector).prepare_data

    def prepare_data() -> None:
        names = vars(data_connector)
        names[_InfiniteBarrier.__name__] = partial(_Barrier, make_group)
        try:
            prepare(connector)
        finally:
            names[_InfiniteBarrier.__name__] = _InfiniteBarrier

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


class _Barrier(_InfiniteBarrier):
    """Lightning's barrier around `prepare_data`, with a limit; its own is 10,000 days."""

    def __init__(self, make_group: Callable[[], Any]) -> None:
        super().__init__()
        self.make_group = make_group

    def __enter__(self) -> "_Barrier":
        if _distributed_is_initialized():
            group = self.make_group()
            self.group = group
            self.barrier = group.monitored_barrier
        return self


def _remove_stop_broadcast(trainer: Trainer) -> None:
    """Remove Lightning's broadcast of a stop flag before every step, because it waits for all
    ranks. In recapp the header of the counts message carries the flag (`recapp/trainer/ending.py`).

    Remove Lightning's handler of SIGTERM too: it would start another broadcast at any point at
    which it interrupts this rank.
    """
    connector = trainer._signal_connector
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
