"""The host of a rank, and the memory that the rank can still give to tables.

Memory comes from pools, and ranks share some of them:

| pool                       | free                                         | shared by            |
|----------------------------|----------------------------------------------|----------------------|
| the machine                | MemAvailable of the kernel                   | ranks on the machine |
| each cgroup above the rank | limit minus use; the page cache of files     | ranks inside         |
|                            | does not count as use                        |                      |
| RLIMIT_AS, RLIMIT_DATA     | limit minus mapped memory of the process     | no other rank        |
| a GPU                      | free memory of the device, as CUDA reports   | no other rank        |
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
    """A pool of memory that a rank takes from.

    Args:
        name: The same on all ranks that share this pool; empty where only one rank uses the pool.
        free_bytes: The memory that all these ranks together can still take.
    """

    name: str
    free_bytes: int


def machine_id() -> str:
    """Return one name for all processes on one machine, also across containers with other names."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def host_id() -> str:
    """Return one name for all processes that share a host and its network.

    Two hosts with the same host name get different names, and so do two network namespaces.
    """
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        network = ""
    return f"{machine_id()} {socket.gethostname()} {network}"


def memory_pools(device: torch.device) -> list[Pool]:
    """Return the pools that give memory to this rank's tables.

    Args:
        device: The device of the rank.
    """
    if device.type == "cuda":
        return [Pool("", int(torch.cuda.mem_get_info(device)[0]))]
    pools = list(_cgroups())
    available = _bytes_of(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        pools.append(Pool(f"machine {machine_id()}", available))
    for which, field in _MAPPED.items():
        limit = resource.getrlimit(which)[0]
        mapped = _bytes_of(_OWN_STATUS, field)
        if limit != resource.RLIM_INFINITY and mapped is not None:
            pools.append(Pool("", max(0, limit - mapped)))
    return pools


def free_memory_bytes(pools_W: Sequence[Sequence[Pool]]) -> list[int | None]:
    """Return the bytes that each rank can still allocate if all ranks do so at once.

    A rank gets an equal share of each of its pools, and the smallest share counts; None where no
    pool is known.

    Args:
        pools_W: The result of `memory_pools` on every rank.
    """
    ranks = Counter(
        name for pools in pools_W for name in {pool.name for pool in pools if pool.name}
    )
    return [
        min((pool.free_bytes // ranks.get(pool.name, 1) for pool in pools), default=None)
        for pools in pools_W
    ]


def _cgroups() -> Iterator[Pool]:
    """Yield the pools of the process's own cgroup and of its visible ancestors, in version 1 and
    version 2 of the kernel's interface.
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
                    statistics = dict(
                        line.split() for line in (folder / "memory.stat").read_text().splitlines()
                    )
                    in_use = int((folder / used).read_text()) - sum(
                        int(statistics.get(name, 0)) for name in files
                    )
                    yield Pool(
                        f"cgroup {machine_id()} {folder.stat().st_ino}", max(0, int(most) - in_use)
                    )
            except (OSError, ValueError):
                continue


def _cgroup_folders() -> list[Path]:
    """Return the directories of the process's own cgroup and of its ancestors.

    A container often sees its own cgroup as the root, but reads the path that the host uses. So
    leave out paths that do not exist.
    """
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    folders = [_CGROUPS, _CGROUPS / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            nearest = _CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
            above = (folder for folder in nearest.parents if _CGROUPS in folder.parents)
            folders += [nearest, *above]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def resident_bytes() -> int | None:
    """Return the resident bytes of this process; None where the system does not report them."""
    return _bytes_of(_OWN_STATUS, "VmRSS:")


def peak_resident_bytes() -> int | None:
    """Return the peak of the resident bytes of this process, since its start or the last
    `forget_peak_resident`; None where the system does not report it.
    """
    return _bytes_of(_OWN_STATUS, "VmHWM:")


def forget_peak_resident() -> None:
    """Reset the peak that `peak_resident_bytes` returns."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak


def give_back_unused() -> None:
    """Return unused memory of Python and of the allocator to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def settled_bytes() -> int:
    """Return unused memory to the system, and return the resident bytes that are left; 0 where the
    system does not report them.
    """
    give_back_unused()
    return resident_bytes() or 0


def _bytes_of(file: Path, field: str) -> int | None:
    """Return a field of a file in /proc in bytes (the file has kilobytes); None where there is no
    such field.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the system.

    Otherwise every step would map a tensor of more than a few MB, fault it in page by page (some
    2 us per 4 KB: 27 ms for an output of 55 MB, measured) and unmap it. The price: a process keeps
    the memory of its largest step. No import does this: the setting `engine.keep_freed_memory`
    decides it for ranks, and a script calls this function before it builds its model.

    Returns:
        Whether glibc has accepted the settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
