"""Which kernels run: one object with the local functions of the engine, chosen once per collection.

| backend | device | what it is |
|---------|--------|------------|
| torch   | any    | `reference.py`: plain torch, defines the result |
| numba   | CPU    | `numba_cpu.py`: compiled for the machine at first use, several times as fast; results are kept on disk |

`auto` takes the fastest that is there; the setting is `topology.backend`. Faster backends give the reference's result up to the order of
sums; within one backend results are the same bits under every plan and for every number of threads.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from recapp.errors import ConfigError, suggest

if TYPE_CHECKING:
    import torch

    from recapp.kernels.reference import TorchBackend

    Backend = TorchBackend | Any
    """Something with the reference's functions."""

BACKENDS = ("auto", "numba", "torch")
SETTING = "topology.backend"


def backend(name: str, device: "torch.device") -> "Backend":
    """Kernels for tensors of a device.

    Args:
        name: `auto`, or one of the table above to force it.
        device: where rows and messages live.

    Raises:
        ConfigError: the name is unknown, or what was forced is not there.
    """
    if name not in BACKENDS:
        raise ConfigError(f"{SETTING}={name}: unknown; {suggest(name, BACKENDS)}")
    on_cpu, installed = device.type == "cpu", find_spec("numba") is not None
    if name == "numba" and not (on_cpu and installed):
        missing = "numba is not installed (pip install numba)" if on_cpu else f"it computes on the CPU, rows live on {device}"
        raise ConfigError(f"{SETTING}=numba: {missing}; use auto or torch")
    if name == "torch" or not (on_cpu and installed):
        from recapp.kernels.reference import TorchBackend

        return TorchBackend()
    from recapp.kernels.numba_cpu import NumbaBackend

    return NumbaBackend()
