"""Python does not end before gloo's threads have let go of their tensors."""

import subprocess
import sys

import pytest

from recapp.transport.communicator import gloo_threads

LATE = """
import ctypes, hashlib, os, threading
import recapp.transport.communicator

def work():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")             # PR_SET_NAME
    named.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)          # without the GIL
    os.write(1, b"let go")

named = threading.Event()
threading.Thread(target=work, daemon=True).start()
named.wait()
"""


@pytest.mark.full
def test_a_thread_of_gloo_that_is_late_takes_the_gil_before_python_ends():
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "let go"), ran.stderr


def _threads(comm):
    comm.barrier()
    return len(gloo_threads())


def test_torch_names_these_threads_as_we_look_for_them(ranks):
    assert min(ranks.run(_threads, 2)) > 0
