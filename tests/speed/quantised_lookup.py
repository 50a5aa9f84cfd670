"""`quantised`: compare lookups of rows in 8 and 4 bits in one process with FBGEMM's inference
kernels, with torch's own, with rows of floats, and with the bytes that must be read.

Each lookup gets the ids of each table (int32) and the ends of bags, and returns new vectors in
fp32.

    recapp              rows of the ids, then one pass over the packed rows of all tables, [B, F D]
    fbgemm              IntNBitTableBatchedEmbeddingBagsCodegen, ids not checked, [B, F D]
    torch_quantised     torch.ops.quantized.embedding_bag_byte (or 4bit) _rowwise_offsets, one call
                        over the packed rows of all tables as if they were one, [F B, D]
    torch               torch's embedding_bag over rows in fp32, one call for all tables, [F B, D]
    fp32                recapp's kernel over these rows in fp32, [B, F D]
    read                reading the packed rows and nothing else (`tests/speed/row_reads.py`):
                        the byte limit, which is the bytes of the packed rows over the bandwidth of
                        random row reads

Each step takes another batch. There are enough batches that no cache holds the rows of a small one.

B samples of a batch, F tables, D columns, L ids of a batch, M = F B bags, R rows of all tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.timing import Measured, Steps, compared
from recapp.benchmarks.workloads import Workload
from recapp.kernels.backend import Backend, backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import BITS, QuantisedRows, empty_rows
from recapp.kernels.row_memory import RowMemory

from .lab import Lab
from .rivals import beside

BAGS = (1, 20)
LOOKUPS = {
    name: Workload(name, 1, (rows,) * 26, (128,) * 26, (1,) * 26)
    for name, rows in (("L48k", 48_000), ("L200k", 200_000))
}
"""26 tables of 128 columns, 640 MB and 2.7 GB in fp32."""
DRAWN_IDS = 1 << 24  # limit for the ids of all batches
MOST_BATCHES = 512  # more than the steps of a measurement
LEAST_BATCHES = 6
PART_ROWS = 1 << 16
TORCH_LOOKUPS: dict[int, Callable[..., Tensor]] = {
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}


@dataclass(frozen=True)
class JaggedIds:
    """Ids and bags of the batches of a workload in the layout that lookups take.

    Args:
        ids_NL: The ids of each batch, int32, table by table.
        first_L: For each id, the first row of its table, int32.
        offsets_M1: The begin and end of each bag among the ids, int32.
        at_M: The position of each bag's vector in [B, F D], int32.
    """

    ids_NL: Tensor
    first_L: Tensor
    offsets_M1: Tensor
    at_M: Tensor

    def rows(self, number: int) -> Tensor:
        """Return the rows of a batch, numbered across all tables, [L]."""
        return self.ids_NL[number % len(self.ids_NL)] + self.first_L


def jagged_ids_of(workload: Workload, ids_NL: Tensor) -> JaggedIds:
    """Return the batches of a workload with the given ids."""
    rows_F = torch.tensor(workload.rows_F)
    per_F = workload.batch_size * torch.tensor(workload.bag_F)
    first_L = torch.repeat_interleave(rows_F.cumsum(0) - rows_F, per_F)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), workload.lengths().cumsum(0)])
    sample_B = torch.arange(workload.batch_size) * workload.width
    column_F = torch.tensor(workload.dim_F).cumsum(0) - torch.tensor(workload.dim_F)
    at_FB = column_F[:, None] + sample_B
    return JaggedIds(ids_NL.int(), first_L.int(), offsets.int(), at_FB.view(-1).int())


def stored_rows(rows: int, dim: int) -> tuple[Tensor, dict[int, QuantisedRows]]:
    """Return random rows in fp32, and their packed rows by the bits of a value."""
    memory = RowMemory(rows, dim, torch.float32, torch.device("cpu"))
    memory.grow(rows)
    generator = torch.Generator().manual_seed(0)
    packed = {bits: empty_rows(rows, dim, bits) for bits in BITS}
    for first in range(0, rows, PART_ROWS):
        part_RD = memory.rows[first : first + PART_ROWS]
        part_RD.normal_(0, 0.01, generator=generator)
        for made in packed.values():
            made.fill(first, part_RD)
    return memory.rows, packed


def lookups_of(
    kernels: Backend, weights_RD: Tensor, packed: QuantisedRows, b: JaggedIds, width: int
) -> dict[str, Callable[[int], object]]:
    """Return the lookups of a batch by name. FBGEMM's lookup is not among them: it runs in another
    process.

    Args:
        kernels: recapp's kernels.
        weights_RD: The rows of all tables in fp32.
        packed: The same rows, quantised.
        b: The batches.
        width: The number of columns of all tables together.
    """
    dim = weights_RD.shape[1]
    samples = len(b.at_M) * dim // width
    in_lines = dim % 16 == 0
    offsets_M1 = b.offsets_M1
    torch_lookup = TORCH_LOOKUPS[packed.bits]

    def by_kernel(pool: Callable[..., None]) -> Callable[[int], object]:
        """Return a lookup by a kernel of recapp, which writes into new memory."""

        def look_up(number: int) -> Tensor:
            links = Links(b.rows(number), offsets_M1, None, b.at_M, len(b.at_M))
            target = torch.empty(samples * width)
            pool(links, target, torch.float32, 1.0, in_lines)
            return target

        return look_up

    found: dict[str, Callable[[int], object]] = {
        "recapp": by_kernel(partial(kernels.pool, packed, dim, dim)),
        "torch_quantised": lambda number: torch_lookup(
            packed.packed_RK, b.rows(number), offsets_M1, False, 0, False, None, None, True
        ),
        "torch": lambda number: torch.nn.functional.embedding_bag(
            b.rows(number), weights_RD, offsets_M1, mode="sum", include_last_offset=True
        ),
        "fp32": by_kernel(partial(kernels.pool, weights_RD.view(-1), dim, dim)),
    }
    if kernels.name == "numba":
        from .row_reads import read_rows

        row_NL = b.ids_NL + b.first_L
        found["read"] = lambda number: read_rows(packed.packed_RK, row_NL[number % len(row_NL)])
    return found


def run(session: Lab) -> None:
    """Measure every workload, number of bits, batch, bag and number of threads."""
    settings = session.settings
    kernels = backend(settings.backend, torch.device("cpu"))
    for name in settings.workload:
        tables = LOOKUPS[name]
        weights_RD, packed = stored_rows(sum(tables.rows_F), tables.dim_F[0])
        for batch_size, bag, ids in product(settings.batch_size, BAGS, settings.ids):
            workload = tables.of_shape(batch_size, bag, ids)
            count = max(LEAST_BATCHES, min(MOST_BATCHES, DRAWN_IDS // workload.ids))
            b = jagged_ids_of(workload, session.ids_of(workload, count))
            for bits, rows in packed.items():
                lookups = lookups_of(kernels, weights_RD, rows, b, workload.width)
                shape = {"workload": name, "bits": bits, "ids": ids}
                _measure(session, workload, shape, rows, lookups)


def _measure(
    session: Lab,
    workload: Workload,
    shape: dict[str, Any],
    rows: QuantisedRows,
    lookups: Mapping[str, Callable[[int], object]],
) -> None:
    """Measure one shape of batches with one number of bits, on every number of threads."""
    contenders = {
        name: Steps({"step": look_up}, inside=torch.inference_mode)
        for name, look_up in lookups.items()
    }
    title = f"{workload.name}, {rows.bits} bits"
    specs = session.specs("quantised", workload, bits=rows.bits)
    for threads, measured in session.by_threads(title, contenders, specs):
        session.add(shape | {"threads": threads} | _row(workload, rows, measured))


def _times(measured: Measured) -> dict[str, float]:
    """Return the median and the minimum of all steps; other programs disturb the minimum least."""
    return {
        "median_ms": measured.median(),
        "least_ms": min(ms for steps in measured.rounds["step"] for ms in steps),
    }


def _row(workload: Workload, rows: QuantisedRows, measured: dict[str, Measured]) -> dict[str, Any]:
    own = measured["recapp"]
    read = measured.get("read")
    packed_row_bytes = rows.packed_RK.shape[1]
    others = {name: measured[name] for name in ("torch_quantised", "torch", "fp32")}
    return {
        "batch_size": workload.batch_size,
        "bag": workload.bag_F[0],
        **compared(own, {**beside("fbgemm", measured), **others, "read": read}),
        "ns_per_row": own.median() * 1e6 / workload.ids,
        "packed_row_bytes": packed_row_bytes,
        "table_bytes": rows.packed_RK.nbytes,
        "read_gb_per_s": read and workload.ids * packed_row_bytes / read.median() / 1e6,
        "of_all": {name: _times(times) for name, times in measured.items()},
    }
