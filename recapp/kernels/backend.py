"""The choice of a backend: one object with the engine's local functions, chosen once per
collection.

| backend | device | what it is                                                                    |
|---------|--------|-------------------------------------------------------------------------------|
| torch   | any    | `reference.py`: plain torch, defines the result                               |
| numba   | CPU    | `numba_cpu.py`: compiled for the machine at first use, several times as fast; |
|         |        | results are kept on disk                                                      |
| triton  | GPU    | `triton_cuda.py`: arithmetic in kernels, integers as the reference; checked   |
|         |        | by Triton's interpreter only, not timed                                       |

`auto` takes the fastest backend that works; the setting is `engine.backend`. Faster backends give
the reference's results up to the order of sums. Within one backend results have the same bits under
every plan and for every number of threads.
"""

from importlib.util import find_spec
from typing import Any

import torch

from recapp.errors import ConfigError, suggest
from recapp.kernels.reference import TorchBackend

Backend = TorchBackend | Any
"""An object with the functions of `TorchBackend`."""

BACKENDS = ("auto", "numba", "torch", "triton")
"""The values of the setting: the names of the backends, and `auto`."""
SETTING = "engine.backend"
"""The name of the setting, for errors."""


def backend(name: str, device: torch.device) -> Backend:
    """Return the backend for tensors of a device.

    Args:
        name: `auto`, or a name of the table above to force that backend.
        device: The device of rows and messages.

    Raises:
        ConfigError: The name is unknown, or the named backend does not work on this device.
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


def slow_kernels_note(name: str, device: torch.device) -> str:
    """Return a line of text with the reason why `auto` found no fast kernels on a device.

    The line is empty if `auto` found fast kernels, or if the setting names a backend.

    Args:
        name: The setting, as `backend` takes it.
        device: The device of rows and messages.
    """
    why = _no_triton(device) if device.type == "cuda" else _no_numba(device)
    return (
        f"{why}: lookup and update run in plain torch, several times slower"
        if name == "auto" and why
        else ""
    )


def _no_numba(device: torch.device) -> str:
    """Return the reason why numba's kernels do not work on a device; empty if they work."""
    if device.type != "cpu":
        return f"the backend computes on the CPU, and the rows are on {device}"
    return "" if find_spec("numba") else "numba is not installed (pip install numba)"


def _no_triton(device: torch.device) -> str:
    """Return the reason why Triton's kernels do not work on a device; empty if they work.

    Triton's interpreter takes CPU tensors as well.
    """
    if not find_spec("triton"):
        return "triton is not installed (torch for CUDA brings it; pip install triton)"
    from triton import knobs

    if device.type == "cuda" or (device.type == "cpu" and knobs.runtime.interpret):
        return ""
    return f"the backend computes on a GPU, and the rows are on {device}"
