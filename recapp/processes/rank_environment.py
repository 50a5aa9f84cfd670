"""The place of a run: the number, host and meeting point of a rank that torchrun, srun or a person
has started, the run directory that such ranks share, and the lock of a run's directory.

| started by | rank, ranks               | on this host               | where they meet            |
|------------|---------------------------|----------------------------|----------------------------|
| torchrun   | RANK, WORLD_SIZE          | LOCAL_RANK,                | MASTER_ADDR, MASTER_PORT:  |
|            |                           | LOCAL_WORLD_SIZE           | the agent's store          |
| srun       | SLURM_PROCID,             | SLURM_LOCALID,             | first host of the step, a  |
|            | SLURM_NTASKS              | SLURM_STEP_TASKS_PER_NODE  | port of job and step       |
| a person   | RANK, WORLD_SIZE          | LOCAL_RANK,                | MASTER_ADDR, MASTER_PORT   |
|            |                           | LOCAL_WORLD_SIZE, if not 0 |                            |
|            |                           | of 1                       |                            |

The ranks that `launch.py` starts look like torchrun's here.

A process that writes into a run's directory holds its lock, and a second run gets an error.

    DIR/.lock     {"pid": 4711, "host": "node07", "since": "2026-01-31 18:05:11"},
                  and the kernel's lock (flock) on it

The kernel frees the lock at every end of its holder, so a file that a killed run leaves behind does
not block the next run. The holder removes the file. If a file system has no locks (some network
file systems), a note warns that the directory is not locked.
"""

import fcntl
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from recapp.console import note, short_path
from recapp.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    import torch

# for steps of srun: these lie below the ports that the kernel assigns by itself
FIRST_PORT = 15000
PORTS = 10000
PARENT_PID = "RECAPP_PARENT_PID"  # the process of the command, for the fork server and for ranks
START_FIELD = 19  # in /proc/PID/stat after the name: start in ticks since boot (proc(5))
SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


@dataclass(frozen=True)
class RankInfo:
    """A rank's number, host and meeting point, as its environment gives them.

    Args:
        rank: The number of the rank among all ranks, 0 to world - 1.
        world: The number of all ranks.
        local_rank: The number of the rank among the ranks of its host.
        local_world: The number of ranks of this host.
        node: The number of the host, as the launcher counts hosts.
        address: The host at which rank 0 listens.
        port: The port at which rank 0 listens.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    address: str
    port: int

    def gpu(self, visible: int) -> int:
        """Return the index of this rank's GPU: `local_rank`, or 0 where a launcher shows each rank
        one GPU (`srun --gpus-per-task=1`).

        Args:
            visible: The number of GPUs that the process sees.

        Raises:
            LaunchError: There are fewer GPUs than ranks on the host.
        """
        if visible > 1 and self.local_rank >= visible:
            raise LaunchError(
                f"rank {self.rank} has the number {self.local_rank} on its host, where it sees "
                f"{visible} GPUs: start at most {visible} ranks on the host, or let each rank "
                "see one GPU of its own (CUDA_VISIBLE_DEVICES)"
            )
        return self.local_rank if visible > 1 else 0


def device_of(kind: str, rank: RankInfo | None) -> "torch.device":
    """Return the device on which this process computes, and make its GPU the current one.

    Args:
        kind: `cpu` or `cuda`.
        rank: The rank of this process; None if it is alone.

    Raises:
        LaunchError: There are fewer GPUs than ranks here.
    """
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    number = rank.gpu(torch.cuda.device_count()) if rank else 0
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def external_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank if torchrun, srun or a person has started it as one of several.

    Returns:
        The number of the rank; None for a process that is not a rank.
    """
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        return int(environ["RANK"])
    if _started_by_srun(environ):
        return int(environ["SLURM_PROCID"])
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["RANK"])
    return None


def cores_of_rank() -> int:
    """Return the number of cores for this rank: an equal share of those of its host, unless the
    launcher has divided them among the ranks already.

    Raises:
        LaunchError: As for `rank_info`.
    """
    cores = len(os.sched_getaffinity(0))
    info = rank_info()
    is_bound = cores < (os.cpu_count() or cores)
    return cores if is_bound or info is None else max(1, cores // info.local_world)


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return this rank as its environment describes it; None if this process is not a rank.

    Raises:
        LaunchError: Ranks were started by hand, and their environment lacks variables.
    """
    rank = external_rank(environ)
    if rank is None:
        return None
    if "TORCHELASTIC_RUN_ID" not in environ and _started_by_srun(environ):
        return _rank_info_of_step(rank, environ)
    missing = [
        name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
    ]
    if missing:
        raise LaunchError(
            f"ranks started by hand: RANK is set, but not {' and '.join(missing)}; each rank "
            "needs RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    world = int(environ["WORLD_SIZE"])
    local_rank = int(environ.get("LOCAL_RANK", 0))
    local_world = int(environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if not 0 <= rank < world:
        raise LaunchError(f"RANK={rank}: must be below WORLD_SIZE={world}, and not below 0")
    node = int(environ.get("GROUP_RANK", rank // local_world))
    return RankInfo(
        rank,
        world,
        local_rank,
        local_world,
        node,
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
    )


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank."""
    here = rank_info()
    return here is None or not here.rank


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks.

    A script of sbatch and a shell in an allocation have the same variables, but each is only one
    process.
    """
    script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    return (
        int(environ.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in environ
        and not script
        and not _typed_in_a_shell(environ)
    )


def _typed_in_a_shell(environ: Mapping[str, str]) -> bool:
    """Return whether a person has typed the command in a shell of an allocation.

    That shell is then the task, and it gives the command a process group of its own. The job's name
    alone is not enough: `srun` in that shell starts tasks under the same name.
    """
    if environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return False
    try:
        return os.getpgid(int(environ["SLURM_TASK_PID"])) != os.getpgrp()
    except (KeyError, ValueError, OSError):
        return True


def _rank_info_of_step(rank: int, environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of a task of srun.

    Two steps of one job may run at once, so each step has a port of its own.
    """
    node = int(environ.get("SLURM_NODEID", 0))
    local_rank = int(environ.get("SLURM_LOCALID", rank))
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)  # 2, 2, 2, 1 for `2(x3),1`
    tasks = [int(number) for number, times in groups for _ in range(int(times or 1))]
    here = tasks[node] if node < len(tasks) else local_rank + 1
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).split(",")[0]  # node07 of node[07-09],other
    job = int(environ.get("SLURM_JOB_ID", 0))
    step = int(environ.get("SLURM_STEP_ID", 0))
    port = int(environ.get("MASTER_PORT") or FIRST_PORT + (37 * job + step) % PORTS)
    return RankInfo(
        rank,
        int(environ["SLURM_NTASKS"]),
        local_rank,
        here,
        node,
        environ.get("MASTER_ADDR") or first,
        port,
    )


def shared_run_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the run directory for all ranks that torchrun, srun or a person has started.

    The directory lies in `outputs`. `RECAPP_RUN_ID`, if set, is its name. Under torchrun, rank 0
    creates a dated directory and sends its name to the other ranks through the agent's store, as
    the run id of torchrun is often just `none`. Under srun, the name holds the numbers of job and
    step.

    Raises:
        LaunchError: A person started the ranks without a name that they share.
    """
    if run := environ.get("RECAPP_RUN_ID"):
        return f"outputs/{run}"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
        key = f"recapp/run_directory/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if external_rank(environ) == 0:
            store.set(key, _new_dated_directory())
        return str(store.get(key).decode())
    if _started_by_srun(environ):
        job = environ.get("SLURM_JOB_ID", "0")
        step = environ.get("SLURM_STEP_ID", "0")
        return f"outputs/slurm_{job}_{step}"
    if environ.get("WORLD_SIZE") == "1":
        return _new_dated_directory()
    raise LaunchError(
        "ranks started by hand need one common directory: give hydra.run.dir=DIR or "
        "RECAPP_RUN_ID=NAME"
    )


def _new_dated_directory() -> str:
    return new_directory(datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))


def interface_towards(info: RankInfo) -> str | None:
    """Return the network interface that leads to rank 0, or None where none is found.

    Gloo listens at the address of this host's own name. On many hosts that address is 127.0.1.1,
    which no other host can reach.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((info.address, info.port))  # sends nothing
            here: str = probe.getsockname()[0]
            if here.startswith("127.") and info.local_world < info.world:
                return None
            return next(
                (name for _, name in socket.if_nameindex() if _address_of(name, probe) == here),
                None,
            )
        except OSError:
            return None


def _address_of(interface: str, probe: socket.socket) -> str | None:
    try:
        packed = fcntl.ioctl(
            probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
        )
    except OSError:
        return None
    return socket.inet_ntoa(packed[20:24])


def process_age(pid: int | str = "self") -> float | None:
    """Return the seconds since a process started, to a hundredth; None where the system does not
    know. The time before the first line of Python counts too.

    Args:
        pid: The number of the process; by default this process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    seconds = int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - seconds


def command_age() -> float | None:
    """Return the seconds since the start of the command that has started this rank; the age of this
    process where it is not such a rank.
    """
    return process_age(os.environ.get(PARENT_PID, "self"))


# ---- the lock of a run's directory

LOCK_FILE = ".lock"
PRINTING_FLAGS = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--shell-completion",
    "-sc",
)


@contextmanager
def locked(directory: Path, setting: str = "hydra.run.dir") -> Iterator[None]:
    """Hold the lock of a directory inside the `with`; make the directory if it does not exist.

    A process that holds the lock may take it again.

    Args:
        directory: The directory of a run or of a sweep.
        setting: The setting that chooses another directory, for the error text.

    Raises:
        ConfigError: Another process holds the lock; the text names the process.
        OSError: The directory cannot be written.
    """
    directory = directory.absolute()
    if directory in _held:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = _take(directory, setting)
    _held.add(directory)
    try:
        yield
    finally:
        _held.discard(directory)
        if file is not None:
            with suppress(OSError):
                (
                    directory / LOCK_FILE
                ).unlink()  # before the close, so that no other process holds it
            os.close(file)


def locked_as_named(
    flags: Sequence[str], overrides: Sequence[str], writes: bool
) -> AbstractContextManager[None]:
    """Return the lock of the directory that a command line names, for the time before Hydra runs.

    The lock does nothing if the command line names no directory, or if the directory does not exist
    yet, so that no process can write there. Each job of a sweep also locks its own directory.

    Args:
        flags: Hydra's flags on the command line; `-m` starts a sweep.
        overrides: The settings on the command line, as `key=value`.
        writes: Whether the command writes into its directory.
    """
    setting = "hydra.sweep.dir" if {"-m", "--multirun"} & set(flags) else "hydra.run.dir"
    named = [
        override.partition("=")[2].strip("'\"")
        for override in overrides
        if override.startswith(f"{setting}=")
    ]
    prints = any(flag.partition("=")[0] in PRINTING_FLAGS for flag in flags)
    if not writes or prints or not named or not Path(named[-1]).is_dir():
        return nullcontext()
    return locked(Path(named[-1]), setting)


def new_directory(first: str) -> str:
    """Make a new directory and return its path. Two runs that begin in the same second get
    different directories.

    Args:
        first: The path. If it exists, `_2`, `_3` and so on are appended. If no directory can be
            made, this path is returned, and the first write there raises the error.
    """
    with suppress(OSError):
        Path(first).parent.mkdir(parents=True, exist_ok=True)
        for path in chain([first], (f"{first}_{number}" for number in count(2))):
            with suppress(FileExistsError):
                Path(path).mkdir()
                return path
    return first


_held: set[Path] = set()


def _take(directory: Path, setting: str) -> int | None:
    """Lock the directory's file and return its descriptor; None if the file system has no locks.

    Raises:
        ConfigError: Another process holds the lock.
    """
    path = directory / LOCK_FILE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
            raise ConfigError(
                f"{short_path(directory)} is in use: {holder} writes there; choose another "
                f"{setting}, or wait"
            ) from None
        except OSError as error:
            os.close(file)
            note(
                f"{short_path(directory)} cannot be locked ({error.strerror}): make sure that no "
                "other run writes there"
            )
            return None
        if _is_still_there(file, path):
            now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            holding = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
            with suppress(OSError):  # on a full disk the lock still holds
                os.truncate(file, 0)
                os.pwrite(file, json.dumps(holding).encode(), 0)
            return file
        os.close(file)  # the earlier holder has just removed the file


def _is_still_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(file: int) -> str:
    try:
        owner = json.loads(os.pread(file, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']},"
    except (ValueError, KeyError, TypeError, RecursionError):  # the file is not written yet
        return "another run"
