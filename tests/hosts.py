"""Ranks that someone else starts: torchrun, two network namespaces as hosts, SLURM on one node.
Each says why where it cannot be had.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs import Finished, environment

PATIENCE_SECONDS = 300
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Started:
    """A command under way; its output in `cwd`/<name>.out and .err. A variable of its own marks all
    processes that come of it.
    """

    def __init__(self, arguments, cwd, name, **variables):
        self.out = cwd / f"{name}.out"
        self.err = cwd / f"{name}.err"
        self.mark = f"STARTED_BY_TEST={uuid.uuid4().hex}"
        variables |= dict([self.mark.split("=")])
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                list(map(str, arguments)),
                cwd=cwd,
                env=environment(**variables),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, seconds=PATIENCE_SECONDS):
        """Its end."""
        self.process.wait(seconds)
        return Finished(self.process.returncode, self.out.read_text(), self.err.read_text())

    def said(self, text):
        return text in self.out.read_text() + self.err.read_text()

    def processes(self, *variables):
        """The ids of its processes that are there, of those that have these variables
        (`RANK=1`).
        """
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                has = (folder / "environ").read_text().split("\0")
            except OSError:
                continue
            if {self.mark, *variables} <= set(has):
                found.append(int(folder.name))
        return found

    def kill(self):
        """Ends all of it, and nothing else."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_for(text, *commands, seconds=PATIENCE_SECONDS):
    """Waits until one of the commands, all under way, has printed `text`."""
    end = time.monotonic() + seconds
    while not any(command.said(text) for command in commands):
        assert time.monotonic() < end and all(
            command.process.poll() is None for command in commands
        ), commands[0].err.read_text()
        time.sleep(0.1)


@contextmanager
def at_once(*commands):
    """Waits for commands that run beside each other; none is left afterwards."""
    with ExitStack() as stack:
        for command in commands:
            stack.callback(command.kill)
        yield commands


# ---- hosts


class Hosts:
    """Two hosts: network namespaces with a cable between them. They share files and the machine's
    name, which leads nowhere.
    """

    def __init__(self):
        self.names = [f"recapp{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = ["10.83.0.1", "10.83.0.2"]

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
        ends = [name[-10:] for name in self.names]
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def torchrun(self, ranks_each, *arguments, cwd):
        """One agent of torchrun on each host, which meet at the first."""
        return [
            Started(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    *TORCHRUN,
                    "--nnodes=2",
                    f"--nproc-per-node={ranks_each}",
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint={self.addresses[0]}:29400",
                    f"--rdzv-conf=is_host={int(number == 0)}",
                    f"--local-addr={self.addresses[number]}",
                    "-m",
                    *arguments,
                ],
                cwd,
                f"host{number}",
                OMP_NUM_THREADS="1",
            )
            for number, name in enumerate(self.names)
        ]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_no_hosts():
    """Why network namespaces cannot be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: iproute2)"
    try:
        with Hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"


# ---- SLURM


class Slurm:
    """A cluster of one node with its daemons in a directory, for `srun`."""

    def __init__(self, directory):
        self.directory = directory
        self.daemons = []

    def __enter__(self):
        for name in ("munge", "state", "spool"):
            (self.directory / name).mkdir(mode=0o700)
        key = self.directory / "munge/key"
        settings = self.directory / "slurm.conf"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        settings.write_text(self._settings())
        munge = [
            f"--{what}={self.directory}/munge/{what.split('-')[0]}"
            for what in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *munge)
        self._daemon("slurmctld", "-D", "-f", settings)
        self._daemon("slurmd", "-D", "-f", settings)
        self.variables = {"SLURM_CONF": str(settings)}
        for _ in range(100):
            states = subprocess.run(
                ["sinfo", "-h", "-o", "%t"],
                env=environment(**self.variables),
                capture_output=True,
                text=True,
            )
            if states.stdout.strip() == "idle":
                return self
            time.sleep(0.2)
        self.__exit__()
        raise TimeoutError(
            f"SLURM's node is {states.stdout.strip() or states.stderr.strip()!r}, not idle"
        )

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)

    def _daemon(self, *arguments):
        with open(self.directory / f"{arguments[0]}.log", "w") as log:
            self.daemons.append(subprocess.Popen(list(map(str, arguments)), stdout=log, stderr=log))

    def _settings(self):
        host = socket.gethostname()
        here = self.directory
        return f"""
            ClusterName=tests
            SlurmctldHost={host}(127.0.0.1)
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket={here}/munge/socket
            SlurmctldPort={free_port()}
            SlurmdPort={free_port()}
            StateSaveLocation={here}/state
            SlurmdSpoolDir={here}/spool
            SlurmctldPidFile={here}/slurmctld.pid
            SlurmdPidFile={here}/slurmd.pid
            ProctrackType=proctrack/pgid
            TaskPlugin=task/none
            SwitchType=switch/none
            MpiDefault=none
            ReturnToService=2
            SelectType=select/cons_tres
            NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}
            PartitionName=all Nodes={host} Default=YES OverSubscribe=FORCE:4
        """


def why_no_slurm():
    """Why SLURM cannot be started here; empty where it may be tried."""
    missing = [
        name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None
    ]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "SLURM's daemons are started as root here"
