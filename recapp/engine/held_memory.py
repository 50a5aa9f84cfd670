"""What a rank's process holds while it trains: rows, the exchange's buffers, and what the system
and the GPU say of all of it.
"""

from collections.abc import Sequence

import torch

from recapp.engine.sharded_tables import ShardedTables
from recapp.processes.process_memory import peak_resident_bytes, resident_bytes


def held_bytes(tables: Sequence[ShardedTables], device: torch.device) -> dict[str, int | None]:
    """Return bytes of this rank, by kind.

    Args:
        tables: The sharded ones of the model.
        device: Of the rank.

    Returns:
        `weights` and `state` (optimiser) of the rows here; `buffers` of the exchange that are kept
        from batch to batch (messages, and scratch memory of batches that are looked ahead to or to
        come; a transport's own memory and what lives only inside a call are not counted); `rss` now
        and `rss_peak` of the process, None where the system does not say; `allocated`, `reserved`
        and `allocated_peak` of the GPU, None on CPUs.
    """
    stores = [store.nbytes for shared in tables for store in shared.state.stores]
    buffers = {t.data_ptr(): t.nbytes for shared in tables for t in shared.exchange_buffers()}
    gpu = device.type == "cuda"
    return {
        "weights": sum(held.rows for held in stores),
        "state": sum(held.state for held in stores),
        "buffers": sum(buffers.values()),
        "rss": resident_bytes(),
        "rss_peak": peak_resident_bytes(),
        "allocated": torch.cuda.memory_allocated(device) if gpu else None,
        "reserved": torch.cuda.memory_reserved(device) if gpu else None,
        "allocated_peak": torch.cuda.max_memory_allocated(device) if gpu else None,
    }
