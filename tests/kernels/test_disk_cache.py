"""Compiled kernels are found again by the next process, as long as no source has changed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import REPOSITORY, environment, small, start

pytest.importorskip("numba")
TESTS = Path(__file__).parents[1]
MODULES = os.pathsep.join(map(str, (REPOSITORY, TESTS, TESTS / "engine")))
TRAIN = """
import sys
from recapp.kernels import numba_cache
assert numba_cache.kept_on_disk()    # asked first: it looks for a directory for `digest`
numba_cache.digest = lambda function: sys.argv[2]
import test_long_bags, test_threads, torch
from engine.engine_cases import make_tables
from recapp.transport.communicator import Comm
if sys.argv[1] == "long bags":
    torch.set_num_threads(2)
    for dim, rule, kind in (8, "adam", "table_wise"), (16, "rowwise_adagrad", "column_wise"):
        test_long_bags.make_tables = lambda dims, **more: make_tables(dims=(dim,) * 3, **more)
        test_long_bags.trained(Comm(), "numba", rule, kind, 2)
else:
    torch.set_num_threads(1)
    test_threads.TABLES = make_tables(dims=(8, 8, 8))
    test_threads.trained("table_wise", False, 1)
"""


def files_after_training(folder, bags, sources):
    """Return the names of the kernels' files after training, and when they were written."""
    subprocess.run(
        [sys.executable, "-c", TRAIN, bags, sources],
        check=True,
        env=environment(PYTHONPATH=MODULES, NUMBA_CACHE_DIR=str(folder), NUMBA_NUM_THREADS="2"),
    )
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}


@pytest.mark.full
def test_changed_sources_compile_anew(tmp_path):
    first, changed = (
        files_after_training(tmp_path, "short bags", sources) for sources in ("before", "after")
    )
    for kernel in ("pooling_8_False", "updating_recapp"):
        assert any(f".{kernel}" in name for name in first), sorted(first)
    assert changed.keys() == first.keys() and all(
        changed[name] > first[name] for name in first if "numba_" in name
    )


@pytest.mark.full
def test_a_second_process_compiles_nothing_on_threads_and_of_long_bags_either(tmp_path):
    first = files_after_training(tmp_path, "long bags", "before")
    for kernel in (
        "pooling.+_on_threads",
        "staging.+pooling.+_on_threads",
        "updating.+_on_threads",
        "staging.+updating.+_on_threads",
        "row_squares",
    ):
        assert any(re.search(rf"\.{kernel}", name) for name in first), sorted(first)
    assert files_after_training(tmp_path, "long bags", "before") == first


WARM = """
import json, os, sys
from pathlib import Path
import torch
from engine.engine_cases import RULES, batch_of, make_plan, make_tables
from recapp.benchmarks.kernel_costs import Mirror
from recapp.transport.communicator import Comm
from recapp.engine.sharded_collection import shard_bags
from recapp.tables.config import PoolingType

def kept():
    return sorted(path.name for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nb?"))

def run(kind, mode, rule, threads, trains, mean):
    torch.set_num_threads(threads)
    pooling = {"pooling": PoolingType.MEAN} if mean else {}
    tables = make_tables(rows=(5000, 40, 7), dims=(16, 16, 16), **pooling)
    comm = Comm() if trains else Mirror(torch.device("cpu"))    # two ranks of one batch
    plan = make_plan(kind, tables, comm.world, mode=mode, column_width=8)
    collection = shard_bags(
        tables, plan, comm, RULES[rule], backend="numba", trains=trains
    )
    before = kept()
    with torch.set_grad_enabled(trains):
        for step, rows in enumerate((3, 14_000)):
            values = collection(batch_of(tables, rows, step, one_hot=True)).values()
            assert rows < 5 or values.nbytes > 4 << 20      # written past the caches
            if trains:
                values.square().sum().backward()
    return before, [name for name in kept() if name not in before]

print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "cases",
    [
        # each has kernels that those before it have not: for several threads, of other columns
        [
            ("table_wise", "unique", "rowwise_adagrad", 1, True, False),
            ("table_wise", "unique", "rowwise_adagrad", 2, True, False),
            ("column_wise", "unique", "rowwise_adagrad", 2, True, False),
        ],
        [("table_wise", "unique", "sgd", 2, False, False)],
        [("table_wise", "pooled", "adam", 2, True, True)],
    ],
    ids=["unique", "read-only", "pooled"],
)
def test_after_the_warm_up_nothing_is_compiled(tmp_path, cases):
    ran = subprocess.run(
        [sys.executable, "-c", WARM, json.dumps(cases)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=MODULES, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_NUM_THREADS="2"),
    )
    for (*_, threads, trains, _), (warmed, later) in zip(
        cases, json.loads(ran.stdout), strict=True
    ):
        assert later == []
        assert any("on_threads" in name for name in warmed) == (threads > 1)
        assert any("updating" in name or "update" in name for name in warmed) == trains


@pytest.mark.full
def test_a_command_reports_all_that_it_compiles(tmp_path):
    """A rank has two threads here and batches large enough for both."""
    cache = tmp_path / "cache"
    process = start(
        "train",
        *small("data", rows=20_000, batch_size=4096, val_batch_size=16_384),
        "+plan=mixed",
        "trainer.max_steps=2",
        "trainer.devices=2",
        cwd=tmp_path,
        fresh=True,
        NUMBA_CACHE_DIR=str(cache),
        OMP_NUM_THREADS="2",
        NUMBA_NUM_THREADS="2",
    )
    while process.poll() is None and "compiled in" not in (tmp_path / "err.txt").read_text():
        time.sleep(0.01)
    reported = {path.name for path in cache.rglob("*.nb?")}
    assert process.wait(120) == 0, (tmp_path / "err.txt").read_text()
    assert any("on_threads" in kernel for kernel in reported)
    assert {path.name for path in cache.rglob("*.nb?")} == reported
    assert (tmp_path / "err.txt").read_text().count("compiled in") == 1


OWN_RULE = """
def step(w, g, mean_square, lr, sqrt, s):
    return w - lr * {factor} * g, s + g
"""
UPDATE = """
import torch
from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.optim.rules import RowRule
from my_rules import step
rule = RowRule("mine", step, 0.5, state=(("seen", "element"),))
index = torch.zeros(1, dtype=torch.int32)
links = Links(index, torch.arange(2, dtype=torch.int32), None, None, 1)
weights, seen = torch.zeros(1, 3), torch.zeros(1, 3)
backend("numba", weights.device).update(
    torch.ones(3), links, index, None, weights, [seen], torch.float32, 0.5, rule
)
print(weights[0, 0].item())
"""


@pytest.mark.full
def test_a_change_in_a_rule_of_the_users_own_compiles_its_kernel_anew(tmp_path):
    """And nothing else: the rule is no part of other kernels."""
    rules = tmp_path / "my_rules.py"
    cache = tmp_path / "cache"
    variables = environment(
        PYTHONPATH=os.pathsep.join(map(str, (REPOSITORY, tmp_path))), NUMBA_CACHE_DIR=str(cache)
    )

    def updated(factor):
        rules.write_text(OWN_RULE.format(factor=factor))
        ran = subprocess.run(
            [sys.executable, "-c", UPDATE], capture_output=True, text=True, env=variables
        )
        assert ran.returncode == 0, ran.stderr
        return float(ran.stdout), {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}

    first, compiled = updated(1)
    again, kept = updated(1)
    changed, later = updated(3)
    assert (first, again, changed) == (-0.5, -0.5, -1.5)
    assert kept == compiled and later.keys() >= kept.keys()
    anew = [path.name for path in kept if later[path] > kept[path]]
    assert anew and all(name.startswith("numba_vectors.updating_my_rules") for name in anew)


REPORT = """
import sys, time
import numba.core.caching as caching
from recapp.kernels import backend

load = caching.Cache.load_overload
slow_disk = float(sys.argv[1])
caching.Cache.load_overload = lambda *args: time.sleep(slow_disk) or load(*args)
with backend.report_compilation(True):
    from kernel_on_disk import kernel
    kernel(1)
"""


@pytest.mark.full
def test_compiling_is_reported_when_something_is_compiled_and_not_when_the_disk_is_slow(tmp_path):
    (tmp_path / "kernel_on_disk.py").write_text(
        "from numba import njit\n\n\n@njit(cache=True)\ndef kernel(x):\n    return x + 1\n"
    )

    def report(seconds):
        path = os.pathsep.join(map(str, (REPOSITORY, tmp_path)))
        ran = subprocess.run(
            [sys.executable, "-c", REPORT, str(seconds)],
            capture_output=True,
            text=True,
            check=True,
            env=environment(PYTHONPATH=path, NUMBA_CACHE_DIR=str(tmp_path / "cache")),
        )
        return [line.split(" in ")[0] for line in ran.stderr.splitlines()]

    assert report(0) == [
        "compiling kernels for this machine (first use; they are kept on disk) ...",
        "compiled",
    ]
    assert report(1.2) == []


NOWHERE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as where every directory is read-only
import recapp.transport.ring
from recapp.kernels import backend, numba_cache
with backend.report_compilation(True):
    print(numba_cache.compiled()(lambda x: x + 1)(1))
"""


@pytest.mark.full
def test_where_no_directory_can_be_written_to_kernels_are_compiled_and_it_is_said():
    ran = subprocess.run(
        [sys.executable, "-c", NOWHERE], capture_output=True, text=True, env=environment()
    )
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr
    begins, ends = ran.stderr.splitlines()
    assert "(each time anew: set NUMBA_CACHE_DIR to a directory that can be written to)" in begins
    assert ends.startswith("compiled in ")
