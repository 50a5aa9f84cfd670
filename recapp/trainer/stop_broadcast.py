"""Lightning's own stop after a signal, which recapp replaces (`recapp/trainer/ending.py`)."""

from lightning.pytorch import Trainer


def remove_stop_broadcast(trainer: Trainer) -> None:
    """Remove Lightning's broadcast of a stop flag before every step, because it waits for all
    ranks. In recapp the header of the counts message carries the flag.

    Remove Lightning's handler of SIGTERM too: it would start another broadcast at any point at
    which it interrupts this rank.
    """
    connector = trainer._signal_connector
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
