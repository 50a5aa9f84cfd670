"""The settings of the engine, the group `engine`: lookups, updates, the exchange between ranks."""

from dataclasses import dataclass
from typing import Literal

from recapp.settings.values import Natural, Transport


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The group `engine`.

    Args:
        backend: The kernels.
        transport: The exchange between ranks of one host.
        payload: The type of vectors and gradients on their way between ranks.
        look_ahead: The number of batches whose exchange of ids runs ahead of their step.
        clip_tables: Whether `trainer.gradient_clip_val` includes the gradients of rows.
        compile: Whether `torch.compile` compiles the dense part.
        graph: Whether the steps of one rank with a GPU are recorded as CUDA graphs.
        keep_freed_memory: Whether freed memory stays with the process.
    """

    backend: Literal["auto", "numba", "triton", "torch"] = "auto"
    transport: Transport = "auto"
    payload: Literal["full", "bf16", "fp16"] = "full"
    look_ahead: Natural = 1
    clip_tables: bool = False
    compile: bool = False
    graph: Literal["auto", "off"] = "auto"
    keep_freed_memory: bool = True
