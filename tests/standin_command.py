"""A command that prints what it knows of itself and of a process from its fork server, as JSON, and
ends with the code of its first argument; `wait` only waits.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import forkserver, util


def of_this_process():
    umask = os.umask(0)
    os.umask(umask)
    return {
        "environ": dict(os.environ),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "path": sys.path[:3],
        "umask": umask,
        "threads": threading.active_count(),
        "handlers": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def tell(pipe):
    pipe.send({"parent": os.getppid(), **of_this_process()})


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        time.sleep(60)
    os.environ["OF_THE_SERVER"] = "1"
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    child = context.Process(target=tell, args=(there,))
    child.start()
    told = here.recv()
    child.join()
    found = {
        "folder": util.get_temp_dir(),
        "module": __spec__.name,
        "leads a session": os.getpid() == os.getsid(0) == os.getpgid(0),
        "has the server": told.pop("parent") == forkserver._forkserver._forkserver_pid,
        "process": of_this_process(),
        "child": told,
    }
    print(json.dumps(found))
    print("beside it", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
