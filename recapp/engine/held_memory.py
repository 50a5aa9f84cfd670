"""What a rank's process holds while it trains: rows, the exchange's buffers, and what the system
and the GPU say of all of it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection

_STATUS = Path("/proc/self/status")


def held_bytes(
    collections: Sequence[ShardedEmbeddingBagCollection], device: torch.device
) -> dict[str, int | None]:
    """Bytes of this rank, by kind.

    Args:
        collections: the sharded ones of the model.
        device: of the rank.

    Returns:
        `weights` and `state` (optimiser) of the rows here; `buffers` of the exchange that are kept
        from batch to batch (messages, and scratch memory of batches in flight or to come; a
        transport's own memory and what lives only inside a call are not counted); `rss` now and
        `rss_peak` of the process, None where the system does not tell; `allocated`, `reserved` and
        `allocated_peak` of the GPU, None on CPUs.
    """
    stores = [c.store(g) for c in collections for g in range(len(c.stores))]
    gpu = device.type == "cuda"
    return {
        "weights": sum(s.weights.nbytes for s in stores),
        "state": sum(held.nbytes for s in stores for held in s.state),
        "buffers": sum({t.data_ptr(): t.nbytes for c in collections for t in _buffers(c)}.values()),
        "rss": _status_bytes("VmRSS:"),
        "rss_peak": _status_bytes("VmHWM:"),
        "allocated": torch.cuda.memory_allocated(device) if gpu else None,
        "reserved": torch.cuda.memory_reserved(device) if gpu else None,
        "allocated_peak": torch.cuda.max_memory_allocated(device) if gpu else None,
    }


def _buffers(c: ShardedEmbeddingBagCollection) -> Iterator[Tensor]:
    """Memory that stays between batches; a batch that is looked ahead to holds some of it."""
    yield from c.messages._free
    yield from c._where.values()
    ahead = [requests for _, requests in c._ahead]
    for lease in (
        c._merging,
        *c._leases[False],
        *c._leases[True],
        *(requests.lease for requests in ahead),
    ):
        for scratch in lease:
            yield from scratch._held.values()
    yield from (requests.ids for requests in ahead if hasattr(requests, "ids"))


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
