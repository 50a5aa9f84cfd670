"""The memory of a rank: the bytes that it holds in training, and a check that the dense part fits.

For a layer that is too large, torch reports only the bytes that the allocator could not get. So the
model is first built on the meta device, without memory, to count its parameters.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from recapp.console import note
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.processes.process_memory import (
    free_memory_bytes,
    memory_pools,
    peak_resident_bytes,
    resident_bytes,
)
from recapp.processes.rank_environment import rank_info
from recapp.tables.collections import collections_in

COPIES = 2  # weights and gradients; the memory of the optimiser's state depends on the optimiser


def held_bytes(tables: Sequence[ShardedTables], device: torch.device) -> dict[str, int | None]:
    """Return the bytes that this rank holds, by kind.

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
    return {
        "weights": sum(size.rows for size in stores),
        "state": sum(size.state for size in stores),
        "buffers": sum(buffers.values()),
        "rss": resident_bytes(),
        "rss_peak": peak_resident_bytes(),
        "allocated": torch.cuda.memory_allocated(device) if gpu else None,
        "reserved": torch.cuda.memory_reserved(device) if gpu else None,
        "allocated_peak": torch.cuda.max_memory_allocated(device) if gpu else None,
    }


def check_room(make: Callable[[], nn.Module]) -> None:
    """Refuse a model whose dense part does not fit into the memory of this rank.

    The model is built on the CPU for every training device, so the memory of the CPU counts.

    Args:
        make: Builds the model. It is called on the meta device. The states of random generators are
            restored.

    Raises:
        ConfigError: Weights and gradients need more than the free memory. The text names the
            largest parameter.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = make()
    # a model that computes with its start values cannot be built on the meta device
    except (RuntimeError, ConfigError) as error:
        if not isinstance(error.__cause__ or error, RuntimeError):
            raise
        note(
            "the memory of the model cannot be computed before it is built: "
            f"{' '.join(str(error).split())}"
        )
        return
    of_tables = {id(p) for _, collection in collections_in(module) for p in collection.parameters()}
    dense = {name: p for name, p in module.named_parameters() if id(p) not in of_tables}
    needed = COPIES * sum(p.numel() * p.element_size() for p in dense.values())
    info = rank_info()
    pools = memory_pools(torch.device("cpu"))
    free = free_memory_bytes([pools] * (info.local_world if info else 1))[0]
    if free is not None and needed > free:
        name, largest = max(dense.items(), key=lambda item: item[1].numel())
        shape = " x ".join(f"{n:,}" for n in largest.shape)
        raise ConfigError(
            f"model: weights and gradients of the dense part need {needed:,} bytes on each rank, "
            f"and {free:,} are free; "
            f"{name} alone is {shape}: use narrower layers (model.bottom_layers, "
            "model.top_layers) or a smaller tables.dim"
        )
