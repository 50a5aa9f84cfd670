"""How much memory this rank can still give to tables: the tightest of the limits that hold for it.

| limit                         | free                                              |
|-------------------------------|---------------------------------------------------|
| RLIMIT_AS, RLIMIT_DATA        | the limit less what the process has mapped        |
| the cgroup                    | the limit less what is in use, by ranks on host   |
| the machine                   | what the kernel calls available, by ranks on host |
| a GPU                         | what CUDA calls free                              |
"""

import resource
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MAPPED = {resource.RLIMIT_AS: "VmSize:", resource.RLIMIT_DATA: "VmData:"}


def free_memory_bytes(device: torch.device, ranks_on_host: int) -> int | None:
    """Bytes this rank can still allocate on its device; None where nothing tells.

    Args:
        device: of the rank.
        ranks_on_host: ranks that share the machine's memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [limit for limit in (_machine(ranks_on_host), _cgroup(ranks_on_host), *_rlimits()) if limit is not None]
    return min(free, default=None)


def _rlimits() -> list[int]:
    found = []
    for which, field in _MAPPED.items():
        limit = resource.getrlimit(which)[0]
        mapped = _kilobytes(Path("/proc/self/status"), field)
        if limit != resource.RLIM_INFINITY and mapped is not None:
            found.append(max(0, limit - mapped))
    return found


def _machine(ranks: int) -> int | None:
    available = _kilobytes(Path("/proc/meminfo"), "MemAvailable:")
    return None if available is None else available // ranks


def _cgroup(ranks: int) -> int | None:
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            most = (_CGROUP / limit).read_text().strip()
            if most != "max":
                return max(0, int(most) - int((_CGROUP / used).read_text())) // ranks
        except (OSError, ValueError):
            continue
    return None


def _kilobytes(file: Path, field: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
