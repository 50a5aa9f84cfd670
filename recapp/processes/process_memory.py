"""The host of a rank, and how much memory the rank can still give to tables.

Memory comes from pools, and ranks share some of them:

| pool                       | free                                         | shared by            |
|----------------------------|----------------------------------------------|----------------------|
| the machine                | what the kernel calls available              | ranks on the machine |
| each cgroup above the rank | its limit less what is in use, files in      | ranks inside         |
|                            | memory not counted                           |                      |
| RLIMIT_AS, RLIMIT_DATA     | the limit less what the process has mapped   | nobody               |
| a GPU                      | what CUDA calls free                         | nobody               |
"""

import ctypes
import gc
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# malloc.h of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
NEVER = -1
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OWN_STATUS = Path("/proc/self/status")
_MAPPED = {resource.RLIMIT_AS: "VmSize:", resource.RLIMIT_DATA: "VmData:"}


class Pool(NamedTuple):
    """Memory that a rank takes from."""

    name: str
    """The same on all ranks that take from this pool; empty where it is the rank's alone."""
    free_bytes: int
    """What all these ranks together can still take."""


def machine_id() -> str:
    """Return one name for all processes on one machine, whatever their containers call it."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def host_id() -> str:
    """Return one name for all processes that share a network.

    Hosts of one name have different ones, and so have network namespaces.
    """
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        network = ""
    return f"{machine_id()} {socket.gethostname()} {network}"


def memory_pools(device: torch.device) -> list[Pool]:
    """Return the pools that this rank's tables are taken from.

    Args:
        device: The device of the rank.
    """
    if device.type == "cuda":
        return [Pool("", int(torch.cuda.mem_get_info(device)[0]))]
    return [*_machine(), *_cgroups(), *_rlimits()]


def free_memory_bytes(pools_W: Sequence[Sequence[Pool]]) -> list[int | None]:
    """Return the bytes that each rank can still allocate if all do so at once.

    That is the least of a rank's shares of its pools; None where no pool is known.

    Args:
        pools_W: What `memory_pools` returned on every rank.
    """
    ranks = Counter(
        name for pools in pools_W for name in {pool.name for pool in pools if pool.name}
    )
    return [
        min((pool.free_bytes // ranks.get(pool.name, 1) for pool in pools), default=None)
        for pools in pools_W
    ]


def _rlimits() -> Iterator[Pool]:
    for which, field in _MAPPED.items():
        limit = resource.getrlimit(which)[0]
        mapped = _bytes_of(_OWN_STATUS, field)
        if limit != resource.RLIM_INFINITY and mapped is not None:
            yield Pool("", max(0, limit - mapped))


def _machine() -> Iterator[Pool]:
    available = _bytes_of(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        yield Pool(f"machine {machine_id()}", available)


def _cgroups() -> Iterator[Pool]:
    """Yield the pools of the process's own cgroup and those around it, as far as they are visible.

    Both versions of the kernel's interface are read.
    """
    for folder in _cgroup_folders():
        for limit, used, files in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            ),
        ):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    held = dict(
                        line.split() for line in (folder / "memory.stat").read_text().splitlines()
                    )
                    in_use = int((folder / used).read_text()) - sum(
                        int(held.get(name, 0)) for name in files
                    )
                    yield Pool(
                        f"cgroup {machine_id()} {folder.stat().st_ino}", max(0, int(most) - in_use)
                    )
            except (OSError, ValueError):
                continue


def _cgroup_folders() -> list[Path]:
    """Return the directories of the process's own cgroup and of those around it.

    A container often sees its own cgroup as the root, under a path that is the host's: what does
    not exist is left out.
    """
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    found = [_CGROUPS, _CGROUPS / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own = _CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
            found += [own, *(folder for folder in own.parents if _CGROUPS in folder.parents)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def resident_bytes() -> int | None:
    """Return how much memory of this process is resident; None where the system does not say."""
    return _bytes_of(_OWN_STATUS, "VmRSS:")


def peak_resident_bytes() -> int | None:
    """Return the most memory of this process that was ever resident, or since
    `forget_peak_resident`; None where the system does not say.
    """
    return _bytes_of(_OWN_STATUS, "VmHWM:")


def forget_peak_resident() -> None:
    """Let `peak_resident_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak


def give_back_unused() -> None:
    """Give memory that is not used back to the system: Python's and the allocator's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _bytes_of(file: Path, field: str) -> int | None:
    """Return a field of a file in /proc, which counts kilobytes, in bytes; None where it lacks."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory instead of giving it back to the system.

    A tensor of more than a few MB would otherwise be mapped, faulted in page by page (some 2 us per
    4 KB: 27 ms for an output of 55 MB, measured) and unmapped in every step. The price: a process
    keeps what its largest step needed. No import does this: whoever starts ranks decides it
    (`engine.keep_freed_memory`), or a script that calls it before it builds its model.

    Returns:
        Whether glibc will do so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
