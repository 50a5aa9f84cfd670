"""Whole tables of a sharded model on rank 0: for a notebook, or to load under any plan."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recapp.engine.sharded_collection import sharded_tables
from recapp.engine.table_strips import Strip, TableStrips
from recapp.sharding.layout import Block, copy_rows
from recapp.tables.row_order import RowOrder
from recapp.transport.communicator import Comm

PART_BYTES = 64 * 2**20  # of a message: rank 0 needs this memory in addition to the tables


def gathered_state_dict(model: nn.Module) -> dict[str, Any]:
    """Assemble the state dict of the unsharded model on rank 0. Every rank calls it.

    Rank 0 needs memory for all tables. The others send their strips in messages of at most 64 MiB.

    Args:
        model: A `DistributedModelParallel` or any other module with sharded collections.

    Returns:
        On rank 0 a copy on the CPU with the entries of the unsharded model's `state_dict`. It loads
        into the unsharded model, and on every rank into a sharded model. On other ranks an empty
        dict.
    """
    tables = sharded_tables(model)
    comm = tables[0].comm if tables else Comm()
    state = model.state_dict()
    strips_of = {
        name: value.strips for name, value in state.items() if isinstance(value, TableStrips)
    }
    whole = gathered_tables(strips_of, comm)
    if comm.rank:
        return {}
    return {name: whole[name] if name in whole else _copied(value) for name, value in state.items()}


def gathered_tables(strips_of: Mapping[str, list[Strip]], comm: Comm) -> dict[str, Tensor]:
    """Assemble whole tables on rank 0 from the strips of all ranks. Every rank calls it.

    Args:
        strips_of: The strips of this rank, by the name of the table in the state dict.
        comm: The ranks.

    Returns:
        On rank 0 each table on the CPU; on other ranks empty tensors.
    """
    headers_W = comm.all_gather(
        {
            name: [(rows, cols, part.dtype, tuple(mixed)) for rows, cols, part, *mixed in strips]
            for name, strips in strips_of.items()
        }
    )
    return {
        name: _gathered(strips, [headers[name] for headers in headers_W], comm)
        for name, strips in strips_of.items()
    }


StripHeader = tuple[tuple[int, int], tuple[int, int], torch.dtype, tuple[tuple[int, int], ...]]


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _gathered(strips: list[Strip], headers_W: list[list[StripHeader]], comm: Comm) -> Tensor:
    """Return a whole table on rank 0; on other ranks an empty tensor. Where several ranks hold a
    strip, the first of them sends it.
    """
    described = [
        (rank, number, *strip)
        for rank, headers in enumerate(headers_W)
        for number, strip in enumerate(headers)
    ]
    shape = (
        max(rows[1] for *_, rows, _, _, _ in described),
        max(cols[1] for *_, cols, _, _ in described),
    )
    here = shape if comm.rank == 0 else (0, 0)
    whole = torch.empty(here, dtype=described[0][-2], device="cpu")
    target = Block("", "", shape, range(shape[0]), range(shape[1]), whole, True)
    seen = set()
    for rank, number, rows, cols, dtype, mixed in described:
        if (rows, cols) in seen:
            continue
        seen.add((rows, cols))
        step = max(1, PART_BYTES // max(1, (cols[1] - cols[0]) * dtype.itemsize))
        for first in range(rows[0], rows[1], step):
            part = (first, min(first + step, rows[1]))
            sent = (
                strips[number][2][part[0] - rows[0] : part[1] - rows[0]]
                if comm.rank == rank
                else None
            )
            arrived = _to_rank_0(sent, rank, (part[1] - part[0], cols[1] - cols[0]), dtype, comm)
            if arrived is not None:
                order = RowOrder(shape[0], *mixed[0]) if mixed else None
                copy_rows(target, arrived, range(*part), range(*cols), order)
    return whole


def _to_rank_0(
    sent: Tensor | None, source: int, shape: tuple[int, int], dtype: torch.dtype, comm: Comm
) -> Tensor | None:
    """Send the rows of one rank to rank 0 and return them there. Other ranks get None without
    waiting.
    """
    if comm.rank not in (0, source):
        return None
    if source == 0:
        return sent
    size = shape[0] * shape[1] * dtype.itemsize
    bytes_N = (
        torch.empty(size, dtype=torch.uint8, device=comm.device)
        if sent is None
        else sent.contiguous().view(-1).view(torch.uint8)
    )
    nothing = [(0, 0)] * comm.world
    spans = [(0, 0)] * comm.world
    spans[source if comm.rank == 0 else 0] = (0, size)
    comm.swap(bytes_N, *((nothing, spans) if comm.rank == 0 else (spans, nothing)))()
    return bytes_N.view(dtype).view(shape) if comm.rank == 0 else None
