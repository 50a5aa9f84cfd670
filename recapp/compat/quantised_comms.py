"""TorchRec's quantised communication as recapp's payload: the type in which ranks send vectors and
their gradients (`engine.payload` under Lightning).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from recapp.console import note_once
from recapp.errors import ConfigError


class CommType(Enum):
    """TorchRec's types of messages; recapp has the first three."""

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
    """The types of sent vectors (forward) and of their gradients (backward).

    Args:
        forward_precision: The type of vectors.
        backward_precision: The type of gradients. recapp has one type for both directions. If the
            two differ, it takes fp32 if that is one of them, else bf16, and prints a note.
        forward_loss_scale: Must be None, because gradients are not scaled.
        backward_loss_scale: Must be None.
        fp8_quantize_dim: A setting of FP8. It has no effect on recapp's types, nor on these types
            in TorchRec; recapp prints a note if it is given.
        fp8_quantize_dim_bwd: A setting of FP8, without effect.
        fp8_bwd_uses_143: A setting of FP8, without effect.
        mx4_quantize_dim: A setting of MX4, without effect.
        mx4_quantize_dim_bwd: A setting of MX4, without effect.
        mx4_rounding_mode: A setting of MX4, without effect.

    Raises:
        ConfigError: recapp does not have a type, or a loss scale is given.
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
        """Return the dtype in which ranks send vectors; None for the compute type."""
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
    """The argument `qcomm_codecs_registry` of `EmbeddingBagCollectionSharder`.

    Args:
        payload: The dtype in which ranks send vectors.
    """

    payload: torch.dtype


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Any = None,
    device: torch.device | str | None = None,
) -> QCommsRegistry | None:
    """Return the registry of a configuration; None if ranks send vectors in the compute type.

    Args:
        qcomms_config: The types.
        comm_ops: Must be None, because all messages of vectors have one type.
        device: Ignored, because every type works on every device. (TorchRec sends FP16 for BF16 on
            CPUs.)

    Raises:
        ConfigError: `comm_ops` is given.
    """
    if comm_ops is not None:
        raise ConfigError(
            "get_qcomm_codecs_registry: comm_ops has no effect here, where all messages of vectors "
            "travel alike: leave it out"
        )
    payload = qcomms_config.payload
    return None if payload is None else QCommsRegistry(payload)
