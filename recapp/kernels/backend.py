"""Which kernels run: one object with the local functions of the engine, chosen once per collection.

| backend | device | what it is                                                                    |
|---------|--------|-------------------------------------------------------------------------------|
| torch   | any    | `reference.py`: plain torch, defines the result                               |
| numba   | CPU    | `numba_cpu.py`: compiled for the machine at first use, several times as fast; |
|         |        | results are kept on disk                                                      |
| triton  | GPU    | `triton_cuda.py`: arithmetic in kernels, integers as the reference; checked   |
|         |        | by Triton's interpreter only, not timed                                       |

`auto` takes the fastest that is there; the setting is `engine.backend`. Faster backends give the
reference's result up to the order of sums; within one backend results are the same bits under every
plan and for every number of threads.
"""

from importlib.util import find_spec
from typing import Any

import torch

from recapp.errors import ConfigError, suggest
from recapp.kernels.reference import TorchBackend

Backend = TorchBackend | Any
"""Something with the reference's functions."""

BACKENDS = ("auto", "numba", "torch", "triton")
SETTING = "engine.backend"


def backend(name: str, device: torch.device) -> Backend:
    """Return kernels for tensors of a device.

    Args:
        name: `auto`, or one of the table above to force it.
        device: Device of rows and messages.

    Raises:
        ConfigError: The name is unknown, or what was forced is not there.
    """
    if name not in BACKENDS:
        raise ConfigError(f"{SETTING}={name}: unknown; {suggest(name, BACKENDS)}")
    obstacles = {"numba": _no_numba, "triton": _no_triton}
    if name in obstacles and (why := obstacles[name](device)):
        raise ConfigError(f"{SETTING}={name}: {why}; use auto or torch")
    if name == "triton" or (name == "auto" and device.type == "cuda" and not _no_triton(device)):
        from recapp.kernels.triton_cuda import TritonBackend

        return TritonBackend()
    if name == "numba" or (name == "auto" and not _no_numba(device)):
        from recapp.kernels.numba_cpu import NumbaBackend

        return NumbaBackend()
    return TorchBackend()


def missed(name: str, device: torch.device) -> str:
    """Return a line for people about the kernels that `auto` had to do without on a device; empty
    where it has the fast ones or was not asked.
    """
    why = _no_triton(device) if device.type == "cuda" else _no_numba(device)
    return (
        f"{why}: lookup and update run in plain torch, several times slower"
        if name == "auto" and why
        else ""
    )


def _no_numba(device: torch.device) -> str:
    """Return why numba's kernels cannot be had; empty if they can."""
    if device.type != "cpu":
        return f"it computes on the CPU, rows live on {device}"
    return "" if find_spec("numba") else "numba is not installed (pip install numba)"


def _no_triton(device: torch.device) -> str:
    """Return why Triton's kernels cannot be had; its interpreter takes CPU tensors as well."""
    if not find_spec("triton"):
        return "triton is not installed (torch for CUDA brings it; pip install triton)"
    from triton import knobs

    if device.type == "cuda" or (device.type == "cpu" and knobs.runtime.interpret):
        return ""
    return f"it computes on a GPU, rows live on {device}"
