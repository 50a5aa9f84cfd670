"""What is done about Python's costs at both ends of a process loses nothing."""

import subprocess
import sys

import pytest

KEEP = """
import gc, weakref
from recapp.processes.stopping import freeze_loaded_objects, loading

class Run: pass

with loading():
    rests = not gc.isenabled()
works = gc.isenabled()
freeze_loaded_objects()
kept = gc.get_freeze_count()
run = Run()
run.itself, gone = run, weakref.ref(run)
del run
freeze_loaded_objects()
gc.collect()
print(rests, works, kept > 0, gone() is None)
"""

END = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from recapp.processes.stopping import end_process

def later():
    time.sleep(.1)
    # print writes the line's end apart, and two threads may meet there
    sys.stdout.write("thread\\n")

atexit.register(print, "hook")
threading.Thread(target=later).start()
ThreadPoolExecutor().submit(later)
end_process(int(sys.argv[1]))
"""


def test_a_process_that_runs_twice_keeps_nothing_of_the_first_run():
    ran = subprocess.run([sys.executable, "-c", KEEP], check=True, capture_output=True, text=True)
    assert ran.stdout == "True True True True\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_ends_after_its_threads_and_hooks_with_its_code_and_all_it_said(code):
    ran = subprocess.run([sys.executable, "-c", END, str(code)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (
        code,
        ["thread", "thread", "hook"],
        "",
    )
