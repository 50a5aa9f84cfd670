"""The product as tests run it: whole commands as a user types them, and jobs on a pool of ranks
without a command around them.

A command starts fresh processes and costs most of ten seconds; ranks that live as long as the
pytest session import torch and Lightning once, and a small job takes one. What a rank prints lands
in `JOB/rank<r>.out` and `.err`.
"""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import proof_cost
from quick_disk import force_nothing
from ranks import context, stop
from warm_commands import WarmCommand

from recapp import errors
from recapp.errors import RecappError

REPOSITORY = Path(__file__).parents[1]
SIZE = 4
TIMEOUT_S = 180
PATIENCE_S = 3  # with the other ranks, once one has failed: they may wait for it
SILENT = ("Silent", "no answer", "")
COMMAND_TIMEOUT_S = 600
# said by whoever came first
FIRST_USE = re.compile(
    r"^(compiling kernels for this machine .*|compiled in [0-9.]+ s)\n", re.MULTILINE
)

TITLE = re.compile(r"[\w.]+ rank (\d+) of \d+ in ")  # of a rank

# One table above 100,000 rows, 12 of at most 6,000 and 13 between: mixed uses three types, and all
# of it is 9 MB.
TABLE_ROWS = (
    120_001,
    18_598,
    14_092,
    7_012,
    18_977,
    4,
    6_385,
    1_245,
    49,
    18_621,
    7_132,
    6_728,
    11,
    2_168,
    7_338,
    61,
    4,
    932,
    15,
    20_451,
    14_152,
    19_943,
    6_091,
    9_137,
    71,
    34,
)


def small(path, rows=6000, **others):
    """Overrides for generated data of a size for tests: 20 batches of 256 train, 858 rows
    validate.
    """
    settings = {
        "path": path,
        "generate.rows": rows,
        "table_rows": str(list(TABLE_ROWS)).replace(" ", ""),
        "batch_size": 256,
        "val_batch_size": 256,
    } | others
    return [f"dataset.{name}={value}" for name, value in settings.items()]


@dataclass
class Finished:
    """A command that has ended. What it said of compiling kernels is left out of `err`."""

    code: int
    out: str
    err: str

    def error(self):
        """The one line on standard error of a command that failed; fails where there is more or
        less.
        """
        assert self.code == 1, (self.code, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


def environment(**more):
    """Of a command: no rank's, and this checkout. Lightning leaves some where a test has trained in
    this process.
    """
    of_ranks = {*environment_of_rank(0, 1, 0), "NODE_RANK"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in of_ranks and not name.startswith(("RECAPP_T", "TORCHELASTIC"))
    }
    return kept | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "150", **more}


def command(name, *arguments, cwd, fresh=False, **variables):
    """`python -m recapp.<name> <arguments>`, to its end."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out.txt"), Path(folder, "err.txt")
        run = started(f"recapp.{name}", arguments, cwd, variables, out, err, fresh)
        try:
            code = run.wait(COMMAND_TIMEOUT_S)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        return Finished(code, out.read_text(), FIRST_USE.sub("", err.read_text()))


def start(name, *arguments, cwd, fresh=False, **variables):
    """The same, not waited for; its output in `cwd`/out.txt and err.txt."""
    return started(
        f"recapp.{name}", arguments, cwd, variables, cwd / "out.txt", cwd / "err.txt", fresh
    )


def started(module, arguments, cwd, variables, out, err, fresh):
    """`python -m module` in a session of its own: forked from a process that has imported it
    (warm_commands.py), or in an interpreter of its own.
    """
    if module == "recapp.train":
        proof_cost.count("trainings")
    arguments = list(map(str, arguments))
    environ = environment(**variables)
    with open(out, "w") as stdout, open(err, "w") as stderr:
        if not fresh:
            return WarmCommand(module, arguments, cwd=cwd, environ=environ, out=out, err=err)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env=environ,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def script(path, *arguments, cwd, world=None):
    """What a program prints: alone, or on the ranks that torchrun would start. It is forked as
    commands are.
    """
    port = free_port()
    given = [environment_of_rank(rank, world, port) for rank in range(world or 0)] or [{}]
    found = os.pathsep.join((str(path.parent), str(REPOSITORY)))
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, f"out{rank}.txt") for rank in range(len(given))]
        errors = [Path(folder, f"err{rank}.txt") for rank in range(len(given))]
        runs = [
            started(path.stem, arguments, cwd, {**each, "PYTHONPATH": found}, out, err, fresh=False)
            for each, out, err in zip(given, outputs, errors, strict=True)
        ]
        for run, err in zip(runs, errors, strict=True):
            assert run.wait(COMMAND_TIMEOUT_S) == 0, err.read_text()
        return "".join(out.read_text() for out in outputs)


def metrics_of(directory):
    """`metrics.json` of a run."""
    found: dict[str, Any] = json.loads((Path(directory) / "metrics.json").read_text())
    return found


def validation(metrics):
    """What must not depend on plan, ranks or interruptions."""
    return {name: value for name, value in metrics.items() if name.startswith("val_")}


class Failed(Exception):
    """A job that failed: kind and text of the exception of each rank that raised one, by rank."""

    def __init__(self, errors):
        super().__init__(
            "\n".join(
                f"rank {rank}: {kind}: {text}\n{calls}"
                for rank, (kind, text, calls) in errors.items()
            )
        )
        self.errors = {rank: (kind, text) for rank, (kind, text, _) in errors.items()}


def refusal(job, *arguments, **options):
    """(kind, line) of the error for people that `job(*arguments)` raises: on all ranks, but for
    those that only heard of it.
    """
    try:
        job(*arguments, **options)
    except RecappError as error:
        found = type(error).__name__, str(error)
    except Failed as failed:
        causes = {error for error in failed.errors.values() if error[0] != "RankError"}
        assert len(causes) == 1, failed
        (found,) = causes
    else:
        raise AssertionError("nothing was refused")
    kind, line = found
    assert issubclass(getattr(errors, kind), RecappError) and len(line.splitlines()) == 1, found
    return kind, line


def resolved(name, overrides, folders=()):
    """The settings that the command `name` would hand to its ranks."""
    from recapp.settings.records import to_plain

    return to_plain(recipe(name, overrides, folders))


def recipe(name, overrides, folders=()):
    """The recipe of the command `name`."""
    from composing import compose as compose_settings

    from recapp.cli import compose
    from recapp.cli.command import recipe_of_job

    overrides = [str(override) for override in overrides]
    composed = compose_settings(
        name, [*compose.stored_choices(overrides, folders), *overrides], folders
    )
    choices = compose.choices(composed.hydra)
    config = compose.without_hydra(composed)
    return recipe_of_job(config, name, tuple(overrides), choices, folders)


def _serve(rank, python_path, pipe):
    sys.path[:] = python_path
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from recapp.transport.communicator import leave_process_group

    torch.set_num_threads(1)
    force_nothing()
    while (job := pipe.recv()) is not None:
        module, settings, directory, environ = job
        os.environ.update(environ)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(
                os.open(f"{directory}/rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                stream,
            )
        try:
            import_module(module).run(settings, Path(directory))
            failure = None
        except Exception as error:
            kind = next(
                (c for c in type(error).__mro__ if c.__module__ == "recapp.errors"), type(error)
            )
            failure = (kind.__name__, str(error), traceback.format_exc())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pipe.send(failure)
        if failure:
            leave_process_group()
        gc.collect()  # a run's model, rings and trainer refer to each other
    os._exit(0)  # the interpreter would take seconds over torch


class Jobs:
    """A pool of ranks that run one job after another. Where some fail and others do not it starts
    afresh: a rank may hang.
    """

    def __init__(self):
        self._workers = []

    def train(self, directory, *overrides, world=2, folders=()):
        """Train in `directory`; what `metrics.json` says. Raises Failed."""
        return self.run("train", directory, overrides, world, folders)

    def evaluate(self, directory, *overrides, world=2):
        """Evaluate in `directory`; what `metrics.json` says. Raises Failed."""
        return self.run("eval", directory, overrides, world)

    def run(self, name, directory, overrides, world, folders=()):
        """A job of the command `name` on `world` ranks."""
        if name == "train":
            proof_cost.count("trainings")
        # the pool may be elsewhere
        settings = resolved(name, overrides, folders)
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if not self._workers:
            self._start()
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            environ = environment_of_rank(rank, world, port)
            pipe.send((f"recapp.{name}", settings, str(directory), environ))
        failures = {}
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            answered = pipe.poll(TIMEOUT_S if not failures else PATIENCE_S)
            failure = pipe.recv() if answered else SILENT
            if failure:
                failures[rank] = failure
        if len(failures) not in (0, world) or SILENT in failures.values():
            self.stop(kill=True)
        if failures:
            raise Failed({r: f for r, f in failures.items() if f != SILENT} or failures)
        return metrics_of(directory)

    def _start(self):
        forked = context()
        for rank in range(SIZE):
            here, there = forked.Pipe()
            process = forked.Process(
                target=_serve, args=(rank, list(sys.path), there), daemon=False
            )
            process.start()
            self._workers.append((process, here))

    def stop(self, kill=False):
        """End the ranks."""
        stop(self._workers, kill)


def environment_of_rank(rank, world, port):
    """As torchrun sets it on one machine."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks_of(pid):
    """The ranks that the command of this process has started: process by rank."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{name}/cmdline").read_text().partition("\0")[0]
            if (rank := TITLE.match(title)) and pid in _ancestors(int(name)):
                found[int(rank[1])] = int(name)
        except OSError:  # it is gone
            continue
    return found


def _ancestors(pid):
    """The parent of a process, and its parent: a fork server."""
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid
