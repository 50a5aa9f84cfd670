"""The first minutes on a GPU: tests, times beside others, whole runs. Each is a process of its own
with a time limit, in the order of their worth, and none keeps the next one from running. Every case
prints a line of JSON as it ends, and appends it to a file, so that a loan that ends early has given
figures. What a case has printed before it failed, or before its time was over, is in its line.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
SECONDS = 300  # of all cases together
LAST_WORDS = 3000  # characters of the output of a case that fails
MODELS = ("tb_8192", "tb_2048", "tb_8192_ten_ids", "tb_65536")
TESTS = ("tests/kernels/test_on_gpu.py", "tests/engine/test_steps_on_gpu.py")


@dataclass(frozen=True)
class Case:
    """A command of this Python.

    Args:
        name: The name of the case.
        limit: The most seconds that it may take.
        arguments: The arguments of the Python.
        files: Files below the working directory whose JSON is the result; the standard output is,
            if it is JSON, where there are none.
    """

    name: str
    limit: int
    arguments: tuple[str, ...]
    files: tuple[str, ...] = field(default=())


def cases():
    """Return the cases in the order of their worth."""
    short = ("--rounds", "3", "--round_seconds", "0.3", "--ranks", "1", "--device", "cuda")
    if find_spec("torchrec") and find_spec("fbgemm_gpu"):
        short += ("--torchrec_python", sys.executable)
    run = ("-m", "recapp.train", "dataset.path=LOGS", "dataset.generate.rows=1000000")
    run += ("hydra.run.dir=RUN", "trainer.limit_val_batches=0")
    run += ("trainer.accelerator=gpu", "trainer.devices=1")
    found = ("RUN/performance.json", "RUN/metrics.json")
    host = ("-m", "recapp.bench", "train", "device=cuda", "ranks=1", "models=hugectr_d128")
    host += ("rounds=3", "round_seconds=0.3", "format=json", "hydra.run.dir=RUN")

    # Several processes compile kernels at once. A warning that only a GPU gives fails no test.
    tests = ("-m", "pytest", "-n", "4", "-q", "--tb", "short", "-W", "default")

    def speed(name, verb, *arguments):
        return Case(name, 60, ("-m", "tests.speed", verb, *arguments, *short))

    first, *others = (speed(f"train {model}", "train", "--model", model) for model in MODELS)
    return [
        Case("kernels", 40, ("-m", "tests.gpu_first.kernels")),
        first,
        *(Case(Path(file).stem, 90, (*tests, file)) for file in TESTS),
        *others,
        speed("bf16", "train", "--bf16", "--model", MODELS[0]),
        speed("tables", "step", "--workload", "W1d", "W2", "--plan", "table_wise"),
        Case("ragged", 30, ("-m", "tests.gpu_first.ragged")),
        Case("from_host", 40, host),
        Case("recapp.train", 60, (*run, "dataset.batch_size=8192"), found),
        Case("launched", 60, (*run, "dataset.batch_size=8192", "engine.graph=off"), found),
        Case("readers", 60, (*run, "dataset.batch_size=8192", "dataset.num_threads=4"), found),
        Case(
            "dynamic",
            60,
            (*run, "dataset.batch_size=1024", "tables=dynamic", "trainer.max_steps=60"),
            found,
        ),
    ]


def main(seconds=SECONDS, names=(), file=None):
    """Run cases, and print a line of JSON for each.

    Args:
        seconds: The seconds of all cases together.
        names: The names of the cases; empty for all.
        file: The path of a file to which lines are appended, too.
    """
    end = time.monotonic() + seconds
    with TemporaryDirectory(prefix="recapp_gpu_first_") as folder:
        for case in cases():
            if names and case.name not in names:
                continue
            left = end - time.monotonic()
            line = {"case": case.name, "error": "no time was left"}
            if left >= 1:
                line = answer_of(case, Path(folder), min(case.limit, left))
            text = json.dumps(line)
            print(text, flush=True)
            if file is not None:
                with open(file, "a") as lines:
                    lines.write(text + "\n")


def answer_of(case, folder, limit):
    """Run a case, and return its line: seconds, and the result or an error."""
    places = {"RUN": str(folder / case.name.replace(".", "_")), "LOGS": str(folder / "logs")}
    arguments = [_placed(argument, places) for argument in case.arguments]
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, said = process.communicate()
        over = f"took more than {limit:.0f} s"
        return {"case": case.name, "error": over, "printed": (printed + said)[-LAST_WORDS:]}
    seconds = round(time.monotonic() - begin, 1)
    line = {"case": case.name, "seconds": seconds}
    if process.returncode:
        return line | {"error": (printed + said)[-LAST_WORDS:]}
    if not case.files:
        return line | {"result": _result(printed)}
    files = {f: Path(_placed(f, places)) for f in case.files}
    return line | {"result": {f: json.loads(p.read_text()) for f, p in files.items() if p.exists()}}


def _placed(text, places):
    for name, path in places.items():
        text = text.replace(name, path)
    return text


def _result(printed):
    """Return what a program printed: its JSON, else its last line."""
    try:
        return json.loads(printed)
    except ValueError:
        return printed.strip().rpartition("\n")[2]
