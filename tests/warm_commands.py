"""Commands without the start of an interpreter: forked from a process that has imported what every
command imports, which takes seconds.

    pytest -> the fork server of its pools of ranks (ranks.py) -> a child becomes the command
                                                                  its child: a fork server, if asked

The child gets a session, directory, environment, module path, arguments and output of its own and
then runs the module of the command as `python -m` does. Where the command starts a fork server of
multiprocessing for its ranks, that is a process forked before the command began: only the start of
an interpreter and its imports are left out.

What the interpreter itself reads when it starts is not read again: PYTHONWARNINGS, `sitecustomize`,
limits on memory. Tests of these, and one of each kind of command, start an interpreter:
`jobs.command(..., fresh=True)`.
"""

import atexit
import fcntl
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing import process, resource_tracker, util

import torch
from ranks import context
from setproctitle import setproctitle

from recapp.processes.fork_server import replace_environment, signals_blocked
from recapp.processes.rank_process import threads_of
from recapp.processes.stopping import die_with_parent

FORK_SERVER = "from multiprocessing.forkserver import main"  # begins its program
MESSAGE_BYTES = 1 << 17  # at most, of the environment and the program of a fork server
UNUSED = 100  # descriptors from here on


class WarmCommand:
    """A command under way, with the methods of `subprocess.Popen` that tests use.

    Its output goes to the files `out` and `err`, which are there. What a test leaves running ends
    with pytest.
    """

    def __init__(self, module, arguments, *, cwd, environ, out, err):
        self.args = [module, *arguments]
        umask = os.umask(0)
        os.umask(umask)
        given = (module, arguments, str(cwd), environ, umask, str(out), str(err))
        self._process = context().Process(target=_become, args=given)
        self._process.start()
        self.pid = self._process.pid
        atexit.register(self.kill)  # else multiprocessing would wait for it

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _become(module, arguments, cwd, environ, umask, out, err):
    """Make this process, fresh from the fork server, `python -m module`, to its end."""
    # while the environment is in its place, beside which the title is written
    setproctitle(" ".join(["python", "-m", module, *arguments]))
    os.setsid()
    die_with_parent()
    os.umask(umask)
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    _set_environment(environ)
    installed = [
        path
        for path in sys.path
        if path.startswith((sys.prefix, sys.base_prefix)) or path.endswith("site-packages")
    ]
    sys.path[:] = [cwd, *environ["PYTHONPATH"].split(os.pathsep), *installed]
    sys.argv = ["-m", *arguments]
    sys.modules.pop(module, None)
    # pytest's own, of which the command makes its own
    resource_tracker._resource_tracker._fd = None
    process.current_process()._config.pop("tempdir", None)
    gc.freeze()
    util.spawnv_passfds = _spawn_with(_waiting_fork_server())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_environment(environ):
    """Set also what torch has read when it was imported."""
    replace_environment(environ)
    torch.set_num_threads(threads_of(environ) or len(os.sched_getaffinity(0)))


def _waiting_fork_server():
    """Fork a process that becomes a fork server when it is asked to, and that no signal ends before
    that: (its id, the socket).
    """
    here, there = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with signals_blocked():
        pid = os.fork()
        if not pid:
            try:
                here.close()
                _become_fork_server(there)
            finally:
                os._exit(0)
    there.close()
    return pid, here


def _become_fork_server(asked):
    die_with_parent()
    message, given, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 8)
    if not message:  # the command has ended without ranks
        return
    environ, cwd, blocked, program, numbers = pickle.loads(message)
    for opened, number in zip(_moved_out_of_the_way(given), numbers, strict=True):
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    _set_environment(environ)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    exec(program, {})


def _moved_out_of_the_way(descriptors):
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, UNUSED) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return moved


def _spawn_with(waiting):
    """`multiprocessing.util.spawnv_passfds`, but that the first fork server is the process that
    waits.
    """
    spawn = util.spawnv_passfds
    left = [waiting]

    def spawnv_passfds(path, args, passfds):
        if not (left and args[-1].startswith(FORK_SERVER)):
            return spawn(path, args, passfds)
        pid, server = left.pop()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        numbers = [1, 2, *passfds]
        message = pickle.dumps((dict(os.environ), os.getcwd(), blocked, args[-1], numbers))
        socket.send_fds(server, [message], numbers)
        server.close()
        return pid

    return spawnv_passfds
