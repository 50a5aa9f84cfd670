"""Convert rows for scoring: floats to quantised records of 8 or 4 bits, to bytes of a file, and
back.

fp32 rows [R, D] --stored--> rows as kernels read them --bytes_of--> uint8 [R, K] --held--> rows
"""

import torch
from torch import Tensor

from recapp.engine.read_only_store import Held, values_of
from recapp.kernels.quantised import QuantisedRows, bytes_of_record, dequantise, quantise
from recapp.tables.config import DataType, EmbeddingConfig

QUANTIZE = ("none", "fp16", "int8", "int4")
"""The values of `quantize` and `quantize_tables`; none keeps the data type of training."""


def row_bytes(data_type: DataType, dim: int) -> int:
    """Return the bytes of a stored row."""
    if data_type.bits is not None:
        return bytes_of_record(dim, data_type.bits)
    return dim * data_type.dtype.itemsize


def stored(rows_RD: Tensor, data_type: DataType) -> Held:
    """Convert rows of floats to a stored data type.

    Raises:
        ValueError: A value to quantise is not finite.
    """
    if data_type.bits is not None:
        return quantise(rows_RD, data_type.bits)
    return rows_RD.to(data_type.dtype)


def bytes_of(rows: Held) -> Tensor:
    """Return stored rows as bytes, [R, K], in the memory of the rows."""
    values = values_of(rows).contiguous()
    return values.view(torch.uint8).view(len(values), -1)


def held(raw_RK: Tensor, data_type: DataType, dim: int) -> Held:
    """Return bytes [R, K] as stored rows, in the memory of the bytes."""
    if data_type.bits is not None:
        return QuantisedRows(raw_RK, dim, data_type.bits)
    return raw_RK.view(data_type.dtype).view(len(raw_RK), dim)


def values(rows: Held, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return stored rows as floats, [R, D]."""
    if isinstance(rows, QuantisedRows):
        return dequantise(rows, torch.arange(len(values_of(rows))), dtype)
    return rows.to(dtype)


def storage_of(table: EmbeddingConfig, quantize: str) -> DataType:
    """Return the stored data type of a table under a `quantize` setting; narrower floats stay."""
    if quantize == "none":
        return table.data_type
    data_type = DataType(quantize)
    half = (DataType.FP16, DataType.BF16)
    return table.data_type if data_type in half and table.data_type in half else data_type
