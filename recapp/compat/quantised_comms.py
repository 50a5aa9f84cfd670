"""TorchRec's quantised communication as recapp's payload: the type in which vectors and their
gradients travel (`engine.payload` under Lightning).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from recapp.console import note_once
from recapp.errors import ConfigError


class CommType(Enum):
    """Types in which vectors travel; recapp has the first three."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"


_DTYPES = {CommType.FP32: None, CommType.FP16: torch.float16, CommType.BF16: torch.bfloat16}


_OF_OTHER_TYPES = (
    "fp8_quantize_dim",
    "fp8_quantize_dim_bwd",
    "fp8_bwd_uses_143",
    "mx4_quantize_dim",
    "mx4_quantize_dim_bwd",
    "mx4_rounding_mode",
)


@dataclass(frozen=True)
class QCommsConfig:
    """Types of vectors (forward) and of their gradients (backward).

    Args:
        forward_precision: The type of vectors.
        backward_precision: The type of gradients. recapp has one type for both directions: of two
            that differ it takes the one with the larger range, bf16 or else fp32, and a note says
            so.
        forward_loss_scale: None; gradients are not scaled.
        backward_loss_scale: None.
        fp8_quantize_dim: A setting of FP8, as the next two: no effect on the types sent here, in
            TorchRec too; a note says so where one is given.
        fp8_quantize_dim_bwd: A setting of FP8.
        fp8_bwd_uses_143: A setting of FP8.
        mx4_quantize_dim: A setting of MX4, as the next two, also without effect.
        mx4_quantize_dim_bwd: A setting of MX4.
        mx4_rounding_mode: A setting of MX4.

    Raises:
        ConfigError: A type that does not travel here, or a loss scale.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: Any = None

    def __post_init__(self) -> None:
        for name in ("forward_precision", "backward_precision"):
            if getattr(self, name) not in _DTYPES:
                raise ConfigError(
                    f"QCommsConfig: {name}={getattr(self, name)}: vectors travel as "
                    f"{', '.join(str(kind) for kind in _DTYPES)}"
                )
        if self.forward_loss_scale is not None or self.backward_loss_scale is not None:
            raise ConfigError("QCommsConfig: there is no loss scale; bf16 needs none")
        given = [name for name in _OF_OTHER_TYPES if getattr(self, name)]
        if given:
            note_once(
                f"QCommsConfig: {', '.join(given)} without effect, as in TorchRec where nothing "
                "travels as FP8 or MX4"
            )

    @property
    def payload(self) -> torch.dtype | None:
        """Return the dtype in which vectors travel; None for the compute type."""
        kinds = (self.forward_precision, self.backward_precision)
        if kinds[0] is kinds[1]:
            return _DTYPES[kinds[0]]
        widest = CommType.FP32 if CommType.FP32 in kinds else CommType.BF16
        note_once(
            f"QCommsConfig: {kinds[0].value} forward and {kinds[1].value} backward: recapp sends "
            f"both as {widest.value}"
        )
        return _DTYPES[widest]


@dataclass(frozen=True)
class QCommsRegistry:
    """What `EmbeddingBagCollectionSharder` takes as `qcomm_codecs_registry`.

    Args:
        payload: The dtype in which vectors travel.
    """

    payload: torch.dtype


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Any = None,
    device: torch.device | str | None = None,
) -> QCommsRegistry | None:
    """Return the registry of a configuration; None where vectors travel as they are computed.

    Args:
        qcomms_config: The types.
        comm_ops: None: all messages of vectors travel alike.
        device: Not needed: every type travels on every device. TorchRec sends FP16 for BF16 on
            CPUs.

    Raises:
        ConfigError: Operations are named.
    """
    if comm_ops is not None:
        raise ConfigError(
            "get_qcomm_codecs_registry: comm_ops has no effect here, where all messages of vectors "
            "travel alike: leave it out"
        )
    payload = qcomms_config.payload
    return None if payload is None else QCommsRegistry(payload)
