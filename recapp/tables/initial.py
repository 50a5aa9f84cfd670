"""Start values of any rectangle of a table, with the same bits on every rank.

A value is a hash of (seed, table name, row, column) in 32-bit integer arithmetic, and of the epoch
where a table begins anew (`recapp/trainer/callbacks.py`). So each rank fills its own shards
without numbers from another, and one process, two ranks and a hundred ranks hold the same model.
The mixing step is the two-multiply integer hash found by Chris Wellon's
prospector search (public domain, "lowbias32"); torch has no unsigned arithmetic, so int64 with
masks is used.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recapp.errors import ConfigError
from recapp.tables.config import EmbeddingConfig
from recapp.tables.positions import RowOrder

# 8 MB of int64 scratch memory: it fits into a last-level cache and bounds the memory beside the
# shard.
CHUNK_ELEMENTS = 1 << 20
_MASK = 0xFFFFFFFF
# A backend's `write_start_values`, which writes the same bits of fp32 many times as fast.
Compiled = Callable[[Tensor, Tensor, Tensor, int, range, float], None]
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: neighbouring columns differ in half of their bits


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers held in int64, in place."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _MASK
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _MASK
    x ^= x >> 16
    return x


def fill_initial(
    out: Tensor,
    table: EmbeddingConfig,
    seed: int,
    rows: range,
    cols: range,
    order: RowOrder | None = None,
    epoch: int = 0,
    compiled: Compiled | None = None,
) -> None:
    """Write the start values of rows x cols of a table into `out`.

    The values are uniform in the open interval +-init_range (default 1/sqrt(rows of the table)) or
    from `weight_init_min` to `weight_init_max`, on a grid of 2^24 values, symmetric about its
    middle; or the table's `init_fn` writes them.

    Args:
        out: [len(rows), len(cols)], any floating dtype, any strides.
        table: The table.
        seed: The seed of the run.
        rows: Rows of the logical table, numbered in `order`.
        cols: Columns of the logical table.
        order: The order of the rows; None: by row number.
        epoch: The epoch in which the table begins anew; 0 when it is made.
        compiled: The kernel of the backend that computes with the rows, if it has one. It fills
            large rectangles; torch has filled a small one before numba has read the kernel.
    """
    whole = None if table.init_fn is None else _made_by_function(table, seed, epoch)
    fast = compiled if whole is None and out.numel() >= CHUNK_ELEMENTS else None
    step = max(1, CHUNK_ELEMENTS // max(1, len(cols)))
    for first in range(rows.start, rows.stop, step):
        row_N = torch.arange(first, min(first + step, rows.stop), device=out.device)
        row_N = row_N if order is None else order.rows_at(row_N)
        at_N = torch.arange(len(row_N), device=out.device) + (first - rows.start)
        if whole is None:
            write_start_values(out, at_N, row_N, table, seed, cols, epoch, fast)
        else:
            out[at_N] = whole[row_N.cpu(), cols.start : cols.stop].to(out)


def write_start_values(
    out: Tensor,
    at_N: Tensor,
    row_N: Tensor,
    table: EmbeddingConfig,
    seed: int,
    cols: range,
    epoch: int,
    compiled: Compiled | None,
) -> None:
    """Write the start values of some rows to places in `out` (see `fill_initial`).

    Args:
        out: The rows of a store, [R, len(cols)].
        at_N: The place of each row in `out`.
        row_N: Rows of the logical table; keys of a dynamic table.
        table: The table, without `init_fn`.
        seed: The seed of the run.
        cols: Columns of the logical table.
        epoch: The epoch in which the table begins anew; 0 when it is made.
        compiled: The kernel of the backend, if it has one.
    """
    exact = out.dtype == torch.float32 and not table.start_middle and out.is_contiguous()
    if compiled is not None and exact:
        compiled(out, at_N, row_N, start_hash(table, seed, epoch), cols, table.start_range)
    else:
        out[at_N] = start_values(row_N, table, seed, cols, out.dtype, epoch).to(out)


def _made_by_function(table: EmbeddingConfig, seed: int, epoch: int) -> Tensor:
    """Return the start values that the table's `init_fn` writes, [R, D], on the CPU.

    The function gets a tensor with uniform values, and torch's generator in a state that depends on
    seed, table and epoch alone. Afterwards the generator has its old state again.

    Raises:
        ConfigError: The function raises an error, or returns another tensor, which would not reach
            the table.
    """
    assert table.init_fn is not None
    shape = (table.num_embeddings, table.embedding_dim)
    whole = torch.empty(shape, dtype=table.data_type.dtype, device="cpu")
    plain = replace(table, init_fn=None)
    fill_initial(whole, plain, seed, range(shape[0]), range(shape[1]), epoch=epoch)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(start_hash(table, seed, epoch))
        try:
            result = table.init_fn(whole)
        except Exception as error:
            raise ConfigError(
                f"tables.{table.name}.init_fn raised {type(error).__name__}: {error}: the "
                f"function gets a tensor [{shape[0]}, {shape[1]}] and must write the start "
                "values into it"
            ) from error
    memory = whole.untyped_storage().data_ptr()
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != memory:
        raise ConfigError(
            f"tables.{table.name}.init_fn returned a new tensor: the function must write into "
            "the tensor that it gets, as torch.nn.init.normal_ does"
        )
    return whole


def start_hash(table: EmbeddingConfig, seed: int, epoch: int = 0) -> int:
    """Return the hash of seed and table name, an input of every start value of a table. The tables
    of all members of an ensemble take the names of the first member's. A table that begins anew
    has another hash in each epoch but the first.
    """
    again = f"/{epoch}" if epoch else ""
    return zlib.crc32(f"{seed}/{table.member_of or table.name}{again}".encode())


def start_values(
    row_N: Tensor,
    table: EmbeddingConfig,
    seed: int,
    cols: range,
    dtype: torch.dtype,
    epoch: int = 0,
) -> Tensor:
    """Return the start values of some rows, [N, len(cols)], in fp32, or in fp64 for a table of
    fp64.

    Args:
        row_N: Rows of the logical table, int64; keys of a dynamic table.
        table: The table.
        seed: The seed of the run.
        cols: Columns of the logical table.
        dtype: The dtype of the table's rows.
        epoch: The epoch in which the table begins anew; 0 when it is made.
    """
    hashed = start_hash(table, seed, epoch)
    values_ND = values_of_hash(row_N, hashed, table.start_range, cols, dtype)
    if table.start_middle:
        values_ND += table.start_middle
        values_ND.clamp_(table.get_weight_init_min(), table.get_weight_init_max())
    return values_ND


def begun_rows(
    row_K: Tensor,
    table: EmbeddingConfig,
    seed: int,
    rows: range,
    cols: range,
    order: RowOrder | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the places of some rows in a rectangle, [M], and their start values, [M, len(cols)].

    Args:
        row_K: Rows of the logical table; those outside of the rectangle are left out.
        table: The table.
        seed: The seed of the run.
        rows: The rows of the rectangle.
        cols: The columns of the rectangle.
        order: The order of the rows; None: by row number.
        dtype: The dtype of the table's rows.
    """
    row_N = torch.arange(rows.start, rows.stop, device="cpu")
    row_N = row_N if order is None else order.rows_at(row_N)
    at_M = torch.isin(row_N, row_K.cpu()).nonzero()[:, 0]
    if table.init_fn is None:
        return at_M, start_values(row_N[at_M], table, seed, cols, dtype)
    whole = torch.empty(
        len(rows), len(cols), dtype=dtype, device="cpu"
    )  # init_fn fills only a whole rectangle
    fill_initial(whole, table, seed, rows, cols, order)
    return at_M, whole[at_M]


def values_of_hash(
    row_N: Tensor, key: int, start_range: float, cols: range, dtype: torch.dtype
) -> Tensor:
    """Return the start values of some rows (see `start_values`).

    Args:
        row_N: See `start_values`.
        key: The result of `start_hash` for the table.
        start_range: The largest distance of a value from 0.
        cols: See `start_values`.
        dtype: See `start_values`.
    """
    scale = start_range / 2**24
    col_C = torch.arange(cols.start, cols.stop, device=row_N.device) * _GOLDEN & _MASK
    mixed_N = _mix((row_N & _MASK) ^ _mix((row_N >> 32) + key & _MASK))
    bits_NC = _mix(mixed_N[:, None] + col_C & _MASK)
    odd_NC = (bits_NC >> 8) * 2 + (1 - 2**24)  # odd, below 2^24 in size: exact in fp32
    return odd_NC.to(torch.float64 if dtype == torch.float64 else torch.float32) * scale
